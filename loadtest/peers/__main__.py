"""Starts every server, measures them in turn, point by point and round by round, and prints a table with ratios.

While one is measured all others are stopped (SIGSTOP). Each point of each round has prompts of its own, so that no
server's prefix cache knows them. A point is the median of the rounds. Everything that was seen goes to a JSON file, and
pictures beside it.
"""

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.peers import plots, servers
from loadtest.peers.client import Client, Seen, closed, opened
from loadtest.peers.points import POINTS, Point, medians
from loadtest.peers.servers import EXTRA, MODEL, Server
from loadtest.peers.traces import TRACES, Request, text_of

SETTLE_S = 1.0


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between neighbours; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * q
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(seen: Sequence[Seen], cpu_s: float, client_s: float, resident: float) -> dict[str, float]:
    """What one run of a point came to. Times in ms."""
    done = [one for one in seen if one.ok]
    began, ended = min(one.due for one in seen), max(one.end for one in seen)
    gaps = [b - a for one in done for a, b in zip(one.events, one.events[1:], strict=False)]
    first = [one.events[0] - one.due for one in done if one.events]
    normalised = [one.normalised for one in done]
    return {
        "requests": len(seen),
        "failed": len(seen) - len(done),
        "req_s": len(done) / (ended - began),
        "tok_s": sum(one.tokens for one in done) / (ended - began),
        "ttft_p50": 1e3 * quantile(first, 0.5),
        "ttft_p99": 1e3 * quantile(first, 0.99),
        "itl_p50": 1e3 * quantile(gaps, 0.5),
        "itl_p99": 1e3 * quantile(gaps, 0.99),
        "norm_p50": 1e3 * quantile(normalised, 0.5),
        "norm_p99": 1e3 * quantile(normalised, 0.99),
        "server_cpu_s": cpu_s,
        "client_cpu_s": client_s,
        "resident_mib": resident,
        "wall_s": ended - began,
    }


def run(server: Server, point: Point, requests: Sequence[Request], seed: int) -> dict[str, float]:
    """One run of one server, which is awake only for it."""
    server.wake()
    shown = text_of if server.kind == "transformers" else list
    client = Client(server.url, MODEL, EXTRA[server.kind] | server.extra, shown)
    asyncio.run(closed(client, requests[-2:], 2))
    time.sleep(SETTLE_S)
    cpu, own = server.usage()[0], time.process_time()
    if point.in_flight:
        seen = asyncio.run(closed(client, requests[:-2], point.in_flight))
    else:
        seen = asyncio.run(opened(client, requests[:-2], point.rate, seed))
    after, resident = server.usage()
    result = summary(seen, after - cpu, time.process_time() - own, resident)
    server.pause()
    errors = sorted({one.error[:160] for one in seen if one.error})
    if result["failed"]:
        print(f"  {server.name}: {result['failed']:.0f} of {len(seen)} failed: {errors[:2]}", flush=True)
    return result


def contestants(names: Sequence[str]) -> list[Server]:
    known = {
        "orca": lambda: servers.orca("orca bf16", "--dtype", "bfloat16"),
        "orca-int8": lambda: servers.orca("orca int8", "--dtype", "bfloat16", "--quantize", "int8"),
        "orca-request-level": lambda: servers.orca(
            "orca request-level", "--dtype", "bfloat16", "--policy", "request-level"
        ),
        "vllm": servers.vllm,
        "llama.cpp": lambda: servers.llama_cpp("bf16", 8, 16384),
        "llama.cpp-16": lambda: servers.llama_cpp("bf16", 16, 24576),
        "llama.cpp-q4": lambda: servers.llama_cpp("q4_0", 8, 16384),
        "transformers": servers.transformers,
    }
    return [known[name]() for name in names]


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """A line per point and server; the ratio is of requests per second, the first server's to this one's."""
    head = f"{'':24} {'req/s':>6} {'tok/s':>7} {'ratio':>6} {'ttft p50':>9} {'p99':>7} {'itl p50':>8} {'p99':>7}"
    lines = [head + f" {'norm p50':>9} {'p99':>7} {'CPU':>5} {'client':>6}"]
    for point, by_server in results.items():
        lines.append(point)
        first = medians(next(iter(by_server.values())))
        for name, rounds in by_server.items():
            m = medians(rounds)
            ratio = first["req_s"] / m["req_s"] if m["req_s"] else math.nan
            lines.append(
                f"  {name:22} {m['req_s']:6.2f} {m['tok_s']:7.1f} {ratio:6.2f}"
                f" {m['ttft_p50']:9.0f} {m['ttft_p99']:7.0f} {m['itl_p50']:8.1f} {m['itl_p99']:7.1f}"
                f" {m['norm_p50']:9.1f} {m['norm_p99']:7.1f}"
                f" {m['server_cpu_s'] / m['wall_s']:5.2f} {m['client_cpu_s'] / m['wall_s']:6.2f}"
            )
    return "\n".join(lines)


def save(path: Path, field: Sequence[Server], points: Sequence[Point], results: plots.Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"servers": {s.name: s.command for s in field}, "results": results}, indent=1))
    plots.draw(points, results, path.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="orca,vllm,llama.cpp", help="the first is what the ratios are of")
    parser.add_argument("--points", default="fixed,saturated", help=f"of {', '.join(POINTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench-results/peers.json"))
    args = parser.parse_args()
    field = contestants(args.servers.split(","))
    points = [point for group in args.points.split(",") for point in POINTS[group]]
    results: dict[str, dict[str, list[dict[str, Any]]]] = {p.name: {s.name: [] for s in field} for p in points}
    try:
        for server in field:
            server.start(Path(tempfile.mkdtemp(prefix="bench-")))
            server.pause()
            print(f"{server.name} is ready", flush=True)
        for number in range(args.rounds):
            # Whoever comes first does not do so in every round.
            order = field[number % len(field) :] + field[: number % len(field)]
            for index, point in enumerate(points):
                requests = TRACES[point.trace](point.count + 2, number * len(points) + index)
                for server in order:
                    results[point.name][server.name].append(run(server, point, requests, number))
            print(f"\nafter round {number + 1}\n{table(results)}", flush=True)
            save(args.json, field, points, results)
    finally:
        for server in field:
            server.stop()


if __name__ == "__main__":
    main()
