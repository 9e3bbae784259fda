"""What the routes ask of the queue, and what they get: one request's journal entries."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.common.admission import Allowance
from services.common.journal import JournalEntry
from services.common.request import GenerateRequest
from services.router.core.document import Document
from services.router.core.limits import FleetLimits
from services.router.core.position import order_of
from services.router.core.tenants import Quota

# Entries kept for a reader that is behind. It takes what comes after them from the journal, at its own speed.
MAX_BUFFERED = 256

# Some entries of a request's journal after an entry id. Waits while Redis is away.
Pull = Callable[[str, str, int], Awaitable[list[JournalEntry]]]


class Stream:
    """One reader's way through one request's journal: entries in order, each once. `fail` ends it with an error.

    fed: the newest entry taken in. behind: the journal has more than was fed, for the reader to pull. ends_at: the last
    entry, if the request was over when this reader came.
    """

    def __init__(self, document: Document, pull: Pull, behind: bool = False, ends_at: str | None = None) -> None:
        self.document = document
        self.ends_at = ends_at
        self.allowance: Allowance | None = None  # what its tenant has left of this minute
        self.fed = "0-0"
        self.behind = behind
        self.heard = time.monotonic()
        self.accepted = False
        self.done = False  # nothing more will come
        self.finished = False  # and the request itself is over
        self.handed_on = False  # it ends here, for another router to go on with
        self._pull = pull
        self._entries: deque[JournalEntry] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._until = 0.0  # who waits does so until then, by the event loop's clock
        self._timer: asyncio.TimerHandle | None = None

    def push(self, entry: JournalEntry, before: str) -> None:
        """Take an entry from the inbox whose predecessor is `before`: if it is not the next one, or too many wait, the
        journal has it."""
        if self.behind or self.done:
            return
        if order_of(before) > order_of(self.fed) or len(self._entries) >= MAX_BUFFERED:
            self.fall_behind()
        else:
            self._feed(entry)

    def fall_behind(self) -> None:
        """The journal has something that did not come here."""
        self.behind = True
        self._news.set()

    def _feed(self, entry: JournalEntry) -> None:
        """One seen before (journal and inbox overlap) is dropped."""
        if self.done or order_of(entry.entry_id) <= order_of(self.fed):
            return
        self.fed = entry.entry_id
        self.heard = time.monotonic()
        self.done = self.finished = entry.usage is not None
        self._entries.append(entry)
        self._news.set()

    def fail(self, error: Exception) -> None:
        if not self.done:
            self.done = True
            self._error = error
            self._news.set()

    async def next(self, patience_s: float) -> JournalEntry | None:
        """The next entry, or None after `patience_s` seconds of silence. Raises what `fail` was given."""
        if not (self._entries or self.behind or self._error):
            await self._wait(patience_s)
        if self._entries:
            return self._entries.popleft()
        if not (self.behind or self._error):
            return None
        try:
            async with asyncio.timeout(patience_s):
                while not self._entries:
                    if self._error is not None:
                        raise self._error
                    await self._more()
        except TimeoutError:
            return None
        return self._entries.popleft()

    async def _wait(self, patience_s: float) -> None:
        """Until there is news, or for so long. Every token comes this way, so its timer is not set anew each time."""
        self._news.clear()
        loop = asyncio.get_running_loop()
        self._until = loop.time() + patience_s
        if self._timer is None or self._timer.when() > self._until:
            self._set_timer(loop)
        await self._news.wait()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self.rest()
        self._timer = loop.call_at(self._until, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if loop.time() >= self._until:
            self._news.set()
        else:
            self._set_timer(loop)

    def rest(self) -> None:
        """Nobody waits here any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _more(self) -> None:
        if not self.behind:
            self._news.clear()
            await self._news.wait()
            return
        self.behind = False  # what comes to the inbox from now on counts again: it follows, or sets this anew
        try:
            entries = await self._pull(self.document.request_id, self.fed, MAX_BUFFERED)
        except asyncio.CancelledError:
            self.behind = True
            raise
        for entry in entries:
            self._feed(entry)
        self.behind = self.behind or (len(entries) == MAX_BUFFERED and not self.done)


class Backend(Protocol):
    """The queue, as the routes see it."""

    limits: FleetLimits | None

    def check_open(self) -> None:
        """Raises Overloaded when the system was full a moment ago: before any work on a request."""
        ...

    async def submit(
        self,
        request: GenerateRequest,
        document: Document,
        key: tuple[str, str] | None,
        resumable: bool,
        quota: Quota,
        outlives: bool = False,
        kept: bool = False,
    ) -> Stream:
        """Put a request into the system. key: digests of an idempotency key and of what was asked; the stream may be
        that of another request then. quota: the tenant's own. outlives: it runs to its end without readers. kept: it
        can be read for the longer window. Raises Overloaded, Unavailable or KeyReused; then nothing was queued."""
        ...

    async def attach(self, request_id: str, tenant: str) -> Stream:
        """Join the readers of a request, from its beginning. Raises StreamNotFound or Unavailable."""
        ...

    async def look(self, request_id: str, tenant: str) -> tuple[Document, list[JournalEntry]]:
        """A request as it stands, without becoming one of its readers. Raises StreamNotFound or Unavailable."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Abort a request, whoever reads it. It ends soon after. Raises Unavailable."""
        ...

    async def forget(self, request_id: str) -> None:
        """Take away what is left of a request that is over. Raises Unavailable."""
        ...

    def leave(self, stream: Stream) -> None:
        """The reader goes; an unfinished request without readers is aborted. Safe to call always."""
        ...
