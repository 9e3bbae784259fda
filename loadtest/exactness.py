"""Are texts and log-probabilities bit-equal over HTTP, whatever the batch? On the real weights, in float32.

`make check-exact`: 24 prompts, greedy and seeded, one by one on a fresh system without prefix cache; then together,
with staggered arrivals, under each policy and order, with two workers, with a pool so small that sequences are
preempted (and swapped), and with prefill in chunks of 16. Prints a line per system; exit code 1 if any differs or the
small pool never preempted. Takes about twenty minutes on two cores.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from loadtest.up import Up
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES
from tests.golden.prompts import CHAT, RAW

MODEL = "smollm2-135m"
SMALL_POOL = ["--kv-blocks", "42"]
SYSTEMS: list[list[str]] = [
    ["--no-prefix-cache"],
    [],
    *(["--policy", policy] for policy in BATCHING_POLICIES if policy != "chunked"),
    *(["--order", order] for order in ORDER_POLICIES if order != "fcfs"),
    ["--workers", "2"],
    SMALL_POOL,
    [*SMALL_POOL, "--host-blocks", "64"],
    ["--token-budget", "16", "--max-num-seqs", "8"],
]
Answer = tuple[str, list[float]]


def requests(tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, body) of every prompt, greedy and at temperature 0.8 with a seed of its own."""
    common = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True}
    for index, prompt in enumerate(RAW):
        for temperature in (0.0, 0.8):
            sampled = common | {"temperature": temperature, "seed": 100 + index}
            yield "/v1/completions", sampled | {"prompt": prompt, "logprobs": 1}
    for index, messages in enumerate(CHAT):
        for temperature in (0.0, 0.8):
            sampled = common | {"temperature": temperature, "seed": 500 + index}
            yield "/v1/chat/completions", sampled | {"messages": messages, "logprobs": True}


async def ask(http: httpx.AsyncClient, url: str, path: str, body: dict[str, Any]) -> Answer:
    response = await http.post(url + path, json=body, timeout=600)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    if "text" in choice:
        return choice["text"], choice["logprobs"]["token_logprobs"]
    return choice["message"]["content"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def one_by_one(url: str, tokens: int) -> list[Answer]:
    async with httpx.AsyncClient() as http:
        return [await ask(http, url, path, body) for path, body in requests(tokens)]


async def together(url: str, tokens: int) -> list[Answer]:
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=100)) as http:

        async def later(index: int, path: str, body: dict[str, Any]) -> Answer:
            await asyncio.sleep(0.15 * index)
            return await ask(http, url, path, body)

        return await asyncio.gather(*(later(i, path, body) for i, (path, body) in enumerate(requests(tokens))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    want: list[Answer] = []
    differing = 0
    for flags in SYSTEMS:
        with tempfile.TemporaryDirectory() as folder, Up(Path(folder), "--dtype", "float32", *flags) as up:
            if not want:
                want = asyncio.run(one_by_one(up.url, options.tokens))
            got = asyncio.run(together(up.url, options.tokens))
            metrics = up.metrics()
            preemptions, swaps = metrics["orca_preemptions_total"], metrics["orca_swaps_total"]
        wrong = [index for index, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
        differing += len(wrong)
        if SMALL_POOL[0] in flags and not preemptions:
            print("the small pool preempted nothing: give it more tokens", flush=True)
            differing += 1
        verdict = "bit-equal" if not wrong else f"DIFFERENT: {wrong}"
        counts = f"{preemptions:.0f} preemptions, {swaps:.0f} swaps"
        print(f"{' '.join(flags) or 'defaults':<40} {len(got)} answers {verdict}, {counts}", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
