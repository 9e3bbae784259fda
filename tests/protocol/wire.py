"""The network between leader and worker, in memory: messages wait in each direction until they are delivered."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from services.common import rpc
from services.common.pb.orca.v1 import worker_pb2
from services.worker.adapters.session import SessionServer

HELLO, END = b"\x00hello", b"\x00end"  # the opening and the end of a stream, among its messages


class Refused(Exception):
    """The worker ends the call before it has begun."""


class Context:
    """What gRPC tells the worker of a call."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(rpc.EPOCH, str(self._epoch))]

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(f"{code.name}: {details}")


class Wire:
    """One bidirectional call. Its leader's end is what `rpc.open_session` returns."""

    def __init__(self, leader: str, worker: str) -> None:
        self.label = f"{leader}-{worker}"
        self.epoch = 0
        self.leader = leader
        self.worker = worker
        self.to_worker: deque[bytes] = deque([HELLO])
        self.to_leader: deque[bytes] = deque()
        self._plans: asyncio.Queue[bytes] = asyncio.Queue()
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.leader_gone = False
        self.worker_gone = False

    @property
    def opening(self) -> bool:
        """The worker has not heard of it yet."""
        return bool(self.to_worker) and self.to_worker[0] == HELLO

    # -- the leader's end

    async def write(self, message: worker_pb2.SchedulerMessage) -> None:
        if not self.leader_gone:
            self.to_worker.append(message.SerializeToString())

    async def read(self) -> Any:
        data = await self._answers.get()
        return grpc.aio.EOF if data == END else worker_pb2.WorkerMessage.FromString(data)

    def cancel(self) -> None:
        """The leader gives up, or sees the link break. What it has sent is still on its way."""
        if not self.leader_gone:
            self.leader_gone = True
            self.to_worker.append(END)
            self.to_leader.clear()
            self._answers.put_nowait(END)

    # -- the worker's end

    async def serve(self, session: SessionServer) -> None:
        try:
            async for message in session.session(self._requests(), Context(self.epoch)):
                self._answer(message.SerializeToString())
        except Refused:
            pass
        finally:
            self.hang_up()

    async def _requests(self) -> AsyncIterator[worker_pb2.SchedulerMessage]:
        while (data := await self._plans.get()) != END:
            yield worker_pb2.SchedulerMessage.FromString(data)

    def _answer(self, data: bytes) -> None:
        if not self.leader_gone:
            self.to_leader.append(data)

    def hang_up(self) -> None:
        """The worker's end is closed: nothing more is taken, and the leader will read the end."""
        if not self.worker_gone:
            self.worker_gone = True
            self.to_worker.clear()
            self._answer(END)

    # -- the network

    def drop_plans(self) -> None:
        """What the leader sent never arrives; the worker is told of the end all the same."""
        self.to_worker = deque(data for data in self.to_worker if data in (HELLO, END))

    def deliver_plan(self) -> None:
        self._plans.put_nowait(self.to_worker.popleft())

    def deliver_answer(self) -> None:
        self._answers.put_nowait(self.to_leader.popleft())


class WireRpc:
    """Stands for `services.common.rpc` in the leader's sessions: an address is the wire itself."""

    @staticmethod
    @asynccontextmanager
    async def dial(address: Wire) -> AsyncIterator[Wire]:
        yield address

    @staticmethod
    def open_session(channel: Wire, epoch: int) -> Wire:
        channel.epoch = epoch
        return channel
