"""What happens at ten times the capacity: `make bench-overload`.

The fake executor with 20 ms steps serves about CAPACITY requests a second; ten times as many come for a minute, from
clients that do not wait for each other. Prints how many were accepted and refused, how fast the refusals came, how long
the accepted waited for their first token, each process's memory before and after, and how long until a lone request is
as fast again as before.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from loadtest.soak import memory_mb
from loadtest.up import Up

MODEL = "smollm2-135m"
SLOTS, TOKENS, STEP_S, LIMIT = 4, 40, 0.02, 16
CAPACITY = SLOTS / (TOKENS * STEP_S)
BODY = {"model": MODEL, "prompt": "a", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
FLAGS = ("--executor", "fake", "--fake-step-ms", "20", "--max-num-seqs", str(SLOTS), "--max-requests", str(LIMIT))


def system_mb(up: Up) -> dict[str, float]:
    """Resident memory of each process."""
    return {name: memory_mb(pid) for name, pid in up.children().items()}


async def ask(http: httpx.AsyncClient, record: dict[str, Any]) -> None:
    started = time.monotonic()
    async with http.stream("POST", "/v1/completions", json=BODY) as response:
        record["statuses"][response.status_code] += 1
        if response.status_code != 200:
            record["refused_s"].append(time.monotonic() - started)
            record["retry_after"].append(int(response.headers.get("retry-after", "0")))
            return
        tokens = 0
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if not tokens:
                    record["first_s"].append(time.monotonic() - started)
                tokens += 1
        record["finished"] += line == "" and tokens >= TOKENS


def new_record() -> dict[str, Any]:
    return {"statuses": Counter(), "refused_s": [], "retry_after": [], "first_s": [], "finished": 0}


async def alone_s(http: httpx.AsyncClient) -> float:
    started = time.monotonic()
    await ask(http, new_record())
    return time.monotonic() - started


async def measure(up: Up, seconds: float, factor: float) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=up.url, timeout=60, limits=limits) as http:
        before = statistics.median([await alone_s(http) for _ in range(5)])
        record, tasks = new_record(), set()
        memory = system_mb(up)
        started = time.monotonic()
        for number in range(int(seconds * CAPACITY * factor)):
            await asyncio.sleep(max(0.0, started + number / (CAPACITY * factor) - time.monotonic()))
            tasks.add(asyncio.create_task(ask(http, record)))
        await asyncio.gather(*tasks)
        ended = time.monotonic()
        while await alone_s(http) > 1.5 * before:
            pass
        record["recovery_s"] = time.monotonic() - ended
        record["memory"] = {name: (memory[name], now) for name, now in system_mb(up).items()}
    return record


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--factor", type=float, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Up(Path(folder), *FLAGS) as up:
        record = asyncio.run(measure(up, options.seconds, options.factor))
    refused, first = record["refused_s"], record["first_s"]
    print(f"{options.factor:g} x {CAPACITY:.1f} requests/s for {options.seconds:g} s: {dict(record['statuses'])}")
    print(f"accepted {record['statuses'][200]}, of which {record['finished']} finished")
    print(f"refused in ms: p50 {1e3 * percentile(refused, 50):.1f}, p99 {1e3 * percentile(refused, 99):.1f}")
    print(f"Retry-After in s: p50 {percentile(record['retry_after'], 50):.0f}, max {max(record['retry_after'])}")
    print(f"first token in s: p50 {percentile(first, 50):.2f}, p99 {percentile(first, 99):.2f}")
    print(f"limit / capacity in s: {LIMIT / CAPACITY:.2f}")
    print(f"normal again {record['recovery_s']:.1f} s after the last answer")
    for name, (first, last) in record["memory"].items():
        print(f"memory of {name}: {first:.0f} -> {last:.0f} MB")


if __name__ == "__main__":
    main()
