"""Chunked prefill within a token budget (Sarathi-Serve, OSDI'24): decodes never stall."""

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.policies import phases
from services.scheduler.core.policies.base import BatchingPolicy


class Chunked(BatchingPolicy):
    """Decodes first, then part-done prefills, then new ones, within the token budget."""

    name = "chunked"
    uses_budget = True

    def fill(self, step: StepBuilder) -> None:
        step.decode(phases.decode_limit(step))
        phases.continue_prefills(step)
        phases.admit(step)
