"""Placement: which worker runs a waiting sequence. Filter, score, pick; asked again each iteration."""

from collections.abc import Iterable

from services.scheduler.core.block_manager import blocks_for
from services.scheduler.core.request import Sequence
from services.scheduler.core.worker_state import WorkerState


def can_ever_fit(sequence: Sequence, worker: WorkerState) -> bool:
    """True if the sequence, alone on the worker, could run to its last token."""
    limits = worker.limits
    needed = blocks_for(sequence.total_slots, limits.block_size)
    return sequence.total_tokens <= limits.max_model_len and needed <= limits.num_blocks


def pick(sequence: Sequence, workers: Iterable[WorkerState]) -> WorkerState | None:
    """The worker that should run the sequence next; None if none can now.

    A preempted sequence stays where it ran: its publisher there still holds the fence.
    """
    fitting = [
        worker
        for worker in workers
        if can_ever_fit(sequence, worker)
        and worker.num_active < worker.limits.max_active
        and (sequence.worker is None or sequence.worker == worker.name)
    ]
    return min(fitting, key=lambda worker: (worker.num_active, worker.pool.num_used, worker.name), default=None)
