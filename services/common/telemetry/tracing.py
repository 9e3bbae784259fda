"""Spans by OTLP. A process that comes to know of a phase when it is over makes its span then, with both times given."""

import logging
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry

from services.common.errors import ConfigurationError
from services.common.telemetry.metrics import MetricsExport

Attributes = Mapping[str, AttributeValue]
SCOPE = "orca"
_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Where one process sends its spans. What is sampled follows OTEL_TRACES_SAMPLER, and a caller's own decision.

    Exporting happens on threads of its own; a collector that is away loses spans, never time.
    """

    def __init__(self, endpoint: str, service: str, name: str, registry: CollectorRegistry) -> None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigurationError("--otlp-endpoint: expected http://host:port or https://host:port")
        resource = Resource.create(
            {"service.name": f"orca-{service}", "service.namespace": "orca", "service.instance.id": name}
        )
        insecure = url.scheme == "http"
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=insecure)))
        self._tracer = self._provider.get_tracer(SCOPE)
        self._metrics = MetricsExport(endpoint, insecure, resource, registry)
        # The exporters tell of every failure; that is for whoever looks for it.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)

    def start(self, name: str, traceparent: str, attributes: Attributes, start_ns: int, kind: SpanKind) -> Span:
        """A span under way. traceparent: of its parent, or "" for a trace of its own. start_ns: unix time."""
        return self._tracer.start_span(name, _context(traceparent), kind, attributes, start_time=start_ns)

    def record(
        self,
        name: str,
        traceparent: str,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        events: Sequence[tuple[str, int]] = (),
        error: str = "",
    ) -> None:
        """A span that is over. events: what happened in it, and when."""
        span = self.start(name, traceparent, attributes, start_ns, SpanKind.INTERNAL)
        for event, at_ns in events:
            span.add_event(event, timestamp=at_ns)
        if error:
            fail(span, error)
        span.end(max(start_ns, end_ns))

    def close(self) -> None:
        """Send what is left; takes some seconds if the collector is away."""
        self._provider.shutdown()
        self._metrics.close()


def _context(traceparent: str) -> Context:
    return _propagator.extract({"traceparent": traceparent}, context=Context())


def traceparent_of(span: Span) -> str:
    """For children of this span in other processes."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def fail(span: Span, kind: str) -> None:
    """Mark a span as failed. kind: of a small set."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def clock_offset_ns() -> int:
    """Unix time less the monotonic clock, now."""
    return time.time_ns() - time.monotonic_ns()
