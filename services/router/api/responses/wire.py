"""What clients of the Responses API send. Everything is bounded here, as in the other APIs' bodies."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from services.router.api.wire import MAX_MESSAGES, Strict
from services.router.api.wire.base import MAX_TOP_LOGPROBS, Metadata, Schema, refused
from services.router.api.wire.chat import MAX_PARTS, MAX_TOOLS, NAME

TEXT_ALONE = "this server takes text and functions alone"


class InputText(Strict):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Schema | None = None


class OutputText(Strict):
    """What a response had as output: its annotations and log-probabilities may come back with it."""

    type: Literal["output_text"]
    text: str
    annotations: list[Schema] | None = Field(default_factory=list)
    logprobs: list[Schema] | None = None


class Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


PARTS = ("input_text", "output_text", "refusal")


def _parts(value: Any) -> Any:
    """What is no text is named here: pydantic would list all that it might have been."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if isinstance(value, list):
        _only(value, PARTS, "parts")
    return value


def _only(values: list[Any], known: tuple[str, ...], what: str) -> None:
    for value in values:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in known:
            raise ValueError(f"{what} of type {kind[:64]!r} are not supported: {TEXT_ALONE}")


Part = Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS), BeforeValidator(_parts)]
Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(max_length=256)]


class Item(Strict):
    id: ItemId | None = None
    status: Status | None = None


class MessageItem(Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_of_an_assistant(cls, data: Any) -> Any:
        """A string is a part of the kind that messages of this role have."""
        if isinstance(data, dict) and data.get("role") == "assistant" and isinstance(data.get("content"), str):
            return data | {"content": [{"type": "output_text", "text": data["content"]}]}
        return data


class FunctionCall(Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(pattern=NAME)
    arguments: str
    namespace: None = None
    caller: Schema | None = None


class FunctionCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: Parts
    caller: Schema | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class Reasoning(Item):
    """Sent back by clients. Whether the model sees earlier thoughts again, its chat template decides."""

    type: Literal["reasoning"]
    summary: list[Schema] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None


AnyItem = Annotated[MessageItem | FunctionCall | FunctionCallOutput | Reasoning, Field(discriminator="type")]
ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _items(value: Any) -> Any:
    """Every form of an input, as items: a string is the user's, and an item without a type is a message."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    items = [{"type": "message"} | item if isinstance(item, dict) and "role" in item else item for item in value]
    _only(items, ITEMS, "items")
    return items


Items = Annotated[list[AnyItem], Field(max_length=MAX_MESSAGES), BeforeValidator(_items)]
ITEMS_OF_BEFORE: TypeAdapter[list[AnyItem]] = TypeAdapter(Items)


class Function(Strict):
    """A tool. Those that OpenAI's servers run have types of their own."""

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    parameters: Schema | None = None
    description: str | None = Field(None, max_length=16_384)
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"tools of type {kind[:64]!r} are not run here: only functions are supported")
        return data


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str = Field(pattern=NAME)


def _choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "function":
        raise ValueError(f"{str(value.get('type'))[:64]!r} is not supported: none, auto, required or a function")
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError("must be none, auto, required or a function")
    return value


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: Schema | None = Field(None, alias="schema")
    description: str | None = Field(None, max_length=4096)
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None and self.name is not None):
            raise ValueError("name and schema are needed with the type json_schema, and with no other")
        return self


class Text(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Thinking(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Strict):
    model: str = Field(min_length=1, max_length=512)
    input: Items = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Function] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[str | FunctionChoice | None, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Thinking | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = Field(None, max_length=16)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    metadata: Metadata = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512)
    access_programs: Annotated[None, refused("there are none here")] = None
    background_options: Annotated[None, refused("what runs in the background is queued like everything else")] = None
    context_management: Annotated[None, refused("the whole conversation is always read")] = None
    conversation: Annotated[None, refused("send the conversation as input, or previous_response_id")] = None
    image: Annotated[None, refused("this server takes text and functions alone")] = None
    max_tool_calls: Annotated[None, refused("it counts tools that the server calls, and this one calls none")] = None
    moderation: Annotated[None, refused("there is none here")] = None
    prompt: Annotated[None, refused("there are no stored prompts here; send instructions and input")] = None
    prompt_cache_options: Annotated[None, refused("every prefix is cached without being asked for")] = None
    prompt_cache_retention: Annotated[None, refused("every prefix is cached without being asked for")] = None

    @model_validator(mode="after")
    def _consistent(self) -> "ResponsesRequest":
        if self.background and self.store is False:
            raise ValueError("background needs store: nobody could read the response")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if not (self.input or self.previous_response_id or self.instructions):
            raise ValueError("input is missing")
        return self

    @property
    def stores(self) -> bool:
        """Whether the response can be read again: unless that is declined, as in OpenAI's API."""
        return self.store is not False

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to each token are told; None is no log-probabilities at all."""
        return self.top_logprobs or 0 if self.include or self.top_logprobs else None
