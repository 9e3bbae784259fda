"""Prometheus: a registry per process, served on a port of its own. Names are declared here, once."""

import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, make_wsgi_app
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from services.common.errors import ConfigurationError
from services.common.health import Health

STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
IDLE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1)
PUBLISH_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.02, 0.05, 0.1, 1, 10)
COUNT_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024)


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter("orca_requests_total", "Requests by how they ended", ["outcome"], registry=registry)
        self.time_to_first_token = Histogram(
            "orca_time_to_first_token_seconds",
            "From receipt to first token",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "orca_inter_token_latency_seconds", "Between token events", buckets=LATENCY_BUCKETS, registry=registry
        )
        self.time_per_output_token = Histogram(
            "orca_time_per_output_token_seconds",
            "Of one request: from its first token to its last, by token",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.request_duration = Histogram(
            "orca_request_duration_seconds", "From receipt to the end", buckets=LATENCY_BUCKETS, registry=registry
        )
        self.prompt_tokens = Counter("orca_prompt_tokens_total", "Prompt tokens accepted", registry=registry)
        self.generated_tokens = Counter("orca_generated_tokens_total", "Tokens generated", registry=registry)


class SchedulerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = Gauge("orca_requests_running", "Sequences that hold blocks", registry=registry)
        self.waiting = Gauge("orca_requests_waiting", "Sequences that wait for blocks or a slot", registry=registry)
        self.blocks = Gauge("orca_kv_blocks", "KV blocks of all workers", ["state"], registry=registry)
        self.workers = Gauge("orca_workers", "Workers connected", registry=registry)
        self._registry = registry

    def count(
        self,
        *,
        preemptions: Callable[[], int],
        swaps: Callable[[], int],
        moves: Callable[[], int],
        hit_tokens: Callable[[], int],
        recomputed_tokens: Callable[[], int],
        trials: Callable[[], int],
        recoveries: Callable[[], int],
        plans: Callable[[], int],
    ) -> None:
        """Take these counts from where they are kept."""
        counted_elsewhere(self._registry, "orca_preemptions", "Sequences preempted", preemptions)
        counted_elsewhere(self._registry, "orca_swaps", "Preemptions that kept the KV in host memory", swaps)
        counted_elsewhere(self._registry, "orca_moves", "Sequences moved to another worker", moves)
        counted_elsewhere(self._registry, "orca_prefix_hit_tokens", "Tokens not computed again", hit_tokens)
        counted_elsewhere(
            self._registry, "orca_recomputed_tokens", "Tokens whose KV was lost and computed again", recomputed_tokens
        )
        counted_elsewhere(self._registry, "orca_trials", "Suspects of a crash run apart from others", trials)
        counted_elsewhere(self._registry, "orca_recoveries", "Sequences that went on from the journal", recoveries)
        counted_elsewhere(self._registry, "orca_plans", "Step plans sent", plans)


class WorkerMetrics:
    def __init__(self, registry: CollectorRegistry, worker: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["worker"], buckets=buckets, registry=registry).labels(worker)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["worker"], registry=registry).labels(worker)

        self.step_duration = histogram("orca_step_duration_seconds", "One step, model and sampling", STEP_BUCKETS)
        self.step_idle = histogram("orca_step_idle_seconds", "From one step's end to the next's start", IDLE_BUCKETS)
        self.step_sequences = histogram("orca_step_sequences", "Sequences in a step", COUNT_BUCKETS)
        self.step_tokens = histogram("orca_step_tokens", "Tokens in a step", COUNT_BUCKETS)
        self.publish = histogram(
            "orca_publish_seconds", "From a step's end to its tokens in the journal", PUBLISH_BUCKETS
        )
        self.steps = counter("orca_steps_total", "Steps run")
        self._registry = registry
        self._worker = worker

    def count(self, model_calls: Callable[[], int], publish_calls: Callable[[], int]) -> None:
        """Take these counts from where they are kept."""
        counted_elsewhere(self._registry, "orca_model_calls", "Calls of the model", model_calls, self._worker)
        counted_elsewhere(
            self._registry, "orca_publish_calls", "Calls of Redis that publish tokens", publish_calls, self._worker
        )


class _Counted(Collector):
    """A counter whose value some object keeps anyway."""

    def __init__(self, name: str, text: str, value: Callable[[], int], worker: str | None) -> None:
        self._name, self._text, self._value, self._worker = name, text, value, worker

    def collect(self) -> Iterable[Metric]:
        labels = ["worker"] if self._worker else []
        family = CounterMetricFamily(self._name, self._text, labels=labels)
        family.add_metric([self._worker] if self._worker else [], self._value())
        yield family


def counted_elsewhere(
    registry: CollectorRegistry, name: str, text: str, value: Callable[[], int], worker: str | None = None
) -> None:
    """Expose NAME_total, read when scraped."""
    registry.register(_Counted(name, text, value, worker))


class _Silent(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(registry: CollectorRegistry, health: Health, host: str, port: int) -> int:
    """Serve /metrics and /health on threads; returns the port. Raises ConfigurationError if it is taken."""
    exposition = make_wsgi_app(registry)

    def app(environ: Any, start_response: Any) -> Any:
        answer = health.answer(environ["PATH_INFO"])
        if answer is None:
            return exposition(environ, start_response)
        status, text = answer
        start_response(f"{status} {'OK' if status == 200 else 'Service Unavailable'}", [("Content-Type", "text/plain")])
        return [text.encode()]

    try:
        server = make_server(host, port, app, ThreadingWSGIServer, _Silent)
    except OSError as error:
        raise ConfigurationError(f"--metrics-port {port}: {error.strerror}") from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)
