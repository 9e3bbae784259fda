"""Grammars that are small to send and large to follow: refused or followed, never a server error, and nobody waits."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from loadtest.up import Up
from tests.e2e.conftest import MODEL

# Seconds: of the answer, and of somebody else's meanwhile.
SLOWEST, SLOWEST_OTHER = 5.0, 2.0


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(depth: int) -> dict[str, Any]:
    """References whose expansion would have 2 ** depth leaves."""
    links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{depth}": {"type": "integer"}}}


def wide(size: int, required: bool) -> dict[str, Any]:
    names = [f"p{index}" for index in range(size)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    return schema | {"required": names if required else [], "additionalProperties": False}


def chain(links: int) -> dict[str, Any]:
    """References that a reader by recursion follows to the end of its stack."""
    each = {f"{i}": {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(links)}
    return {"$defs": each | {f"{links}": {"type": "integer"}}, "$ref": "#/$defs/0"}


PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
HARD: dict[str, dict[str, Any]] = {
    "repeated repetition": {"regex": "(x{1000}){1000}"},
    "optional and not": {"regex": "(a?){200}a{200}"},
    "alternatives anywhere": {"regex": "(" + "|".join(f".*{index}.*" for index in range(200)) + ")"},
    "exponential automaton": {"regex": "(a|b)*a(a|b){500}"},
    "unicode classes": {"regex": r"[\p{L}\p{N}]{1,300}@[\p{L}]{1,300}"},
    "ignored case": {"regex": "(?i)" + "abc" * 300},
    "control characters": {"regex": "\x00+"},
    "no regex": {"regex": "("},
    "many choices": {"choice": [f"choice {index}" for index in range(1000)]},
    "left recursion": {"grammar": 'start: start "a" | "b"'},
    "only itself": {"grammar": "start: start"},
    "empty loop": {"grammar": 'start: a\na: b\nb: a | ""'},
    "ambiguous": {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    "undefined": {"grammar": "start: nothing"},
    "import": {"grammar": "%import common.NOTHING\nstart: NOTHING"},
    "special token": {"grammar": "start: <|im_end|>"},
    "huge repeat": {"grammar": 'start: "a"{0,1000000}'},
    "gbnf": {"grammar": 'root ::= "a" root | "b"'},
    "bad gbnf": {"grammar": "root ::= ("},
    "50 deep": {"json": nested(50)},
    "400 deep": {"json": nested(400)},
    "doubling": {"json": doubling(30)},
    "3000 required": {"json": wide(3000, True)},
    "1000 optional": {"json": wide(1000, False)},
    "8000 values": {"json": {"enum": [f"value {index}" for index in range(8000)]}},
    "a million items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}},
    "a long string": {"json": {"type": "string", "minLength": 100_000, "maxLength": 10**9}},
    "nested repetition": {"json": {"type": "string", "pattern": "^(([a-z]{1,50}){1,50}){1,50}$"}},
    "tiny multiple": {"json": {"type": "number", "multipleOf": 1e-300}},
    "no multiple": {"json": {"type": "integer", "multipleOf": 0}},
    "huge range": {"json": {"type": "number", "minimum": -1e308, "maximum": 1e308}},
    "many multiples": {"json": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES]}},
    "a chain of references": {"json": chain(1200)},
    "a chain of rules": {
        "grammar": "start: r0\n" + "\n".join(f'r{i}: "x" r{i + 1}' for i in range(2500)) + '\nr2500: "y"'
    },
    "a large prime": {"json": {"type": "integer", "multipleOf": 999983}},
    "ambiguous everywhere": {"grammar": "start: e+\ne: /./ | /../ | /.../ | e e"},
    "gbnf in a pair of brackets": {"grammar": "root ::= " + "(" * 400 + '"a"' + ")" * 400},
    "gbnf cut off": {"grammar": 'root ::= "\\'},
    "gbnf without a rule": {"grammar": "root ::= nope"},
    "reference to itself": {"json": {"$ref": "#"}},
    "required for ever": {"json": {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}},
}


async def slowest_other(up: Up, done: asyncio.Event) -> float:
    """The longest that a plain request takes until `done`."""
    worst = 0.0
    async with httpx.AsyncClient(base_url=up.url, timeout=30) as http:
        while True:
            began = time.monotonic()
            response = await http.post("/v1/completions", json={"model": MODEL, "prompt": "b", "max_tokens": 3})
            assert response.status_code == 200
            worst = max(worst, time.monotonic() - began)
            if done.is_set():
                return worst


@pytest.mark.parametrize("wanted", HARD.values(), ids=[name.replace(" ", "-") for name in HARD])
async def test_a_hard_grammar_is_refused_or_followed(unharmed: Up, wanted: dict[str, Any]) -> None:
    done = asyncio.Event()
    beside = asyncio.create_task(slowest_other(unharmed, done))
    body = {"model": MODEL, "prompt": "a", "max_tokens": 40, "structured_outputs": wanted}
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=unharmed.url, timeout=60) as http:
        response = await http.post("/v1/completions", json=body)
    took = time.monotonic() - began
    done.set()
    waited = await beside
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["param"].startswith("structured_outputs")
        assert len(response.content) < 1000
    assert took < SLOWEST
    assert waited < SLOWEST_OTHER
