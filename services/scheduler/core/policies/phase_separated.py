"""A step is all prefill or all decode, prefill first: what engines did before chunked prefill."""

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.policies import phases
from services.scheduler.core.step import WorkerLimits


class PhaseSeparated:
    """New prompts go before decodes, which stall meanwhile; both stay within the token budget."""

    name = "phase-separated"
    uses_budget = True

    def max_in_flight(self, limits: WorkerLimits) -> int:
        return limits.max_in_flight

    def fill(self, step: StepBuilder) -> None:
        phases.continue_prefills(step)
        phases.admit(step)
        if not step.num_scheduled:
            phases.decode(step)
