"""The baseline that every paper compares with: a batch runs until its last member ends."""

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.step import WorkerLimits


class RequestLevel:
    """Nobody joins a batch in progress, and a slot whose request has ended stays empty.

    Blocks for prompt + max_tokens are reserved at the start, so nothing is ever preempted.
    """

    name = "request-level"
    uses_budget = False

    def max_in_flight(self, limits: WorkerLimits) -> int:
        return limits.max_in_flight

    def fill(self, step: StepBuilder) -> None:
        if step.worker.running:
            for sequence in step.in_order():
                if sequence.remaining:
                    step.advance(sequence, sequence.remaining)
            return
        for sequence in step.candidates():
            if step.num_scheduled == step.limits.max_num_seqs:
                return
            if not step.admit(sequence, sequence.remaining, reserve=sequence.total_slots):
                return
