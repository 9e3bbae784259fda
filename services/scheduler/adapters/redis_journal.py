"""The engine's side of Redis: reads requests and doorbells, writes finishes, raises fences."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable

from google.protobuf.message import DecodeError

from services.common.codec import request_from_bytes
from services.common.failpoints import failpoint
from services.common.journal import Crash, FenceAnswer, PublishItem
from services.common.log import about
from services.common.redis.store import Store, until_answered
from services.scheduler.core.request import FinishReason
from services.scheduler.engine import Engine

log = logging.getLogger(__name__)

READ_BLOCK_MS = 1_000
REAP_S = 2.0
EXPIRE_S = 0.25
# How long a dead router's requests run on, for a client that may come back.
ORPHAN_GRACE_S = 30.0


class RedisJournal:
    """Implements the engine's `Journal`: one queue of operations, done in order."""

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._operations: asyncio.Queue[Callable[[Engine], Awaitable[None]]] = asyncio.Queue()
        self._working = False
        self._clock_offset_s = 0.0  # Redis' clock, which stamps the requests, less ours

    def finish(self, request_id: str, choices: list[int], reason: FinishReason) -> None:
        self._operations.put_nowait(lambda engine: self._finish(engine, request_id, choices, reason))

    def recover(self, request_id: str, choices: list[int], crash: Crash = Crash.NONE) -> None:
        self._operations.put_nowait(lambda engine: self._recover(engine, request_id, choices, crash))

    @property
    def is_idle(self) -> bool:
        return self._operations.empty() and not self._working

    async def work(self, engine: Engine) -> None:
        """Do what the engine asks. Ends by cancellation."""
        while True:
            operation = await self._operations.get()
            self._working = True
            await operation(engine)
            self._working = False
            engine.pump()

    async def _fence(self, request_id: str, choices: list[int], crash: Crash = Crash.NONE) -> FenceAnswer | str:
        return await until_answered(lambda: self._store.fence(request_id, self._epoch, choices, crash))

    async def _finish(self, engine: Engine, request_id: str, choices: list[int], reason: FinishReason) -> None:
        fence = await self._fence(request_id, choices)
        if isinstance(fence, FenceAnswer):
            await self._publish_finish(request_id, fence, choices, reason)
        engine.on_finished(request_id, choices)

    async def _refuse(self, request_id: str) -> None:
        """End a request that we cannot even read."""
        fence = await self._fence(request_id, [])
        if isinstance(fence, FenceAnswer):
            await self._publish_finish(request_id, fence, range(len(fence.choices)), FinishReason.ERROR)

    async def _publish_finish(
        self, request_id: str, fence: FenceAnswer, choices: Iterable[int], reason: FinishReason
    ) -> None:
        items = [
            PublishItem(request_id, self._epoch, fence.choices[choice].attempt, choice, 0, (), 0, reason.value)
            for choice in choices
        ]
        failpoint("finish.before")
        answers = await until_answered(lambda: self._store.publish("scheduler", items))
        failpoint("finish.after")
        if "stale" in answers:
            log.warning("request %s: another leader has taken over", request_id)

    async def _recover(self, engine: Engine, request_id: str, choices: list[int], crash: Crash) -> None:
        # A crash is counted once: if the answer is lost the call comes again, and counts again.
        fence = await self._fence(request_id, choices, crash)
        failpoint("recover.fenced")
        engine.on_recovered(request_id, choices, fence)

    async def read(self, engine: Engine) -> None:
        """Read requests, from the oldest on, and doorbells. Ends by cancellation."""
        positions = {self._store.requests_key: "0-0", self._store.control_key: "0-0"}
        began_s = await until_answered(self._store.time_s)
        self._clock_offset_s = began_s - time.monotonic()
        while True:
            entries = await until_answered(lambda: self._store.read(positions, READ_BLOCK_MS))
            requests = [(entry, dict(fields)) for key, entry, fields in entries if key == self._store.requests_key]
            bells = [(entry, dict(fields)) for key, entry, fields in entries if key == self._store.control_key]
            for entry_id, fields in requests:
                await self._accept(engine, entry_id, fields)
            for entry_id, bell in bells:
                # A move is done once: those rung for an earlier leader are over.
                if b"w" not in bell or _seconds(entry_id) >= began_s:
                    await self._answer(engine, bell[b"r"].decode(), bell.get(b"w"))
            engine.pump()

    async def _answer(self, engine: Engine, request_id: str, move_to: bytes | None) -> None:
        """Somebody rang for a request."""
        if request_id not in engine.records:
            return
        if move_to is not None:
            engine.on_move(request_id, move_to.decode())
        elif await until_answered(lambda: self._store.is_aborted(request_id)):
            engine.on_abort(request_id)

    async def watch(self, engine: Engine) -> None:
        """End what is past its deadline. Ends by cancellation."""
        while True:
            await asyncio.sleep(EXPIRE_S)
            engine.expire(time.monotonic())
            engine.pump()

    async def reap(self, engine: Engine) -> None:
        """Abort requests whose every router has been gone for the grace period, but for those that need no reader, and
        take those that nobody has read: a failover brings back what had ended, or loses what was read. Ends by
        cancellation."""
        orphaned: dict[str, float] = {}
        unread = 0
        while True:
            await asyncio.sleep(REAP_S)
            unread = unread + 1 if await until_answered(self._store.num_requests) > len(engine.records) else 0
            if unread > 1:
                for entry_id, pairs in await until_answered(self._store.requests):
                    await self._accept(engine, entry_id, dict(pairs))
            alive = (await until_answered(lambda: self._store.registered("routers"))).keys()
            request_ids = list(engine.records)
            readers = await until_answered(lambda ids=request_ids: self._store.readers(ids))  # type: ignore[misc]
            now = time.monotonic()
            pairs_of = zip(request_ids, readers, strict=True)
            orphans = {r for r, routers in pairs_of if routers is not None and not routers & alive}
            orphaned = {request_id: orphaned.get(request_id, now) for request_id in orphans}
            for request_id, since in orphaned.items():
                if now - since >= ORPHAN_GRACE_S:
                    trace = engine.records[request_id].request.traceparent if request_id in engine.records else ""
                    log.info("request %s has had no reader for %d s", request_id, ORPHAN_GRACE_S, extra=about(trace))
                    engine.on_abort(request_id)
            engine.pump()

    async def _accept(self, engine: Engine, entry_id: str, fields: dict[bytes, bytes]) -> None:
        request_id = fields[b"r"].decode()
        if request_id in engine.records:
            return
        try:
            request = request_from_bytes(fields[b"p"])
        except DecodeError:
            log.error("request %s cannot be read", request_id)
            await self._refuse(request_id)
            return
        fence = await self._fence(request_id, [])
        failpoint("accept.fenced")
        if isinstance(fence, FenceAnswer):
            arrived_s = _seconds(entry_id)
            deadline_s = arrived_s - self._clock_offset_s + request.timeout_s if request.timeout_s else math.inf
            engine.on_request(request, fence, arrived_s, deadline_s)
        else:
            log.info("request %s: %s", request_id, fence)


def _seconds(entry_id: str) -> float:
    """When an entry was made, by Redis' clock."""
    return int(entry_id.split("-")[0]) / 1000
