"""One trace per request across router, scheduler and worker; metrics by OTLP; log lines with the trace's id."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loadtest.up import Up
from tests.e2e.conftest import MODEL, eventually
from tests.support.otlp import Collector, ReceivedSpan, collector

FLAGS = ("--executor", "fake", "--fake-step-ms", "5", "--kv-blocks", "24", "--log-format", "json")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, Collector]]:
    """A system with few KV blocks, that sends what it has to a collector."""
    with pytest.MonkeyPatch.context() as patch, collector() as made:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with Up(tmp_path_factory.mktemp("traced"), *FLAGS, "--otlp-endpoint", made.endpoint) as up:
            yield up, made


def body(tokens: int, stream: bool = True, prompt: str = "Hello there", **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    } | more


def parent(number: int) -> tuple[str, str]:
    """A caller's trace: its id, and the header."""
    trace_id = f"{number:032x}"
    return trace_id, f"00-{trace_id}-00000000000000aa-01"


async def trace_of(made: Collector, trace_id: str, *names: str) -> dict[str, list[ReceivedSpan]]:
    """The spans of a trace by name, once all of these have come."""

    def found() -> dict[str, list[ReceivedSpan]]:
        spans: dict[str, list[ReceivedSpan]] = {}
        for span in made.trace(trace_id):
            spans.setdefault(span.name, []).append(span)
        return spans

    await eventually(lambda: set(names) <= found().keys())
    return found()


def check_connected(spans: dict[str, list[ReceivedSpan]], root: ReceivedSpan, caller: str) -> None:
    assert root.parent_id == caller
    for span in (span for named in spans.values() for span in named if span is not root):
        assert span.parent_id == root.span_id, f"{span.name} hangs elsewhere"
        assert root.start_ns <= span.start_ns <= span.end_ns, span.name


async def test_a_streamed_request_is_one_trace_with_a_span_per_phase(traced: tuple[Up, Collector]) -> None:
    up, made = traced
    trace_id, header = parent(1)
    labels = {"user": "ada", "metadata": {"team": "blue"}}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(
            f"{up.url}/v1/chat/completions", json=body(20, seed=7, top_p=0.9, **labels), headers={"traceparent": header}
        )
    assert answer.status_code == 200
    request_id = answer.headers["x-orca-request-id"]
    spans = await trace_of(made, trace_id, f"chat {MODEL}", "queue", "prefill", "decode", "stream")
    assert sum(map(len, spans.values())) == 5, "a span per phase, none per token"
    [root], [queue], [prefill], [decode], [stream] = (
        spans[name] for name in (f"chat {MODEL}", "queue", "prefill", "decode", "stream")
    )
    check_connected(spans, root, "00000000000000aa")
    assert [s.service for s in (root, queue, prefill, decode, stream)] == [
        "orca-router",
        "orca-scheduler",
        "orca-worker",
        "orca-worker",
        "orca-router",
    ]
    for key, value in {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "orca",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.id": request_id,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.seed": 7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.response.finish_reasons": ["length"],
        "http.route": "/v1/chat/completions",
        "orca.outcome": "ok",
        "orca.user": "ada",
        "orca.metadata.team": "blue",
    }.items():
        assert root.attributes[key] == value, key
    prompt = root.attributes["gen_ai.usage.input_tokens"]
    assert prefill.attributes["orca.tokens.computed"] + prefill.attributes["orca.tokens.cached"] == prompt
    assert prefill.attributes["orca.tokens.generated"] == 1
    assert decode.attributes["orca.tokens.generated"] == 19
    assert decode.attributes["orca.steps"] == 19
    assert decode.attributes["orca.end"] == "length"
    assert queue.attributes["orca.worker"] == prefill.attributes["orca.worker"] == "worker-0"
    assert queue.attributes["orca.waits_after"] == "arrival"
    assert {s.attributes["orca.request.id"] for s in (root, queue, prefill, decode)} == {request_id}
    assert prefill.end_ns == decode.start_ns
    assert not any(span.failed for named in spans.values() for span in named)
    await eventually(lambda: trace_id in {line.get("trace_id") for line in log_lines(up, "router-0")})
    await eventually(up.is_idle)


def log_lines(up: Up, process: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (up.folder / "logs" / f"{process}.log").read_text().splitlines()]


async def test_an_aborted_request_ends_its_spans_as_aborted(traced: tuple[Up, Collector]) -> None:
    up, made = traced
    trace_id, header = parent(2)
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{up.url}/v1/chat/completions"
        async with http.stream("POST", url, json=body(300), headers={"traceparent": header}) as answer:
            lines = answer.aiter_lines()
            for _ in range(6):
                await anext(lines)
    spans = await trace_of(made, trace_id, f"chat {MODEL}", "queue", "prefill", "decode", "stream")
    [root], [decode] = spans[f"chat {MODEL}"], spans["decode"]
    check_connected(spans, root, "00000000000000aa")
    assert root.failed
    assert root.attributes["orca.outcome"] == root.attributes["error.type"] == "abort"
    assert decode.attributes["orca.end"] == "released"
    assert 0 < decode.attributes["orca.tokens.generated"] < 299
    [line] = [line for line in log_lines(up, "router-0") if line.get("trace_id") == trace_id]
    assert "abort" in line["message"]
    await eventually(up.is_idle)


async def test_a_preempted_request_has_its_phases_again(traced: tuple[Up, Collector]) -> None:
    """24 blocks of 16, and two requests that come to need more together: one gives way, then goes on."""
    up, made = traced
    before = up.metrics()["orca_preemptions_total"]
    async with httpx.AsyncClient(timeout=60) as http:
        sent = [
            http.post(
                f"{up.url}/v1/chat/completions",
                json=body(200, stream=index == 0, prompt=f"number {index}"),
                headers={"traceparent": parent(10 + index)[1]},
            )
            for index in range(2)
        ]
        answers = await asyncio.gather(*sent)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert up.metrics()["orca_preemptions_total"] > before, "nobody was preempted"
    for index in range(2):

        def ended(trace_id: str = parent(10 + index)[0]) -> bool:
            return any(s.name == "decode" and s.attributes.get("orca.end") == "length" for s in made.trace(trace_id))

        await eventually(ended)
    traces = [await trace_of(made, parent(10 + i)[0], f"chat {MODEL}", "decode", "stream") for i in range(2)]
    preempted = [spans for spans in traces if len(spans["queue"]) > 1]
    assert preempted
    for spans in preempted:
        [root] = spans[f"chat {MODEL}"]
        check_connected(spans, root, "00000000000000aa")
        assert len(spans["queue"]) == len(spans["prefill"])
        last = max(spans["queue"], key=lambda span: span.start_ns)
        assert last.attributes["orca.waits_after"] == "preemption"
        assert last.attributes["orca.preemptions"] >= 1
        ends = [s.attributes.get("orca.end") for s in sorted(spans["decode"], key=lambda span: span.start_ns)]
        assert ends[:-1] == ["released"] * (len(ends) - 1)
        assert ends[-1] == "length"
        generated = sum(s.attributes["orca.tokens.generated"] for s in (*spans["prefill"], *spans["decode"]))
        assert generated == 200
    await eventually(up.is_idle)


async def test_what_is_not_sampled_leaves_nothing(traced: tuple[Up, Collector]) -> None:
    up, made = traced
    trace_id, header = parent(20)
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"traceparent": header.removesuffix("01") + "00"}
        answer = await http.post(f"{up.url}/v1/chat/completions", json=body(5), headers=headers)
        assert answer.status_code == 200
        after, header = parent(21)
        await http.post(f"{up.url}/v1/chat/completions", json=body(5), headers={"traceparent": header})
    await trace_of(made, after, f"chat {MODEL}", "queue", "decode")  # what came before it has come as well
    assert made.trace(trace_id) == []
    await eventually(up.is_idle)


async def test_a_refused_request_is_a_failed_span(traced: tuple[Up, Collector]) -> None:
    up, made = traced
    trace_id, header = parent(30)
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"traceparent": header, "Idempotency-Key": "k"}
        first = await http.post(f"{up.url}/v1/chat/completions", json=body(5), headers=headers)
        again = await http.post(f"{up.url}/v1/chat/completions", json=body(6), headers=headers)
    assert first.status_code == 200
    assert again.status_code == 422
    await eventually(lambda: any(span.failed for span in made.trace(trace_id)))
    [failed] = [span for span in made.trace(trace_id) if span.failed]
    assert failed.attributes["error.type"] == "idempotency_key_reused"
    await eventually(up.is_idle)


def test_metrics_are_sent_as_well_the_last_time_at_the_end(traced: tuple[Up, Collector]) -> None:
    """After all others here: it ends the system."""
    up, made = traced
    up.stop()

    def value(service: str, name: str) -> float:
        [point] = made.metrics[service, name]
        return float(point.as_double or point.as_int)

    assert value("orca-router", "orca_generated_tokens") > 400
    assert value("orca-worker", "orca_steps") > 200
    assert value("orca-scheduler", "orca_preemptions") > 0
    for name in ("time_to_first_token", "time_per_output_token", "request.duration"):
        [spread] = made.metrics["orca-router", f"gen_ai.server.{name}"]
        assert spread.count == sum(spread.bucket_counts) > 3
        assert len(spread.bucket_counts) == len(spread.explicit_bounds) + 1
        assert spread.sum > 0
