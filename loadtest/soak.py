"""20,000 short requests with disconnects and faults: `make bench-soak`. Afterwards everything must be as it was.
With `--model-steps`, 5,000 on the real model, without faults: what its worker holds must not grow.

Prints memory, open files, keys, stream lengths and pending entries after the first thousand requests and after the
last; exit code 1 if something has grown beyond its slack, or a request that should have ended well did not.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from loadtest.up import Up
from services.common.redis.store import connect

MODEL = "smollm2-135m"
CONCURRENCY, WARM_UP = 48, 1000
FLAGS = ("--executor", "fake", "--fake-step-ms", "2", "--workers", "2", "--schedulers", "2", "--resume-window", "5")
FAULT_EVERY = 1500
MODEL_FLAGS, MODEL_REQUESTS = ("--resume-window", "5"), 5_000
VICTIMS = ("worker-0", "scheduler-0", "worker-1", "scheduler-1")
# Relative and absolute growth of a process's memory, and absolute growth of its open files, that is no leak.
SLACK, SLACK_MB, SLACK_FILES = 0.15, 15.0, 12


async def ask(http: httpx.AsyncClient, index: int, rng: random.Random, seen: Counter[str]) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": f"p{index % 50}", "max_tokens": 8, "stream": index % 2 == 0}
    leaves = rng.random() < 0.1
    task = asyncio.create_task(http.post("/v1/completions", json=body | ({"max_tokens": 400} if leaves else {})))
    if leaves:
        await asyncio.sleep(rng.uniform(0, 0.1))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        seen["left"] += 1
        return
    response = await task
    well = response.status_code == 200 and '"error":{' not in response.text
    seen["ok" if well else f"failed {response.status_code}"] += 1


def memory_mb(pid: int) -> float:
    """Resident memory."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


async def state(up: Up) -> dict[str, float]:
    """Everything that must not grow."""
    while not await asyncio.to_thread(up.is_idle):  # noqa: ASYNC110 - the state of other processes
        await asyncio.sleep(0.1)
    await asyncio.sleep(8)  # finished requests expire after 5 s
    out: dict[str, float] = {}
    for name in ("scheduler", "worker", "router", "valkey"):
        pids = [up.pid(child) for child in (f"{name}-0", f"{name}-1", name) if child in up.children()]
        out[f"memory {name} MB"] = round(max(map(memory_mb, pids)), 1)
        out[f"files {name}"] = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    redis = connect(up.redis_url)
    keys = [key async for key in redis.scan_iter(count=1000)]
    out["keys"] = len(keys)
    out["length requests"] = await redis.xlen("orca:{default}:requests")
    out["length control"] = await redis.xlen("orca:{default}:control")
    out["consumer groups"] = len(await redis.xinfo_groups("orca:{default}:requests"))
    await redis.aclose()
    return out


async def soak(up: Up, count: int, faults: bool) -> tuple[dict[str, float], dict[str, float], Counter[str]]:
    rng = random.Random(1)
    seen: Counter[str] = Counter()
    numbers = iter(range(count))
    limits = httpx.Limits(max_connections=None)

    async def worker(until: int) -> None:
        for index in numbers:
            await ask(http, index, rng, seen)
            if faults and index and index % FAULT_EVERY == 0:
                victim = VICTIMS[index // FAULT_EVERY % len(VICTIMS)]
                os.kill(up.pid(victim), signal.SIGKILL)
                seen[f"killed {victim}"] += 1
            if index >= until:
                return

    async with httpx.AsyncClient(base_url=up.url, timeout=60, limits=limits) as http:
        await asyncio.gather(*(worker(WARM_UP) for _ in range(CONCURRENCY)))
        first = await state(up)
        await asyncio.gather(*(worker(count) for _ in range(CONCURRENCY)))
    return first, await state(up), seen


def grown(name: str, first: float, last: float) -> bool:
    if name.startswith("memory"):
        return last > first * (1 + SLACK) + SLACK_MB
    if name.startswith("files"):
        return last > first + SLACK_FILES
    return last > first + (1000 if name == "length control" else 4)  # the doorbells are trimmed at 1,000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, help="default: 20,000, or 5,000 with --model-steps")
    parser.add_argument("--model-steps", action="store_true", help="the model's steps, and no faults")
    options = parser.parse_args()
    count = options.requests or (MODEL_REQUESTS if options.model_steps else 20_000)
    flags = MODEL_FLAGS if options.model_steps else FLAGS
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Up(Path(folder), *flags) as up:
        first, last, seen = asyncio.run(soak(up, count, not options.model_steps))
    print(f"{count} requests in {time.monotonic() - started:.0f} s: {dict(seen)}")
    bad = [name for name in first if grown(name, first[name], last[name])]
    for name in first:
        print(f"{name:<22} {first[name]:>8g} -> {last[name]:>8g}{'   GROWN' if name in bad else ''}")
    return 1 if bad or any(name.startswith("failed") for name in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
