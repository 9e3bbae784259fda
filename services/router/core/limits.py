"""What can be served, from what workers registered; requests that can never fit are refused here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import ContextLengthError, InvalidRequest, Unavailable


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """The most that one sequence may hold: by the model's context, and by the largest pool."""

    max_model_len: int
    pool_tokens: int
    vocab_size: int

    @classmethod
    def from_documents(cls, workers: Mapping[str, Mapping[str, Any]]) -> "FleetLimits | None":
        """None while no worker is registered."""
        if not workers:
            return None
        documents = workers.values()
        return cls(
            max_model_len=max(int(d["max_model_len"]) for d in documents),
            pool_tokens=max(int(d["num_blocks"]) * int(d["block_size"]) for d in documents),
            vocab_size=min(int(d["vocab_size"]) for d in documents),
        )

    @property
    def most_tokens(self) -> int:
        """Prompt and output of one sequence; the last token is sampled, never written, so needs no slot."""
        return min(self.max_model_len, self.pool_tokens + 1)


def require(limits: FleetLimits | None) -> FleetLimits:
    if limits is None:
        raise Unavailable("no worker is ready")
    return limits


def output_limit(
    limits: FleetLimits, prompt_tokens: int, max_tokens: int | None, param: str, name: str = "max_tokens"
) -> int:
    """max_tokens to use: what was asked for, or what is left. Raises ContextLengthError with the true counts."""
    most = limits.most_tokens
    what = "context" if most == limits.max_model_len else "KV cache"
    if prompt_tokens >= most:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens; this model's {what} is {most} tokens, output included", param
        )
    if max_tokens is None:
        return most - prompt_tokens
    if prompt_tokens + max_tokens > most:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens and {name} is {max_tokens}, "
            f"{prompt_tokens + max_tokens} together; this model's {what} is {most} tokens",
            name,
        )
    return max_tokens


def check_token_ids(ids: list[int], limits: FleetLimits, param: str) -> None:
    if not ids:
        raise InvalidRequest(f"{param} has no tokens", param)
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        raise InvalidRequest(f"{param} has token ids outside 0 .. {limits.vocab_size - 1}", param)
