"""Overload: what cannot be served soon is refused at once, honestly; what was accepted finishes."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from loadtest.up import Up
from tests.e2e.conftest import MODEL, eventually

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


async def ask(http: httpx.AsyncClient, tenant: str = "", **body: Any) -> httpx.Response:
    return await http.post("/v1/completions", json=BODY | body, headers={"X-Orca-Tenant": tenant})


async def test_the_system_refuses_what_is_too_much(tmp_path: Path) -> None:
    limits = ("--max-requests", "16", "--max-tokens", "2000", "--tenant-requests", "8", "--tenant-tokens", "1000")
    with Up(tmp_path, "--executor", "fake", "--fake-step-ms", "20", *limits) as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=60, limits=httpx.Limits(max_connections=300)) as http:
            tenants = ["a"] * 80 + ["b"] * 80 + ["c"] * 80
            answers = await asyncio.gather(*(ask(http, tenant) for tenant in tenants))
            statuses = [answer.status_code for answer in answers]
            assert set(statuses) == {200, 429}
            assert statuses.count(200) >= 16, "up to the limit everybody is served"
            for answer in answers:
                if answer.status_code == 429:
                    assert 1 <= int(answer.headers["retry-after"]) <= 60
                    assert answer.json()["error"]["code"] == "overloaded"
                else:
                    assert answer.json()["usage"]["completion_tokens"] == 20, "what was accepted has finished"
            await eventually(up.is_idle)

            large = await asyncio.gather(*(ask(http, "a", max_tokens=600) for _ in range(3)))
            assert sorted(answer.status_code for answer in large) == [200, 429, 429]
            assert "tokens of this tenant" in next(a for a in large if a.status_code == 429).json()["error"]["message"]
            assert (await ask(http, "a")).status_code == 200
        await eventually(up.is_idle)


async def test_a_client_that_reads_nothing_holds_up_nobody(tmp_path: Path) -> None:
    with Up(tmp_path, "--executor", "fake", "--fake-step-ms", "5") as up:
        slow: dict[str, Any] = {"n": 8, "logprobs": 20, "max_tokens": 1500, "stream": True, "prompt": "slow"}
        async with httpx.AsyncClient(base_url=up.url, timeout=60) as http:
            async with http.stream("POST", "/v1/completions", json=BODY | slow) as response:
                for _ in range(5):
                    assert (await ask(http, max_tokens=100)).json()["usage"]["completion_tokens"] == 100
                await eventually(up.is_idle, within_s=40)  # it has been generated to its end meanwhile
                events = [line async for line in response.aiter_lines() if line.startswith("data: {")]
            assert sum('"finish_reason":"length"' in event for event in events) == 8
            assert sum(event.count('"token_logprobs":[-') for event in events) == 8 * 1500, "and nothing was lost"
