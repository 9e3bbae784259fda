"""An OpenTelemetry collector that keeps what it is sent."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class ReceivedSpan:
    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: list[str]


@dataclass
class Collector:
    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    # By service and name: the data points last received.
    metrics: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        with self.lock:
            return [span for span in self.spans if span.trace_id == trace_id]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                received = ReceivedSpan(
                    name=span.name,
                    service=service,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    failed=span.status.code == 2,
                    attributes=_attributes(span.attributes),
                    events=[event.name for event in span.events],
                )
                with self._collector.lock:
                    self._collector.spans.append(received)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            service = _attributes(resource.resource.attributes)["service.name"]
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                points = getattr(metric, metric.WhichOneof("data")).data_points
                with self._collector.lock:
                    self._collector.metrics[service, metric.name] = list(points)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    made = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(made), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(made), server)
    made.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(None).wait()
