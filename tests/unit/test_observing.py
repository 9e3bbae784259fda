"""Health, logs and metrics as others see them; and whether two observers saw the same."""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from loadtest.agreement import compare, histograms
from services.common import cache, health, log, metrics
from services.common.errors import ConfigurationError
from services.common.health import Health
from services.common.settings import OrcaSettings
from services.common.telemetry import configure, is_sampled
from services.common.telemetry.metrics import convert

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_health_answers_three_questions() -> None:
    state = Health()
    assert state.answer("/health/started") == (503, "starting")
    assert state.answer("/health/ready") == (503, "starting")
    assert state.answer("/health/live") == (200, "ok")
    state.started = True
    assert state.answer("/health/ready") == (503, "Redis does not answer")
    state.reachable = True
    assert state.answer("/health/ready") == state.answer("/health/started") == (200, "ok")
    state.draining = True
    assert state.answer("/health/ready") == (503, "draining")
    assert state.answer("/health/started") == (200, "ok")
    assert state.answer("/metrics") is None


async def test_a_stuck_event_loop_is_seen_from_outside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Health()
    turning = asyncio.create_task(state.run())
    await asyncio.sleep(0)
    monkeypatch.setattr(health, "STUCK_S", 0.0)
    answer = state.answer("/health/live")  # asked by another thread, as the loop does not turn
    assert answer is not None
    assert answer[0] == 503
    turning.cancel()


def test_metrics_and_health_share_a_port_that_must_be_free() -> None:
    registry = CollectorRegistry()
    Counter("hits", "Hits", registry=registry).inc(3)
    port = metrics.serve(registry, Health(), "127.0.0.1", 0)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        assert "hits_total 3.0" in http.get("/metrics").text
        assert http.get("/health/started").status_code == 503
        assert http.get("/health/live").text == "ok"
    with pytest.raises(ConfigurationError, match=f"--metrics-port {port}"):
        metrics.serve(registry, Health(), "127.0.0.1", port)


def test_a_json_line_has_the_trace_that_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        log.configure("router-0", "info", log.JSON)
        logging.getLogger("a.b").info('said "%s"\nand more', "ü", extra=log.about(TRACE))
        logging.getLogger("a.b").info("no trace", extra=log.about(""))
        try:
            raise ValueError("bad")
        except ValueError:
            logging.getLogger("a.b").exception("failed")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == 'said "ü"\nand more'
    assert (first["process"], first["level"], first["logger"]) == ("router-0", "info", "a.b")
    assert (first["trace_id"], first["span_id"]) == (TRACE.split("-")[1], TRACE.split("-")[2])
    assert "trace_id" not in second
    assert "ValueError: bad" in third["exception"]


def test_tracing_is_off_without_an_endpoint_and_refuses_a_bad_one() -> None:
    assert configure(OrcaSettings(), "router", "router-0", CollectorRegistry()) is None
    with pytest.raises(ConfigurationError, match="--otlp-endpoint"):
        configure(OrcaSettings(otlp_endpoint="collector:4317"), "router", "router-0", CollectorRegistry())
    assert is_sampled(TRACE)
    assert not is_sampled(TRACE[:-2] + "00")
    assert not is_sampled("")


def test_without_an_endpoint_no_tracing_is_imported() -> None:
    """OpenTelemetry itself may be: other packages look for it."""
    wanted = "'telemetry.tracing' in m or 'exporter' in m or '.spans' in m"
    code = f"import sys; from services.{{0}} import main; print([m for m in sys.modules if {wanted}])"
    for service in ("router", "scheduler", "worker"):
        done = subprocess.run([sys.executable, "-c", code.format(service)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


def test_prometheus_families_become_otlp_metrics() -> None:
    registry = CollectorRegistry()
    Counter("hits", "Hits", ["kind"], registry=registry).labels("a").inc(2)
    Gauge("depth", "Depth", registry=registry).set(1.5)
    histogram = Histogram("orca_request_duration_seconds", "D", ["x"], buckets=(0.1, 1), registry=registry)
    for value in (0.05, 0.5, 0.6, 7):
        histogram.labels("y").observe(value)
    found = {metric.name: metric for metric in convert(registry.collect(), 1, 2)}
    assert set(found) == {"hits", "depth", "gen_ai.server.request.duration"}
    [hits] = found["hits"].data.data_points
    assert (hits.value, hits.attributes) == (2, {"kind": "a"})
    [depth] = found["depth"].data.data_points
    assert depth.value == 1.5
    [spread] = found["gen_ai.server.request.duration"].data.data_points
    assert (spread.count, spread.bucket_counts, spread.explicit_bounds) == (4, [1, 2, 1], [0.1, 1.0])
    assert spread.sum == pytest.approx(8.15)
    assert found["gen_ai.server.request.duration"].unit == "s"


def test_two_observers_are_compared_by_buckets() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("t_seconds", "T", buckets=(0.1, 0.25, 0.5, 1), registry=registry)
    histogram.observe(0.9)
    before = histograms(generate_latest(registry).decode())["t_seconds"]
    for value in [0.2] * 50 + [0.3] * 45 + [0.7] * 5:
        histogram.observe(value)
    added = histograms(generate_latest(registry).decode())["t_seconds"].since(before)
    assert sum(added.counts) == 100
    lines = compare("T", lambda q: {0.5: 0.21, 0.9: 0.24, 0.99: 3.0}[q], added)
    assert [(line.low_s, line.high_s, line.apart) for line in lines] == [(0.1, 0.25, 0), (0.25, 0.5, 1), (0.5, 1.0, 1)]
    assert "same bucket" in str(lines[0])


def test_what_an_image_ships_is_found_before_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache.cached("thing") == tmp_path / "cache" / "orca" / "thing"
    monkeypatch.setenv(cache.SHIPPED, str(tmp_path))
    assert cache.cached("thing") == tmp_path / "cache" / "orca" / "thing"
    (tmp_path / "thing").write_text("x")
    assert cache.cached("thing") == tmp_path / "thing"
