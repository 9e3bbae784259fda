"""Leaders, workers and a client, each made of shipped parts. They move when the world lets something through."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from services.common.admission import Admission, AdmissionLimits, Terms
from services.common.codec import request_to_bytes
from services.common.journal import JournalEntry
from services.common.redis.store import Store, parse_entry, until_answered
from services.common.request import GenerateRequest
from services.router.api.stream import Stream
from services.router.core.document import Document
from services.scheduler.adapters.redis_journal import RedisJournal
from services.scheduler.adapters.workers import Session, WrongWorker
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine import Engine
from services.worker.adapters.publisher import Publisher
from services.worker.adapters.session import Identity, SessionServer
from services.worker.core.input_batch import InputBatch
from services.worker.core.plan import StepOutput
from services.worker.core.publishing import PublishBook
from services.worker.engine import StepLoop
from services.worker.executor.fake import FakeExecutor
from tests.protocol import oracle
from tests.protocol.gate import Gate, GatedStore
from tests.protocol.observer import require
from tests.protocol.wire import Wire

# Small enough that two requests of two choices press on the pool and on the token budget.
NUM_BLOCKS, MAX_NUM_SEQS, TOKEN_BUDGET, MAX_IN_FLIGHT = 12, 3, 8, 3
ROUTER = "router"
WINDOW_S = 3600


async def enqueue(store: Store, request: GenerateRequest) -> Admission:
    """The one place that knows how a request is put into the system."""
    terms = Terms(
        router=ROUTER,
        choices=request.num_choices,
        prompt_tokens=request.num_prompt_tokens,
        tokens=request.most_tokens,
        limits=AdmissionLimits(),
        window_s=WINDOW_S,
    )
    return await store.enqueue(request.request_id, request_to_bytes(request), terms)


def make_journal(store: Store, epoch: int) -> RedisJournal:
    return RedisJournal(store, epoch)


def make_engine(journal: RedisJournal, epoch: int) -> Engine:
    core = Scheduler(BATCHING_POLICIES["chunked"](), ORDER_POLICIES["fcfs"](), SchedulerConfig(first_id=epoch << 32))
    return Engine(core, journal)


class Actor:
    """A process: its tasks, and the gate to Redis that it alone uses."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.gate = Gate(name)
        self.alive = True
        self._loop = loop
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work, name=self.name)
        self._tasks.append(task)
        return task

    def raise_failures(self) -> None:
        """A task that has failed is a bug, as it would end the process."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            if not task.cancelled():
                task.result()

    def kill(self) -> None:
        self.alive = False
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ManualSteps(StepLoop):
    """The shipped step loop without its thread: somebody else says when the next plan runs."""

    @property
    def has_plan(self) -> bool:
        return not self._inbox.empty()

    def run_one(self) -> None:
        item = self._inbox.get_nowait()
        assert item is not None
        self.take(item)

    def contents(self) -> "Future[dict[int, bytes]]":
        """What has no plan before it is answered at once."""
        idle = not self.has_plan
        future = super().contents()
        if idle:
            self.run_one()
        return future


class Worker(Actor):
    """One incarnation of a worker: its KV is empty at first, and its salt makes its tokens its own."""

    def __init__(self, name: str, incarnation: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(f"{name}#{incarnation}", loop)
        self.worker = name
        self.incarnation = str(incarnation)
        executor = FakeExecutor(NUM_BLOCKS, oracle.BLOCK_SIZE, oracle.VOCABULARY, salt=incarnation)
        batch = InputBatch(NUM_BLOCKS, oracle.BLOCK_SIZE, oracle.EOS)
        self.steps = ManualSteps(executor, batch, self._on_step, self._on_failure, keep_results=MAX_IN_FLIGHT)
        identity = Identity(name, self.incarnation, "fake", MAX_IN_FLIGHT, 64, oracle.VOCABULARY)
        self.session = SessionServer(identity, self.steps)
        self.book = PublishBook(new_decoder=lambda: oracle.decode)
        self.publisher: Publisher | None = None
        self._planned = 0

    def open(self, store: GatedStore) -> None:
        self.publisher = Publisher(
            store, self.worker, self.book, self.session.send_outcomes, on_published=self.steps.published
        )
        self.start(self.publisher.run())

    @property
    def has_plan_of_session(self) -> bool:
        return self._planned == self.session._session

    def _on_step(self, step: StepOutput) -> None:
        assert not step.error, f"the worker refuses what its leader planned: {step.error}"
        self._planned = step.plan.session
        self.session.send_step(step)
        if not step.repeated:
            assert self.publisher is not None
            self.publisher.put(step)

    @staticmethod
    def _on_failure(error: Exception) -> None:
        raise error

    def take(self, wire: Wire) -> None:
        """The next message of a wire arrives here."""
        if wire.opening:
            wire.to_worker.popleft()
            self.start(wire.serve(self.session))
        else:
            wire.deliver_plan()


class Leader(Actor):
    """A leader under one epoch. Nobody tells it when it is the leader no more."""

    def __init__(self, name: str, epoch: int, store: GatedStore, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name, loop)
        self.gate = gate
        self.epoch = epoch
        self.wires: dict[str, Wire] = {}
        self.journal = make_journal(store, epoch)
        self.engine = make_engine(self.journal, epoch)
        self.start(self.journal.work(self.engine))
        self.start(self.journal.read(self.engine))

    def dial(self, worker: Worker) -> Wire:
        wire = Wire(self.name, worker.name)
        self.wires[worker.worker] = wire
        self.start(self._converse(worker, wire))
        return wire

    async def _converse(self, worker: Worker, wire: Wire) -> None:
        """One session, as the keeper of sessions holds it before it dials again."""
        session = Session(worker.worker, self.engine, self.epoch)
        document = {"address": wire, "incarnation": worker.incarnation}
        try:
            await session.run(document, MAX_NUM_SEQS, TOKEN_BUDGET)
        except WrongWorker:
            pass
        finally:
            wire.cancel()
            del self.wires[worker.worker]

    def kill(self) -> None:
        """Its links end first, so that no clean-up of ours says anything more."""
        for wire in self.wires.values():
            wire.cancel()
        super().kill()


class Client(Actor):
    """A router with its readers: the journal as it comes through the inbox."""

    def __init__(self, store: GatedStore, direct: Store, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__("client", loop)
        self.gate = gate
        self.streams: dict[str, Stream] = {}
        self.aborted: set[str] = set()
        self._store = store
        self._direct = direct
        self._positions = {direct.inbox_key(ROUTER): "0-0"}

    def submit(self, request: GenerateRequest) -> None:
        self.streams[request.request_id] = Stream(Document.of(request, "completion", 0, True, False), self._pull)
        self.start(until_answered(lambda: enqueue(self._store, request)))

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.start(until_answered(lambda: self._store.abort(request_id)))

    async def read(self) -> None:
        """Take the frames that have come, as the router's backend does; the inbox is never trimmed here."""
        for _, _, fields in await self._direct.read(self._positions, block_ms=None):  # type: ignore[arg-type]
            (_, request), (_, entry_id), (_, before), *rest = fields
            stream = self.streams[request.decode()]
            stream.push(parse_entry(request.decode(), entry_id.decode(), rest), before.decode())
            require(not stream.behind, f"{request.decode()}: a frame was lost, or came too many")

    @staticmethod
    async def _pull(request_id: str, after: str, count: int) -> list[JournalEntry]:
        raise AssertionError(f"{request_id} is behind at {after} by up to {count}")
