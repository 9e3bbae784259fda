"""`make bench-control-plane`: everything but the model. The fake executor, one worker, all processes and the client on
this machine.

Per number of streams and step time: tokens a second, how far the cadence is stretched, how long a token takes from the
end of its step to the client (one machine, one monotonic clock: the event names its journal entry, the entry its step,
and the recorded step says when it ended), how much of that until it is in the journal (the worker's histogram), and CPU
time per token by process.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis as redis_client

from loadtest.peers.__main__ import quantile as quantile_of
from loadtest.peers.servers import MODEL
from loadtest.pipeline import quantile
from loadtest.up import Up

CASES = ((1, 0.0), (32, 0.0), (256, 0.0), (1, 20.0), (32, 20.0), (64, 20.0), (256, 20.0))
SECONDS = 8.0
COMPONENTS = ("router", "scheduler", "worker", "valkey")
# Title, key, width, places. Times in ms, but for CPU, in us per token.
COLUMNS = (
    ("streams", "streams", 7, 0),
    ("step", "step_ms", 4, 0),
    ("tok/s", "tok_s", 6, 0),
    ("gap", "gap_mean", 6, 2),
    ("stretch", "stretch", 7, 3),
    ("publish p99", "publish_p99", 11, 1),
    ("client p50", "total_p50", 10, 1),
    ("p99", "total_p99", 6, 1),
    ("idle p50", "idle_p50", 8, 2),
    ("p99", "idle_p99", 5, 2),
    ("redis/step", "redis_ms_per_step", 10, 2),
    ("calls/tok", "redis_calls_per_token", 9, 2),
    ("router", "router_us", 6, 0),
    ("sched", "scheduler_us", 5, 0),
    ("worker", "worker_us", 6, 0),
    ("redis", "valkey_us", 5, 0),
    ("client", "client_us", 6, 0),
)


@dataclass(slots=True)
class Stream:
    """gaps: between events, ms. events: ids of theirs and when they came, by the monotonic clock in s."""

    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    events: list[tuple[bytes, float]] = field(default_factory=list)


def _request(port: int, tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": [1, 2, 3],
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
    )
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def _read(port: int, tokens: int) -> Stream:
    """One stream to its end. What the client itself costs is kept low: it looks for ids and counts."""
    seen = Stream()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(port, tokens))
    last, tail = 0.0, b""
    while chunk := await reader.read(1 << 16):
        now = time.monotonic()
        lines = (tail + chunk).split(b"\n")
        tail = lines.pop()
        for line in lines:
            if line.startswith(b"id: "):
                seen.events.append((line[4:], now))
            elif line.startswith(b"data: {"):
                seen.tokens += 1
                if last:
                    seen.gaps.append(1e3 * (now - last))
                last = now
    writer.close()
    return seen


def _latencies(up: Up, redis: redis_client.Redis, streams: list[Stream]) -> list[float]:
    """From the end of its step to the client, in ms, for every event that is the last of its journal entry."""
    lines = map(json.loads, (up.folder / "steps.jsonl").read_text().splitlines())
    ended = {f"{line['worker']}:{line['step']}".encode(): line["ended_s"] for line in lines}
    out = []
    for stream in streams:
        request = stream.events[0][0].split(b":")[1].decode()
        rows: Any = redis.xrange(f"orca:{{default}}:journal:{request}")
        steps = {entry: fields[b"@"] for entry, fields in rows}
        entries = [(event.split(b":")[0], came) for event, came in stream.events]
        out += [1e3 * (came - ended[steps[entry]]) for entry, came in entries if b"." not in entry]
    return out


def _buckets(up: Up, name: str) -> dict[float, float]:
    return {
        float(key.split('le="')[1].split('"')[0].replace("+Inf", "inf")): value
        for key, value in up.metrics().items()
        if key.startswith(f"{name}_bucket")
    }


def _cpu(up: Up) -> dict[str, float]:
    seconds = dict.fromkeys(COMPONENTS, 0.0)
    for name, pid in up.children().items():
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        seconds[name.split("-")[0]] += (int(stat[11]) + int(stat[12])) / 100
    return seconds


@contextmanager
def _system(step_ms: float) -> Iterator[Up]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--executor", "fake", "--fake-step-ms", str(step_ms), "--max-num-seqs", "256", "--kv-blocks", "40000")
        with Up(Path(folder), *flags, "--record-steps", str(Path(folder) / "steps.jsonl")) as up:
            yield up


def measure(up: Up, streams: int, step_ms: float) -> dict[str, float]:
    """One case on a running system."""
    tokens = 400 if not step_ms else round(SECONDS * 1e3 / step_ms)
    if not step_ms and streams == 256:
        tokens = 100
    redis = redis_client.Redis.from_url(up.redis_url)
    cpu, published = _cpu(up), _buckets(up, "orca_publish_seconds")
    idle = _buckets(up, "orca_step_idle_seconds")
    steps, stats = up.metrics(), redis.info("commandstats")
    busy = sum(entry["usec"] for entry in stats.values())
    calls = sum(entry["calls"] for entry in stats.values())
    own, began = time.process_time(), time.monotonic()

    async def everybody() -> list[Stream]:
        return list(await asyncio.gather(*(_read(up.port, tokens) for _ in range(streams))))

    seen = asyncio.run(everybody())
    took, client = time.monotonic() - began, time.process_time() - own
    after, stats = _cpu(up), redis.info("commandstats")
    total = sum(one.tokens for one in seen)
    count = up.metrics()['orca_steps_total{worker="worker-0"}'] - steps['orca_steps_total{worker="worker-0"}']
    latencies = _latencies(up, redis, seen)
    gaps = [gap for one in seen for gap in one.gaps]
    result = {
        "streams": streams,
        "step_ms": step_ms,
        "tok_s": total / took,
        "gap_mean": statistics.mean(gaps),
        "stretch": statistics.mean(gaps) / step_ms - 1 if step_ms else 0.0,
        "publish_p99": 1e3 * quantile(published, _buckets(up, "orca_publish_seconds"), 0.99),
        "total_p50": quantile_of(latencies, 0.5),
        "total_p99": quantile_of(latencies, 0.99),
        "idle_p50": 1e3 * quantile(idle, _buckets(up, "orca_step_idle_seconds"), 0.5),
        "idle_p99": 1e3 * quantile(idle, _buckets(up, "orca_step_idle_seconds"), 0.99),
        "redis_ms_per_step": (sum(entry["usec"] for entry in stats.values()) - busy) / 1e3 / count,
        "redis_calls_per_token": (sum(entry["calls"] for entry in stats.values()) - calls) / total,
        "client_us": 1e6 * client / total,
    }
    return result | {f"{name}_us": 1e6 * (after[name] - cpu[name]) / total for name in COMPONENTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench-results/control-plane.json"))
    args = parser.parse_args()
    rounds: dict[tuple[int, float], list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(args.rounds):
        for step_ms in sorted({step for _, step in CASES}):
            with _system(step_ms) as up:
                measure(up, 8, step_ms)  # warm
                for case in (case for case in CASES if case[1] == step_ms):
                    rounds[case].append(measure(up, *case))
    print(" ".join(title.rjust(width) for title, _, width, _ in COLUMNS))
    results = []
    for measured in rounds.values():
        m = {key: statistics.median(one[key] for one in measured) for key in measured[0]}
        results.append(m)
        print(" ".join(f"{m[key]:{width}.{places}f}" for _, key, width, places in COLUMNS), flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
