"""A step is all prefill or all decode, prefill first: what engines did before chunked prefill."""

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.policies import phases
from services.scheduler.core.policies.base import BatchingPolicy


class PhaseSeparated(BatchingPolicy):
    """New prompts go before decodes, which stall meanwhile; both stay within the token budget."""

    name = "phase-separated"
    uses_budget = True

    def fill(self, step: StepBuilder) -> None:
        if step.has_prefills():
            step.rest()
            phases.continue_prefills(step)
            phases.admit(step)
        if not step.num_prefills:
            step.decode(phases.decode_limit(step))
