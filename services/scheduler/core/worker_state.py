"""What the scheduler knows of one worker: its pool, its sequences, the plans in flight."""

from collections import deque

from services.scheduler.core.block_manager import BlockPool
from services.scheduler.core.request import Sequence
from services.scheduler.core.step import StepPlan, WorkerLimits


class WorkerState:
    """One worker (model replica) as the scheduler sees it.

    running: sequences that hold blocks here, in the order of admission.
    decoding, held: the mirror of what the worker believes, from which deltas are made.
    """

    def __init__(self, name: str, limits: WorkerLimits) -> None:
        self.name = name
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.running: list[Sequence] = []
        self.in_flight: deque[StepPlan] = deque()
        self.decoding: set[int] = set()
        self.held: set[int] = set()
        self.to_release: list[int] = []
        self.next_plan = 1

    @property
    def num_active(self) -> int:
        """Sequences that still need steps. One whose last token is already planned has left its slot."""
        return sum(1 for sequence in self.running if sequence.remaining or not sequence.promised)

    def forget(self, sequence: Sequence, tell_worker: bool) -> None:
        """Take the sequence's blocks and slot back."""
        self.running.remove(sequence)
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []
        self.decoding.discard(sequence.sequence_id)
        self.held.discard(sequence.sequence_id)
        if tell_worker:
            self.to_release.append(sequence.sequence_id)
