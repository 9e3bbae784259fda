"""Log-probabilities out of a journal item's payload."""

from dataclasses import dataclass

from services.common.codec import details_from_bytes


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """logprob of the chosen token; top: (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def parse_details(payload: bytes) -> tuple[TokenDetail, ...]:
    """One detail per token of the item; none if log-probabilities were not asked for."""
    return tuple(TokenDetail(logprob, top) for logprob, top in details_from_bytes(payload)) if payload else ()
