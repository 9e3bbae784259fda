"""The scheduler's spans: each time that a sequence waits for its place, from the queue or after a preemption, a move or
the loss of its worker. Implements the engine's `Waits`."""

import time

from services.common.request import GenerateRequest
from services.common.telemetry import is_sampled
from services.common.telemetry.tracing import Tracing
from services.scheduler.core.request import Sequence


class QueueSpans:
    """What waits is known by its request and choice."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._since_ns: dict[tuple[str, int], tuple[int, str]] = {}

    def begin(self, request: GenerateRequest, choice: int, why: str, since_s: float = 0.0) -> None:
        """It waits from now on, or since a moment of unix time."""
        key = (request.request_id, choice)
        if is_sampled(request.traceparent) and key not in self._since_ns:
            now_ns = time.time_ns()
            self._since_ns[key] = (min(now_ns, int(since_s * 1e9) or now_ns), why)

    def placed(self, request: GenerateRequest, sequence: Sequence) -> None:
        """It waits no more: a plan runs it."""
        self._end(request, sequence.choice, {"orca.worker": sequence.worker or ""}, sequence)

    def gone(self, request: GenerateRequest, sequence: Sequence) -> None:
        """Its request is over; perhaps it was waiting still."""
        reason = sequence.finish_reason.value if sequence.finish_reason else ""
        self._end(request, sequence.choice, {"orca.end": reason}, sequence)

    def _end(self, request: GenerateRequest, choice: int, attributes: dict[str, str | int], sequence: Sequence) -> None:
        found = self._since_ns.pop((request.request_id, choice), None)
        if found is None:
            return
        since_ns, why = found
        attributes |= {
            "orca.request.id": request.request_id,
            "orca.choice": choice,
            "orca.waits_after": why,
            "orca.priority": sequence.priority,
            "orca.preemptions": sequence.num_preemptions,
            "orca.moves": sequence.num_moves,
        }
        self._tracing.record("queue", request.traceparent, since_ns, time.time_ns(), attributes)
