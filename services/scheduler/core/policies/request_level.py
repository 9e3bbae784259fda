"""The baseline that every paper compares with: a batch runs until its last member ends."""

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.policies.base import BatchingPolicy
from services.scheduler.core.request import Sequence
from services.scheduler.core.step import WorkerLimits


class RequestLevel(BatchingPolicy):
    """Nobody joins a batch in progress, and a slot whose request has ended stays empty.

    Blocks for prompt + max_tokens are reserved at the start, so nothing is ever preempted. One batch at a time, also
    through pipeline stages.
    """

    name = "request-level"
    reserves = True
    returns_together = True

    def max_in_flight(self, limits: WorkerLimits) -> int:
        return 1 if limits.stages > 1 else limits.max_in_flight

    def reserve(self, sequence: Sequence, limits: WorkerLimits) -> int:
        return sequence.total_slots

    def fill(self, step: StepBuilder) -> None:
        if step.worker.running:
            step.decode(step.limits.max_num_seqs)
            return
        for sequence in step.candidates():
            if not step.start(sequence, sequence.num_tokens, reserve=sequence.total_slots):
                return
