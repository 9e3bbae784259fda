"""Chunked prefill within a token budget (Sarathi-Serve, OSDI'24): decodes never stall."""

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.policies import phases
from services.scheduler.core.step import WorkerLimits


class Chunked:
    """Decodes first, then part-done prefills, then new ones, within the token budget."""

    name = "chunked"
    uses_budget = True

    def max_in_flight(self, limits: WorkerLimits) -> int:
        return limits.max_in_flight

    def fill(self, step: StepBuilder) -> None:
        phases.decode(step)
        phases.continue_prefills(step)
        phases.admit(step)
