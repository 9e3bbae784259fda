"""Why each decision was taken: a bounded record, kept only when asked for."""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from services.scheduler.core.request import Sequence

DEFAULT_SIZE = 10_000


class Reason(Enum):
    SCHEDULED = "scheduled"
    NO_BLOCKS = "waits for blocks"
    NO_SLOT = "waits for a slot"
    NO_BUDGET = "waits for token budget"
    NO_WORKER = "no worker has room"
    PROMPT_SHARED = "waits for the prompt that another choice computes"
    RESULTS_DUE = "waits for results in flight"
    PLACED = "placed"
    ADMITTED = "admitted"
    HELD = "sits out"
    PREEMPTED = "preempted"
    SWAPPED = "preempted, kept in host memory"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Decision:
    """About one sequence in one plan. detail: tokens scheduled, for whom it was preempted, where it was moved from."""

    plan: int
    worker: str
    request_id: str
    choice: int
    reason: Reason
    detail: str = ""


class Explain:
    """The last decisions, oldest dropped first. `plan` is the plan being made."""

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        self.decisions: deque[Decision] = deque(maxlen=size)
        self.plan = 0

    def note(self, worker: str, sequence: Sequence, reason: Reason, detail: str = "") -> None:
        self.decisions.append(Decision(self.plan, worker, sequence.request_id, sequence.choice, reason, detail))

    def of(self, request_id: str) -> list[Decision]:
        """One request's own account, oldest first."""
        return [decision for decision in self.decisions if decision.request_id == request_id]
