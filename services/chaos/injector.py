"""Carries out one run's faults, each when its time has come, and writes down which of them hit somebody."""

import asyncio
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from services.chaos.client import Client, Outcome
from services.chaos.faults import MID, STOP, Fault
from services.chaos.target import Hit, LocalTarget

POLL_S = 0.02
MID_STREAMS, MID_EVENTS = 32, 5


@dataclass(slots=True)
class Injected:
    """A fault and whom it hit; nobody if the run did not come to its place."""

    fault: Fault
    hit: Hit | None = None


def under_way(outcomes: Sequence[Outcome]) -> int:
    """Streams that have some events and not yet all."""
    return sum(outcome.num_events >= MID_EVENTS and not outcome.ended for outcome in outcomes)


class Injector:
    """arm before the streams start, run beside them, finish after them."""

    def __init__(self, target: LocalTarget, faults: Sequence[Fault], clients: Sequence[Client], seed: int) -> None:
        self._target = target
        self._outcomes = [client.outcome for client in clients]
        self._rng = random.Random(f"injector {seed}")
        self._continuing: set[asyncio.Task[None]] = set()
        self.injected = [Injected(fault) for fault in faults]

    async def arm(self) -> None:
        await self._target.leader()  # so that its successor is told from its restart
        for injected in self._at_points():
            self._target.arm(injected.fault)

    async def run(self) -> None:
        """Ends when there is nothing more to do; may be cancelled."""
        await asyncio.gather(self._mid(), self._watch())

    def finish(self) -> list[Injected]:
        """What was not hit is disarmed, who is stopped continues."""
        for injected in self._at_points():
            self._target.disarm(injected.fault)
            injected.hit = injected.hit or self._target.hit_at(injected.fault)
            self._resume(injected.hit)
        for task in self._continuing:
            task.cancel()
        self._target.continue_all()
        return self.injected

    def _at_points(self) -> list[Injected]:
        return [injected for injected in self.injected if injected.fault.where != MID]

    async def _mid(self) -> None:
        """One after the other: the first in the thick of it, the others while anybody still waits."""
        enough = min(MID_STREAMS, len(self._outcomes) // 2)
        for injected in self.injected:
            if injected.fault.where != MID:
                continue
            await self._until_under_way(enough)
            enough = 1
            await asyncio.sleep(injected.fault.delay_s)
            await self._hit_somebody(injected)
            self._continue_later(injected)

    async def _hit_somebody(self, injected: Injected) -> None:
        """Wait for the one to be hit, if it is just being replaced; but not longer than there is work."""
        while injected.hit is None and not all(outcome.ended for outcome in self._outcomes):
            injected.hit = await self._target.hit(injected.fault, self._rng)
            if injected.hit is None:
                await asyncio.sleep(POLL_S)

    async def _watch(self) -> None:
        waiting = self._at_points()
        while waiting:
            for injected in list(waiting):
                injected.hit = self._target.hit_at(injected.fault)
                if injected.hit is not None:
                    waiting.remove(injected)
                    self._continue_later(injected)
            await asyncio.sleep(POLL_S)

    def _continue_later(self, injected: Injected) -> None:
        if injected.fault.kind != STOP or injected.hit is None:
            return
        hit, stopped_s = injected.hit, injected.fault.stopped_s

        async def wait() -> None:
            await asyncio.sleep(stopped_s)
            self._resume(hit)

        task = asyncio.create_task(wait())
        self._continuing.add(task)
        task.add_done_callback(self._continuing.discard)

    def _resume(self, hit: Hit | None) -> None:
        if hit is not None:
            self._target.signal(hit.pid, signal.SIGCONT)

    async def _until_under_way(self, enough: int) -> None:
        # A poll: what it waits for changes with every event of any stream.
        while under_way(self._outcomes) < enough:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
