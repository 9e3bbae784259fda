"""Keeps a session with each worker that discovery finds."""

import asyncio
import json
import logging
import time
from typing import Any

import grpc

from services.common import process, rpc
from services.common.failpoints import failpoint
from services.common.pb.orca.v1 import worker_pb2
from services.common.redis.store import CONNECTION_ERRORS, Store, backoff
from services.scheduler.adapters import codec
from services.scheduler.adapters.discovery import Discovery
from services.scheduler.core.scheduler import OutOfOrder
from services.scheduler.core.step import StepPlan
from services.scheduler.core.worker_state import WorkerState
from services.scheduler.engine import Assignment, Engine

log = logging.getLogger(__name__)

DISCOVERY_S = 0.25
STABLE_S = 5.0
DRAINING_TTL_MS = 3_000
# A step is wedged when it takes so much longer than foreseen, and so long at least; with nothing to foresee it by, a
# new worker has more time.
WEDGED_FACTOR = 10
WEDGED_S = 5.0
WEDGED_UNKNOWN_S = 60.0
MIN_OBSERVED = 8
HELLO_S = 10.0


class WrongWorker(Exception):
    """Another process answers at a worker's address: its registration is old."""


class Session:
    """One session with one worker; implements the engine's `WorkerLink`."""

    def __init__(self, name: str, engine: Engine, epoch: int) -> None:
        self.name = name
        self._engine = engine
        self._epoch = epoch
        self._outgoing: asyncio.Queue[worker_pb2.SchedulerMessage] = asyncio.Queue()
        self._call: Any = None
        self.greeted = False
        self.why = ""
        self._heard = 0.0
        self._step_since = 0.0  # when the oldest plan that has not been answered began, at the latest
        self.leaves = False

    def send(self, plan: StepPlan, added: list[Assignment]) -> None:
        if len(self._engine.core.workers[self.name].in_flight) == 1:
            self._step_since = time.monotonic()
        self._outgoing.put_nowait(codec.plan_to_proto(plan, added, self._epoch))

    def close(self, why: str = "") -> None:
        self.why = why
        if self._call is not None:
            self._call.cancel()

    def check(self, silence_s: float) -> None:
        """Close the session of a worker that says nothing, or whose step does not end."""
        worker = self._engine.core.workers.get(self.name)
        if worker is None or not self.greeted or self.why:
            return
        now = time.monotonic()
        if now - self._heard > silence_s:
            self.close(f"silent for {silence_s:g} s")
        elif worker.in_flight and now - self._step_since > self._patience_s(worker):
            self.close(f"plan {worker.in_flight[0].number} is wedged")

    @staticmethod
    def _patience_s(worker: WorkerState) -> float:
        if worker.model.num_observed < MIN_OBSERVED:
            return WEDGED_UNKNOWN_S
        return max(WEDGED_S, WEDGED_FACTOR * worker.model.predict(worker.in_flight[0].features))

    async def run(self, document: dict[str, Any], max_num_seqs: int, token_budget: int) -> None:
        """Dial, hear hello, then exchange plans and results until either side goes.

        Raises grpc.RpcError, TimeoutError if no hello comes, or WrongWorker if somebody else answers at the address.
        """
        async with rpc.dial(document["address"]) as channel:
            self._call = rpc.open_session(channel, self._epoch)
            async with asyncio.timeout(HELLO_S):
                hello = await self._hello(document.get("incarnation"))
            limits = codec.limits_from_hello(hello, max_num_seqs, token_budget)
            contents = codec.contents_from_hello(hello)
            log.info("%s is connected: %d blocks, %d with content", self.name, limits.num_blocks, len(contents))
            self._heard = self._step_since = time.monotonic()
            self._engine.on_worker(self.name, self, limits, contents)
            writer = asyncio.create_task(self._write())
            try:
                self._engine.pump()
                while (message := await self._call.read()) is not grpc.aio.EOF:
                    self._take(message)
                    self._engine.pump()
            finally:
                await process.end(writer)
                self._engine.on_worker_lost(self.name)
                self._engine.pump()

    async def _hello(self, incarnation: str | None) -> worker_pb2.Hello:
        message = await self._call.read()
        if message is grpc.aio.EOF or message.WhichOneof("kind") != "hello":
            raise WrongWorker("no hello came")
        hello: worker_pb2.Hello = message.hello
        right = hello.worker == self.name and incarnation in (None, hello.incarnation)
        if not right or not hello.block_size:
            raise WrongWorker(f"{hello.worker} answers instead of {self.name}")
        self.greeted = True
        return hello

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._outgoing.get())
            failpoint("plan.sent")

    def _take(self, message: worker_pb2.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        self._heard = time.monotonic()
        if kind == "heartbeat":
            if message.heartbeat.paused:
                self._step_since = self._heard
            if message.heartbeat.draining and not self.leaves:
                log.info("%s drains", self.name)
                self.leaves = True
                self._engine.on_drain(self.name)
        elif kind == "result":
            self._step_since = self._heard
            if message.result.error:
                # What the worker holds is not what we think: start anew, from the journal.
                log.error("%s could not run plan %d: %s", self.name, message.result.plan_number, message.result.error)
                self.close("step failed")
                return
            try:
                self._engine.on_result(self.name, codec.result_from_proto(message.result))
            except OutOfOrder as error:
                log.error("%s", error)
                self.close("out of order")
        elif kind == "published":
            for outcome in message.published.outcomes:
                self._engine.on_outcome(codec.outcome_from_proto(outcome))
        elif kind == "refusal":
            log.error("%s refused plan %d: %s", self.name, message.refusal.plan_number, message.refusal.reason)
            self.close("plan refused")


class Workers:
    """A session per worker found, dialled again with backoff when it ends."""

    def __init__(
        self,
        store: Store,
        discovery: Discovery,
        engine: Engine,
        epoch: int,
        max_num_seqs: int,
        token_budget: int,
        silence_s: float,
    ) -> None:
        self._store = store
        self._discovery = discovery
        self._engine = engine
        self._epoch = epoch
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._silence_s = silence_s
        self._sessions: dict[str, Session] = {}
        self._drained: frozenset[str] = frozenset()
        self._known: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._connected: frozenset[str] = frozenset()
        self._stable_since = 0.0

    async def run(self) -> None:
        """Follow discovery. Ends by cancellation; a bug in a session ends it too."""
        try:
            while True:
                try:
                    self._known = await self._discovery.workers()
                    await self._obey(frozenset(await self._store.registered("drains")))
                except CONNECTION_ERRORS:
                    log.debug("Redis does not answer; the workers known so far stay")
                for name in self._known.keys() - self._tasks.keys():
                    self._tasks[name] = asyncio.create_task(self._keep(name))
                for name in [name for name, task in self._tasks.items() if task.done()]:
                    self._tasks.pop(name).result()
                self._judge_fleet()
                for session in self._sessions.values():
                    session.check(self._silence_s)
                await asyncio.sleep(DISCOVERY_S)
        finally:
            await process.end(*self._tasks.values())

    async def _obey(self, drains: frozenset[str]) -> None:
        """Empty the workers that an operator wants empty, and say how far that is."""
        for name in self._drained - drains:
            if name not in self._sessions or not self._sessions[name].leaves:  # that one wants to go by itself
                self._engine.on_undrain(name)
        self._drained = drains
        for name in drains & self._engine.core.workers.keys():
            self._engine.on_drain(name)
            worker = self._engine.core.workers[name]
            left = len(worker.running) + len(worker.queue)
            await self._store.register("draining", name, json.dumps({"sequences": left}), DRAINING_TTL_MS)
        self._engine.pump()

    def _judge_fleet(self) -> None:
        """The fleet is known once all workers found have been connected, unchanged, for a while."""
        connected = frozenset(self._engine.core.workers)
        if connected != self._connected or connected != self._known.keys() or not connected:
            self._connected, self._stable_since = connected, time.monotonic()
            self._engine.fleet_known = False
        elif not self._engine.fleet_known and time.monotonic() - self._stable_since > STABLE_S:
            self._engine.end_impossible()

    async def _keep(self, name: str) -> None:
        waits = backoff()
        while name in self._known:
            session = self._sessions[name] = Session(name, self._engine, self._epoch)
            try:
                await session.run(self._known[name], self._max_num_seqs, self._token_budget)
                log.warning("%s has gone", name)
            except (grpc.RpcError, WrongWorker, TimeoutError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and _is_ours(error):
                    raise
                log.warning("%s is lost: %s", name, session.why or _reason(error))
            finally:
                del self._sessions[name]
            if session.greeted:
                waits = backoff()
            await anext(waits)


def _is_ours(_: asyncio.CancelledError) -> bool:
    """True if this task was asked to end; a call that `close` cancelled raises the same class."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or "session closed"
