"""The worker's side of the session with the scheduler."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc

from services.common import process, rpc
from services.common.pb.orca.v1 import worker_pb2
from services.worker.adapters.codec import outcomes_to_proto, plan_from_proto, result_to_proto
from services.worker.adapters.publisher import Outcome
from services.worker.core.plan import StepOutput
from services.worker.engine import StepLoop

log = logging.getLogger(__name__)

Outgoing = asyncio.Queue[worker_pb2.WorkerMessage | None]
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker is, for hello and registration."""

    name: str
    incarnation: str
    model: str
    max_in_flight: int
    max_model_len: int
    vocab_size: int


class SessionServer:
    """Serves one scheduler at a time; a newer session takes over from an older one, unless its epoch is older."""

    def __init__(self, identity: Identity, loop: StepLoop) -> None:
        self._identity = identity
        self._loop = loop
        self._outgoing: Outgoing | None = None
        self._session = 0
        self._draining = False

    @property
    def connected(self) -> bool:
        return self._outgoing is not None

    def send_step(self, step: StepOutput) -> None:
        """Only the session that brought the plan hears its result; a newer one has plans of its own."""
        if step.plan.session == self._session:
            self._send(result_to_proto(step))

    def send_outcomes(self, outcomes: list[Outcome]) -> None:
        self._send(outcomes_to_proto(outcomes))

    def drain(self) -> None:
        """Ask the scheduler to give this worker's sequences to others."""
        self._draining = True
        self._send(self._heartbeat())

    def _heartbeat(self) -> worker_pb2.WorkerMessage:
        beat = worker_pb2.Heartbeat(paused=self._loop.paused, draining=self._draining)
        return worker_pb2.WorkerMessage(heartbeat=beat)

    async def _beat(self, outgoing: Outgoing) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            outgoing.put_nowait(self._heartbeat())

    def _send(self, message: worker_pb2.WorkerMessage) -> None:
        # Without a scheduler the message is for nobody: the next one starts from the journal, not from us.
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def session(
        self, requests: AsyncIterator[worker_pb2.SchedulerMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """The rpc: hello, then results and outcomes while plans come in."""
        epoch = int(dict(context.invocation_metadata() or ()).get(rpc.EPOCH, 0))
        if epoch < self._loop.highest_epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another leader has followed")
        self._loop.highest_epoch = epoch
        outgoing: Outgoing = asyncio.Queue()
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)  # the older session ends, so that its leader does not wait for results
        self._outgoing = outgoing
        self._session += 1
        self._loop.session = session = self._session
        log.info("a scheduler has connected")
        tasks: list[asyncio.Task[None]] = []
        try:
            # What the older session's plans may still write must have been written when we say what is where.
            contents = await asyncio.wrap_future(self._loop.contents())
            tasks.append(asyncio.create_task(self._read(requests, outgoing, session)))
            tasks.append(asyncio.create_task(self._beat(outgoing)))
            yield self._hello(contents)
            if self._draining:
                yield self._heartbeat()
            while (message := await outgoing.get()) is not None:
                yield message
        finally:
            await process.end(*tasks)
            if self._outgoing is outgoing:
                self._outgoing = None
            log.warning("the scheduler has gone; waiting for the next")

    async def _read(
        self,
        requests: AsyncIterator[worker_pb2.SchedulerMessage],
        outgoing: Outgoing,
        session: int,
    ) -> None:
        try:
            await self._take_plans(requests, outgoing, session)
        finally:
            outgoing.put_nowait(None)  # the scheduler has gone

    async def _take_plans(
        self,
        requests: AsyncIterator[worker_pb2.SchedulerMessage],
        outgoing: Outgoing,
        session: int,
    ) -> None:
        async for message in requests:
            if outgoing is not self._outgoing:
                return  # a newer session has taken over
            plan = replace(plan_from_proto(message.plan), session=session)
            if not self._loop.submit(plan):
                refusal = worker_pb2.Refusal(
                    plan_number=plan.number, highest_epoch=self._loop.highest_epoch, reason="stale epoch"
                )
                outgoing.put_nowait(worker_pb2.WorkerMessage(refusal=refusal))

    def _hello(self, contents: dict[int, bytes]) -> worker_pb2.WorkerMessage:
        identity, loop = self._identity, self._loop
        hello = worker_pb2.Hello(
            incarnation=identity.incarnation,
            worker=identity.name,
            model=identity.model,
            max_in_flight=identity.max_in_flight,
            last_plan=loop.last_plan,
            highest_epoch=loop.highest_epoch,
            num_blocks=loop.executor.num_blocks,
            block_size=loop.executor.block_size,
            max_model_len=identity.max_model_len,
            stages=1,
            shards=1,
            cached=[worker_pb2.CachedBlock(block_id=block, digest=digest) for block, digest in contents.items()],
            num_host_blocks=loop.executor.num_host_blocks,
            swap_s=loop.executor.swap_s,
        )
        return worker_pb2.WorkerMessage(hello=hello)
