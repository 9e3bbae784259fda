"""The scheduler's engine: the pure core, told what happened and asked for plans. Single-threaded, on the event loop.

It awaits nothing: what must be done in Redis it hands to a `Journal`, whose answers come back as calls.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from services.common.journal import Crash, FenceAnswer
from services.common.log import about
from services.common.request import GenerateRequest, SamplingParams
from services.scheduler.core.request import FinishReason, Sequence, Slo, Status
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import Features, Scheduled, StepPlan, StepResult, WorkerLimits

log = logging.getLogger(__name__)

# A request that crashes its worker so often, alone and without a token in between, is ended.
MAX_CRASHES = 3
# And one whose tokens so often do not go into the journal, without one that does.
MAX_STALLS = 8
NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker must be told of a sequence that is new to it."""

    item: Scheduled
    attempt: int
    params: SamplingParams
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """What became of a sequence's tokens in Redis; finish_reason is set when the finish is in the journal."""

    sequence_id: int
    answer: str
    finish_reason: FinishReason | None


class WorkerLink(Protocol):
    """A connected worker."""

    def send(self, plan: StepPlan, added: list[Assignment]) -> None: ...

    def close(self) -> None: ...


class Journal(Protocol):
    """What the engine asks of Redis. Done in the background and in order, until it succeeds."""

    def finish(self, request_id: str, choices: list[int], reason: FinishReason) -> None:
        """Publish the finish of some choices; then `Engine.on_finished`."""
        ...

    def recover(self, request_id: str, choices: list[int], crash: Crash = Crash.NONE) -> None:
        """Raise the fence of some choices and read their journal; then `Engine.on_recovered`. crash: why, if their
        worker has crashed."""
        ...

    @property
    def is_idle(self) -> bool:
        """Nothing that was asked for is still to be done."""
        ...


class Recorder(Protocol):
    """Keeps a trace of what the system served, for the simulator."""

    def request(self, record: "Record") -> None:
        """A request has ended."""
        ...

    def step(self, worker: str, features: Features, result: StepResult) -> None:
        """A worker has run a step."""
        ...


class Waits(Protocol):
    """Is told when sequences begin to wait for a place, and when they have one. Absent where nobody traces."""

    def begin(self, request: GenerateRequest, choice: int, why: str, since_s: float = 0.0) -> None: ...

    def placed(self, request: GenerateRequest, sequence: Sequence) -> None: ...

    def gone(self, request: GenerateRequest, sequence: Sequence) -> None: ...


@dataclass(slots=True)
class Record:
    """A request in the system. open: choices whose finish is not in the journal yet. deadline_s: on the engine's clock.
    stalls: how often a choice's tokens were refused, and how many it had then."""

    request: GenerateRequest
    sequences: list[Sequence]
    attempts: list[int]
    open: set[int] = field(default_factory=set)
    assignments: list[int] = field(default_factory=list)
    deadline_s: float = math.inf
    stalls: dict[int, tuple[int, int]] = field(default_factory=dict)


class Engine:
    """Owns all requests of the partition, for one leader."""

    def __init__(
        self,
        core: Scheduler,
        journal: Journal,
        depth: int = 0,
        slo: Slo = NO_SLO,
        recorder: Recorder | None = None,
        waits: Waits | None = None,
    ) -> None:
        self.core = core
        self._slo = slo
        self._recorder = recorder
        self._waits = waits
        self.num_plans = 0
        self.num_recovered = 0
        self.records: dict[str, Record] = {}
        self._journal = journal
        self._depth = depth
        self._links: dict[str, WorkerLink] = {}
        self._assigned: dict[int, Sequence] = {}
        self._arrivals = count(1)
        # True once the workers connected are those registered: only then "fits nowhere" is known.
        self.fleet_known = False
        # No more plans: another leader is about to take over.
        self.handing_over = False

    # -- requests

    def on_request(
        self, request: GenerateRequest, fence: FenceAnswer, arrived_s: float = 0.0, deadline_s: float = math.inf
    ) -> None:
        """A request was read from the stream and its fence raised; part of it may be in the journal already."""
        if request.request_id in self.records:
            return
        arrival = next(self._arrivals)
        sequences = [
            Sequence(
                request_id=request.request_id,
                choice=choice,
                prompt=request.prompts[choice // request.n],
                max_tokens=request.params.max_tokens,
                arrival=arrival,
                arrived_s=arrived_s,
                tenant=request.tenant,
                priority=request.priority,
                weight=request.weight,
                prompt_index=choice // request.n,
                slo=self._slo,
                reuses=not request.params.prompt_logprobs or choice % request.n > 0,
                output=list(fenced.token_ids),
            )
            for choice, fenced in enumerate(fence.choices)
        ]
        for sequence in sequences:  # an earlier leader's workers had computed what it has
            sequence.num_lost = sequence.num_tokens - 1 if sequence.output else 0
        record = Record(request, sequences, [fenced.attempt for fenced in fence.choices], deadline_s=deadline_s)
        self.records[request.request_id] = record
        record.open = {choice for choice, fenced in enumerate(fence.choices) if fenced.finish is None}
        todo = [sequence for sequence in sequences if sequence.choice in record.open]
        if todo:
            self.core.add(todo)
        if self._waits:
            for choice in record.open:
                self._waits.begin(request, choice, "arrival", arrived_s)
        if todo and fence.crashes:
            self.core.accuse(todo)  # it crashed alone under another leader
        if fence.aborted:
            self._end(request.request_id, FinishReason.ABORT)
        elif self.fleet_known:
            self._end_if_impossible(request.request_id)

    def end_impossible(self) -> None:
        """End what no worker could ever run, now that all workers are known. The router refuses most of it before."""
        self.fleet_known = True
        for request_id in list(self.records):
            self._end_if_impossible(request_id)

    def _end_if_impossible(self, request_id: str) -> None:
        waiting = (s for s in self.core.sequences(request_id) if s.status is Status.WAITING)
        if not all(self.core.can_ever_fit(sequence) for sequence in waiting):
            log.error("request %s can never fit on any worker", request_id, extra=self._about(request_id))
            self._end(request_id, FinishReason.ERROR)

    def on_abort(self, request_id: str) -> None:
        """The flag is set. Blocks are free at once; the finish goes into the journal behind. Idempotent."""
        self._end(request_id, FinishReason.ABORT)

    def expire(self, now_s: float) -> None:
        """End what has not ended by its deadline."""
        for request_id, record in list(self.records.items()):
            if record.deadline_s < now_s and record.open:
                record.deadline_s = math.inf
                self._end(request_id, FinishReason.DEADLINE)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        record = self.records.get(request_id)
        if record is None:
            return
        for choice in record.open:
            self.core.finish(record.sequences[choice], reason, tell_worker=True)
        self._journal.finish(request_id, sorted(record.open), reason)

    def on_finished(self, request_id: str, choices: list[int]) -> None:
        """The finish of these choices is in the journal. With the last one the request is forgotten."""
        record = self.records.get(request_id)
        if record is None:
            return
        for choice in choices:
            record.open.discard(choice)
            self.core.finish(record.sequences[choice], FinishReason.STOP, tell_worker=True)
        if not record.open:
            self._forget(record)

    def _forget(self, record: Record) -> None:
        request_id = record.request.request_id
        del self.records[request_id]
        self.core.forget(request_id)
        if self._recorder:
            self._recorder.request(record)
        if self._waits:
            for sequence in record.sequences:
                self._waits.gone(record.request, sequence)
        for sequence_id in record.assignments:
            del self._assigned[sequence_id]
        if not self.records:
            self._check_idle()

    def _check_idle(self) -> None:
        for worker in self.core.workers.values():
            if worker.pool.num_used:
                log.error("%s: %d blocks are held though nothing runs", worker.name, worker.pool.num_used)

    # -- workers

    def on_worker(
        self, name: str, link: WorkerLink, limits: WorkerLimits, contents: Mapping[int, bytes] | None = None
    ) -> None:
        """A worker has said hello. contents: what its KV blocks hold, by digest."""
        self._links[name] = link
        self.core.add_worker(name, limits, contents)

    def on_worker_lost(self, name: str) -> None:
        """A worker's session has ended: its sequences recover from the journal. Those in steps that it has not answered
        are suspects."""
        if self._links.pop(name, None) is None:
            return
        homeless: dict[str, list[Sequence]] = {}
        for sequence in self.core.remove_worker(name, crashed=True):
            homeless.setdefault(sequence.request_id, []).append(sequence)
        accused = [request_id for request_id, sequences in homeless.items() if any(s.trial for s in sequences)]
        self.num_recovered += sum(map(len, homeless.values()))
        for request_id, sequences in homeless.items():
            crash = Crash.NONE
            if request_id in accused:
                crash = Crash.ALONE if len(accused) == 1 else Crash.SHARED
            self._recover(request_id, [sequence.choice for sequence in sequences], "loss", crash)

    def _recover(self, request_id: str, choices: list[int], why: str, crash: Crash = Crash.NONE) -> None:
        if self._waits:
            for choice in choices:
                self._waits.begin(self.records[request_id].request, choice, why)
        self._journal.recover(request_id, choices, crash)

    def on_drain(self, name: str) -> None:
        """A worker wants to go, or an operator wants it empty. Idempotent."""
        if name in self.core.workers:
            self.core.drain(name)

    def on_undrain(self, name: str) -> None:
        """It may run sequences again."""
        if name in self.core.workers and self.core.workers[name].draining:
            self.core.undrain(name)

    def on_move(self, request_id: str, target: str) -> None:
        """An operator wants a request on another worker; "" is any."""
        if target and target not in self.core.workers:
            log.warning("request %s cannot move: there is no worker %s", request_id, target)
            return
        for sequence in self.core.sequences(request_id):
            here = sequence.worker
            if here is not None and here != target and sequence.status in (Status.RUNNING, Status.PREEMPTED):
                others = [w for w in self.core.workers.values() if w.name != here and w.takes_new]
                least = min(others, key=lambda worker: worker.load, default=None)
                self.core.send_away(sequence, target or (least.name if least else None))

    def on_result(self, name: str, result: StepResult) -> None:
        """A worker has run its oldest plan. Raises OutOfOrder."""
        in_flight = self.core.workers[name].in_flight
        features = in_flight[0].features if in_flight else None
        self.core.apply(name, result)
        if self._recorder and features and features.tokens:
            self._recorder.step(name, features, result)

    def on_outcome(self, outcome: PublishOutcome) -> None:
        """What became of tokens in Redis."""
        sequence = self._assigned.get(outcome.sequence_id)
        if sequence is None:
            return
        request_id, choice = sequence.request_id, sequence.choice
        if outcome.finish_reason is not None:
            self.core.finish(sequence, outcome.finish_reason, tell_worker=True)
            self.on_finished(request_id, [choice])
        elif outcome.answer in ("finished", "gone"):
            self.on_finished(request_id, [choice])
        elif sequence.sequence_id == outcome.sequence_id and sequence.status is not Status.FINISHED:
            # Differs, gap or stale: the journal wins, and the sequence continues from it.
            self.core.suspend(sequence)
            self._recover(request_id, [choice], "journal")
            self.num_recovered += 1
            self._count_stall(self.records[request_id], choice)

    def on_recovered(self, request_id: str, choices: list[int], fence: FenceAnswer | str) -> None:
        """The fence is raised and the journal read: go on from there."""
        record = self.records.get(request_id)
        if record is None:
            return
        if isinstance(fence, str):
            log.info("request %s: %s at recovery", request_id, fence, extra=self._about(request_id))
            self.on_finished(request_id, choices)
            return
        for choice in choices:
            sequence, fenced = record.sequences[choice], fence.choices[choice]
            record.attempts[choice] = fenced.attempt
            if fenced.finish is not None:
                self.on_finished(request_id, [choice])
            elif sequence.status is Status.RECOVERING:
                self.core.resume(sequence, fenced.token_ids)
        if (fence.crashes or 0) >= MAX_CRASHES:
            text = "request %s has crashed its worker %d times, alone"
            log.error(text, request_id, MAX_CRASHES, extra=self._about(request_id))
            self._end(request_id, FinishReason.ERROR)
        elif fence.aborted:
            self.on_abort(request_id)
        elif self.fleet_known:
            self._end_if_impossible(request_id)

    def _count_stall(self, record: Record, choice: int) -> None:
        known = len(record.sequences[choice].output)
        then, stalls = record.stalls.get(choice, (known, 0))
        record.stalls[choice] = (known, stalls + 1 if known <= then else 1)
        if record.stalls[choice][1] > MAX_STALLS:
            request_id = record.request.request_id
            log.error("request %s gets no token into its journal", request_id, extra=self._about(request_id))
            self._end(request_id, FinishReason.ERROR)

    def _about(self, request_id: str) -> dict[str, str]:
        return about(self.records[request_id].request.traceparent)

    # -- plans

    @property
    def is_quiet(self) -> bool:
        """No worker has a plan that it has not answered, and the journal has nothing to do."""
        return self._journal.is_idle and not any(worker.in_flight for worker in self.core.workers.values())

    def pump(self) -> None:
        """Give the workers the plans that they can take now. Called after every event; asks those whom it concerns."""
        core = self.core
        if self.handing_over:
            return
        self._recover_moving()
        core.place()
        while core.awake:
            name, _ = core.awake.popitem()
            worker, link = core.workers[name], self._links[name]
            while not self._depth or len(worker.in_flight) < self._depth:
                plan = core.schedule(name)
                if plan is None:
                    break
                self.num_plans += 1
                if self._waits:
                    self._note_preempted(plan, self._waits)
                link.send(plan, [self._assign(item) for item in plan.add])
            self._recover_moving()

    def _note_preempted(self, plan: StepPlan, waits: Waits) -> None:
        for sequence_id in plan.release:
            sequence = self._assigned.get(sequence_id)
            if sequence is not None and sequence.status is Status.PREEMPTED:
                waits.begin(self.records[sequence.request_id].request, sequence.choice, "preemption")

    def _recover_moving(self) -> None:
        for sequence in self.core.take_moving():
            self._recover(sequence.request_id, [sequence.choice], "move")

    def _assign(self, item: Scheduled) -> Assignment:
        sequence = item.sequence
        record = self.records[sequence.request_id]
        record.assignments.append(item.sequence_id)
        self._assigned[item.sequence_id] = sequence
        if self._waits:
            self._waits.placed(record.request, sequence)
        request = record.request
        params = request.params
        if params.prompt_logprobs and sequence.reuses:  # the first choice of its prompt tells those
            params = replace(params, prompt_logprobs=False)
        return Assignment(item, record.attempts[sequence.choice], params, request.traceparent)
