"""What the bodies of all APIs share."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, WithJsonSchema, model_validator

MAX_CHOICES = 128
MAX_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_IDS = 1 << 20
MAX_STOPS = 4
MAX_STOP_CHARS = 1000
MAX_METADATA = 16
MAX_SCHEMA_DEPTH = 64
MAX_PATTERNS = 1000


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


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise ValueError(f"must be an object of at most {MAX_METADATA} entries")
    if not all(isinstance(text, str) and len(key) <= 64 and len(text) <= 512 for key, text in value.items()):
        raise ValueError("must have keys of at most 64 and string values of at most 512 characters")
    return value


def shallow(value: Any) -> Any:
    """Nested no deeper than a schema of use is: whoever walks through it by recursion can. Raises ValueError."""
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise ValueError(f"nested deeper than {MAX_SCHEMA_DEPTH}")


def refused(why: str) -> BeforeValidator:
    """Of a parameter that is known and not supported: null or absent, else refused with the reason."""

    def check(value: Any) -> None:
        if value is not None:
            raise ValueError(why)

    return BeforeValidator(check)


def described(schema: dict[str, Any], check: Callable[[Any], Any]) -> list[Any]:
    """A check of ours, and what the OpenAPI document says instead of it."""
    return [BeforeValidator(check), WithJsonSchema(schema)]


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_BIAS = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "maxProperties": MAX_BIAS,
}
_METADATA = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": 512},
    "maxProperties": MAX_METADATA,
}

Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Stops = Annotated[
    list[str] | None,
    *described(nullable({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}), _stop_strings),
]
Bias = Annotated[dict[str, float] | None, *described(nullable(_BIAS), _bias)]
Metadata = Annotated[dict[str, str] | None, *described(nullable(_METADATA), _metadata)]
Schema = Annotated[dict[str, JsonValue], BeforeValidator(shallow)]


class Strict(BaseModel):
    """No coercion: "5" is no number, true is no integer, 1.5 is no count. Unknown fields are refused: a parameter that
    did nothing would be worse than one that is not there."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = Field(None, max_length=4096)


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """One of them; in vLLM's form."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1, max_length=16_384)
    choice: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        None, min_length=1, max_length=MAX_PATTERNS
    )
    grammar: str | None = Field(None, min_length=1, max_length=65_536)
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        if sum(value is not None for value in vars(self).values()) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object is needed")
        return self


class SamplingFields(Strict):
    """Fields that chat and completions share. None means the default, as in OpenAI's API."""

    model: str = Field(min_length=1, max_length=512)
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
    logit_bias: Bias = None
    seed: Int64 | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    metadata: Metadata = None
    user: str | None = Field(None, max_length=512)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _consistent_options(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        formatted = self.response_format is not None and self.response_format.type != "text"
        if formatted and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs exclude each other")
        return self
