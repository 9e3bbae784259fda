"""The official anthropic client, unmodified, on the real weights."""

from typing import Any

import pytest
from anthropic import AsyncAnthropic, BadRequestError, NotFoundError
from anthropic.types import Message

from tests.clients.tasks import CAPITAL, MODEL, PARAMETERS, REPORT, WEATHER, GetWeather

# This client no longer has a parameter for it; the API still does.
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 30, "extra_body": {"temperature": 0}}
TOOL: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": PARAMETERS}


def prompt_tokens(message: Message) -> int:
    """In this API, those from the cache are not among the others."""
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


async def test_messages_whole_and_streamed(anthropic: AsyncAnthropic) -> None:
    whole = await anthropic.messages.create(**GREEDY, messages=CAPITAL)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", MODEL)
    assert whole.content[0].type == "text"
    assert "Paris" in whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    async with anthropic.messages.stream(**GREEDY, messages=CAPITAL) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text
    assert [block.model_dump(exclude={"parsed_output"}) for block in final.content] == [
        block.model_dump() for block in whole.content
    ]
    assert final.stop_reason == whole.stop_reason
    assert prompt_tokens(final) == prompt_tokens(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_events_come_in_their_order(anthropic: AsyncAnthropic) -> None:
    kinds = [e.type async for e in await anthropic.messages.create(**GREEDY, messages=CAPITAL, stream=True)]
    kinds = [kind for kind in kinds if kind != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


async def test_a_system_prompt_and_blocks(anthropic: AsyncAnthropic) -> None:
    blocks: list[Any] = [{"role": "user", "content": [{"type": "text", "text": CAPITAL[0]["content"]}]}]
    plain = await anthropic.messages.create(**GREEDY, messages=CAPITAL, system="Be brief.")
    as_blocks = await anthropic.messages.create(
        **GREEDY, messages=blocks, system=[{"type": "text", "text": "Be brief."}]
    )
    without = await anthropic.messages.create(**GREEDY, messages=CAPITAL)
    assert plain.content == as_blocks.content
    assert prompt_tokens(plain) != prompt_tokens(without), "it is part of the prompt"


async def test_stop_sequences(anthropic: AsyncAnthropic) -> None:
    answer = await anthropic.messages.create(**GREEDY, messages=CAPITAL, stop_sequences=["Paris"])
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == "Paris"
    assert all("Paris" not in block.text for block in answer.content if block.type == "text")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "named"])
async def test_tool_loop(anthropic: AsyncAnthropic, choice: Any) -> None:
    options = {**GREEDY, "max_tokens": 200, "tools": [TOOL]}
    asked = await anthropic.messages.create(**options, messages=WEATHER, tool_choice=choice)
    assert asked.stop_reason == "tool_use"
    use = next(block for block in asked.content if block.type == "tool_use")
    assert use.name == "get_weather"
    assert GetWeather.model_validate(use.input)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": REPORT}]}
    messages: list[Any] = [*WEATHER, {"role": "assistant", "content": asked.content}, result]
    answer = await anthropic.messages.create(**options, messages=messages, tool_choice={"type": "none"})
    assert any(block.type == "text" and block.text for block in answer.content)


async def test_a_tool_s_input_is_streamed(anthropic: AsyncAnthropic) -> None:
    """In parts, for each block by itself; the helper puts them together to the same."""
    options: dict[str, Any] = {**GREEDY, "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "any"}}
    parts: dict[int, str] = {}
    async with anthropic.messages.stream(**options, messages=WEATHER) as stream:
        async for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                parts[event.index] = parts.get(event.index, "") + event.delta.partial_json
        final = await stream.get_final_message()
    assert parts
    for index, part in parts.items():
        block = final.content[index]
        assert block.type == "tool_use"
        assert GetWeather.model_validate_json(part) == GetWeather.model_validate(block.input)


async def test_one_tool_at_a_time(anthropic: AsyncAnthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    options = {**GREEDY, "max_tokens": 200, "tools": [TOOL]}
    asked = await anthropic.messages.create(**options, messages=WEATHER, tool_choice=choice)
    assert [block.type for block in asked.content].count("tool_use") == 1


async def test_count_tokens_is_what_a_message_takes(anthropic: AsyncAnthropic) -> None:
    counted = await anthropic.messages.count_tokens(model=MODEL, messages=CAPITAL, system="Be brief.")
    made = await anthropic.messages.create(**GREEDY, messages=CAPITAL, system="Be brief.")
    assert counted.input_tokens == prompt_tokens(made)


async def test_errors_have_their_shape(anthropic: AsyncAnthropic) -> None:
    with pytest.raises(NotFoundError) as missing:
        await anthropic.messages.create(**{**GREEDY, "model": "claude-none"}, messages=CAPITAL)
    assert isinstance(missing.value.body, dict)
    assert missing.value.body["type"] == "error"
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(BadRequestError) as invalid:
        await anthropic.messages.create(**{**GREEDY, "max_tokens": 0}, messages=CAPITAL)
    assert isinstance(invalid.value.body, dict)
    assert invalid.value.body["error"]["type"] == "invalid_request_error"
