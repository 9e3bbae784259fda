"""Moves: when a sequence is better off on another worker than where it is.

A move throws its KV away there and computes it again here, so it must gain more than that. It cannot become a
ping-pong: the gain must be HYSTERESIS times the cost, the loads must still be apart afterwards, and a sequence moves
at most max_moves times.
"""

from services.scheduler.core.placement import Placement
from services.scheduler.core.request import Sequence, Status
from services.scheduler.core.worker_state import WorkerState

HYSTERESIS = 2.0
MIN_DIFFERENCE = 3
# How many of the least loaded workers are asked.
MAX_TARGETS = 2
# Without a better guess, a sequence goes on for as long as it has run.
MIN_EXPECTED = 16


def best(worker: WorkerState, placement: Placement, max_moves: int) -> tuple[Sequence, WorkerState] | None:
    """The sequence that should leave this worker, and for where; None if all are where they should be."""
    targets = placement.loads.least(MAX_TARGETS, lambda target: target is not worker and target.takes_new)
    if not targets:
        return None
    return _stranded(worker, targets, placement, max_moves) or _balancing(worker, targets[0], placement, max_moves)


def _stranded(
    worker: WorkerState, targets: list[WorkerState], placement: Placement, max_moves: int
) -> tuple[Sequence, WorkerState] | None:
    """Preempted, and there is no room here but elsewhere: it would only wait."""
    for sequence in worker.queue:
        if sequence.status is not Status.PREEMPTED or sequence.num_moves >= max_moves:
            continue
        if sequence.last_plan > worker.applied or not sequence.remaining:
            continue
        blocks = worker.queue[sequence].blocks
        if worker.pool.num_free - blocks >= placement.spare(worker) and worker.num_active < worker.limits.max_active:
            continue
        for target in targets:
            if placement.has_room(sequence, target):
                return sequence, target
    return None


def _balancing(
    worker: WorkerState, target: WorkerState, placement: Placement, max_moves: int
) -> tuple[Sequence, WorkerState] | None:
    """Steps here are long because many share them; elsewhere few do. The youngest is the cheapest to move."""
    difference = worker.load - target.load
    if difference < MIN_DIFFERENCE or worker.queue or target.queue:
        return None
    movable = [
        sequence
        for sequence in worker.decoding.values()
        if sequence.num_moves < max_moves and sequence.total_slots - sequence.num_scheduled > MIN_EXPECTED
    ]
    if not movable:
        return None
    youngest = min(movable, key=lambda sequence: (sequence.num_scheduled, sequence.arrival, sequence.choice))
    tokens = youngest.num_scheduled
    left = min(youngest.total_slots - tokens, max(MIN_EXPECTED, len(youngest.output)))
    # Every step is shorter for those who stay and longer for those who are joined, by a sequence's share.
    gain = worker.model.sequence_s(tokens) * (difference - 1) * left
    cost = worker.model.token_s(tokens // 2) * tokens * (target.load + 1)
    if gain <= HYSTERESIS * cost or not placement.has_room(youngest, target):
        return None
    return youngest, target
