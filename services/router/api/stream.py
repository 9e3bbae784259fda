"""What the routes ask of the queue, and what they get: one request's journal entries."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from services.common.journal import JournalEntry
from services.common.request import GenerateRequest
from services.router.core.limits import FleetLimits


def order_of(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)


@dataclass(eq=False)
class Stream:
    """One request's journal entries, in order, each once. `fail` ends it with an error."""

    request: GenerateRequest
    last_id: str = "0-0"
    heard: float = field(default_factory=time.monotonic)
    accepted: bool = False
    done: bool = False  # nothing more will come
    finished: bool = False  # and the request itself is over
    _entries: asyncio.Queue[JournalEntry | Exception] = field(default_factory=asyncio.Queue)

    def follows(self, before: str) -> bool:
        """True if an entry whose predecessor is `before` is the next one: nothing in between was lost."""
        return order_of(before) <= order_of(self.last_id)

    def feed(self, entry: JournalEntry) -> None:
        """Take an entry; one seen before (journal and inbox overlap) is dropped."""
        if self.done or order_of(entry.entry_id) <= order_of(self.last_id):
            return
        self.last_id = entry.entry_id
        self.heard = time.monotonic()
        self.done = self.finished = entry.usage is not None
        self._entries.put_nowait(entry)

    def fail(self, error: Exception) -> None:
        if not self.done:
            self.done = True
            self._entries.put_nowait(error)

    async def next(self, patience_s: float) -> JournalEntry | None:
        """The next entry, or None after `patience_s` seconds of silence. Raises what `fail` was given."""
        try:
            async with asyncio.timeout(patience_s):
                entry = await self._entries.get()
        except TimeoutError:
            return None
        if isinstance(entry, Exception):
            raise entry
        return entry


class Backend(Protocol):
    """The queue, as the routes see it."""

    limits: FleetLimits | None

    async def submit(self, request: GenerateRequest) -> Stream:
        """Put a request into the system. Raises Overloaded or Unavailable; then nothing was queued."""
        ...

    def leave(self, stream: Stream) -> None:
        """The reader goes; an unfinished request is aborted. Safe to call always."""
        ...
