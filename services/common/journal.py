"""The journal's records: what is published of a request, and what is read back."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
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
class FencedChoice:
    """One choice as it stood in the journal when its fence was raised: final."""

    attempt: int
    token_ids: tuple[int, ...]
    finish: str | None


@dataclass(frozen=True, slots=True)
class FenceAnswer:
    aborted: bool
    choices: tuple[FencedChoice, ...]


@dataclass(frozen=True, slots=True)
class JournalItem:
    """Tokens of one choice within a journal entry. finish is None while the choice goes on."""

    choice: int
    index: int
    token_ids: tuple[int, ...]
    finish: str | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry: what one step published of one request. usage is (prompt, completion) tokens on the last."""

    request_id: str
    entry_id: str
    worker: str
    step: int
    items: tuple[JournalItem, ...]
    usage: tuple[int, int] | None


def parse_ids(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def parse_entry(request_id: str, entry_id: str, fields: Sequence[tuple[bytes, bytes]]) -> JournalEntry:
    """From the field-value pairs that `publish` wrote."""
    worker, step, items, usage = "", 0, [], None
    for name, value in fields:
        if name == b"@":
            worker, _, number = value.decode().rpartition(":")
            step = int(number)
        elif name == b"$":
            prompt, _, completion = value.partition(b":")
            usage = (int(prompt), int(completion))
        else:
            choice, index, ids, finish = name.decode().split(":")
            items.append(JournalItem(int(choice), int(index), parse_ids(ids), finish or None, value))
    return JournalEntry(request_id, entry_id, worker, step, tuple(items), usage)
