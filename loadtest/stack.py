"""`make bench-stack`: what the rest of the system costs: the full stack over HTTP against the engine alone.

The engine alone is the same scheduler core driving the same executor in one process, without Redis, gRPC, HTTP or a
client. Both serve the same requests (Orca's trace), 32 in flight, in turns.
"""

import argparse
import asyncio
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from loadtest.peers.client import Client, closed
from loadtest.peers.servers import EXTRA, MODEL, Server, orca
from loadtest.peers.traces import TRACES, Request
from services.common.models.resolve import resolve_model
from services.common.request import SamplingParams
from services.common.settings import DEFAULT_MODEL
from services.worker.executor.torch_executor import TorchExecutor
from tests.harness import LocalSystem

IN_FLIGHT = 32


def engine_alone(executor: TorchExecutor, requests: Sequence[Request]) -> float:
    """Output tokens a second."""
    system = LocalSystem([executor], checks=False)
    waiting = list(enumerate(requests))[::-1]
    began = time.monotonic()
    while True:
        running = sum(1 for record in system.generated.values() if record.finish is None)
        while waiting and running < IN_FLIGHT:
            index, request = waiting.pop()
            params = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
            system.submit(f"r{index}", request.prompt, params)
            running += 1
        if not system.step():
            break
    took = time.monotonic() - began
    return sum(len(record.tokens) for record in system.generated.values()) / took


def full_stack(server: Server, requests: Sequence[Request]) -> float:
    """The same, as the client sees it."""
    client = Client(server.url, MODEL, EXTRA["orca"])
    began = time.monotonic()
    seen = asyncio.run(closed(client, requests, IN_FLIGHT))
    took = time.monotonic() - began
    if failed := [one for one in seen if not one.ok]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].error}")
    return sum(one.tokens for one in seen) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", "int8"))
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    quantize = "int8" if args.weights == "int8" else "none"
    executor = TorchExecutor(
        resolve_model(DEFAULT_MODEL),
        torch.bfloat16,
        torch.device("cpu"),
        4096,
        16,
        kernels="fast",
        quantize=quantize,
        threads=os.cpu_count() or 1,
    )
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    server = orca("orca", "--dtype", "bfloat16", "--quantize", quantize)
    server.start(Path(tempfile.mkdtemp(prefix="bench-")))
    alone, whole = [], []
    try:
        for number in range(args.rounds + 1):  # the first warms both
            requests = TRACES["orca"](args.requests if number else 8, number)
            server.pause()
            one = engine_alone(executor, requests)
            server.wake()
            other = full_stack(server, requests)
            if number:
                print(f"engine alone {one:.1f} tok/s, full stack {other:.1f}, ratio {other / one:.3f}", flush=True)
                alone.append(one)
                whole.append(other)
    finally:
        server.stop()
    ratio = statistics.median(b / a for a, b in zip(alone, whole, strict=True))
    print(f"{args.weights}, median of {args.rounds}: {ratio:.3f}")


if __name__ == "__main__":
    main()
