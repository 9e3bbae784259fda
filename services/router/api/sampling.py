"""Wire fields to sampling parameters."""

import secrets

from services.common.errors import InvalidRequest
from services.common.request import SamplingParams
from services.router.api.wire import SamplingFields
from services.router.core.limits import FleetLimits


def sampling(
    body: SamplingFields, max_tokens: int, logprobs: int | None, limits: FleetLimits, grammar: str = ""
) -> SamplingParams:
    """Wire fields to sampling parameters; the seed is drawn here where none was given."""
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest("min_tokens is larger than max_tokens", "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=(secrets.randbits(63) if body.seed is None else body.seed) & ((1 << 64) - 1),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=min(max(body.top_k or 0, 0), limits.vocab_size),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_bias(body.logit_bias or {}, limits),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop=tuple(body.stop or ()),
        stop_token_ids=_stop_tokens(body.stop_token_ids or [], limits),
        logprobs=logprobs,
        grammar=grammar,
    )


def _stop_tokens(ids: list[int], limits: FleetLimits) -> tuple[int, ...]:
    if any(token >= limits.vocab_size for token in ids):
        raise InvalidRequest(f"stop_token_ids: not all within 0 .. {limits.vocab_size - 1}", "stop_token_ids")
    return tuple(ids)


def _bias(bias: dict[str, float], limits: FleetLimits) -> dict[int, float]:
    out = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < limits.vocab_size):
            raise InvalidRequest(f"logit_bias: {key[:32]!r} is not a token id of this model", "logit_bias")
        out[int(key)] = value
    return out
