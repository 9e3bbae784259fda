"""Bodies of the Responses API to chat requests, and those to prompts and parameters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.router.api.endpoint import Prepared
from services.router.api.prepare import prepare_chat
from services.router.api.responses.wire import (
    AnyItem,
    Function,
    FunctionCall,
    FunctionCallOutput,
    FunctionChoice,
    MessageItem,
    Part,
    Reasoning,
    Refusal,
    ResponsesRequest,
    TextFormat,
)
from services.router.api.service import Service
from services.router.api.translation import given
from services.router.api.wire import MAX_MESSAGES, ChatRequest
from services.router.core.limits import FleetLimits

# Of an item what says nothing to a model, and what a stored conversation may hold.
UNKEPT = {"encrypted_content": True, "summary": True, "annotations": True, "logprobs": True}
MAX_KEPT_BYTES = 1 << 20
# As they are called here, by what they are called in the chat request.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def chat_of(body: ResponsesRequest, items: Sequence[AnyItem]) -> dict[str, Any]:
    """The chat request that asks for the same. items: the whole conversation."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    logprobs = body.logprobs
    return {"model": body.model, "messages": system + _messages(items)} | given(
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=True if logprobs is not None else None,
        top_logprobs=logprobs,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_choice(body.tool_choice) if body.tools else None,
        parallel_tool_calls=body.parallel_tool_calls if body.tools else None,
        response_format=_format(body.text.format) if body.text and body.text.format else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        service_tier=body.service_tier,
        user=body.user,
    )


async def prepare_response(
    service: Service, body: ResponsesRequest, before: list[AnyItem], limits: FleetLimits
) -> Prepared:
    """before: the conversation up to this request. Raises InvalidRequest or Overloaded."""
    items = before + body.input
    try:
        prepared = await prepare_chat(service, service.parse(chat_of(body, items), ChatRequest), limits)
    except InvalidRequest as error:
        raise _renamed(error) from None
    detail: dict[str, Any] = {"shown": shown(body)}
    if body.stores:
        detail["input"] = _kept(items)
    view = replace(prepared.view, detail=detail)
    return replace(prepared, view=view, outlives=bool(body.background), kept=body.stores)


def _kept(items: list[AnyItem]) -> list[dict[str, Any]]:
    """Of a conversation what is needed to go on with it. Raises InvalidRequest if it is too much to be kept."""
    kept = [item.model_dump(exclude_none=True, exclude=UNKEPT) for item in items]
    if len(kept) > MAX_MESSAGES or len(orjson.dumps(kept)) > MAX_KEPT_BYTES:
        raise InvalidRequest(
            "input: with what went before it is too large to be stored; ask with store: false", "input"
        )
    return kept


def shown(body: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    format_ = body.text.format if body.text else None
    choice = body.tool_choice
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "store": body.stores,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": format_.model_dump(by_alias=True, exclude_none=True) if format_ else {"type": "text"}},
        "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """With the names of this API's parameters instead of chat's."""
    for theirs, ours in NAMES.items():
        error.message = error.message.replace(f"{theirs} is", f"{ours} is")
        if error.message.startswith(theirs):
            error.message = ours + error.message.removeprefix(theirs)
    error.param = NAMES.get(error.param or "", error.param)
    return error


def _messages(items: Sequence[AnyItem]) -> list[dict[str, Any]]:
    """An assistant's thoughts and calls are items of their own here, and part of its message in chat."""
    out: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem(role="assistant") if out and _has_thoughts_alone(out[-1]):
                out[-1]["content"] = _text(item.content)
            case MessageItem():
                out.append({"role": item.role, "content": _text(item.content)})
            case FunctionCallOutput():
                out.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case FunctionCall():
                _turn(out).setdefault("tool_calls", []).append(_call(item))
            case Reasoning() if item.content:
                thoughts = "".join(part.text for part in item.content)
                out.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    return out


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is the last one, or that comes now."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _has_thoughts_alone(message: dict[str, Any]) -> bool:
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in parts)


def _call(item: FunctionCall) -> dict[str, Any]:
    return {
        "id": item.call_id,
        "type": "function",
        "function": {"name": item.name, "arguments": item.arguments},
    }


def _tool(tool: Function) -> dict[str, Any]:
    more = given(description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return {"type": "function", "function": {"name": tool.name} | more}


def _choice(choice: str | FunctionChoice | None) -> Any:
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _format(text: TextFormat) -> dict[str, Any]:
    if text.type != "json_schema":
        return {"type": text.type}
    schema = {"name": text.name, "schema": text.schema_} | given(description=text.description, strict=text.strict)
    return {"type": "json_schema", "json_schema": schema}
