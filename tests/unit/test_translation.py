"""Bodies of the newer APIs, as the chat requests that ask for the same."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.router.api.messages import translate as messages
from services.router.api.messages.wire import MessagesRequest
from services.router.api.responses import translate as responses
from services.router.api.responses.wire import ResponsesRequest
from services.router.api.wire import ChatRequest

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place":"Oslo"}'}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "description": "d"}}
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"a": DEEP}


def of_messages(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]} | fields
    chat = messages.chat_of(MessagesRequest.model_validate(body))
    ChatRequest.model_validate(chat)
    return chat


def of_responses(**fields: Any) -> dict[str, Any]:
    body = ResponsesRequest.model_validate({"model": "m", "input": "Hi"} | fields)
    chat = responses.chat_of(body, body.input)
    ChatRequest.model_validate(chat)
    return chat


def test_a_message_with_everything() -> None:
    chat = of_messages(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stream=True,
        metadata={"user_id": "u"},
        tools=[{"name": "weather", "description": "d", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    )
    assert chat == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "user": "u",
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
    }


def test_blocks_of_tools_and_thoughts() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"place": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Before."},
                {"type": "tool_result", "tool_use_id": "c1", "content": "rain", "is_error": False},
                {"type": "tool_result", "tool_use_id": "c2"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    assert of_messages(messages=turns)["messages"] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL], "reasoning_content": "Look."},
        {"role": "user", "content": "Before."},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("theirs", "ours"), [({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none")]
)
def test_choices_of_tools(theirs: dict[str, Any], ours: str) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    assert of_messages(tools=tools, tool_choice=theirs)["tool_choice"] == ours


def test_a_response_with_everything() -> None:
    chat = of_responses(
        instructions="Be brief.",
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        user="u",
        service_tier="flex",
        top_logprobs=2,
        tools=[{"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": None}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
    )
    assert chat == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "user": "u",
        "service_tier": "flex",
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
    }


def test_items_of_a_conversation() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place":"Oslo"}'}
    items = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": "Wea"}, {"type": "input_text", "text": "ther?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "reasoning", "id": "rs", "summary": []},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "And?"},
    ]
    assert of_responses(input=items)["messages"] == [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "tool_calls": [CALL, CALL | {"id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True, "description": "d"},
    ],
)
def test_formats_of_text(form: dict[str, Any]) -> None:
    told = of_responses(text={"format": form})["response_format"]
    rest = {name: value for name, value in form.items() if name != "type"}
    assert told == {"type": form["type"]} | ({"json_schema": rest} if rest else {})


def test_what_is_nested_too_deep_is_refused() -> None:
    use = {"type": "tool_use", "id": "c", "name": "n", "input": DEEP}
    with pytest.raises(ValidationError, match="nested deeper"):
        of_messages(messages=[{"role": "assistant", "content": [use]}, {"role": "user", "content": "x"}])
    with pytest.raises(ValidationError, match="nested deeper"):
        of_messages(tools=[{"name": "n", "input_schema": DEEP}])
    part = {"type": "output_text", "text": "x", "annotations": [DEEP]}
    with pytest.raises(ValidationError, match="nested deeper"):
        of_responses(input=[{"role": "assistant", "content": [part]}])
    with pytest.raises(ValidationError, match="nested deeper"):
        of_responses(tools=[{"type": "function", "name": "n", "parameters": DEEP}])
