"""`make bench-policies`: iteration-level against request-level scheduling, served for real, and simulated.

Orca's trace at several rates, the same system with one flag changed. Every run is then simulated with the production
core: the same arrivals and lengths, a cost model fitted to the steps that the worker has just run. Latency is end to
end per output token, as a streaming client sees it; request-level scheduling lets nobody in before all have ended.
"""

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtest.peers.__main__ import quantile
from loadtest.peers.client import Client, Seen, closed, opened
from loadtest.peers.servers import EXTRA, MODEL, Server, orca
from loadtest.peers.traces import TRACES, Request
from services.scheduler.core.step import WorkerLimits
from services.simulator.costs import CostModel, fit, read_steps
from services.simulator.engine import Cluster, Simulation
from services.simulator.trace import Arrival

POLICIES = {"iteration-level": "chunked", "request-level": "request-level"}
RATES = (0.5, 1.0, 2.0, 3.0)
SHORT = 32  # output tokens of a short request, at most
BATCH, BUDGET, BLOCKS, BLOCK = 32, 512, 4096, 16
# From a result to the step that its plan asks for, where no plan waits: two messages and a decision.
CONTROL_S = 0.002


Latency = tuple[int, float]  # output tokens, and seconds per token


@dataclass(frozen=True, slots=True)
class Latencies:
    """Normalised, in ms: the median of all requests, and P99 of the short ones."""

    median: float
    short_p99: float

    @classmethod
    def of(cls, normalised: Sequence[Latency]) -> "Latencies":
        short = [value for tokens, value in normalised if tokens <= SHORT]
        return cls(1e3 * quantile([value for _, value in normalised], 0.5), 1e3 * quantile(short, 0.99))


def serve(server: Server, requests: Sequence[Request], rate: float, seed: int) -> list[Seen]:
    server.wake()
    client = Client(server.url, MODEL, EXTRA["orca"])
    asyncio.run(closed(client, requests[-2:], 2))
    seen = asyncio.run(opened(client, requests[:-2], rate, seed))
    server.pause()
    if failed := [one.error for one in seen if not one.ok]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0][:200]}")
    return seen


def simulate(policy: str, cost: CostModel, requests: Sequence[Request], seen: Sequence[Seen]) -> list[Latency]:
    """The same requests at the same times."""
    began = seen[0].due
    arrivals = [
        Arrival(one.due - began, len(request.prompt), request.num_output)
        for request, one in zip(requests, seen, strict=True)
    ]
    limits = WorkerLimits(
        num_blocks=BLOCKS,
        block_size=BLOCK,
        max_model_len=8192,
        max_num_seqs=BATCH,
        token_budget=BUDGET,
        max_in_flight=2,
    )
    outcome = Simulation(Cluster(cost, limits, policy=policy, control_s=CONTROL_S), arrivals).run()
    return [
        (one.arrival.output_tokens, (one.last_token_s - one.arrival.arrival_s) / one.arrival.output_tokens)
        for one in outcome.served
    ]


def rate_at(target_ms: float, curve: Sequence[tuple[float, float]]) -> float:
    """The rate at which the median crosses the target, between the two that enclose it; NaN if none do."""
    for (rate, low), (higher, high) in pairwise(curve):
        if low <= target_ms < high:
            share = math.log(target_ms / low) / math.log(high / low)
            return rate + share * (higher - rate)
    return math.nan


def start(policy: str, folder: Path) -> tuple[Server, Path]:
    steps = folder / f"steps-{policy}.jsonl"
    flags = ("--dtype", "bfloat16", "--policy", policy, "--max-num-seqs", str(BATCH), "--token-budget", str(BUDGET))
    server = orca(policy, *flags, "--kv-blocks", str(BLOCKS), "--record-steps", str(steps))
    server.start(folder)
    server.pause()
    return server, steps


Runs = dict[str, dict[float, list[tuple[list[Request], list[Seen]]]]]


def tell(runs: Runs, costs: dict[str, CostModel], target_ms: float) -> list[dict[str, Any]]:
    """One table, served and simulated: of all rounds' requests, for those of one are too few for a P99."""
    results = []
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    print(f"\n{'':17} {'':5} {'median ms/token':^26} {f'p99 of <= {SHORT} tokens':^26}")
    print(f"{'':17} req/s {'served':>9} {'simulated':>10} {'':>5} {'served':>9} {'simulated':>10}")
    for name, by_rate in runs.items():
        for rate, rounds in by_rate.items():
            served = [(one.tokens, one.normalised) for _, seen in rounds for one in seen]
            simulated = [one for pair in rounds for one in simulate(POLICIES[name], costs[name], *pair)]
            row: dict[str, Any] = {"policy": name, "rate": rate}
            for kind, found in (("served", Latencies.of(served)), ("simulated", Latencies.of(simulated))):
                row[f"{kind}_median"], row[f"{kind}_short_p99"] = found.median, found.short_p99
                curves.setdefault((name, kind), []).append((rate, row[f"{kind}_median"]))
            parts = [
                f"{row[f'served_{what}']:9.1f} {row[f'simulated_{what}']:10.1f} "
                f"{row[f'simulated_{what}'] / row[f'served_{what}'] - 1:+5.0%}"
                for what in ("median", "short_p99")
            ]
            print(f"{name:17} {rate:5.2f} {parts[0]} {parts[1]}", flush=True)
            results.append(row)
    for kind in ("served", "simulated"):
        first, second = (rate_at(target_ms, curves[name, kind]) for name in POLICIES)
        print(f"{kind}: {target_ms:g} ms/token at {first:.2f} and {second:.2f} req/s, ratio {first / second:.2f}")
        results.append({"kind": kind, "target_ms": target_ms, "iteration_level": first, "request_level": second})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals, per rate")
    parser.add_argument("--target-ms", type=float, default=50.0, help="median at which the rates are compared")
    parser.add_argument("--json", type=Path, default=Path("bench-results/policies.json"))
    args = parser.parse_args()
    runs: Runs = {name: {rate: [] for rate in RATES} for name in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        started = {name: start(policy, Path(folder)) for name, policy in POLICIES.items()}
        try:
            for number in range(args.rounds):
                for index, rate in enumerate(RATES):  # prompts of its own, or the prefix cache would know them
                    requests = TRACES["orca"](round(rate * args.seconds) + 2, number * len(RATES) + index)
                    for name in (*POLICIES,) if number % 2 == 0 else (*POLICIES,)[::-1]:
                        seen = serve(started[name][0], requests, rate, number)
                        runs[name][rate].append((requests[:-2], seen))
                print(f"round {number + 1} of {args.rounds} is done", flush=True)
        finally:
            for server, _ in started.values():
                server.stop()
        costs = {name: fit(read_steps(steps)) for name, (_, steps) in started.items()}
    results = tell(runs, costs, args.target_ms)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
