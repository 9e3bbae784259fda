"""The engine's side of Redis: reads requests and doorbells, writes finishes, raises fences."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from google.protobuf.message import DecodeError

from services.common.codec import request_from_bytes
from services.common.journal import FenceAnswer, PublishItem
from services.common.redis.store import CONNECTION_ERRORS, Store, backoff
from services.scheduler.core.request import FinishReason
from services.scheduler.engine import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")
READ_BLOCK_MS = 1_000
REAP_S = 2.0
# How long a dead router's requests run on, for a client that may come back.
ORPHAN_GRACE_S = 30.0


async def until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Try an idempotent call until Redis answers; says so once when it is away and once when it is back."""
    waits = backoff()
    failures = 0
    while True:
        try:
            result = await call()
        except CONNECTION_ERRORS as error:
            failures += 1
            if failures == 1:
                log.warning("Redis does not answer (%s); trying again", error)
            await anext(waits)
            continue
        if failures:
            log.warning("Redis is back after %d tries", failures)
        return result


class RedisJournal:
    """Implements the engine's `Journal`: one queue of operations, done in order."""

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._operations: asyncio.Queue[Callable[[Engine], Awaitable[None]]] = asyncio.Queue()

    def finish(self, request_id: str, choices: list[int], reason: FinishReason) -> None:
        self._operations.put_nowait(lambda engine: self._finish(engine, request_id, choices, reason))

    def recover(self, request_id: str, choices: list[int]) -> None:
        self._operations.put_nowait(lambda engine: self._recover(engine, request_id, choices))

    async def work(self, engine: Engine) -> None:
        """Do what the engine asks. Ends by cancellation."""
        while True:
            operation = await self._operations.get()
            await operation(engine)
            engine.pump()

    async def _fence(self, request_id: str, choices: list[int]) -> FenceAnswer | str:
        return await until_answered(lambda: self._store.fence(request_id, self._epoch, choices))

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
        answers = await until_answered(lambda: self._store.publish("scheduler", items))
        if "stale" in answers:
            log.warning("request %s: another leader has taken over", request_id)

    async def _recover(self, engine: Engine, request_id: str, choices: list[int]) -> None:
        engine.on_recovered(request_id, choices, await self._fence(request_id, choices))

    async def read(self, engine: Engine) -> None:
        """Read requests, from the oldest on, and doorbells. Ends by cancellation."""
        positions = {self._store.requests_key: "0-0", self._store.control_key: "0-0"}
        while True:
            entries = await until_answered(lambda: self._store.read(positions, READ_BLOCK_MS))
            requests = [(entry, dict(fields)) for key, entry, fields in entries if key == self._store.requests_key]
            bells = {dict(fields)[b"r"].decode() for key, _, fields in entries if key == self._store.control_key}
            for entry_id, fields in requests:
                await self._accept(engine, fields, arrived_s=int(entry_id.split("-")[0]) / 1000)
            for request_id in bells:
                if request_id in engine.records and await until_answered(
                    lambda request_id=request_id: self._store.is_aborted(request_id)  # type: ignore[misc]
                ):
                    engine.on_abort(request_id)
            engine.pump()

    async def reap(self, engine: Engine) -> None:
        """Abort requests whose every router has been gone for the grace period. Ends by cancellation."""
        orphaned: dict[str, float] = {}
        while True:
            await asyncio.sleep(REAP_S)
            alive = (await until_answered(lambda: self._store.registered("routers"))).keys()
            request_ids = list(engine.records)
            readers = await until_answered(lambda ids=request_ids: self._store.readers(ids))  # type: ignore[misc]
            now = time.monotonic()
            orphans = {r for r, routers in zip(request_ids, readers, strict=True) if not routers & alive}
            orphaned = {request_id: orphaned.get(request_id, now) for request_id in orphans}
            for request_id, since in orphaned.items():
                if now - since >= ORPHAN_GRACE_S:
                    log.info("request %s has had no reader for %d s", request_id, ORPHAN_GRACE_S)
                    engine.on_abort(request_id)
            engine.pump()

    async def _accept(self, engine: Engine, fields: dict[bytes, bytes], arrived_s: float) -> None:
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
        if isinstance(fence, FenceAnswer):
            engine.on_request(request, fence, arrived_s)
        else:
            log.info("request %s: %s", request_id, fence)
