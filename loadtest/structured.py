"""What a constraint costs per token: `make bench-structured`.

First the grammar alone: to compile, and per token to fill a mask and go on by a token. Then the whole system on the
real weights: the same number of streams, free and constrained in turns, in one run; the ratio of their tokens/s.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from loadtest.up import Up
from services.common.models.resolve import resolve_model
from services.common.text import grammar
from services.worker.core.plan import allowed_tokens

MODEL = "builtin:smollm2-135m"
NAME = "smollm2-135m"
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            name: {"type": kind} for name, kind in (("name", "string"), ("age", "integer"), ("ok", "boolean"))
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "any": {"type": "object"},
}
# Ends no text, so that free and constrained streams have the same number of tokens.
ENDLESS = r"[a-z ,.]{2000}"


def microseconds(values: list[float]) -> str:
    return f"median {1e6 * statistics.median(values):.0f} us, P99 {1e6 * np.quantile(values, 0.99):.0f} us"


def alone(tokens: int) -> None:
    """Random walks through each grammar."""
    files = resolve_model(MODEL)
    grammars = grammar.Grammars(files.tokenizer_json, files.vocab_size, files.eos_token_ids)
    grammars.build("schema", {})  # makes the tokenizer
    rng = np.random.default_rng(1)
    for name, schema in SCHEMAS.items():
        text = grammar.of_schema(schema)
        compiled, fills, accepts = [], [], []
        while len(fills) < tokens:
            began = time.perf_counter()
            matcher = grammars.constrain(text, ())
            allowed = allowed_tokens(matcher, files.vocab_size)
            compiled.append(time.perf_counter() - began)
            complete = False
            while not complete and len(fills) < tokens:
                began = time.perf_counter()
                allowed = allowed_tokens(matcher, files.vocab_size)
                fills.append(time.perf_counter() - began)
                assert allowed is not None
                token = int(rng.choice(np.flatnonzero(allowed)))
                began = time.perf_counter()
                complete = matcher.accept(token)
                accepts.append(time.perf_counter() - began)
        print(f"{name:5} to compile, with its first mask: {microseconds(compiled)}")
        print(f"      a mask: {microseconds(fills)}; a token: {microseconds(accepts)}")


async def tokens_per_s(url: str, streams: int, tokens: int, fields: dict[str, Any]) -> float:
    body = {"model": NAME, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "temperature": 0.8}
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        began = time.monotonic()
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json=body | fields | {"seed": i}) for i in range(streams))
        )
        seconds = time.monotonic() - began
    total = sum(json.loads(answer.content)["usage"]["completion_tokens"] for answer in answers)
    assert total == streams * tokens, "every stream made all its tokens"
    return total / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    alone(3000)
    kinds: dict[str, dict[str, Any]] = {
        "free": {},
        "free, sampled apart": {"presence_penalty": 0.001},
        "constrained": {"structured_outputs": {"regex": ENDLESS}},
    }
    with tempfile.TemporaryDirectory() as folder, Up(Path(folder)) as up:
        for streams in (1, 8, 32):
            speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(options.rounds):
                for kind, fields in kinds.items():
                    speeds[kind].append(asyncio.run(tokens_per_s(up.url, streams, options.tokens, fields)))
            medians = {kind: statistics.median(values) for kind, values in speeds.items()}
            told = ", ".join(f"{kind} {value:.1f}" for kind, value in medians.items())
            more_ms = streams * 1e3 * (1 / medians["constrained"] - 1 / medians["free"])
            print(f"{streams:2} streams, tokens/s: {told}; constrained / free", end=" ")
            print(f"{medians['constrained'] / medians['free']:.3f}, {more_ms:+.2f} ms a step")


if __name__ == "__main__":
    main()
