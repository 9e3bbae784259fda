"""The protocol of batching policies."""

from typing import Protocol

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.step import WorkerLimits


class BatchingPolicy(Protocol):
    name: str
    uses_budget: bool

    def max_in_flight(self, limits: WorkerLimits) -> int:
        """Plans that may be on a worker at once."""
        ...

    def fill(self, step: StepBuilder) -> None:
        """Decide the step."""
        ...
