"""Bodies of Anthropic's API to chat requests, and those to prompts and parameters."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.router.api.endpoint import Prepared
from services.router.api.messages.wire import (
    Block,
    CountRequest,
    Message,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from services.router.api.prepare import conversation, encode_chat, prepare_chat
from services.router.api.service import Service
from services.router.api.translation import given
from services.router.api.wire import ChatRequest
from services.router.core.limits import FleetLimits

# The variable of chat templates that decides whether the model thinks.
SWITCH = "enable_thinking"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_count(body: CountRequest) -> dict[str, Any]:
    """A chat request with the same prompt, for one token."""
    system = [{"role": "system", "content": _text(body.system)}] if body.system else []
    messages = system + [chat for message in body.messages for chat in _messages(message)]
    chat = {"model": body.model, "messages": messages, "max_tokens": 1}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        chat |= _choice(body.tool_choice)
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema_, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def chat_of(body: MessagesRequest) -> dict[str, Any]:
    """The chat request that asks for the same."""
    return (
        chat_of_count(body)
        | {"max_tokens": body.max_tokens}
        | given(
            stream=body.stream,
            stop=body.stop_sequences or None,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            user=body.metadata.user_id if body.metadata else None,
        )
    )


async def prepare_messages(service: Service, body: MessagesRequest, limits: FleetLimits) -> Prepared:
    """Raises InvalidRequest or Overloaded."""
    chat = service.parse(chat_of(body) | _thoughtless(service, body), ChatRequest)
    prepared = await prepare_chat(service, chat, limits)
    detail = {"input_tokens": sum(map(len, prepared.prompts))}
    return replace(prepared, view=replace(prepared.view, detail=detail))


async def count_tokens(service: Service, body: CountRequest) -> int:
    """What a message would count as its input. Raises InvalidRequest or Overloaded."""
    chat = service.parse(chat_of_count(body) | _thoughtless(service, body), ChatRequest)
    with_tools = replace(conversation(chat.messages, chat.offered), variables=dict(chat.chat_template_kwargs or {}))
    return len((await encode_chat(service, with_tools, service.files.max_model_len)).ids)


def _thoughtless(service: Service, body: CountRequest) -> dict[str, Any]:
    """What keeps the model from thinking, where that was asked for and its template has a switch."""
    if body.thinking is None or not _has_switch(service):
        return {}
    return {"chat_template_kwargs": {SWITCH: False}}


def _has_switch(service: Service) -> bool:
    try:
        service.chat.check_variables([SWITCH], "thinking")
    except InvalidRequest:
        return False
    return True


def _text(blocks: list[TextBlock] | None) -> str:
    return "".join(block.text for block in blocks or [])


def _messages(message: Message) -> Iterator[dict[str, Any]]:
    """A user's results of tools are messages of their own in chat, in their places between the user's text."""
    if message.role == "assistant":
        yield _assistant(message.content)
        return
    for is_result, blocks in groupby(message.content, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            yield from (_result(block) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            yield {"role": message.role, "content": _text([b for b in blocks if isinstance(b, TextBlock)])}
    if not message.content:
        yield {"role": message.role, "content": ""}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}


def _assistant(content: list[Block]) -> dict[str, Any]:
    calls = [_call(block) for block in content if isinstance(block, ToolUseBlock)]
    thoughts = "".join(block.thinking for block in content if isinstance(block, ThinkingBlock))
    text = _text([block for block in content if isinstance(block, TextBlock)])
    more = given(tool_calls=calls or None, reasoning_content=thoughts or None)
    return {"role": "assistant", "content": text} | more


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    return {"type": "function", "function": function | given(description=tool.description, strict=tool.strict)}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}} | parallel
    return {"tool_choice": CHOICES[choice.type]} | parallel
