"""A store whose every Redis call is two events: the server executes it, and the answer arrives. Either may be lost."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common.journal import Crash, PublishItem
from services.common.redis.store import Store

# Functions after whose execution a stream that somebody blocks on may have grown.
WAKING = ("enqueue", "abort")


class Call:
    """One call on its way. asleep: a blocking read that has found nothing yet."""

    def __init__(self, label: str, run: Callable[[], Awaitable[Any]], answered: "asyncio.Future[Any]") -> None:
        self.label = label
        self.executed = False
        self.asleep = False
        self._run = run
        self.answered = answered
        self._answer: Any = None

    async def execute(self) -> None:
        """The server runs it; a read without news goes on blocking."""
        self._answer = await self._run()
        self.asleep = self._answer is None
        self.executed = not self.asleep

    def deliver(self) -> None:
        self.answered.set_result(self._answer)

    def lose(self) -> None:
        """The connection breaks: the caller cannot know whether the server has executed it."""
        self.answered.set_exception(RedisConnectionError("the connection is lost"))


class Gate:
    """The calls of one actor that are under way, in the order in which they were made."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.calls: list[Call] = []

    async def send(self, label: str, run: Callable[[], Awaitable[Any]]) -> Any:
        call = Call(f"{self.owner}.{label}", run, asyncio.get_running_loop().create_future())
        self.calls.append(call)
        try:
            return await call.answered
        finally:
            self.calls.remove(call)


class GatedStore(Store):
    """The shipped store of one actor, behind a gate. answers counts what `publish` and `fence` were told."""

    def __init__(self, redis: Redis, partition: str, gate: Gate, answers: Counter[str]) -> None:
        super().__init__(redis, partition)
        self._gate = gate
        self._answers = answers

    async def _call(self, function: str, *args: Any) -> list[Any]:
        answer: list[Any] = await self._gate.send(function, lambda: super(GatedStore, self)._call(function, *args))
        return answer

    async def fence(self, request_id: str, epoch: int, choices: Sequence[int] = (), crash: Crash = Crash.NONE) -> Any:
        answer = await super().fence(request_id, epoch, choices, crash)
        self._answers[f"fence {answer}" if isinstance(answer, str) else "fence ok"] += 1
        return answer

    async def publish(self, worker: str, items: Sequence[PublishItem]) -> list[str]:
        answers = await super().publish(worker, items)
        self._answers.update(answer.partition(":")[0] for answer in answers)
        return answers

    async def time_s(self) -> float:
        """No request here has a deadline."""
        return 0.0

    async def is_aborted(self, request_id: str) -> bool:
        return bool(await self._gate.send("is_aborted", lambda: super(GatedStore, self).is_aborted(request_id)))

    async def read(self, positions: dict[str, str], block_ms: int) -> list[Any]:
        """The reader's positions move when the answer arrives, not when the server gives it."""
        moved = dict(positions)

        async def look() -> list[Any] | None:
            rows = await super(GatedStore, self).read(moved, block_ms=None)  # type: ignore[arg-type]  # do not block
            return rows or None

        rows: list[Any] = await self._gate.send("read", look)
        positions.update(moved)
        return rows
