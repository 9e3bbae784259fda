"""Orca's own policy (OSDI'22, Algorithm 1)."""

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.step import WorkerLimits


class Orca:
    """Oldest first up to max_bs; prompt + max_tokens reserved at first scheduling.

    The scan stops at the first request that does not fit: it does not skip to a smaller one, which is what
    keeps the order first-come-first-served by iteration. A request in flight is not selected again before its
    result. n_workers (pipeline stages) batches are in flight at once; a whole prompt is one iteration.
    """

    name = "orca"
    uses_budget = False

    def max_in_flight(self, limits: WorkerLimits) -> int:
        return limits.stages

    def fill(self, step: StepBuilder) -> None:
        for sequence in step.in_order():
            if step.num_scheduled == step.limits.max_num_seqs:
                return
            if sequence.steps_in_flight == 0 and sequence.remaining:
                step.advance(sequence, sequence.remaining)
        for sequence in step.candidates():
            if step.num_scheduled == step.limits.max_num_seqs:
                return
            if not step.admit(sequence, sequence.remaining, reserve=sequence.total_slots):
                return
