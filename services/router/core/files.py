"""A tenant's files: what is known of one, and pages of lists."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

# What the bytes of a file are kept and sent in.
CHUNK_BYTES = 1 << 20
BATCH_INPUT = "batch"
BATCH_OUTPUT = "batch_output"


class Listed(Protocol):
    """What a list holds."""

    @property
    def name(self) -> str: ...
    def to_object(self) -> dict[str, Any]: ...


L = TypeVar("L", bound=Listed)


@dataclass(frozen=True, slots=True)
class File:
    """size: in bytes. created_at, expires_at: unix time in s."""

    name: str
    filename: str
    purpose: str
    size: int
    created_at: int
    expires_at: int

    @classmethod
    def from_json(cls, text: bytes) -> "File":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def num_chunks(self) -> int:
        return -(-self.size // CHUNK_BYTES)

    def to_object(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.name,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def derived_name(kind: str, *of: object) -> str:
    """A name that whoever makes the same thing again finds again."""
    return kind + hashlib.sha256("\0".join(map(str, of)).encode()).hexdigest()[:24]


def following(items: Sequence[L], after: str) -> Sequence[L]:
    """Those after the one that is named. One that is not known ends the list: it is gone."""
    if not after:
        return items
    names = [item.name for item in items]
    return items[names.index(after) + 1 :] if after in names else ()


def page(items: Sequence[Listed], limit: int) -> dict[str, Any]:
    """The first of a list, as OpenAI's cursors have them."""
    shown = [item.to_object() for item in items[:limit]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


class Pieces:
    """Cuts what is pushed into chunks of one size; how it came makes no difference."""

    def __init__(self) -> None:
        self._held = bytearray()
        self.size = 0

    def push(self, data: bytes) -> list[bytes]:
        """The chunks that are full now."""
        self.size += len(data)
        self._held += data
        full = []
        while len(self._held) >= CHUNK_BYTES:
            full.append(bytes(self._held[:CHUNK_BYTES]))
            del self._held[:CHUNK_BYTES]
        return full

    def rest(self) -> list[bytes]:
        """The last chunk, if there is something left."""
        return [bytes(self._held)] if self._held else []
