"""How soon everything is free again after a client has gone, in each phase, streaming and not.

`make bench-disconnect`: the fake executor with 20 ms steps; prints median and maximum of the time from the closed
socket to running = waiting = used blocks = 0, as /metrics shows them.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from loadtest.up import Up

MODEL = "smollm2-135m"


async def leave_after(up: Up, seconds: float, stream: bool, n: int) -> float:
    """Seconds from the disconnect until the system is idle."""
    body = {"model": MODEL, "prompt": [5] * 2000, "max_tokens": 5000, "n": n, "stream": stream, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as http:
        task = asyncio.create_task(http.post(f"{up.url}/v1/completions", json=body))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    left = time.monotonic()
    while not await asyncio.to_thread(up.is_idle):  # noqa: ASYNC110 - the state of another process
        await asyncio.sleep(0.005)
    return time.monotonic() - left


async def measure(up: Up, rounds: int) -> list[float]:
    rng = random.Random(1)
    return [await leave_after(up, rng.uniform(0, 0.5), i % 2 == 0, rng.choice([1, 3])) for i in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Up(Path(folder), "--executor", "fake", "--fake-step-ms", "20") as up:
        times = asyncio.run(measure(up, options.rounds))
    print(f"{options.rounds} disconnects at random moments: idle again after")
    print(f"median {1e3 * statistics.median(times):.0f} ms, maximum {1e3 * max(times):.0f} ms")


if __name__ == "__main__":
    main()
