"""`make bench-control-plane`: everything but the model. The fake executor, one worker, all processes and the client on
this machine.

Per number of streams and step time: tokens a second, how far the cadence is stretched, how long a token takes from the
end of its step into the journal (the worker's histogram) and from there to the client (event ids carry Redis' time),
and CPU time per token by process.
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

import redis as redis_client

from loadtest.peers.__main__ import quantile as quantile_of
from loadtest.peers.servers import MODEL
from loadtest.pipeline import quantile
from loadtest.up import Up

CASES = ((1, 0.0), (32, 0.0), (256, 0.0), (1, 20.0), (32, 20.0), (64, 20.0), (256, 20.0))
SECONDS = 8.0
COMPONENTS = ("router", "scheduler", "worker", "valkey")


@dataclass(slots=True)
class Stream:
    """gaps: between events, ms. delays: from the journal to here, ms."""

    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)


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
        now = time.time() * 1e3
        lines = (tail + chunk).split(b"\n")
        tail = lines.pop()
        for line in lines:
            if line.startswith(b"id: "):
                seen.delays.append(now - int(line[4:].split(b"-", 1)[0]))
            elif line.startswith(b"data: {"):
                seen.tokens += 1
                if last:
                    seen.gaps.append(now - last)
                last = now
    writer.close()
    return seen


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
        with Up(Path(folder), *flags) as up:
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
    delays = [delay for one in seen for delay in one.delays]
    gaps = [gap for one in seen for gap in one.gaps]
    result = {
        "streams": streams,
        "step_ms": step_ms,
        "tok_s": total / took,
        "gap_mean": statistics.mean(gaps),
        "stretch": statistics.mean(gaps) / step_ms - 1 if step_ms else 0.0,
        "publish_p99": 1e3 * quantile(published, _buckets(up, "orca_publish_seconds"), 0.99),
        "deliver_p99": quantile_of(delays, 0.99),
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
    print("                             ms: gap         publish deliver   idle  idle   redis  calls   CPU us per token")
    print("                                              p99     p99     p50   p99  /step   /tok")
    print(
        "streams  step ms   tok/s     mean  stretch                                              router sched worker",
        end="",
    )
    print("  redis client")
    results = []
    for case, measured in rounds.items():
        m = {key: statistics.median(one[key] for one in measured) for key in measured[0]}
        results.append(m)
        print(
            f"{case[0]:7} {case[1]:8.0f} {m['tok_s']:7.0f} {m['gap_mean']:8.2f} {m['stretch']:8.1%}"
            f" {m['publish_p99']:6.1f} {m['deliver_p99']:7.1f} {m['idle_p50']:7.2f} {m['idle_p99']:5.2f}"
            f" {m['redis_ms_per_step']:6.2f} {m['redis_calls_per_token']:6.2f}"
            f" {m['router_us']:7.0f} {m['scheduler_us']:5.0f} {m['worker_us']:6.0f}"
            f" {m['valkey_us']:5.0f} {m['client_us']:6.0f}",
            flush=True,
        )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
