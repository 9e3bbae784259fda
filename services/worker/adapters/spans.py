"""The worker's spans of a sequence: its prefill, up to the first token, and its decode after it. None per token."""

from dataclasses import dataclass, field

from services.common.telemetry import is_sampled
from services.common.telemetry.tracing import Tracing, clock_offset_ns
from services.worker.core.plan import NewSequence, SequenceOutput, StepOutput


@dataclass(slots=True)
class _Phases:
    """A sequence under way. Times on the worker's monotonic clock, in ns; offset_ns leads to unix time. tokens,
    computed, steps: of this phase."""

    new: NewSequence
    began_ns: int
    offset_ns: int
    decoding: bool = False
    last_ns: int = 0
    tokens: int = 0
    computed: int = 0
    steps: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)


class PhaseSpans:
    """Follows the traced sequences from step to step. A preempted sequence that comes again has its phases again."""

    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing = tracing
        self._worker = worker
        self._open: dict[int, _Phases] = {}

    def on_step(self, step: StepOutput) -> None:
        """Called once for every step, in order."""
        plan = step.plan
        for sequence_id in list(self._open) if plan.full else plan.release:
            self._end(sequence_id, step.started_ns, "released")
        for new in plan.add:
            if is_sampled(new.traceparent):
                self._open[new.sequence_id] = _Phases(new, step.started_ns, clock_offset_ns())
        if not self._open:
            return
        for event, grants in (("swapped out", plan.swap_out), ("swapped in", plan.swap_in)):
            for sequence_id, _ in grants:
                if sequence_id in self._open:
                    self._open[sequence_id].events.append((event, step.started_ns))
        for output in step.outputs:
            phases = self._open.get(output.sequence.sequence_id)
            if phases is not None:
                self._advance(phases, output, step.finished_ns)

    def _advance(self, phases: _Phases, output: SequenceOutput, now_ns: int) -> None:
        phases.last_ns = now_ns
        phases.steps += 1
        phases.computed += output.num_computed
        phases.tokens += len(output.token_ids)
        ended = output.finish_reason or output.sequence.ended
        if ended:
            self._end(output.sequence.sequence_id, now_ns, ended)
        elif output.token_ids and not phases.decoding:
            self._record(phases, now_ns, "")
            phases.decoding, phases.began_ns = True, now_ns
            phases.tokens = phases.computed = phases.steps = 0

    def _end(self, sequence_id: int, now_ns: int, reason: str) -> None:
        phases = self._open.pop(sequence_id, None)
        if phases is not None:
            self._record(phases, phases.last_ns or now_ns, reason)

    def _record(self, phases: _Phases, ended_ns: int, reason: str) -> None:
        new, offset = phases.new, phases.offset_ns
        attributes: dict[str, str | int] = {
            "orca.request.id": new.request_id,
            "orca.choice": new.choice,
            "orca.sequence.id": new.sequence_id,
            "orca.worker": self._worker,
            "orca.steps": phases.steps,
            "orca.tokens.computed": phases.computed,
            "orca.tokens.generated": phases.tokens,
        }
        if not phases.decoding:
            attributes["orca.tokens.cached"] = new.num_computed
        if reason:
            attributes["orca.end"] = reason
        self._tracing.record(
            "decode" if phases.decoding else "prefill",
            new.traceparent,
            phases.began_ns + offset,
            ended_ns + offset,
            attributes,
            [(event, at_ns + offset) for event, at_ns in phases.events],
            "error" if reason == "error" else "",
        )
        phases.events.clear()
