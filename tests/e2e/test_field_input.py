"""Public bug reports that must not happen here, about what comes in: D09 to D13, D15 to D17, D21, D23.

Each for chat and completions, streamed and whole; after each the house rules hold.
"""

import asyncio
import time
from typing import Any

import httpx
import pytest

from loadtest.up import Up
from tests.e2e.asking import APIS, PATHS, Answer, ask, body_of, read
from tests.e2e.conftest import MODEL
from tests.e2e.test_field_text import both, each_api, house

__all__ = ["house"]

CONTEXT = 8192
VOCABULARY = 49152


def assert_refused(answer: Answer, *, says: str = "", code: str = "") -> None:
    """One 4xx with a small error object; as a status, also when a stream was asked for."""
    assert 400 <= answer.status < 500, answer.raw[:300]
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert says in answer.error["message"], answer.error
    assert not code or answer.error["code"] == code
    assert len(answer.raw) < 1000


@both
async def test_d09_an_empty_prompt(house: httpx.AsyncClient, stream: bool) -> None:
    for prompt in ["", [""], [], ["a", ""], [[]], [[5], []]]:
        assert_refused(await ask(house, "completion", prompt, stream=stream), says="prompt")
    body = {"model": MODEL, "messages": [], "stream": stream}
    assert_refused(read(await house.post(PATHS["chat"], json=body)), says="messages")
    assert (await ask(house, "chat", "", stream=stream)).status == 200, "the template gives it tokens"


@both
async def test_d10_the_edges_of_the_context(house: httpx.AsyncClient, stream: bool) -> None:
    for length in (CONTEXT, CONTEXT + 1):
        for most in ({"max_tokens": None}, {"max_tokens": 1}):
            answer = await ask(house, "completion", [5] * length, stream=stream, **most)
            assert_refused(answer, says=f"the prompt has {length} tokens", code="context_length_exceeded")
    for most in (1, None):
        answer = await ask(house, "completion", [5] * (CONTEXT - 1), stream=stream, max_tokens=most)
        assert (answer.status, answer.choices[0].finishes) == (200, ["length"])
    assert_refused(
        await ask(house, "completion", [5] * 8000, stream=stream, max_tokens=193),
        says="8193",
        code="context_length_exceeded",
    )
    exact = await ask(house, "completion", [5] * 8000, stream=stream, max_tokens=192, stream_options=None)
    assert exact.choices[0].finishes == ["length"]
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await ask(house, "chat", "hi", stream=stream, **{"max_tokens": None, name: CONTEXT})
        assert_refused(answer, says=name, code="context_length_exceeded")


@both
async def test_d11_scoring_a_prompt(house: httpx.AsyncClient, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await ask(
        house, "completion", "to be scored", stream=stream, echo=True, logprobs=1, max_tokens=0, **options
    )
    choice = answer.choices[0]
    assert (answer.text, choice.finishes) == ("to be scored", ["length"])
    assert answer.usage["completion_tokens"] == 0
    assert [entry[1] is None for entry in choice.entries] == [True] + [False] * (len(choice.entries) - 1)
    assert_refused(await ask(house, "completion", "a", stream=stream, max_tokens=0), says="max_tokens")
    for api in APIS:
        for value in (-1, 1.5, "5", True, 0):
            assert_refused(await ask(house, api, "a", stream=stream, max_tokens=value), says="max_tokens")
    assert (await ask(house, "completion", "a", stream=stream, max_tokens=None, stop=["e"])).status == 200


@both
@each_api
async def test_d12_bias_outside_the_vocabulary(house: httpx.AsyncClient, api: str, stream: bool) -> None:
    for key in ("99999999", "-1", "abc", "1.5", str(VOCABULARY), "٣"):
        assert_refused(await ask(house, api, "a", stream=stream, logit_bias={key: 1}), says="logit_bias")
    for value in (101, -101, None, "5", 1e308):
        assert_refused(await ask(house, api, "a", stream=stream, logit_bias={"5": value}), says="logit_bias")
    many = {str(i): 1 for i in range(10_000)}
    assert_refused(await ask(house, api, "a", stream=stream, logit_bias=many), says="1024")
    assert (await ask(house, api, "a", stream=stream, logit_bias={"500": 100, "501": -100})).status == 200


@both
@each_api
async def test_d13_temperatures(house: httpx.AsyncClient, api: str, stream: bool) -> None:
    greedy = await ask(house, api, "cold", stream=stream)
    neighbour = asyncio.create_task(ask(house, api, "a plain neighbour", stream=stream))
    assert (await ask(house, api, "cold", stream=stream, temperature=0)).text == greedy.text
    assert (await ask(house, api, "cold", stream=stream, temperature=2.0)).status == 200
    for value in (2.01, -0.1):
        assert_refused(await ask(house, api, "cold", stream=stream, temperature=value), says="temperature")
    for literal in ("1e999", "NaN", "-Infinity", "Infinity"):
        body = orjson_free(body_of(api, "cold", stream=stream), literal)
        response = await house.post(PATHS[api], content=body, headers={"content-type": "application/json"})
        assert_refused(read(response))
    assert (await neighbour).shown() == (await ask(house, api, "a plain neighbour", stream=stream)).shown()


def orjson_free(body: dict[str, Any], literal: str) -> bytes:
    """The body as JSON, with a temperature that no JSON encoder would write."""
    import json

    return json.dumps(body | {"temperature": "HERE"}).replace('"HERE"', literal).encode()


def history(arguments: Any = '{"city": "Paris"}', **call: Any) -> list[dict[str, Any]]:
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **call}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": "Thanks"},
    ]


@both
async def test_d15_tool_calls_in_the_history(house: httpx.AsyncClient, stream: bool) -> None:
    async def chat(messages: Any) -> Answer:
        body = {"model": MODEL, "messages": messages, "max_tokens": 3, "stream": stream}
        return read(await house.post(PATHS["chat"], json=body))

    for arguments in ('{"city": "Paris"}', "", "null", "{}", ' {"a": {"b": [1, null]}} '):
        assert (await chat(history(arguments))).status == 200
    for arguments in ("[]", "42", '"text"', "{bad", "true", "NaN", '{"a": 1}}'):
        assert_refused(await chat(history(arguments)), says="messages.1")
    for arguments in (None, 5, {"city": "Paris"}):
        assert_refused(await chat(history(arguments)), says="messages.1")
    good = history()
    assert (await chat([good[0], {"role": "assistant", "content": "hi", "tool_calls": []}])).status == 200
    assert_refused(await chat([good[0], good[1], {"role": "tool", "content": "sunny"}]), says="messages.2")
    assert_refused(
        await chat([{"role": "user", "content": "x", "tool_calls": good[1]["tool_calls"]}]), says="messages.0"
    )
    assert_refused(
        await chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), says="messages.0"
    )
    sent_back = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None}
    assert (await chat([good[0], sent_back | {"function_call": None, "tool_calls": None}, good[3]])).status == 200


SURROGATES = ['"\\ud800"', '"\\udc00"', '"\\udc00\\ud800"', '"a\\ud83d"']
PLACES = [
    '{"model": "smollm2-135m", "max_tokens": 2, "messages": [{"role": "user", "content": HERE}]}',
    '{"model": "smollm2-135m", "max_tokens": 2, "messages": '
    '[{"role": "user", "content": [{"type": "text", "text": HERE}]}]}',
    '{"model": "smollm2-135m", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "stop": [HERE]}',
    '{"model": "smollm2-135m", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "user": HERE}',
    '{"model": "smollm2-135m", "max_tokens": 2, "prompt": HERE}',
    '{"model": "smollm2-135m", "max_tokens": 2, "prompt": ["a", HERE]}',
    '{"model": "smollm2-135m", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", '
    '"content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": HERE}}]}]}',
]


@both
@pytest.mark.parametrize("place", PLACES, ids=["content", "part", "stop", "user", "prompt", "prompts", "arguments"])
async def test_d16_text_that_is_no_text(house: httpx.AsyncClient, place: str, stream: bool) -> None:
    path = PATHS["chat" if "messages" in place else "completion"]
    place = place.replace('"max_tokens"', f'"stream": {str(stream).lower()}, "max_tokens"', 1)

    async def send(literal: bytes) -> Answer:
        headers = {"content-type": "application/json"}
        return read(await house.post(path, content=place.encode().replace(b"HERE", literal), headers=headers))

    for literal in SURROGATES:
        assert_refused(await send(literal.encode()))
    for raw in (b'"\xff\xfe"', b'"\xc3"', b'"\xed\xa0\x80"'):
        assert_refused(await send(raw))
    arguments = "tool_calls" in place
    for good in (
        (b'"{\\"a\\": \\"\\ud83d\\ude00\\"}"', b'"{}"')
        if arguments
        else (b'"\\ud83d\\ude00"', b'"a\\u0000b"', b'"\xef\xbb\xbfa"')
    ):
        assert (await send(good)).status == 200
    if "messages" in place and '"content": HERE' in place:
        escaped, spelt = await send(b'"\\ud83d\\ude00"'), await send('"😀"'.encode())
        assert escaped.usage == spelt.usage


HUGE = [
    ("n", 5_000_000),
    ("n", 10**30),
    ("stop", ["x"] * 500_000),
    ("stop", "x" * 2_000_000),
    ("stop_token_ids", list(range(500_000))),
    ("user", "u" * 1_000_000),
    ("metadata", {str(i): "x" for i in range(100_000)}),
    ("temperature", 10**400),
]


@both
@each_api
async def test_d17_small_requests_of_huge_work(house: httpx.AsyncClient, api: str, stream: bool) -> None:
    for name, value in [*HUGE, ("top_logprobs" if api == "chat" else "logprobs", 10**9)]:
        answer = await ask(house, api, "a", stream=stream, **{name: value})
        assert_refused(answer)
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    assert_refused(await ask(house, api, "a", stream=stream, response_format=schema), says="deep")
    if api == "completion":
        for ids in ([-1], [VOCABULARY], [1 << 31], [1 << 63], [[5], [-1]]):
            assert_refused(await ask(house, api, ids, stream=stream), says="prompt")
        assert_refused(await ask(house, api, ["a"] * 100_000, stream=stream), says="128")
        assert_refused(await ask(house, api, ["a"] * 100, stream=stream, n=100), says="128")
    else:
        tool = {"type": "function", "function": {"name": "f"}}
        assert_refused(await ask(house, api, "a", stream=stream, tools=[tool] * 10_000), says="tools")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}] * 10_000, "stream": stream}
        assert_refused(read(await house.post(PATHS[api], json=body)), says="messages")
    huge = await house.post(PATHS[api], content=b'{"a":"' + b"x" * 50_000_000)
    assert huge.status_code == 413


async def test_d23_long_prompts_do_not_hold_up_others(fake_up: Up, house: httpx.AsyncClient) -> None:
    """Health answers, and a small stream runs to its end, while prompts of 200,000 characters are looked at."""
    long = ["word " * 40_000, " " * 100_000 + "x", "a" * 200_000, "é한👩" * 20_000]
    prompts = [asyncio.create_task(ask(house, "completion", text, max_tokens=1)) for text in long * 2]
    small = asyncio.create_task(ask(house, "completion", "small", stream=True, max_tokens=5))
    answered = 0
    while not all(task.done() for task in prompts):
        assert (await house.get("/health/live")).status_code == 200
        answered += 1
    assert (await small).choices[0].finishes == ["length"]
    assert answered >= 1
    for task in prompts:
        answer = await task
        assert answer.status == 200 or answer.error["code"] == "context_length_exceeded"


async def test_d21_the_cache_is_a_tenants_own(house: httpx.AsyncClient) -> None:
    """Reuse within a tenant, none across: both are looked at, since without a cache the second holds by itself."""
    prompt = f"a long prompt that somebody else may have sent {time.time_ns()} " * 20

    async def cached(tenant: str) -> int:
        headers = {"X-Orca-Tenant": tenant}
        body = body_of("completion", prompt, max_tokens=1)
        usage = (await house.post(PATHS["completion"], json=body, headers=headers)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert await cached("alpha") == 0
    assert await cached("beta") == 0
    assert await cached("alpha") > 100
    assert await cached("beta") > 100
