"""The router's side of Redis: enqueue, one inbox for all streams, a reconciler for what the inbox lost."""

import asyncio
import json
import logging
import time
from contextlib import suppress
from typing import Any

from services.common import process
from services.common.codec import request_to_bytes
from services.common.errors import GenerationFailed, Overloaded, Unavailable
from services.common.redis.store import CONNECTION_ERRORS, Store, backoff, parse_entry
from services.common.request import GenerateRequest
from services.router.api.stream import Stream, order_of
from services.router.core.limits import FleetLimits

log = logging.getLogger(__name__)

READ_BLOCK_MS = 1_000
WATCH_S = 1.0
SILENT_S = 1.0
LAST_EVENTS_S = 1.0


class Backend:
    """All streams of one router incarnation."""

    def __init__(self, store: Store, router: str, max_requests: int, resume_window_s: int) -> None:
        self._store = store
        self._router = router
        self._max_requests = max_requests
        self._resume_window_s = resume_window_s
        self._streams: dict[str, Stream] = {}
        self._lagging: set[Stream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving: set[asyncio.Task[None]] = set()
        self.limits: FleetLimits | None = None
        self.reachable = False
        self.draining = False

    async def submit(self, request: GenerateRequest) -> Stream:
        """Put a request into the system. Raises Overloaded or Unavailable; then nothing was queued."""
        if self.draining:
            raise Unavailable("this server is shutting down")
        stream = Stream(request)
        self._streams[request.request_id] = stream
        self._idle.clear()
        try:
            accepted = await self._store.enqueue(
                request.request_id,
                request_to_bytes(request),
                self._router,
                request.num_choices,
                request.num_prompt_tokens,
                self._max_requests,
                self._resume_window_s,
            )
        except CONNECTION_ERRORS:
            self.leave(stream)  # the call may have gone through
            raise Unavailable("the queue does not answer") from None
        except asyncio.CancelledError:
            self.leave(stream)
            raise
        if not accepted:
            self._remove(request.request_id)
            raise Overloaded("too many requests are waiting; try again later")
        stream.accepted = True
        return stream

    def leave(self, stream: Stream) -> None:
        """The reader goes. An unfinished request is aborted, in the background; safe to call always."""
        if not self._remove(stream.request.request_id) or stream.finished:
            return
        task = asyncio.get_running_loop().create_task(self._abort(stream.request.request_id))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _remove(self, request_id: str) -> bool:
        """False if the stream has left already."""
        known = self._streams.pop(request_id, None) is not None
        if not self._streams:
            self._idle.set()
        return known

    async def _abort(self, request_id: str) -> None:
        waits = backoff()
        while True:
            try:
                await self._store.abort(request_id, self._router)
                return
            except CONNECTION_ERRORS:
                await anext(waits)

    async def run(self) -> None:
        """Background work. Ends by cancellation."""
        tasks = [asyncio.ensure_future(self._read_inbox()), asyncio.ensure_future(self._watch())]
        try:
            await asyncio.gather(*tasks)
        finally:
            await process.end(*tasks)

    async def drain(self, grace_s: float) -> None:
        """Take no more; open streams may finish, then those left end with an error event."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        for stream in list(self._streams.values()):
            stream.fail(Unavailable("this server is shutting down"))
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVENTS_S):
                await self._idle.wait()

    async def idle(self) -> None:
        """No stream is open."""
        await self._idle.wait()

    async def settle(self) -> None:
        """All aborts under way have been told to Redis."""
        await asyncio.gather(*self._leaving)

    async def _read_inbox(self) -> None:
        positions = {self._store.inbox_key(self._router): "0-0"}
        waits = backoff()
        while True:
            try:
                frames = await self._store.read(positions, READ_BLOCK_MS)
            except CONNECTION_ERRORS as error:
                log.warning("Redis does not answer (%s); trying again", error)
                await anext(waits)
                continue
            waits = backoff()
            for _, _, fields in frames:
                self._dispatch(fields)
            lagging, self._lagging = self._lagging, set()
            for stream in lagging:
                try:
                    await self._catch_up(stream)
                except CONNECTION_ERRORS:
                    self._lagging.add(stream)  # next time

    def _dispatch(self, fields: list[tuple[bytes, bytes]]) -> None:
        (_, request), (_, entry_id), (_, before), *rest = fields
        stream = self._streams.get(request.decode())
        if stream is None:
            return
        if stream.follows(before.decode()):
            stream.feed(parse_entry(stream.request.request_id, entry_id.decode(), rest))
        else:  # a frame before this one was trimmed away: the journal has it
            self._lagging.add(stream)

    async def _catch_up(self, stream: Stream) -> None:
        for entry in await self._store.journal(stream.request.request_id, after=stream.last_id):
            stream.feed(entry)

    async def _watch(self) -> None:
        """Once a second: who can serve, and every stream that has been silent for a while."""
        while True:
            try:
                workers: dict[str, Any] = {
                    name: json.loads(document) for name, document in (await self._store.registered("workers")).items()
                }
                self.limits = FleetLimits.from_documents(workers)
                self.reachable = True
                await self._reconcile()
            except CONNECTION_ERRORS:
                self.reachable = False
            await asyncio.sleep(WATCH_S)

    async def _reconcile(self) -> None:
        """Trimmed inboxes, lost frames, failovers, an emptied Redis: one check covers them all."""
        now = time.monotonic()
        silent = [s for s in self._streams.values() if s.accepted and not s.done and now - s.heard > SILENT_S]
        if not silent:
            return
        last = await self._store.last_entries([stream.request.request_id for stream in silent])
        for stream, entry_id in zip(silent, last, strict=True):
            if entry_id is None:
                stream.fail(GenerationFailed("the request was lost with the queue's state"))
            elif order_of(entry_id) > order_of(stream.last_id):
                await self._catch_up(stream)
