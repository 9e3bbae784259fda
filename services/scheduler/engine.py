"""The scheduler's engine: the pure core, told what happened and asked for plans. Single-threaded, on the event loop.

It awaits nothing: what must be done in Redis it hands to a `Journal`, whose answers come back as calls.
"""

import logging
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from services.common.journal import FenceAnswer
from services.common.request import GenerateRequest, SamplingParams
from services.scheduler.core.request import FinishReason, Sequence, Slo, Status
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import Features, Scheduled, StepPlan, StepResult, WorkerLimits

log = logging.getLogger(__name__)

# Assignments of one choice under one leader: what fails as often is not tried again.
MAX_ATTEMPTS = 4
NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker must be told of a sequence that is new to it."""

    item: Scheduled
    attempt: int
    params: SamplingParams


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

    def recover(self, request_id: str, choices: list[int]) -> None:
        """Raise the fence of some choices and read their journal; then `Engine.on_recovered`."""
        ...


class Recorder(Protocol):
    """Keeps a trace of what the system served, for the simulator."""

    def request(self, record: "Record") -> None:
        """A request has ended."""
        ...

    def step(self, worker: str, features: Features, seconds: float) -> None:
        """A worker has run a step."""
        ...


@dataclass(slots=True)
class Record:
    """A request in the system. open: choices whose finish is not in the journal yet."""

    request: GenerateRequest
    sequences: list[Sequence]
    attempts: list[int]
    open: set[int] = field(default_factory=set)
    assignments: list[int] = field(default_factory=list)


class Engine:
    """Owns all requests of the partition, for one leader."""

    def __init__(
        self,
        core: Scheduler,
        journal: Journal,
        depth: int = 0,
        slo: Slo = NO_SLO,
        recorder: Recorder | None = None,
    ) -> None:
        self.core = core
        self._slo = slo
        self._recorder = recorder
        self.num_plans = 0
        self.records: dict[str, Record] = {}
        self._journal = journal
        self._depth = depth
        self._links: dict[str, WorkerLink] = {}
        self._assigned: dict[int, Sequence] = {}
        self._arrivals = count(1)
        # True once the workers connected are those registered: only then "fits nowhere" is known.
        self.fleet_known = False

    # -- requests

    def on_request(self, request: GenerateRequest, fence: FenceAnswer, arrived_s: float = 0.0) -> None:
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
                prompt_index=choice // request.n,
                slo=self._slo,
                output=list(fenced.token_ids),
            )
            for choice, fenced in enumerate(fence.choices)
        ]
        record = Record(request, sequences, [fenced.attempt for fenced in fence.choices])
        self.records[request.request_id] = record
        record.open = {choice for choice, fenced in enumerate(fence.choices) if fenced.finish is None}
        todo = [sequence for sequence in sequences if sequence.choice in record.open]
        if todo:
            self.core.add(todo)
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
            log.error("request %s can never fit on any worker", request_id)
            self._end(request_id, FinishReason.ERROR)

    def on_abort(self, request_id: str) -> None:
        """The flag is set. Blocks are free at once; the finish goes into the journal behind. Idempotent."""
        self._end(request_id, FinishReason.ABORT)

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
        for sequence_id in record.assignments:
            del self._assigned[sequence_id]
        if not self.records:
            self._check_idle()

    def _check_idle(self) -> None:
        for worker in self.core.workers.values():
            if worker.pool.num_used:
                log.error("%s: %d blocks are held though nothing runs", worker.name, worker.pool.num_used)

    # -- workers

    def on_worker(self, name: str, link: WorkerLink, limits: WorkerLimits) -> None:
        """A worker has said hello."""
        self._links[name] = link
        self.core.add_worker(name, limits)

    def on_worker_lost(self, name: str) -> None:
        """A worker's session has ended: its sequences recover from the journal."""
        if self._links.pop(name, None) is None:
            return
        homeless: dict[str, list[int]] = {}
        for sequence in self.core.remove_worker(name):
            homeless.setdefault(sequence.request_id, []).append(sequence.choice)
        for request_id, choices in homeless.items():
            self._journal.recover(request_id, choices)

    def on_result(self, name: str, result: StepResult) -> None:
        """A worker has run its oldest plan. Raises OutOfOrder."""
        in_flight = self.core.workers[name].in_flight
        features = in_flight[0].features if in_flight else None
        self.core.apply(name, result)
        if self._recorder and features and features.tokens:
            self._recorder.step(name, features, result.seconds)

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
            self._journal.recover(request_id, [choice])

    def on_recovered(self, request_id: str, choices: list[int], fence: FenceAnswer | str) -> None:
        """The fence is raised and the journal read: go on from there."""
        record = self.records.get(request_id)
        if record is None:
            return
        if isinstance(fence, str):
            log.info("request %s: %s at recovery", request_id, fence)
            self.on_finished(request_id, choices)
            return
        for choice in choices:
            sequence, fenced = record.sequences[choice], fence.choices[choice]
            record.attempts[choice] = fenced.attempt
            if fenced.finish is not None:
                self.on_finished(request_id, [choice])
            elif sequence.status is Status.RECOVERING:
                self.core.resume(sequence, fenced.token_ids)
        # A move raises the attempt too, but it is no failure.
        failures = (a - s.num_moves for a, s in zip(record.attempts, record.sequences, strict=True))
        if max(failures) > MAX_ATTEMPTS:
            log.error("request %s has failed %d times", request_id, MAX_ATTEMPTS)
            self._end(request_id, FinishReason.ERROR)
        elif fence.aborted:
            self.on_abort(request_id)
        elif self.fleet_known:
            self._end_if_impossible(request_id)

    # -- plans

    def pump(self) -> None:
        """Give the workers the plans that they can take now. Called after every event; asks those whom it concerns."""
        core = self.core
        core.place()
        while core.awake:
            name, _ = core.awake.popitem()
            worker, link = core.workers[name], self._links[name]
            while not self._depth or len(worker.in_flight) < self._depth:
                plan = core.schedule(name)
                if plan is None:
                    break
                self.num_plans += 1
                link.send(plan, [self._assign(item) for item in plan.add])
            for sequence in core.take_moving():
                self._journal.recover(sequence.request_id, [sequence.choice])

    def _assign(self, item: Scheduled) -> Assignment:
        sequence = item.sequence
        record = self.records[sequence.request_id]
        record.assignments.append(item.sequence_id)
        self._assigned[item.sequence_id] = sequence
        return Assignment(item, record.attempts[sequence.choice], record.request.params)
