"""What prompts of 200,000 characters do to others: `make bench-long-prompts`.

A small stream runs over and over, and /health/live is asked, for a while alone and then while four such prompts arrive
each second: ordinary words (too long for the context: refused after they were tokenized), and a tokenizer's hard cases.
Prints the stream's ITL and the health check's latency, quiet and loaded.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson

from loadtest.up import Up

MODEL = "smollm2-135m"
SIZE = 200_000
PROMPTS = [("word " * SIZE)[:SIZE], "a" * SIZE, " " * (SIZE - 1) + "x", ("é한👩 " * SIZE)[:SIZE]]
PER_SECOND = 4
HEALTH_S = 0.05


@dataclass
class Seen:
    """Seconds. gaps: between the events of the small stream; health: of /health/live."""

    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)


def quantile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000)[round(share * 1000) - 1]


async def small_streams(http: httpx.AsyncClient, seen: Seen) -> None:
    body = {"model": MODEL, "prompt": "small", "max_tokens": 100, "stream": True, "ignore_eos": True}
    while True:
        last = None
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if last is not None:
                        seen.gaps.append(now - last)
                    last = now


async def health(http: httpx.AsyncClient, seen: Seen) -> None:
    while True:
        began = time.monotonic()
        response = await http.get("/health/live")
        assert response.status_code == 200
        seen.health.append(time.monotonic() - began)
        await asyncio.sleep(HEALTH_S)


async def long_prompts(http: httpx.AsyncClient, seen: Seen, bodies: list[bytes]) -> None:
    """At a fixed rate, whatever becomes of those before."""

    async def send(body: bytes) -> None:
        headers = {"content-type": "application/json"}
        seen.statuses[(await http.post("/v1/completions", content=body, headers=headers)).status_code] += 1

    async with asyncio.TaskGroup() as group:
        for body in itertools.cycle(bodies):
            group.create_task(send(body))
            await asyncio.sleep(1 / PER_SECOND)


async def watch(url: str, seconds: float, loaded: bool) -> Seen:
    seen = Seen()
    bodies = [orjson.dumps({"model": MODEL, "prompt": text, "max_tokens": 1}) for text in PROMPTS]
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as http,
        httpx.AsyncClient(base_url=url, timeout=60) as other,
    ):
        tasks = [asyncio.ensure_future(small_streams(http, seen)), asyncio.ensure_future(health(http, seen))]
        if loaded:
            tasks.append(asyncio.ensure_future(long_prompts(other, seen, bodies)))
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
    return seen


def show(name: str, seen: Seen) -> None:
    gaps, health_s = ([1e3 * quantile(values, share) for share in (0.5, 0.99)] for values in (seen.gaps, seen.health))
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(seen.statuses.items()))
    print(
        f"{name:8} ITL median {gaps[0]:6.1f} ms, P99 {gaps[1]:6.1f} ms ({len(seen.gaps)} events); "
        f"/health/live median {health_s[0]:5.1f} ms, P99 {health_s[1]:6.1f} ms ({len(seen.health)} times)"
        + (f"; long prompts: {statuses}" if statuses else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=20)
    options = parser.parse_args()
    flags = ("--executor", "fake", "--fake-step-ms", str(options.step_ms))
    ratios, worst = [], []
    with tempfile.TemporaryDirectory() as folder, Up(Path(folder), *flags) as up:
        for number in range(options.rounds):
            quiet = asyncio.run(watch(up.url, options.seconds, loaded=False))
            loaded = asyncio.run(watch(up.url, options.seconds, loaded=True))
            print(f"round {number + 1}")
            show("quiet", quiet)
            show("loaded", loaded)
            ratios.append(quantile(loaded.gaps, 0.99) / quantile(quiet.gaps, 0.99))
            worst.append(quantile(loaded.health, 0.99))
    print(
        f"medians of {options.rounds}: the stream's ITL P99 is {statistics.median(ratios):.2f} times its quiet value; "
        f"/health/live P99 {1e3 * statistics.median(worst):.0f} ms"
    )


if __name__ == "__main__":
    main()
