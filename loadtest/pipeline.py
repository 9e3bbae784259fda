"""How long a worker stands idle between steps, with plans sent one ahead (depth 2) and without (depth 1).

`make bench-pipeline`: the fake executor with 20 ms steps, one worker, some concurrent streams; the two depths in
turn, several rounds. Prints a table and writes JSON.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.up import Up

MODEL = "smollm2-135m"


async def load(url: str, streams: int, tokens: int) -> None:
    """Streams that all run at once, each to its last token."""

    async def one(client: httpx.AsyncClient, index: int) -> None:
        body = {"model": MODEL, "prompt": f"stream {index}", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            async for _ in response.aiter_raw():
                pass

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=streams)) as client:
        await asyncio.gather(*(one(client, index) for index in range(streams)))


def idle_buckets(url: str) -> dict[float, float]:
    """Cumulative counts of the worker's idle gaps by upper bound in seconds."""
    text = httpx.get(f"{url}/metrics").text
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "orca_step_idle_seconds_bucket"
    }


def quantile(before: dict[float, float], after: dict[float, float], q: float) -> float:
    """Upper bound, in seconds, of the bucket that holds the quantile (linear within it)."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts[float("inf")]
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= q * total:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (q * total - below) / max(1.0, count - below)
        lower, below = bound, count
    return lower


def measure(depth: int, streams: int, tokens: int) -> dict[str, float]:
    """Median and P99 of the idle gap under steady load, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--executor", "fake", "--fake-step-ms", "20", "--depth", str(depth))
        with Up(Path(folder), *flags) as up:
            asyncio.run(load(up.url, streams, 10))
            before = idle_buckets(up.url)
            asyncio.run(load(up.url, streams, tokens))
            after = idle_buckets(up.url)
    return {"median_ms": 1e3 * quantile(before, after, 0.5), "p99_ms": 1e3 * quantile(before, after, 0.99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench-results/pipeline.json"))
    options = parser.parse_args()
    runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(options.rounds):
        for depth in runs:
            runs[depth].append(measure(depth, options.streams, options.tokens))
    print(f"idle gap between 20 ms steps, {options.streams} streams, median of {options.rounds} rounds")
    print(f"{'depth':>5} {'median':>10} {'P99':>10}")
    for depth, results in runs.items():
        median, p99 = (statistics.median(r[key] for r in results) for key in ("median_ms", "p99_ms"))
        print(f"{depth:>5} {median:>7.2f} ms {p99:>7.2f} ms")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({str(depth): results for depth, results in runs.items()}, indent=2))


if __name__ == "__main__":
    main()
