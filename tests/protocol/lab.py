"""Where worlds live: an event loop, a Valkey, and the function library that it has loaded."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from services.common.redis.library import source
from services.common.redis.store import CONNECTION_ERRORS, Store, connect
from tests.protocol.wire import WireRpc
from tests.protocol.world import Config, Tally, World

LIBRARY = source()


async def _no_backoff(cap_s: float = 2.0) -> AsyncIterator[float]:
    """A caller tries again at once; when that arrives is the gate's affair."""
    while True:
        yield 0.0


@contextmanager
def _controlled_time() -> Iterator[None]:
    """No waits, and step times that are the same in every run, as the scheduler learns from them."""
    ticks = itertools.count(1)
    clock = SimpleNamespace(monotonic_ns=lambda: 1_000_000 * next(ticks))
    with ExitStack() as stack:
        for target, stand_in in (
            ("services.common.redis.store.backoff", _no_backoff),
            ("services.worker.adapters.publisher.backoff", _no_backoff),
            ("services.scheduler.adapters.workers.rpc", WireRpc),
            ("services.worker.engine.time", clock),
        ):
            stack.enter_context(patch(target, stand_in))
        yield


class Lab:
    """Makes one world after the other, each on a partition of its own."""

    def __init__(self, url: str, library: str, config: Config) -> None:
        self._config = config
        self.tally = Tally()
        self._loop = asyncio.new_event_loop()
        self._redis = connect(url)
        self._stack = ExitStack()
        self._loop.run_until_complete(self._load(library))

    async def _load(self, library: str) -> None:
        store = Store(self._redis, "lab")
        for _ in range(100):
            try:
                await store.ping()
                break
            except CONNECTION_ERRORS:
                await asyncio.sleep(0.05)  # the server is starting
        load: Any = self._redis.function_load(library, replace=True)
        await load

    def open_world(self) -> World:
        self.tally.examples += 1
        self._stack.enter_context(_controlled_time())
        return World(self._loop, self._redis, f"t{uuid.uuid4().hex[:12]}", self.tally, self._config)

    def close_world(self, world: World) -> None:
        world.close()
        self._stack.close()

    def close(self) -> None:
        self._stack.close()
        self._loop.run_until_complete(self._redis.aclose())
        self._loop.close()
