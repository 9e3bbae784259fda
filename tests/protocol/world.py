"""All actors on one partition, and the events that can happen next. Nothing happens but by an event."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from redis.asyncio import Redis

from services.common.redis.store import Store
from services.common.request import GenerateRequest, SamplingParams
from services.scheduler.core import invariants
from tests.protocol.actors import Actor, Client, Leader, Worker
from tests.protocol.gate import WAKING, Call, Gate, GatedStore
from tests.protocol.observer import Observer
from tests.protocol.wire import Wire

WORKERS = ("w0", "w1")
MAX_LEADERS = 2
LEAD_TTL_MS = 3_600_000
# Rounds of the fair run at the end; each lets everything that can happen happen once.
MAX_ROUNDS = 500


@dataclass
class Tally:
    """What a whole run has come across, to show that it covers the protocol."""

    examples: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str | None] = field(default_factory=Counter)


@dataclass(frozen=True)
class Config:
    """drains: at its end a world must come to rest; off, only what is in the journals counts."""

    drains: bool = True


class Loss(Enum):
    """What becomes of a call whose connection breaks."""

    CALL = "never executed"
    DELAYED = "in the server's buffer, to be executed at any time"
    ANSWER = "executed"


@dataclass(frozen=True)
class Event:
    label: str
    happen: Callable[[], None]


class World:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, redis: Redis, partition: str, tally: Tally, config: Config
    ) -> None:
        self._loop = loop
        self._redis = redis
        self._partition = partition
        self._tally = tally
        self._config = config
        self._direct = Store(redis, partition)
        self._salts: list[int] = []
        self.observer = Observer(self._direct, self._salts)
        self.leaders: list[Leader] = []
        self.workers: dict[str, Worker] = {}
        self.wires: list[Wire] = []
        self.strays: list[Call] = []  # calls whose callers have given them up, but which may still arrive
        self.faults = 0
        self._dead: list[Actor] = []
        gate = Gate("client")
        self.client = Client(self._store(gate), self._direct, gate, loop)
        self._elections = 0
        self._elected = ""
        for name in WORKERS:
            self._start_worker(name)
        self.elect()

    # -- running

    def _store(self, gate: Gate) -> GatedStore:
        return GatedStore(self._redis, self._partition, gate, self._tally.answers)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def settle(self) -> None:
        """Run until every task waits for a gate, a queue or a wire. Raises what a task has failed with."""
        self._run(self._until_quiet())
        for actor in self._actors():
            actor.raise_failures()
        for leader in self.leaders:
            invariants.check(leader.engine.core)
        self.wires = [wire for wire in self.wires if wire.to_worker or wire.to_leader or not _closed(wire)]

    async def _until_quiet(self) -> None:
        while True:
            await asyncio.sleep(0)
            if not self._loop._ready:  # type: ignore[attr-defined]  # no public way to ask whether anything can run
                return

    def _actors(self) -> list[Actor]:
        return [self.client, *self.leaders, *self.workers.values()]

    # -- what can happen by itself

    def enabled(self) -> list[Event]:
        """In an order that depends on nothing but what happened before."""
        events = [self._call_event(call) for call in self.calls() if not call.asleep]
        events += [Event(f"late {call.label}", lambda call=call: self._arrive_late(call)) for call in self.strays]
        for wire in self.wires:
            events += self._wire_events(wire)
        for worker in self.workers.values():
            if worker.steps.has_plan:
                events.append(Event(f"step {worker.name}", worker.steps.run_one))
        return events + self._dials()

    def calls(self) -> list[Call]:
        return [call for actor in self._actors() for call in actor.gate.calls]

    def _call_event(self, call: Call) -> Event:
        if call.executed:
            return Event(f"answer {call.label}", call.deliver)
        return Event(f"execute {call.label}", lambda: self._execute(call))

    def _wire_events(self, wire: Wire) -> list[Event]:
        events = []
        worker = self._incarnation(wire)
        if wire.to_worker and worker is not None:
            events.append(Event(f"{wire.label} to worker", lambda: worker.take(wire)))
        if wire.to_leader:
            events.append(Event(f"{wire.label} to leader", wire.deliver_answer))
        return events

    def _incarnation(self, wire: Wire) -> Worker | None:
        return next((worker for worker in self.workers.values() if worker.name == wire.worker), None)

    def _dials(self) -> list[Event]:
        """A leader dials again whatever session it has lost."""
        return [
            Event(f"{leader.name} dials {worker.name}", lambda leader=leader, worker=worker: self._dial(leader, worker))
            for leader in self.leaders
            for worker in self.workers.values()
            if worker.worker not in leader.wires
        ]

    def happen(self, event: Event) -> None:
        event.happen()
        self.settle()

    def _execute(self, call: Call) -> None:
        self._run(call.execute())
        name = call.label.rpartition(".")[2]
        if name in WAKING:
            for other in self.calls():
                other.asleep = False
        if name == "publish":
            self._run(self.observer.look())

    def _arrive_late(self, call: Call) -> None:
        self.strays.remove(call)
        self._execute(call)

    def _dial(self, leader: Leader, worker: Worker) -> None:
        self.wires.append(leader.dial(worker))

    # -- what is done to it

    def request(self, prompt: tuple[int, ...], choices: int, max_tokens: int, stop: tuple[str, ...]) -> None:
        name = f"r{len(self.observer.seen)}"
        params = SamplingParams(max_tokens, seed=len(self.observer.seen), stop=stop)
        made = GenerateRequest(name, "fake", (prompt,), params, n=choices)
        self.observer.expect(made)
        self.client.submit(made)
        self.settle()

    def abort(self, index: int) -> None:
        request_id = _pick(list(self.observer.seen), index)
        self.observer.seen[request_id].aborted = True
        self.client.abort(request_id)
        self.settle()

    def read(self) -> None:
        """The client reads its inbox: of each journal it has a beginning, nothing else."""
        self._run(self.client.read())

    def lossy_calls(self) -> list[Call]:
        return [call for call in self.calls() if not call.asleep]

    def lose_call(self, index: int, loss: Loss) -> None:
        """The caller's connection breaks; it cannot tell when, so it tries again."""
        self.faults += 1
        call = _pick(self.lossy_calls(), index)
        if loss is Loss.ANSWER and not call.executed:
            self._execute(call)
        if loss is Loss.DELAYED and not call.executed and _changes(call):
            self.strays.append(call)
        call.lose()
        self.settle()

    def break_link(self, index: int, loses_plans: bool) -> None:
        """The leader takes the worker for dead. The worker lives on, and goes on with what has reached it."""
        self.faults += 1
        wire = _pick(self.open_wires(), index)
        wire.cancel()
        if loses_plans:
            wire.drop_plans()
        self.settle()

    def open_wires(self) -> list[Wire]:
        return [wire for wire in self.wires if not wire.leader_gone]

    def linked(self) -> list[str]:
        """The worker of each open wire."""
        return [wire.worker.partition("#")[0] for wire in self.open_wires()]

    def kill_worker(self, index: int) -> None:
        """Its next incarnation starts at once, with nothing in its KV."""
        self.faults += 1
        worker = self.workers[WORKERS[index % len(WORKERS)]]
        self._kill(worker)
        for wire in self.wires:
            if wire.worker == worker.name:
                wire.hang_up()
        self._start_worker(worker.worker)
        self.settle()

    def _start_worker(self, name: str) -> None:
        worker = Worker(name, len(self._salts), self._loop)
        self._salts.append(len(self._salts))
        self.workers[name] = worker
        worker.open(self._store(worker.gate))

    def kill_leader(self, index: int) -> None:
        self.faults += 1
        leader = _pick(self.leaders, index)
        self.leaders.remove(leader)
        self._kill(leader)
        self.settle()

    def _kill(self, actor: Actor) -> None:
        self.strays += [call for call in actor.gate.calls if not call.executed and _changes(call)]
        actor.kill()
        self._run(actor.ended())

    def elect(self) -> None:
        """The lead has lapsed: a new leader takes it, and the one before, if it lives on, is not told."""
        self.faults += bool(self.leaders)
        if len(self.leaders) == MAX_LEADERS:
            self.kill_leader(0)
        self._elections += 1
        self._elected = name = f"L{self._elections}"
        self._run(self._redis.delete(self._direct.requests_key.replace("requests", "leader")))
        lead = self._run(self._direct.lead(name, LEAD_TTL_MS, claim="vacant"))
        assert isinstance(lead, tuple)
        epoch = lead[0]
        gate = Gate(name)
        self.leaders.append(Leader(name, epoch, self._store(gate), gate, self._loop))
        self.settle()

    # -- the end

    def finish(self) -> None:
        if self._config.drains:
            self.drain()
            self.check_end()
        else:
            self.check_journals()

    def drain(self) -> None:
        """No more faults: whoever leads no more ends, and everything that can happen happens, in turn."""
        for leader in [leader for leader in self.leaders if leader.name != self._elected]:
            self.kill_leader(self.leaders.index(leader))
        if not self.leaders:
            self.elect()
        self.happen_all_but()

    def happen_all_but(self, *excluded: str) -> None:
        """In turn, until nothing else can happen."""
        for _ in range(MAX_ROUNDS):
            labels = [event.label for event in self.enabled() if not event.label.startswith(excluded)]
            if not labels:
                return
            for label in labels:
                # An earlier event of this round may have made this one impossible.
                still = next((event for event in self.enabled() if event.label == label), None)
                if still is not None:
                    self.happen(still)
        raise AssertionError("it goes on for ever")

    def check_journals(self) -> None:
        """Also those that should not have grown any more."""
        self._run(self.observer.look(ended_too=True))
        self.read()

    def check_end(self) -> None:
        self.check_journals()
        leader = self.leaders[0]
        for name, seen in self.observer.seen.items():
            assert seen.usage is not None, f"{name} never ends"
            self._tally.finishes.update(seen.finishes)
            if not self.faults:
                assert "error" not in seen.finishes, f"{name} failed though nothing else did"
            assert self.client.streams[name].finished
        assert not leader.engine.records, "the leader holds on to requests"
        assert self._run(self._direct.num_requests()) == 0
        invariants.check_idle(leader.engine.core)
        for worker in self.workers.values():
            if worker.has_plan_of_session:  # else its first plan, a full one, will clear what an older session left
                assert not worker.steps.batch.sequences, f"{worker.name} holds on to sequences"

    def close(self) -> None:
        for actor in self._actors():
            actor.kill()
            self._run(actor.ended())


def _closed(wire: Wire) -> bool:
    return wire.leader_gone and wire.worker_gone


def _changes(call: Call) -> bool:
    return not call.label.endswith((".read", ".is_aborted"))


def _pick(items: list[Any], index: int) -> Any:
    return items[index % len(items)]
