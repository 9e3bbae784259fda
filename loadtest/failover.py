"""How long streams pause when a part of the system is killed: the time to the next token after the fault.

`make bench-failover`: fake executor, 20 ms steps, 32 streams; two workers, two routers, a standby scheduler. Each fault
is SIGKILL; a router's clients reconnect with Last-Event-ID; Redis restarts from its append-only file. Prints, per
fault, the distribution over all streams that paused, and how many did not.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from loadtest.up import Up
from services.chaos.client import Client, Patience
from services.chaos.requests import COMPLETIONS, Request
from services.common.redis.store import Store, connect

MODEL = "smollm2-135m"
STREAMS, TOKENS, MIN_EVENTS = 32, 200, 20
FAULTS = ("worker", "leader", "router", "redis")
FLAGS = ("--executor", "fake", "--fake-step-ms", "20", "--workers", "2", "--routers", "2", "--schedulers", "2")
# A pause belongs to the fault if it begins no later than this after it: what was on its way still arrives.
ON_ITS_WAY_S = 0.3
SETTLE_S = 3.0


async def victim(up: Up, fault: str, rng: random.Random) -> str:
    if fault == "leader":
        store = Store(connect(up.redis_url), "default")
        try:
            return str(await store.leader()).rpartition("-")[0]
        finally:
            await store.aclose()
    return "valkey" if fault == "redis" else f"{fault}-{rng.randrange(2)}"


def requests(number: int) -> list[Request]:
    body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    return [Request(i, COMPLETIONS, body | {"prompt": f"round {number} stream {i} " * 10}) for i in range(STREAMS)]


async def one_round(up: Up, fault: str, number: int, rng: random.Random) -> list[float]:
    """Seconds that each stream paused for; 0 for one that did not. Fails if a stream is not whole."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=up.url, limits=limits) as http:
        clients = [Client(http, r, f"{fault}-{number}-{r.index}", Patience()) for r in requests(number)]
        running = [asyncio.create_task(client.run()) for client in clients]
        while min(client.outcome.num_events for client in clients) < MIN_EVENTS:  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.01)
        name = await victim(up, fault, rng)
        at = time.monotonic()
        os.kill(up.pid(name), signal.SIGKILL)
        outcomes = await asyncio.gather(*running)
    for outcome in outcomes:
        assert outcome.usage is None
        assert not any((outcome.anomalies, outcome.hung, outcome.failed)), outcome
        assert sum(len(choice.pieces) for choice in outcome.choices.values()) > MIN_EVENTS
    mine = [[e - max(s, at) for s, e in o.gaps if s <= at + ON_ITS_WAY_S and e >= at] for o in outcomes]
    return [max(gaps, default=0.0) for gaps in mine]


def summary(pauses: list[float]) -> dict[str, float]:
    felt = sorted(pause for pause in pauses if pause > 0)
    if not felt:
        return {"streams": len(pauses), "paused": 0}
    cut = statistics.quantiles(felt, n=100, method="inclusive")
    return {
        "streams": len(pauses),
        "paused": len(felt),
        "p50_s": round(statistics.median(felt), 3),
        "p90_s": round(cut[89], 3),
        "p99_s": round(cut[98], 3),
        "max_s": round(felt[-1], 3),
    }


async def measure(up: Up, rounds: int) -> dict[str, dict[str, float]]:
    rng = random.Random(1)
    pauses: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    for number in range(rounds):
        for fault in FAULTS:
            pauses[fault] += await one_round(up, fault, number, rng)
            await asyncio.sleep(SETTLE_S)  # the killed process is back before the next fault
    return {fault: summary(values) for fault, values in pauses.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Up(Path(folder), *FLAGS) as up:
        result = asyncio.run(measure(up, options.rounds))
    for fault, values in result.items():
        print(f"{fault:<8}" + "  ".join(f"{name} {value:g}" for name, value in values.items()))
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
