"""What clients of Anthropic's API send. Everything is bounded here, as in the other APIs' bodies."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.router.api.wire import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, Strict
from services.router.api.wire.base import Schema, refused
from services.router.api.wire.chat import MAX_TOOLS, NAME

MAX_BLOCKS = 1024
TEXT_ALONE = "this server takes text and tools alone"
NOT_OF_ROLE = {
    "user": ("tool_use", "thinking", "redacted_thinking"),
    "assistant": ("tool_result",),
    "system": ("tool_use", "tool_result", "thinking", "redacted_thinking"),
}

# A hint to a cache that is kept by hand. Here every prefix is cached without being asked for.
CacheControl = dict[str, Any]


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ThinkingBlock(Strict):
    """Sent back by clients. Whether the model sees earlier thoughts again, its chat template decides."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(pattern=NAME)
    input: Schema
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


def _blocks(value: Any) -> Any:
    """A string is one block of text. What is no text is named here: pydantic would list all that it might have been."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        for block in value:
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in KNOWN:
                raise ValueError(f"blocks of type {kind[:64]!r} are not supported: {TEXT_ALONE}")
    return value


Texts = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), BeforeValidator(_blocks)]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
KNOWN = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(max_length=MAX_BLOCKS), BeforeValidator(_blocks)]

    @model_validator(mode="after")
    def _blocks_of_its_role(self) -> "Message":
        for block in self.content:
            if block.type in NOT_OF_ROLE[self.role]:
                raise ValueError(f"a message of the role {self.role} has no {block.type} blocks")
        return self


class Tool(Strict):
    """One that the client runs. Those that Anthropic's servers run have a type of their own."""

    name: str = Field(pattern=NAME)
    input_schema: Schema
    description: str | None = Field(None, max_length=16_384)
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(f"tools of type {str(kind)[:64]!r} are not run here: only custom tools are supported")
        return data


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=128)
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_of_a_tool(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is needed with the type tool, and with no other")
        return self


class UserMetadata(Strict):
    user_id: str | None = Field(None, max_length=512)


class JSONFormat(Strict):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Strict):
    format: JSONFormat | None = None
    effort: Annotated[None, refused("this model thinks as much as it does")] = None


class CountRequest(Strict):
    """What count_tokens takes, and the beginning of what a message takes."""

    model: str = Field(min_length=1, max_length=512)
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    container: Annotated[None, refused("there is no code execution here")] = None
    context_management: Annotated[None, refused("the whole conversation is always read")] = None
    diagnostics: Annotated[None, refused("there are none here")] = None
    inference_geo: Annotated[None, refused("this server runs where it is")] = None
    mcp_servers: Annotated[None, refused("MCP servers are the client's to call")] = None
    speed: Annotated[None, refused("there is one speed")] = None
    user_profile_id: Annotated[None, refused("there are no profiles here")] = None
    workspace_id: Annotated[None, refused("there are no workspaces here")] = None

    @model_validator(mode="after")
    def _consistent(self) -> "CountRequest":
        if self.thinking is not None and self.thinking != {"type": "disabled"}:
            raise ValueError("thinking is not supported: only disabled, or none")
        if self.messages[-1].role == "assistant":
            raise ValueError("messages: the last one may not be the assistant's; going on from it is not supported")
        if self.tool_choice is not None and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self


StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, lt=1 << 31)
    stream: bool | None = None
    stop_sequences: list[StopSequence] | None = Field(None, max_length=MAX_STOPS)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
