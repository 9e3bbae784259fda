"""Orders, tenants and the recorded trace, through real processes (fake executor: the model is not the point)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.up import Up
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES
from services.simulator.main import main as simulate
from tests.e2e.conftest import MODEL, eventually

EVERY = [(policy, "fcfs") for policy in sorted(BATCHING_POLICIES)] + [
    ("chunked", order) for order in sorted(ORDER_POLICIES) if order != "fcfs"
]


async def complete(http: httpx.AsyncClient, up: Up, prompt: str, tokens: int, **headers: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    named = {f"X-Orca-{name}": value for name, value in headers.items()}
    return await http.post(f"{up.url}/v1/completions", json=body, headers=named, timeout=60)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("policy", "order"), EVERY)
async def test_every_policy_and_order_serves_and_records(tmp_path: Path, policy: str, order: str) -> None:
    trace, steps = tmp_path / "trace.jsonl", tmp_path / "steps.jsonl"
    flags = ["--executor", "fake", "--fake-step-ms", "2", "--policy", policy, "--order", order, "--max-num-seqs", "4"]
    flags += ["--record", str(trace), "--record-steps", str(steps), "--kv-blocks", "64", "--host-blocks", "8"]
    with Up(tmp_path, *flags) as up:
        async with httpx.AsyncClient() as http:
            calls = [
                complete(http, up, "the same beginning " * 10 + str(i), 12, Tenant="ab"[i % 2], Priority=str(i % 3))
                for i in range(12)
            ]
            answers = await asyncio.gather(*calls)
            assert [answer.status_code for answer in answers] == [200] * 12
            refused = await complete(http, up, "x", 1, Priority="urgent")
            assert refused.status_code == 400
            assert "X-Orca-Priority" in refused.json()["error"]["message"]
        await eventually(up.is_idle)
        served = up.metrics()
    recorded = [line for line in lines(trace) if line["output_tokens"] == 12]
    assert len(recorded) == 12
    assert {line["tenant"] for line in recorded} == {"a", "b"}
    assert {line["priority"] for line in recorded} == {0, 1, 2}
    assert len(lines(steps)) == served['orca_steps_total{worker="worker-0"}']
    # orca-max gives each request the whole pool, so nothing of another tenant's stays cached.
    assert served["orca_prefix_hit_tokens_total"] > 0 or policy == "orca-max"
    flags = ["--trace", str(trace), "--cost", "measured", "--steps", str(steps), "--kv-blocks", "64"]
    assert simulate([*flags, "--policy", policy, "--order", order, "--json"]) == 0


async def test_a_high_priority_request_overtakes_what_waits_and_what_runs(tmp_path: Path) -> None:
    flags = ["--executor", "fake", "--fake-step-ms", "10", "--order", "priority", "--max-num-seqs", "1"]
    with Up(tmp_path, *flags) as up:
        async with httpx.AsyncClient() as http:
            low = [asyncio.create_task(complete(http, up, f"low {i}", 60)) for i in range(3)]
            await eventually(lambda: up.metrics()["orca_requests_waiting"] == 2)
            high = await complete(http, up, "high", 5, Priority="7")
            assert high.status_code == 200
            assert not any(task.done() for task in low)
            assert up.metrics()["orca_preemptions_total"] >= 1
            answers = await asyncio.gather(*low)
        assert all(answer.json()["usage"]["completion_tokens"] == 60 for answer in answers)
        await eventually(up.is_idle)


async def test_what_is_preempted_moves_to_the_worker_that_has_room(tmp_path: Path) -> None:
    """Two long ones share a worker that cannot hold both to their end; the other worker is idle by then."""
    flags = ["--executor", "fake", "--fake-step-ms", "30", "--workers", "2", "--kv-blocks", "6"]
    with Up(tmp_path, *flags) as up:
        async with httpx.AsyncClient() as http:
            alone = [(await complete(http, up, prompt, 60)).json()["choices"][0]["text"] for prompt in ("a", "c")]
            first = asyncio.create_task(complete(http, up, "a", 60))
            await eventually(lambda: up.metrics()["orca_requests_running"] == 1)
            short = asyncio.create_task(complete(http, up, "b", 40))
            await eventually(lambda: up.metrics()["orca_requests_running"] == 2)
            third = asyncio.create_task(complete(http, up, "c", 60))
            answers = await asyncio.gather(first, third)
            assert (await short).status_code == 200
            assert [answer.json()["choices"][0]["text"] for answer in answers] == alone
        assert up.metrics()["orca_moves_total"] >= 1
        await eventually(up.is_idle)
