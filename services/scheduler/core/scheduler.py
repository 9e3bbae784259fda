"""The scheduler: sequences in, plans out, results applied. One object for all workers of a partition."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from services.scheduler.core import moves, placement, trials
from services.scheduler.core.block_manager import blocks_for
from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.config import Counters, SchedulerConfig
from services.scheduler.core.explain import Explain, Reason
from services.scheduler.core.order import OrderPolicy
from services.scheduler.core.placement import Placement
from services.scheduler.core.policies.base import BatchingPolicy
from services.scheduler.core.prefix_cache import reusable_digests
from services.scheduler.core.request import FinishReason, Sequence, Status
from services.scheduler.core.step import Scheduled, StepPlan, StepResult, WorkerLimits, tokens_by_tenant
from services.scheduler.core.trials import Trial, Trials
from services.scheduler.core.waiting import WaitingQueue
from services.scheduler.core.worker_state import WorkerState


class OutOfOrder(Exception):
    """A worker answered another plan than the oldest in flight."""


@dataclass(slots=True)
class Scheduler:
    """Decides each worker's next step. Raises nothing on results of sequences that have ended meanwhile."""

    batching: BatchingPolicy
    order: OrderPolicy
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    explain: Explain | None = None
    workers: dict[str, WorkerState] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    waiting: WaitingQueue = field(init=False)
    trials: Trials = field(default_factory=Trials)
    # Workers that may have a plan to make, and sequences taken off their worker to run elsewhere.
    awake: dict[str, None] = field(default_factory=dict)
    moving: list[Sequence] = field(default_factory=list)
    _placement: Placement = field(init=False)
    _ids: Iterator[int] = field(init=False)
    by_request: dict[str, list[Sequence]] = field(default_factory=dict)
    # The first in order found no room: until somebody has more of it, nobody need be asked again.
    _blocked: Sequence | None = None
    _roomier: dict[str, WorkerState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = WaitingQueue(self.order)
        self._placement = Placement(self.workers, self.batching, self.config.watermark, self.config.headroom)
        self._ids = count(self.config.first_id)

    # -- workers

    def add_worker(self, name: str, limits: WorkerLimits, contents: Mapping[int, bytes] | None = None) -> None:
        """A worker is connected. Its first plan will be full. contents: what its KV blocks hold, by digest.
        Raises ValueError if the name is taken."""
        if name in self.workers:
            raise ValueError(f"worker {name} is already there")
        caches = self.config.prefix_cache
        worker = WorkerState(name, limits, caches, partial(self._placement.index.change, name))
        self.workers[name] = worker
        self._placement.joined(worker)
        if caches:
            for block, digest in (contents or {}).items():
                worker.pool.adopt(block, digest)
        self._blocked = None
        self._has_room(worker)

    def remove_worker(self, name: str, crashed: bool = False) -> list[Sequence]:
        """A worker is lost. Returns its sequences, which recover: raise their fence, then `resume` each.

        crashed: what it was running may be why; those sequences are on trial.
        """
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        if crashed:
            self.trials.accuse(worker.suspects())
        self._interrupt_trial(worker)
        self._placement.left(worker)
        self._roomier.pop(name, None)
        self.awake.pop(name, None)
        homeless = [*worker.running.values(), *worker.ended.values()]
        for sequence in list(worker.queue):
            if sequence.status is Status.PREEMPTED:
                homeless.append(sequence)
            else:
                self._unbind(worker, sequence)
        for sequence in homeless:
            sequence.begin_recovery()
        self._blocked = None
        return homeless

    def drain(self, name: str) -> None:
        """A worker shall run nothing any more: its sequences move, as `take_moving` says."""
        worker = self.workers[name]
        if worker.draining:
            return
        worker.draining = True
        self._return_unplaced(worker)
        self._interrupt_trial(worker)
        for sequence in [*worker.running.values(), *worker.queue]:
            self.send_away(sequence)
        self.awake[name] = None

    def undrain(self, name: str) -> None:
        """It may run sequences again."""
        self.workers[name].draining = False
        self._has_room(self.workers[name])

    def send_away(self, sequence: Sequence, target: str | None = None) -> None:
        """Move a sequence that a worker has, to a certain other one or to any."""
        self.suspend(sequence)
        sequence.moving_to = target
        self.counters.moves += 1
        self.moving.append(sequence)

    def suspend(self, sequence: Sequence) -> None:
        """Take one sequence off its worker to recover; then `resume` it. Its blocks are free at once."""
        self._leave(sequence, tell_worker=True)
        sequence.begin_recovery()

    def resume(self, sequence: Sequence, output: Iterable[int]) -> None:
        """Let a recovering sequence continue from the journal's output, on any worker."""
        sequence.move_to(Status.WAITING)
        sequence.output = list(output)
        del sequence.hashes[sequence.num_prompt_tokens // max(1, sequence.hash_block_size) :]
        trial = sequence.trial
        if trial is not None:
            trial.suspects[sequence] = len(sequence.output)
        if trial is None:
            self.waiting.add(sequence)
            self._blocked = None
        elif (worker := self._tries(trial)) is not None:
            self._bind(sequence, worker)
        else:
            self._wake_for(trial)

    def accuse(self, sequences: list[Sequence]) -> None:
        """Waiting sequences that crashed a worker under an earlier leader: a trial for each half of their requests."""
        for sequence in sequences:
            self._leave_queue(sequence)
        self.trials.accuse(sequences)
        self.awake.update(dict.fromkeys(self.workers))

    # -- requests

    def add(self, sequences: list[Sequence]) -> None:
        """A request's sequences join the queue."""
        self.by_request.setdefault(sequences[0].request_id, []).extend(sequences)
        leaders: dict[int, Sequence] = {}
        for sequence in sequences:
            leader = leaders.setdefault(sequence.prompt_index, sequence)
            sequence.leader = leader if leader is not sequence else None
            for size in self._placement.block_sizes:  # hashed on arrival, not while a worker waits for its plan
                reusable_digests(sequence, size)
            self.waiting.add(sequence)
        if self.waiting.first() is not self._blocked:
            self._blocked = None

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """False when no connected worker could run it even alone. True while none is connected: nothing is known."""
        return not self.workers or any(placement.can_ever_fit(sequence, worker) for worker in self.workers.values())

    def sequences(self, request_id: str) -> list[Sequence]:
        return self.by_request.get(request_id, [])

    def abort(self, request_id: str) -> list[Sequence]:
        """End a request now; its blocks are free at once. Returns the sequences that this ended. Idempotent."""
        ended = [s for s in self.sequences(request_id) if s.status is not Status.FINISHED]
        for sequence in ended:
            self.finish(sequence, FinishReason.ABORT, tell_worker=True)
        return ended

    def finish(self, sequence: Sequence, reason: FinishReason, tell_worker: bool) -> None:
        """One sequence is over, in the journal too or soon by our own hand. Idempotent: the first reason stands."""
        if sequence.status is Status.FINISHED:
            return
        self._leave(sequence, tell_worker)
        self._acquit(sequence)
        sequence.move_to(Status.FINISHED)
        sequence.finish_reason = sequence.finish_reason or reason

    def _end_move(self, sequence: Sequence) -> None:
        """It has arrived, somewhere, or will not."""
        target = self.workers.get(sequence.moving_to or "")
        sequence.moving_to = None
        if target is not None:
            target.incoming.pop(sequence, None)
            self._placement.loads.changed(target)

    def _leave(self, sequence: Sequence, tell_worker: bool) -> None:
        """Take a sequence out of wherever it is: its worker's blocks, or a queue."""
        self._end_move(sequence)
        worker = self.workers.get(sequence.worker or "")
        if worker is None:
            if sequence.status is Status.WAITING and sequence.trial is None:
                self._leave_queue(sequence)
            return
        if sequence.status is Status.RUNNING:
            worker.forget(sequence, tell_worker)
        elif sequence.status is Status.ENDED:
            worker.ended.pop(sequence.sequence_id, None)
        elif sequence in worker.queue:
            worker.dequeue(sequence)
            if sequence.host_table:
                worker.host.free(sequence.host_table)
                sequence.host_table = []
                if tell_worker:
                    worker.to_release.append(sequence.sequence_id)
            if sequence.status is Status.WAITING:
                self.order.on_returned(sequence)
                sequence.worker = None
        self._has_room(worker)

    def _leave_queue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._blocked = None

    def forget(self, request_id: str) -> None:
        """The request's end is in the journal. Raises ValueError if a sequence of it still runs."""
        if any(s.status is not Status.FINISHED for s in self.sequences(request_id)):
            raise ValueError(f"{request_id} has not ended")
        for sequence in self.by_request.pop(request_id, []):
            sequence.leader = None

    # -- placement

    def place(self) -> None:
        """Bind waiting sequences, first in order first, to workers that have room for them in their next plan. Stops at
        the first that finds none."""
        later = []
        while (sequence := self.waiting.first()) is not None:
            if self._waits_for_leader(sequence):
                self.waiting.remove(sequence)
                later.append(sequence)
                continue
            worker = self._find_room(sequence)
            if worker is None and not self.can_ever_fit(sequence):
                self.waiting.remove(sequence)  # it waits for another worker, or for its end: in nobody's way
                later.append(sequence)
                continue
            if worker is None:
                self._note(sequence, Reason.NO_WORKER)
                break
            self.waiting.remove(sequence)
            self._bind(sequence, worker)
        for sequence in later:
            self.waiting.add(sequence, returned=True)
            self._note(sequence, Reason.PROMPT_SHARED if self._waits_for_leader(sequence) else Reason.NO_WORKER)

    def _bind(self, sequence: Sequence, worker: WorkerState) -> None:
        self._end_move(sequence)
        sequence.worker = worker.name
        self.order.on_selected(sequence)
        slots = self.batching.reserve(sequence, worker.limits)
        todo = self._placement.to_compute(sequence, worker)
        worker.enqueue(sequence, blocks_for(slots, worker.limits.block_size), todo)
        self._placement.loads.changed(worker)
        self.awake[worker.name] = None
        self._note(sequence, Reason.PLACED, worker.name)

    def _find_room(self, sequence: Sequence) -> WorkerState | None:
        if self._blocked is sequence:
            worker = self._placement.pick(sequence, self._roomier.values()) if self._roomier else None
        else:
            worker = self._placement.pick(sequence)
        self._roomier.clear()
        self._blocked = sequence if worker is None else None
        return worker

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """A choice waits until the first of its request has computed their common prompt, to share it."""
        leader = sequence.leader if sequence.reuses else None
        return (
            leader is not None
            and self.config.prefix_cache
            and not self.batching.reserves
            and leader.status in (Status.WAITING, Status.RUNNING)
            and leader.num_computed < leader.num_prompt_tokens
        )

    def _return_unplaced(self, worker: WorkerState) -> bool:
        """What could not start is for anybody again. True if there was any."""
        unplaced = [s for s in worker.queue if s.status is Status.WAITING and s.trial is None]
        for sequence in unplaced:
            self._unbind(worker, sequence)
        return bool(unplaced)

    def _unbind(self, worker: WorkerState, sequence: Sequence) -> None:
        worker.dequeue(sequence)
        sequence.worker = None
        self.order.on_returned(sequence)
        if sequence.trial is None:
            self.waiting.add(sequence, returned=True)
            self._blocked = None

    def _summon(self, worker: WorkerState) -> None:
        """The first in order found no room anywhere; if it outranks what runs here, it comes here."""
        sequence = self.waiting.first()
        if sequence is None or sequence is not self._blocked or not placement.can_ever_fit(sequence, worker):
            return
        if not worker.takes_new or not self.batching.accepts(len(worker.running)):
            return
        if any(self.order.outranks(sequence, running) for running in worker.running.values()):
            self.waiting.remove(sequence)
            self._blocked = None
            self._bind(sequence, worker)

    def _has_room(self, worker: WorkerState) -> None:
        """A worker may have more room than before."""
        worker.declined = False
        self._roomier[worker.name] = worker
        self.awake[worker.name] = None
        self._placement.loads.changed(worker)

    def _move(self, worker: WorkerState) -> None:
        """Take a sequence off a worker if it gains more elsewhere than that costs; it recovers, then runs there."""
        move = moves.best(worker, self._placement, self.config.max_moves)
        if move is None:
            return
        sequence, target = move
        self._note(sequence, Reason.MOVED, f"from {worker.name} to {target.name}")
        self.suspend(sequence)
        sequence.num_moves += 1
        sequence.moving_to = target.name
        target.incoming[sequence] = None
        self._placement.loads.changed(target)
        self.counters.moves += 1
        self.moving.append(sequence)

    def take_moving(self) -> list[Sequence]:
        """Sequences just taken off their worker to run elsewhere: raise their fence, then `resume` each."""
        moving, self.moving = self.moving, []
        return moving

    # -- trials

    def _begin_trial(self, worker: WorkerState) -> None:
        """The next trial, if one can begin, is this worker's."""
        if worker.trial or worker.draining:
            return
        trial = self.trials.next_ready(lambda sequence: placement.can_ever_fit(sequence, worker))
        if trial is None:
            return
        self._return_unplaced(worker)
        worker.trial = trial
        self.counters.trials += 1
        for sequence in trial.suspects:
            self._bind(sequence, worker)

    def _tries(self, trial: Trial) -> WorkerState | None:
        """The worker that a trial runs on."""
        return next((worker for worker in self.workers.values() if worker.trial is trial), None)

    def _acquit(self, sequence: Sequence) -> None:
        """It is no suspect any more."""
        trial = sequence.trial
        if trial is None:
            return
        self.trials.acquit(sequence)
        worker = self._tries(trial)
        if worker is not None and not trial.suspects:
            worker.trial = None
            self._has_room(worker)
        self._wake_for(trial)

    def _wake_for(self, trial: Trial) -> None:
        """If a trial waits and can begin, every worker is asked."""
        if trial in self.trials and trial.is_ready:
            self.awake.update(dict.fromkeys(self.workers))

    def _interrupt_trial(self, worker: WorkerState) -> None:
        """It goes on elsewhere, with those who were not judged here."""
        trial, worker.trial = worker.trial, None
        if trial is not None and trial.suspects:
            for sequence in [s for s in worker.queue if s in trial.suspects and s.status is Status.WAITING]:
                self._unbind(worker, sequence)
            self.trials.put_back(trial)
            self._wake_for(trial)

    # -- the step

    def schedule(self, worker_name: str) -> StepPlan | None:
        """The worker's next plan; None if it has enough in flight or nothing to do."""
        worker = self.workers[worker_name]
        if len(worker.in_flight) >= self.batching.max_in_flight(worker.limits):
            return None
        self._begin_trial(worker)
        if worker.trial is not None and any(plan.trial is not worker.trial for plan in worker.in_flight):
            return None  # the steps before it end first: if the worker crashes now, it was them
        self.place()
        if worker.trial is None:
            if self.order.acts_on_running:
                self._summon(worker)
            if len(self.workers) > 1:
                self._move(worker)
        step = StepBuilder(worker, self.order, self._next_id, self._placement.spare, self.explain)
        if worker.trial is not None:
            trials.fill(step, worker.trial, self.batching)
        else:
            self.batching.fill(step)
        returned = self._return_unplaced(worker) if worker.queue else False
        plan = step.build()
        worker.declined = plan is None and (returned or worker.declined)
        self.counters.preemptions += step.num_preempted
        self.counters.swaps += step.num_swapped
        self.counters.hit_tokens += step.num_hit_tokens
        self.counters.recomputed_tokens += step.num_recomputed
        self.counters.displaced += step.num_displaced
        self._placement.loads.changed(worker)
        self._roomier[worker_name] = worker
        return plan

    def _next_id(self) -> int:
        return next(self._ids)

    def apply(self, worker_name: str, result: StepResult) -> list[Sequence]:
        """Take the result of the oldest plan in flight. Returns the sequences that it ended; `finish` each when
        that is in the journal.

        A sequence preempted meanwhile keeps its token; its KV is gone, unless it was swapped. Raises OutOfOrder.
        """
        worker = self.workers[worker_name]
        if not worker.in_flight or worker.in_flight[0].number != result.number:
            raise OutOfOrder(f"{worker_name}: result {result.number} is not the next one")
        plan = worker.in_flight.popleft()
        worker.applied = plan.number
        worker.declined = False
        self.awake[worker_name] = None
        tokens = result.tokens
        # The loop that every token passes: what is not plain goes elsewhere.
        for sequence, sequence_id in zip(plan.decodes.sequences, plan.decodes.ids, strict=True):
            token = tokens.get(sequence_id)
            if token is not None and sequence.sequence_id == sequence_id and sequence.status is Status.RUNNING:
                sequence.output.append(token)
                sequence.num_computed += 1
            else:
                self._apply_one(worker, Scheduled(sequence, sequence_id, 1, True), result)
        for item in plan.prefills:
            self._apply_one(worker, item, result)
        for sequence in plan.grown:
            if worker.running.get(sequence.sequence_id) is sequence:
                worker.cache(sequence)
        if result.seconds and plan.features.tokens:
            worker.model.observe(plan.features, result.seconds)
        if self.order.counts_service:
            self.order.on_tokens(tokens_by_tenant(plan, result))
        self._placement.loads.changed(worker)
        ended = self._end(worker, result) if result.finished else []
        if worker.trial is not None:
            for sequence in worker.trial.cleared():
                self._acquit(sequence)
        return ended

    def _apply_one(self, worker: WorkerState, item: Scheduled, result: StepResult) -> None:
        sequence = item.sequence
        # Recovered or ended since: its output was reset to the journal, or is complete.
        if sequence.sequence_id != item.sequence_id or sequence.status not in (Status.RUNNING, Status.PREEMPTED):
            return
        if sequence.status is Status.RUNNING or sequence.host_table:
            sequence.num_computed += item.num_tokens
        token = result.tokens.get(item.sequence_id)
        if token is not None:
            sequence.output.append(token)
        elif item.samples and sequence.status is Status.RUNNING:
            worker.drain(sequence)  # the worker dropped it; its publish outcome will say why
        if sequence.status is Status.RUNNING:
            worker.cache(sequence)

    def _end(self, worker: WorkerState, result: StepResult) -> list[Sequence]:
        preempted = {sequence.sequence_id: sequence for sequence in worker.queue if sequence.status is Status.PREEMPTED}
        ended = []
        for sequence_id, reason in result.finished.items():
            sequence = worker.running.get(sequence_id) or preempted.get(sequence_id)
            if sequence is None:  # ended or recovered since
                continue
            self._leave(sequence, tell_worker=False)
            sequence.move_to(Status.ENDED)
            sequence.finish_reason = reason
            worker.ended[sequence_id] = sequence
            ended.append(sequence)
        return ended

    def _note(self, sequence: Sequence, reason: Reason, detail: str = "") -> None:
        if self.explain:
            self.explain.note("", sequence, reason, detail)

    # -- what can be seen

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self.trials.num_suspects + sum(len(worker.queue) for worker in self.workers.values())

    @property
    def num_running(self) -> int:
        return sum(len(worker.running) for worker in self.workers.values())
