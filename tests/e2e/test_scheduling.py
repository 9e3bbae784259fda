"""Iteration-level scheduling, shown from the journal's step numbers, through real processes."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.up import Up
from services.common.journal import JournalEntry
from services.common.redis.store import Store, connect
from tests.e2e.conftest import MODEL, eventually


async def _complete(http: httpx.AsyncClient, up: Up, prompt: str, tokens: int) -> str:
    """Run one request; returns its id."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    response = await http.post(f"{up.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200
    return response.headers["x-request-id"]


def _steps(entries: list[JournalEntry]) -> list[int]:
    return [entry.step for entry in entries for item in entry.items for _ in item.token_ids]


@pytest.mark.parametrize("policy", ["request-level", "orca", "chunked"])
async def test_a_short_request_need_not_wait_for_a_long_one(tmp_path: Path, policy: str) -> None:
    with Up(tmp_path, "--executor", "fake", "--fake-step-ms", "10", "--policy", policy) as up:
        store = Store(connect(up.redis_url), "default")
        async with httpx.AsyncClient() as http:
            long = asyncio.create_task(_complete(http, up, "long", 200))
            await eventually(lambda: up.metrics()["orca_requests_running"] == 1)
            short_id = await _complete(http, up, "short", 4)
            long_id = await long
        long_steps, short_steps = _steps(await store.journal(long_id)), _steps(await store.journal(short_id))
        await store.aclose()
        assert len(long_steps) == 200
        assert len(short_steps) == 4
        assert long_steps == list(range(long_steps[0], long_steps[0] + 200)), "the long one ran in every step"
        if policy == "request-level":
            assert short_steps[0] > long_steps[-1]
        else:
            assert long_steps[0] < short_steps[0]
            assert short_steps[-1] < long_steps[-1]
        await eventually(up.is_idle)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "short"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "short"}]},
}


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_d05_a_queued_stream_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """One slot, a long request in it: the stream behind it has its headers at once, then comments, then its text."""
    monkeypatch.setenv("ORCA_KEEP_ALIVE", "0.2")
    with Up(tmp_path, "--executor", "fake", "--fake-step-ms", "10", "--max-num-seqs", "1") as up:
        async with httpx.AsyncClient(timeout=60) as http:
            long = asyncio.create_task(_complete(http, up, "long", 150))
            await eventually(lambda: up.metrics()["orca_requests_running"] == 1)
            body = {"model": MODEL, "max_tokens": 2, "stream": True, **BODIES[path]}
            async with http.stream("POST", f"{up.url}{path}", json=body) as response:
                assert not long.done()
                raw = "".join([chunk async for chunk in response.aiter_text()])
            await long
        events = raw.split("\n\n")
        comments = [event for event in events if event.startswith(":")]
        assert len(comments) >= 3
        assert events[: len(comments)] == comments, "a comment inside the answer"
        assert events[-2] == "data: [DONE]"
        await eventually(up.is_idle)


async def test_d05_a_preempted_stream_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives way in the middle, to one of higher priority: comments fill the gap, and none is inside an event."""
    monkeypatch.setenv("ORCA_KEEP_ALIVE", "0.2")
    flags = ("--executor", "fake", "--fake-step-ms", "10", "--max-num-seqs", "1", "--order", "priority")
    with Up(tmp_path, *flags) as up:
        async with httpx.AsyncClient(timeout=60) as http:
            body = {"model": MODEL, "max_tokens": 60, "stream": True, **BODIES["/v1/completions"]}
            lines: list[str] = []
            async with http.stream("POST", f"{up.url}/v1/completions", json=body) as response:
                high: asyncio.Task[Any] | None = None
                async for line in response.aiter_lines():
                    lines.append(line)
                    if high is None and line.startswith("data: "):
                        urgent = {"model": MODEL, "prompt": "urgent", "max_tokens": 150}
                        headers = {"X-Orca-Priority": "9"}
                        sent = http.post(f"{up.url}/v1/completions", json=urgent, headers=headers)
                        high = asyncio.create_task(sent)
            assert high is not None
            assert (await high).status_code == 200
        assert up.metrics()["orca_preemptions_total"] >= 1
        assert sum(line.startswith(":") for line in lines) >= 3
        allowed = (":", "id: ", "data: ")
        assert all(not line or line.startswith(allowed) for line in lines)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        await eventually(up.is_idle)
