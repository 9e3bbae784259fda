"""What clients send. Everything is bounded here, before anything is allocated in proportion to it."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_CHOICES = 128
MAX_PROMPTS = 128
MAX_MESSAGES = 2048
MAX_BIAS = 1024
MAX_TOP_LOGPROBS = 20

MAX_PROMPT_IDS = 1 << 20
MAX_STOPS = 4
MAX_STOP_CHARS = 1000


def _stop_strings(value: Any) -> list[str] | None:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS}")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"each must be a string of 1 to {MAX_STOP_CHARS} characters")
    return stops


def _bias(value: Any) -> dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_BIAS:
        raise ValueError(f"must be an object of at most {MAX_BIAS} entries")
    for bias in value.values():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not math.fabs(bias) <= 100:
            raise ValueError("values must be numbers between -100 and 100")
    return {key: float(bias) for key, bias in value.items()}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Every form of a prompt, as a list; looked at by hand, since a union would report every element of every form."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, token ids, or a list of either, and not empty")
    if type(value[0]) is int:
        if len(value) > MAX_PROMPT_IDS or not _is_ids(value):
            raise ValueError(f"token ids must be integers, at most {MAX_PROMPT_IDS}")
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
    if all(isinstance(item, str) for item in value):
        return value
    if all(item and len(item) <= MAX_PROMPT_IDS and _is_ids(item) for item in value if isinstance(item, list)) and all(
        isinstance(item, list) for item in value
    ):
        return value
    raise ValueError("must be all strings, or all non-empty lists of token ids")


Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class Strict(BaseModel):
    """No coercion: "5" is no number, true is no integer, 1.5 is no count. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None


class SamplingFields(Strict):
    """Fields that chat and completions share. None means the default, as in OpenAI's API."""

    model: str = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    min_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_bias)] = None
    seed: Int64 | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stop_strings)] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    user: str | None = Field(None, max_length=512)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=256)] | None = None
    name: str | None = Field(None, max_length=256)

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: text content, and `developer` under its older name."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(SamplingFields):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tool_choice: Literal["none", "auto"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.response_format is not None and self.response_format.get("type", "text") != "text":
            raise ValueError("response_format: only text is supported")
        return self


class CompletionRequest(SamplingFields):
    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported")
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise ValueError(f"prompts times n may not be over {MAX_CHOICES}")
        return self
