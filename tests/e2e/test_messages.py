"""Anthropic's Messages API with the official client, over real processes (fake executor)."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from loadtest.up import Up
from tests.e2e.conftest import MODEL, eventually
from tests.e2e.test_keys import write

USER: list[Any] = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "messages": USER, "temperature": 0}
# The client of today has no sampling parameters; those of yesterday had.
OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "messages": USER, "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


# What is made for it ends soon, whatever the model.
SWITCH: Any = {
    "name": "switch",
    "input_schema": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


@pytest.fixture
async def claude(fake_up: Up) -> AsyncIterator[AsyncAnthropic]:
    """The official client, on the fake system; afterwards the system must be idle."""
    async with AsyncAnthropic(base_url=fake_up.url, api_key="none", max_retries=0) as made:
        yield made
    await eventually(fake_up.is_idle)


def post(up: Up, body: Any, path: str = "/v1/messages", **more: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{up.url}{path}", content=content, timeout=30, **more)


def put(up: Up) -> httpx.Response:
    return httpx.put(f"{up.url}/v1/messages", timeout=30)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_whole_and_streamed_are_the_same(claude: AsyncAnthropic) -> None:
    whole = await claude.messages.create(**OPTIONS)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", MODEL)
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    assert whole.usage.output_tokens == 12
    assert whole._request_id is not None
    assert whole.id == f"msg_{whole._request_id}"
    async with claude.messages.stream(**OPTIONS) as stream:
        pieces = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(pieces) == text_of(final) == text_of(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == "max_tokens"


async def test_events_come_in_their_order(claude: AsyncAnthropic) -> None:
    events = [event async for event in await claude.messages.create(**OPTIONS, stream=True)]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


async def test_a_stream_has_named_events_that_can_be_resumed(fake_up: Up, claude: AsyncAnthropic) -> None:
    body = BODY | {"stream": True, "max_tokens": 30}
    response = post(fake_up, body, headers={"Idempotency-Key": "messages-resume"})
    assert "[DONE]" not in response.text
    events = re.findall(r"event: (\S+)\nid: (\S+)\ndata: (.*)\n\n", response.text)
    assert len(events) == response.text.count("data: ")
    assert all(json.loads(data)["type"] == name for name, _, data in events)
    for index in (0, 1, len(events) // 2, len(events) - 2):
        rest = post(fake_up, body, headers={"Last-Event-ID": events[index][1]})
        assert re.findall(r"event: (\S+)\nid: (\S+)\ndata: (.*)\n\n", rest.text) == events[index + 1 :]
    over = post(fake_up, body, headers={"Last-Event-ID": events[-1][1]})
    assert over.status_code == 204


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_stop_sequence_is_named(claude: AsyncAnthropic, streamed: bool) -> None:
    text = text_of(await claude.messages.create(**OPTIONS | {"max_tokens": 30}))
    stop = text[len(text) // 3 : len(text) // 3 + 9]
    options = OPTIONS | {"max_tokens": 30, "stop_sequences": ["never comes", stop]}
    if streamed:
        async with claude.messages.stream(**options) as stream:
            message = await stream.get_final_message()
    else:
        message = await claude.messages.create(**options)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]


async def test_counting_is_what_a_message_counts(claude: AsyncAnthropic) -> None:
    forms: list[dict[str, Any]] = [
        {"messages": USER},
        {"messages": USER, "system": "Be brief."},
        {"messages": USER, "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"messages": USER, "tools": [WEATHER]},
    ]
    counts = []
    for form in forms:
        counted = await claude.messages.count_tokens(model=MODEL, **form)
        message = await claude.messages.create(model=MODEL, max_tokens=1, **form)
        usage = message.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        counts.append(counted.input_tokens)
    assert counts[1] == counts[2]
    assert counts[3] > counts[0], "tools are told to the model"


async def test_a_conversation_with_tools_and_thoughts_is_taken(claude: AsyncAnthropic) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather in Oslo?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    message = await claude.messages.create(
        model=MODEL,
        messages=messages,
        max_tokens=5,
        tools=[WEATHER],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        metadata={"user_id": "somebody"},
        thinking={"type": "disabled"},
        service_tier="auto",
        extra_body={"top_k": 5, "top_p": 0.9, "temperature": 1},
    )
    assert message.usage.output_tokens == 5


async def test_a_tool_is_called_and_its_result_goes_back(claude: AsyncAnthropic) -> None:
    options = OPTIONS | {"max_tokens": 150, "tools": [SWITCH], "tool_choice": {"type": "tool", "name": "switch"}}
    whole = await claude.messages.create(**options)
    assert whole.stop_reason == "tool_use"
    (call,) = whole.content
    assert call.type == "tool_use"
    assert isinstance(call.input["on"], bool)
    async with claude.messages.stream(**options) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["tool_use"]
    assert final.content[0].input == call.input  # type: ignore[union-attr]
    assert "".join(event.partial_json for event in events if event.type == "input_json")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done", "is_error": False}
    turns = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = await claude.messages.create(**OPTIONS | {"messages": turns, "tools": [SWITCH]})
    assert after.usage.output_tokens == 12


async def test_output_of_a_schema(claude: AsyncAnthropic) -> None:
    format_: Any = {"type": "json_schema", "schema": SWITCH["input_schema"]}
    message = await claude.messages.create(**OPTIONS | {"max_tokens": 100}, output_config={"format": format_})
    assert message.stop_reason == "end_turn"
    assert isinstance(json.loads(text_of(message))["on"], bool)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://nowhere/x.png"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1_000_000}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "blocks of type 'image' are not supported"),
    ({"messages": [*USER, {"role": "assistant", "content": "The answer is"}]}, "the last one may not be"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' are not run here"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "name is needed"),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
    ({"container": "c"}, "container: there is no code execution here"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"speling": 1}, "speling"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda value: str(value)[:40])
async def test_refused_with_what_is_wrong(fake_up: Up, change: dict[str, Any], message: str) -> None:
    response = post(fake_up, {name: value for name, value in (BODY | change).items() if value is not None})
    body = response.json()
    assert response.status_code == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]
    assert body["request_id"] == response.headers["request-id"]


async def test_errors_have_anthropics_shape(fake_up: Up, claude: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.messages.create(**OPTIONS | {"model": "claude"})
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert unknown.value.request_id is not None
    for body in (b"{", b"[]"):
        assert post(fake_up, body).json()["error"]["type"] == "invalid_request_error"
    large = post(fake_up, b" " * (33 << 20))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    assert put(fake_up).json()["error"]["type"] == "invalid_request_error"
    assert post(fake_up, {}, "/v1/messages/nothing").json()["error"]["type"] == "not_found_error"
    assert "type" in post(fake_up, b"{", "/v1/chat/completions").json()["error"], "and others have OpenAI's"


async def test_the_key_comes_in_x_api_key_and_limits_are_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, a={"requests_per_minute": 1})
    with Up(tmp_path / "up", "--executor", "fake", "--api-keys", str(path)) as up:
        async with AsyncAnthropic(base_url=up.url, api_key="key-a", max_retries=0) as claude:
            assert (await claude.messages.create(**OPTIONS)).stop_reason == "max_tokens"
            with pytest.raises(anthropic.RateLimitError) as limited:
                await claude.messages.create(**OPTIONS)
            assert limited.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
            assert int(limited.value.response.headers["retry-after"]) > 0
            assert (await claude.messages.count_tokens(model=MODEL, messages=USER)).input_tokens > 0
        async with AsyncAnthropic(base_url=up.url, api_key="key-b", max_retries=0) as stranger:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await stranger.messages.create(**OPTIONS)
            assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        await eventually(up.is_idle)


async def test_a_deadline_is_an_error_in_either_form(fake_up: Up, claude: AsyncAnthropic) -> None:
    options = OPTIONS | {"max_tokens": 1500, "extra_headers": {"X-Orca-Timeout": "0.3"}}
    with pytest.raises(anthropic.APIStatusError) as whole:
        await claude.messages.create(**options)
    assert whole.value.status_code == 504
    with pytest.raises(anthropic.APIStatusError) as streamed:
        async with claude.messages.stream(**options) as stream:
            await stream.get_final_message()
    assert streamed.value.body["error"]["type"] == "timeout_error"  # type: ignore[index]
