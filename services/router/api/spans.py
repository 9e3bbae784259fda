"""The router's spans of one request: all of it, as its caller sees it, and in it the stream of its answer."""

import time
from typing import Any

from opentelemetry.trace import Span, SpanKind

from services.common.request import GenerateRequest
from services.common.telemetry import is_sampled
from services.common.telemetry.tracing import Tracing, clock_offset_ns, fail, traceparent_of
from services.router.core.document import Document

OPERATIONS = {
    "chat": "chat",
    "completion": "text_completion",
    "embedding": "embeddings",
    "messages": "chat",
    "responses": "chat",
}
ROUTES = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "embedding": "/v1/embeddings",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


class Spans:
    """Makes them, where tracing is on."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def begin(self, api: str, request: GenerateRequest, received: float, labels: dict[str, str]) -> "RequestSpan":
        """Of a request that is about to be queued. received: on the monotonic clock. labels: what its
        caller says of it."""
        return RequestSpan(self._tracing, api, request, received, labels)

    def resumed(self, document: Document) -> "StreamSpan | None":
        """Of one more reader of a request; it joins that request's trace."""
        return StreamSpan(self._tracing, document.traceparent) if is_sampled(document.traceparent) else None


class StreamSpan:
    """From the first event of an answer to its last."""

    def __init__(self, tracing: Tracing, traceparent: str) -> None:
        self._tracing = tracing
        self._stream: Span | None = None
        self.traceparent = traceparent

    def first_event(self) -> None:
        self._stream = self._tracing.start("stream", self.traceparent, {}, time.time_ns(), SpanKind.INTERNAL)

    def end(self, outcome: str, num_tokens: int, finishes: dict[int, str]) -> None:
        """Must be called once. outcome: as the metrics count it. finishes: by choice."""
        if self._stream is not None:
            _end(self._stream, outcome, num_tokens, finishes)


class RequestSpan(StreamSpan):
    """From receipt to the last event. traceparent: what the scheduler, the workers and other routers go on with."""

    def __init__(
        self, tracing: Tracing, api: str, request: GenerateRequest, received: float, labels: dict[str, str]
    ) -> None:
        operation = OPERATIONS[api]
        attributes = {"http.request.method": "POST", "http.route": ROUTES[api], "gen_ai.operation.name": operation}
        self._span = tracing.start(
            f"{operation} {request.model}",
            request.traceparent,
            attributes | _asked(request) | {f"orca.{name}": text for name, text in labels.items()},
            int(received * 1e9) + clock_offset_ns(),
            SpanKind.SERVER,
        )
        super().__init__(tracing, traceparent_of(self._span))

    def end(self, outcome: str, num_tokens: int, finishes: dict[int, str]) -> None:
        super().end(outcome, num_tokens, finishes)
        _end(self._span, outcome, num_tokens, finishes)

    def refused(self, code: str) -> None:
        """It was not queued. Called once, instead of `end`."""
        fail(self._span, code)
        self._span.end()


def _end(span: Span, outcome: str, num_tokens: int, finishes: dict[int, str]) -> None:
    span.set_attribute("orca.outcome", outcome)
    span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
    if finishes:
        span.set_attribute("gen_ai.response.finish_reasons", [finishes[choice] for choice in sorted(finishes)])
    if outcome != "ok":
        fail(span, outcome)
    span.end()


def _asked(request: GenerateRequest) -> dict[str, Any]:
    params = request.params
    return {
        "gen_ai.provider.name": "orca",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.choice.count": request.num_choices,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed & ((1 << 63) - 1),
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "orca.request.id": request.request_id,
        "orca.tenant": request.tenant,
        "orca.priority": request.priority,
    }
