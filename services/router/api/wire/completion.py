"""The body of /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from services.router.api.wire.base import MAX_CHOICES, MAX_PROMPT_IDS, MAX_TOP_LOGPROBS, SamplingFields, described

MAX_PROMPTS = 128


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def prompt_list(value: Any) -> list[str] | list[list[int]]:
    """Every form of a prompt, as a list; looked at by hand, since a union would report every element of every form."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, token ids, or a list of either, and not empty")
    if type(value[0]) is int:
        if len(value) > MAX_PROMPT_IDS or not is_ids(value):
            raise ValueError(f"token ids must be integers, at most {MAX_PROMPT_IDS}")
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
    if all(isinstance(item, str) for item in value):
        return value
    if all(item and len(item) <= MAX_PROMPT_IDS and is_ids(item) for item in value if isinstance(item, list)) and all(
        isinstance(item, list) for item in value
    ):
        return value
    raise ValueError("must be all strings, or all non-empty lists of token ids")


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_PROMPT_IDS}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
PROMPTS = {
    "anyOf": [{"type": "string"}, _IDS, {**_MANY, "items": {"type": "string"}}, {**_MANY, "items": _IDS}],
}
Prompts = Annotated[list[str] | list[list[int]], *described(PROMPTS, prompt_list)]


class CompletionRequest(SamplingFields):
    """max_tokens 0 is for scoring a prompt: with echo."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    @property
    def generated(self) -> int:
        """Choices of each prompt that are made; n of them are shown."""
        return self.best_of or self.n or 1

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError("best_of may not be less than n")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ValueError("best_of more than n cannot be streamed: which are best is known at the end")
        if len(self.prompt) * self.generated > MAX_CHOICES:
            raise ValueError(f"prompts times n, or best_of, may not be over {MAX_CHOICES}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo: true")
        return self
