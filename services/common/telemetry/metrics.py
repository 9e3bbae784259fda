"""The Prometheus registry by OTLP as well: one definition, two ways out, and nothing added where counting is done."""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

INTERVAL_S = 15.0
# What the semantic conventions for generative AI call some of ours.
CONVENTIONAL = {
    "orca_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "orca_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "orca_request_duration_seconds": "gen_ai.server.request.duration",
}
CUMULATIVE = AggregationTemporality.CUMULATIVE


class MetricsExport:
    """Sends everything in a registry from time to time, on a thread of its own."""

    def __init__(self, endpoint: str, insecure: bool, resource: Resource, registry: CollectorRegistry) -> None:
        self._exporter = OTLPMetricExporter(endpoint=endpoint, insecure=insecure)
        self._resource = resource
        self._registry = registry
        self._began_ns = time.time_ns()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._export()

    def _export(self) -> None:
        metrics = list(convert(self._registry.collect(), self._began_ns, time.time_ns()))
        scope = ScopeMetrics(InstrumentationScope("orca"), metrics, "")
        self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]))

    def close(self) -> None:
        """Send the last state."""
        self._ended.set()
        self._thread.join()
        self._export()
        self._exporter.shutdown()


def convert(families: Iterable[Family], began_ns: int, now_ns: int) -> Iterable[Metric]:
    """Prometheus families as OTLP metrics. began_ns: when the counting began."""
    for family in families:
        data: Sum | Gauge | Histogram
        if family.type == "counter":
            samples = [s for s in family.samples if s.name.endswith("_total")]
            data = Sum([_number(s, began_ns, now_ns) for s in samples], CUMULATIVE, is_monotonic=True)
        elif family.type == "gauge":
            data = Gauge([_number(s, began_ns, now_ns) for s in family.samples])
        elif family.type == "histogram":
            data = Histogram([*_histograms(family.samples, began_ns, now_ns)], CUMULATIVE)
        else:
            continue
        unit = "s" if family.name.endswith("_seconds") else "1"
        yield Metric(CONVENTIONAL.get(family.name, family.name), family.documentation, unit, data)


def _number(sample: Sample, began_ns: int, now_ns: int) -> NumberDataPoint:
    return NumberDataPoint(dict(sample.labels), began_ns, now_ns, sample.value)


def _histograms(samples: Iterable[Sample], began_ns: int, now_ns: int) -> Iterable[HistogramDataPoint]:
    """One for each set of labels; Prometheus counts buckets from below, OTLP each by itself."""
    points: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in samples:
        labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
        kind = sample.name.rpartition("_")[2]
        points.setdefault(labels, {})[sample.labels["le"] if kind == "bucket" else kind] = sample.value
    for labels, values in points.items():
        bounds, counts = _buckets(values)
        total = int(values["count"])
        # The extremes are not known. They are optional on the wire, though this class says otherwise.
        unknown: Any = None
        yield HistogramDataPoint(dict(labels), began_ns, now_ns, total, values["sum"], counts, bounds, unknown, unknown)


def _buckets(values: Mapping[str, float]) -> tuple[list[float], list[int]]:
    """Upper bounds, without the infinite one, and how many values each bucket has."""
    others = ("sum", "count", "created")
    up_to = sorted((float(bound), int(count)) for bound, count in values.items() if bound not in others)
    counts = [count - before for (_, count), (_, before) in zip(up_to, [(0.0, 0), *up_to], strict=False)]
    return [bound for bound, _ in up_to[:-1]], counts
