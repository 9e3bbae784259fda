"""What a batching policy is."""

from abc import ABC, abstractmethod

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.request import Sequence
from services.scheduler.core.step import WorkerLimits


class BatchingPolicy(ABC):
    """Decides what may share a step.

    uses_budget: its steps keep to the token budget.
    reserves: all the blocks that a sequence may need are taken at its start, so none is held back for the running ones.
    returns_together: a client gets its answer when the whole batch has ended (a simulator counts latency so).
    """

    name = ""
    uses_budget = False
    reserves = False
    returns_together = False

    def max_in_flight(self, limits: WorkerLimits) -> int:
        """Plans that may be on a worker at once."""
        # Through pipeline stages, one batch each; on one stage a plan waits there while another runs.
        return limits.stages if limits.stages > 1 else limits.max_in_flight

    def accepts(self, running: int) -> bool:
        """True if a worker with so many running sequences takes new ones."""
        return True

    def reserve(self, sequence: Sequence, limits: WorkerLimits) -> int:
        """KV slots that a sequence gets when it starts."""
        return sequence.num_tokens

    @abstractmethod
    def fill(self, step: StepBuilder) -> None:
        """Decide the step."""
