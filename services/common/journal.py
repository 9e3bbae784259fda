"""The journal's records: what is published of a request, and what is read back. Nobody changes one; those that are made
for every token are not declared frozen, which would take three times as long."""

from dataclasses import dataclass
from enum import Enum


class Crash(Enum):
    """Whether the worker that ran a request has crashed, and if so in whose company."""

    NONE = ""
    SHARED = "shared"
    ALONE = "alone"


class Leave(Enum):
    """How a reader leaves: for good; so that another may go on with the stream; or before the request has come."""

    ABORT = ""
    DETACH = "detach"
    UNBORN = "unborn"


@dataclass(slots=True)
class PublishItem:
    """Tokens of one choice made by one step, or its finish, under a fence. payload: serialised TokenDetails or b""."""

    request_id: str
    epoch: int
    attempt: int
    choice: int
    index: int
    token_ids: tuple[int, ...]
    step: int
    finish: str = ""
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Attached:
    """A request that one more router reads. document: as it was enqueued. ends_at: its last entry, if it is over."""

    document: str
    ends_at: str | None


@dataclass(frozen=True, slots=True)
class FencedChoice:
    """One choice as it stood in the journal when its fence was raised: final."""

    attempt: int
    token_ids: tuple[int, ...]
    finish: str | None


@dataclass(frozen=True, slots=True)
class FenceAnswer:
    """crashes: how often it has crashed alone without a token in between; None if it is under no suspicion."""

    aborted: bool
    choices: tuple[FencedChoice, ...]
    crashes: int | None = None


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """logprob of the chosen token; top: (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class JournalItem:
    """Tokens of one choice within a journal entry. finish is None while the choice goes on.

    details: one per token, or none if log-probabilities were not asked for. prompt: of the tokens of its prompt but
    the first, or embedding: of its prompt, with its first token, where that was asked for. cached: tokens of its prompt
    that were not computed again, with its first token.
    """

    choice: int
    index: int
    token_ids: tuple[int, ...]
    finish: str | None
    details: tuple[TokenDetail, ...]
    prompt: tuple[TokenDetail, ...] = ()
    embedding: tuple[float, ...] = ()
    cached: int = 0


@dataclass(slots=True)
class JournalEntry:
    """One entry: what one step published of one request. usage is (prompt, completion) tokens on the last."""

    request_id: str
    entry_id: str
    worker: str
    step: int
    items: tuple[JournalItem, ...]
    usage: tuple[int, int] | None
