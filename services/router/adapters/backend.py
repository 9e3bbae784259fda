"""The router's side of Redis: enqueue, one inbox for all streams, a reconciler for what the inbox lost."""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from services.common import process
from services.common.admission import (
    Admission,
    AdmissionLimits,
    Admitted,
    Full,
    IdempotencyKey,
    Joined,
    Mismatch,
    Terms,
    Withdrawn,
)
from services.common.codec import request_to_bytes
from services.common.errors import (
    GenerationFailed,
    KeyReused,
    Overloaded,
    StreamInterrupted,
    StreamNotFound,
    Unavailable,
)
from services.common.failpoints import failpoint
from services.common.journal import JournalEntry, Leave
from services.common.redis.store import CONNECTION_ERRORS, Store, parse_entry, until_answered
from services.common.request import GenerateRequest
from services.router.api.stream import MAX_BUFFERED, Stream
from services.router.core.document import Document
from services.router.core.limits import FleetLimits
from services.router.core.position import order_of
from services.router.core.tenants import Quota

log = logging.getLogger(__name__)

T = TypeVar("T")
READ_BLOCK_MS = 1_000
WATCH_S = 1.0
SILENT_S = 1.0
LAST_EVENTS_S = 1.0
# How long a request waits for a queue that does not answer: a restart of Redis is shorter.
PATIENCE_S = 15.0
# Workers that have gone may be on their way back: so long their limits are believed, and requests wait for them.
LIMITS_MEMORY_S = 30.0
# After a refusal, the next are refused without asking again.
CLOSED_S = 0.05
FULL = {
    "requests": "too many requests are in the system",
    "tokens": "too many tokens are in the system",
    "tenant_requests": "too many requests of this tenant are in the system",
    "tenant_tokens": "too many tokens of this tenant are in the system",
    "requests_per_minute": "too many requests of this tenant in a minute",
    "tokens_per_minute": "too many tokens of this tenant in a minute",
}


@dataclass(frozen=True, slots=True)
class Windows:
    """Seconds that a request can be read after its end; and one with an idempotency key, or that is kept."""

    resume_s: int
    idempotency_s: int


class Backend:
    """All streams of one router incarnation."""

    def __init__(self, store: Store, router: str, admission: AdmissionLimits, windows: Windows) -> None:
        self._store = store
        self._router = router
        self._admission = admission
        self._windows = windows
        self._streams: dict[str, set[Stream]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._attaching: Counter[str] = Counter()
        self._closed_until = 0.0
        self._refusal: Overloaded | None = None
        self._turned_away = 0
        self.limits: FleetLimits | None = None
        self._limits_seen = 0.0
        self.reachable = False
        self.draining = False  # not ready: others take what is new
        self.closed = False  # there are no others

    # -- coming

    def check_open(self) -> None:
        """Raises Overloaded when the system was full a moment ago: before any work on a request."""
        if self._refusal is not None and time.monotonic() < self._closed_until:
            self._turned_away += 1
            raise Overloaded(self._refusal.message, self._refusal.retry_after_s)

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
        """Put a request into the system. Raises Overloaded, Unavailable or KeyReused; then nothing was queued."""
        if self.closed:
            raise Unavailable("this server is shutting down")
        stream = self._open(document, behind=False)
        turned_away, self._turned_away = self._turned_away, 0
        terms = Terms(
            router=self._router,
            choices=request.num_choices,
            prompt_tokens=request.num_prompt_tokens,
            tokens=request.most_tokens,
            limits=self._admission.of_tenant(quota.requests, quota.tokens),
            window_s=self._windows.idempotency_s if key or kept else self._windows.resume_s,
            tenant=request.tenant,
            document=document.to_json(),
            idempotency=IdempotencyKey(*key) if key else None,
            resumable=resumable or key is not None,
            outlives=outlives,
            turned_away=turned_away,
            rates=(quota.requests_per_minute, quota.tokens_per_minute),
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                failpoint("enqueue.before")
                payload = request_to_bytes(request)
                answer = await until_answered(lambda: self._store.enqueue(request.request_id, payload, terms))
                failpoint("enqueue.after")
        except TimeoutError:
            self._leave(stream, Leave.UNBORN)  # the call may still go through
            raise Unavailable("the queue does not answer") from None
        except asyncio.CancelledError:
            self._leave(stream, Leave.UNBORN)
            raise
        return await self._take(answer, stream)

    async def _take(self, answer: Admission, stream: Stream) -> Stream:
        """What the queue said of a new request. Raises Overloaded, Unavailable or KeyReused."""
        match answer:
            case Full(limit, retry_after_s):
                self._drop(stream)
                raise self._refuse(limit, retry_after_s)
            case Joined(request_id):
                self._drop(stream)
                return await self.attach(request_id, stream.document.tenant)
            case Mismatch():
                self._drop(stream)
                raise KeyReused("this Idempotency-Key was used with another request", "Idempotency-Key")
            case Withdrawn():
                self._drop(stream)
                raise Unavailable("the queue did not answer in time")
            case Admitted(allowance):
                stream.allowance = allowance
        stream.accepted = True
        return stream

    def _refuse(self, limit: str, retry_after_s: int) -> Overloaded:
        refusal = Overloaded(f"{FULL[limit]}; try again in {retry_after_s} s", retry_after_s)
        if limit in ("requests", "tokens"):
            self._refusal, self._closed_until = refusal, time.monotonic() + CLOSED_S
        return refusal

    async def attach(self, request_id: str, tenant: str) -> Stream:
        """Join the readers of a request, from its beginning. Raises StreamNotFound or Unavailable."""
        if self.closed:
            raise Unavailable("this server is shutting down")
        self._attaching[request_id] += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                if request_id in self._leaving:  # or our own goodbye would come after this
                    await asyncio.shield(self._leaving[request_id])
                found = await until_answered(lambda: self._store.attach(request_id, self._router))
        except (TimeoutError, asyncio.CancelledError) as error:
            if request_id not in self._streams:  # the call may still go through
                self._say_goodbye(request_id, Leave.DETACH)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise Unavailable("the queue does not answer") from None
        finally:
            self._attaching[request_id] -= 1
            self._attaching += Counter()  # forgets those at zero
        document = Document.from_json(found.document) if found is not None else None
        if found is None or document is None or document.tenant != tenant:
            if document is not None and request_id not in self._streams:
                self._say_goodbye(request_id, Leave.DETACH)
            raise _not_found()
        stream = self._open(document, behind=True, ends_at=found.ends_at)
        stream.accepted = True
        return stream

    def _open(self, document: Document, behind: bool, ends_at: str | None = None) -> Stream:
        stream = Stream(document, self._pull, behind, ends_at)
        self._streams.setdefault(document.request_id, set()).add(stream)
        self._idle.clear()
        return stream

    async def _pull(self, request_id: str, after: str, count: int) -> list[JournalEntry]:
        return await until_answered(lambda: self._store.journal(request_id, after, count))

    # -- looking

    async def look(self, request_id: str, tenant: str) -> tuple[Document, list[JournalEntry]]:
        """A request as it stands, without becoming one of its readers. Raises StreamNotFound or Unavailable."""
        text = await self._ask(lambda: self._store.document(request_id))
        document = Document.from_json(text) if text is not None else None
        if document is None or document.tenant != tenant:
            raise _not_found()
        return document, await self._ask(lambda: self._so_far(request_id))

    async def _so_far(self, request_id: str) -> list[JournalEntry]:
        """Its journal, read as readers read it: Redis is not held up by a long one."""
        entries: list[JournalEntry] = []
        while page := await self._store.journal(request_id, entries[-1].entry_id if entries else "-", MAX_BUFFERED):
            entries += page
        return entries

    async def cancel(self, request_id: str) -> None:
        """Abort a request, whoever reads it. It ends soon after. Raises Unavailable."""
        await self._ask(lambda: self._store.abort(request_id))

    async def forget(self, request_id: str) -> None:
        """Take away what is left of a request that is over. Raises Unavailable."""
        await self._ask(lambda: self._store.forget(request_id))

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await until_answered(call)
        except TimeoutError:
            raise Unavailable("the queue does not answer") from None

    # -- going

    def leave(self, stream: Stream) -> None:
        """The reader goes. An unfinished request without readers is aborted, in the background; safe to call always."""
        self._leave(stream, Leave.DETACH if stream.handed_on else Leave.ABORT)

    def _leave(self, stream: Stream, how: Leave) -> None:
        request_id = stream.document.request_id
        if self._drop(stream) and not stream.finished and request_id not in self._streams:
            self._say_goodbye(request_id, how)

    def _drop(self, stream: Stream) -> bool:
        """False if the stream has left already."""
        request_id = stream.document.request_id
        streams = self._streams.get(request_id, set())
        known = stream in streams
        streams.discard(stream)
        stream.rest()
        if not streams:
            self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()
        return known

    def _say_goodbye(self, request_id: str, how: Leave) -> None:
        before = self._leaving.get(request_id)
        task = asyncio.get_running_loop().create_task(self._tell_leaving(request_id, how, before))
        self._leaving[request_id] = task
        task.add_done_callback(lambda done: self._left(request_id, done))

    def _left(self, request_id: str, task: "asyncio.Task[None]") -> None:
        if self._leaving.get(request_id) is task:
            del self._leaving[request_id]

    async def _tell_leaving(self, request_id: str, how: Leave, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await before

        async def leave() -> None:
            # Somebody reads it here again: that reader says goodbye in its turn.
            if request_id not in self._streams and not self._attaching[request_id]:
                await self._store.abort(request_id, self._router, how)

        await until_answered(leave)

    async def idle_within(self, grace_s: float) -> None:
        """Return once no stream is open, or after the grace."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()

    async def hand_on(self) -> None:
        """Take nothing more; what is open ends so that another router can go on with it."""
        self.draining = self.closed = True
        for stream in self._all():
            stream.handed_on = True
            name = stream.document.request_id
            stream.fail(StreamInterrupted(f"this server is shutting down; the stream goes on at /v1/streams/{name}"))
        await self.idle_within(LAST_EVENTS_S)

    async def idle(self) -> None:
        """No stream is open."""
        await self._idle.wait()

    async def settle(self) -> None:
        """All leavings under way have been told to Redis."""
        await asyncio.gather(*self._leaving.values())

    # -- reading

    def _all(self) -> list[Stream]:
        return [stream for streams in self._streams.values() for stream in streams]

    async def run(self) -> None:
        """Background work. Ends by cancellation."""
        tasks = [asyncio.ensure_future(self._read_inbox()), asyncio.ensure_future(self._watch())]
        try:
            await asyncio.gather(*tasks)
        finally:
            await process.end(*tasks)

    async def _read_inbox(self) -> None:
        positions = {self._store.inbox_key(self._router): "0-0"}
        while True:
            frames = await until_answered(lambda: self._store.read(positions, READ_BLOCK_MS))
            for _, _, fields in frames:
                self._dispatch(fields)

    def _dispatch(self, fields: list[tuple[bytes, bytes]]) -> None:
        (_, request), (_, entry_id), (_, before), *rest = fields
        streams = self._streams.get(request.decode())
        if streams:
            entry = parse_entry(request.decode(), entry_id.decode(), rest)
            for stream in streams:
                stream.push(entry, before.decode())

    async def _watch(self) -> None:
        """Once a second: who can serve, and every stream that has been silent for a while."""
        while True:
            try:
                workers: dict[str, Any] = {
                    name: json.loads(document) for name, document in (await self._store.registered("workers")).items()
                }
                self._learn(FleetLimits.from_documents(workers))
                self.reachable = True
                await self._reconcile(self._all())
            except CONNECTION_ERRORS:
                self.reachable = False
            await asyncio.sleep(WATCH_S)

    def _learn(self, limits: FleetLimits | None) -> None:
        now = time.monotonic()
        if limits is not None or now - self._limits_seen > LIMITS_MEMORY_S:
            self.limits = limits
        if limits is not None:
            self._limits_seen = now

    async def _reconcile(self, streams: Iterable[Stream]) -> None:
        """Trimmed inboxes, lost frames, failovers, an emptied Redis: one check covers them all."""
        now = time.monotonic()
        silent = [s for s in streams if s.accepted and not s.done and now - s.heard > SILENT_S]
        if not silent:
            return
        last = await self._store.last_entries([stream.document.request_id for stream in silent])
        for stream, entry_id in zip(silent, last, strict=True):
            if entry_id is None:
                stream.fail(GenerationFailed("the request was lost with the queue's state"))
            elif order_of(entry_id) > order_of(stream.fed):
                stream.fall_behind()
                # Its frames do not come: a failover may have forgotten that it is read here.
                await self._store.attach(stream.document.request_id, self._router)


def _not_found() -> StreamNotFound:
    return StreamNotFound("there is no such stream, or it has been over for too long", "request_id")
