"""The body of /v1/chat/completions."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, JsonValue, model_validator

from services.router.api.wire.base import MAX_TOP_LOGPROBS, SamplingFields, Schema, Strict, refused, shallow

MAX_MESSAGES = 2048
MAX_PARTS = 256
MAX_CALLS = 128
MAX_TOOLS = 128
MAX_TEMPLATE_VARIABLES = 16
NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class TextPart(Strict):
    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


class CalledFunction(Strict):
    """arguments: JSON of an object, or nothing."""

    name: str = Field(pattern=NAME)
    arguments: str


class ToolCall(Strict):
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class Message(Strict):
    """One message. What our own answers have beside it (refusal, annotations, ...) may be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = Field(None, min_length=1, max_length=256)
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    audio: Annotated[None, refused("this model answers in text")] = None
    function_call: Annotated[None, refused("functions are called by tool_calls")] = None

    @model_validator(mode="after")
    def _complete(self) -> "Message":
        if self.content is None and (self.role != "assistant"):
            raise ValueError("content is missing")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id is for messages of role tool, and needed there")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)
        return self.content or self.refusal or ""

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: text content, `developer` under its older name, arguments as objects. Raises
        ValueError on arguments that are none."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments as an object; nothing and null are an empty one. Raises ValueError."""
    try:
        value = orjson.loads(text) if text.strip() else {}
    except orjson.JSONDecodeError:
        raise ValueError("the arguments of a tool call are not JSON") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("the arguments of a tool call are not a JSON object")
    shallow(value)
    return value


class Function(Strict):
    name: str = Field(pattern=NAME)
    description: str | None = Field(None, max_length=16_384)
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    name: str = Field(pattern=NAME)


class NamedChoice(Strict):
    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(SamplingFields):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, str | bool | int | float | None], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None
    ) = None
    modalities: list[Literal["text"]] | None = None
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512)
    prompt_cache_retention: Literal["in_memory"] | None = None
    store: Literal[False] | None = None
    audio: Annotated[None, refused("this model answers in text")] = None
    function_call: Annotated[None, refused("use tool_choice")] = None
    functions: Annotated[None, refused("use tools")] = None
    moderation: Annotated[None, refused("there is no moderation here")] = None
    prediction: Annotated[None, refused("predicted outputs are not supported")] = None
    prompt_cache_options: Annotated[None, refused("the prefix cache has no options")] = None
    verbosity: Annotated[None, refused("this model has no verbosity")] = None
    web_search_options: Annotated[None, refused("there is no web search here")] = None

    @property
    def most_asked(self) -> tuple[str, int | None]:
        """The limit on its output, and the parameter that sets it."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have the same name")
        if self.tool_choice in ("required", "auto") and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice names a function that is not among the tools")
        if self.calls_surely and self.is_formatted:
            raise ValueError("a tool call that is required leaves no room for response_format or structured_outputs")
        return self

    @property
    def calls_surely(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def is_formatted(self) -> bool:
        formatted = self.response_format is not None and self.response_format.type != "text"
        return formatted or self.structured_outputs is not None
