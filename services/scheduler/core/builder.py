"""Builds one step plan: the vocabulary in which batching policies speak."""

from bisect import insort
from collections.abc import Callable, Iterator

from services.scheduler.core.block_manager import blocks_for
from services.scheduler.core.order import OrderPolicy
from services.scheduler.core.request import Sequence, Status
from services.scheduler.core.step import Scheduled, StepPlan
from services.scheduler.core.worker_state import WorkerState


class StepBuilder:
    """The step being decided, for one worker. Policies call its verbs; it keeps blocks and counters right."""

    def __init__(
        self,
        worker: WorkerState,
        waiting: list[Sequence],
        order: OrderPolicy,
        place: Callable[[Sequence], WorkerState | None],
        next_id: Callable[[], int],
        watermark: float,
        headroom: int,
    ) -> None:
        self.worker = worker
        self.limits = worker.limits
        self.budget = worker.limits.token_budget
        self.num_preempted = 0
        self._waiting = waiting
        self._order = order
        self._place = place
        self._next_id = next_id
        self._watermark = int(worker.limits.num_blocks * watermark)
        self._headroom = headroom
        self._scheduled: list[Scheduled] = []
        self._added: list[Scheduled] = []
        self._granted: dict[int, list[int]] = {}

    @property
    def num_scheduled(self) -> int:
        return len(self._scheduled)

    def in_order(self) -> list[Sequence]:
        """The worker's running sequences, first in order first."""
        return sorted(self.worker.running, key=self._order.key)

    def candidates(self) -> Iterator[Sequence]:
        """Waiting sequences that should run here, first in order first. Safe against admission while iterating."""
        if self.worker.num_active >= self.limits.max_active:
            return  # no slot: nobody need be asked
        for sequence in list(self._waiting):
            # A preempted sequence comes back only when its last results are known: they are part of its prompt now.
            if sequence.steps_in_flight == 0 and self._place(sequence) is self.worker:
                yield sequence

    def advance(self, sequence: Sequence, num_tokens: int) -> bool:
        """Schedule tokens of a running sequence, with blocks of later ones if need be. False if it had to go itself."""
        needed = blocks_for(sequence.num_computed + sequence.in_flight + num_tokens, self.limits.block_size)
        while not self._grow(sequence, needed):
            victim = max(self.worker.running, key=self._order.key)
            self.preempt(victim)
            if victim is sequence:
                return False
        self._schedule(sequence, num_tokens)
        return True

    def admit(self, sequence: Sequence, num_tokens: int, reserve: int) -> bool:
        """Start a waiting sequence with blocks for `reserve` token positions. False, and nothing changed, if they
        are not free or the watermark would be passed (it does not bind on an empty worker)."""
        needed = blocks_for(reserve, self.limits.block_size)
        # Running sequences may want blocks soon; an empty worker holds nothing back.
        running = len(self.worker.running)
        spare = max(self._watermark, running * self._headroom) if running else 0
        if self.worker.pool.num_free - needed < spare:
            return False
        sequence.sequence_id = self._next_id()
        sequence.worker = self.worker.name
        sequence.move_to(Status.RUNNING)
        self._waiting.remove(sequence)
        self.worker.running.append(sequence)
        granted = self._grow(sequence, needed)
        assert granted, "free blocks were counted"
        self._added.append(self._schedule(sequence, num_tokens))
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a running sequence; it resumes by recompute, output kept, in its old place."""
        assert all(item.sequence is not sequence for item in self._scheduled), "a scheduled sequence is no victim"
        self.worker.forget(sequence, tell_worker=True)
        self._granted.pop(sequence.sequence_id, None)
        sequence.move_to(Status.PREEMPTED)
        sequence.num_computed = 0
        sequence.in_flight = 0
        sequence.num_preemptions += 1
        self.num_preempted += 1
        insort(self._waiting, sequence, key=self._order.key)

    def build(self, full: bool) -> StepPlan | None:
        """The plan, as a delta; None if there is nothing to run and nobody to let go."""
        worker = self.worker
        if not self._scheduled and not (worker.to_release and not worker.in_flight):
            return None
        hold, resume, chunks = self._deltas()
        plan = StepPlan(
            number=worker.next_plan,
            worker=worker.name,
            scheduled=tuple(self._scheduled),
            add=tuple(self._added),
            blocks=tuple((sequence_id, tuple(blocks)) for sequence_id, blocks in self._granted.items()),
            chunks=chunks,
            hold=hold,
            resume=resume,
            release=tuple(worker.to_release),
            full=full,
        )
        worker.to_release.clear()
        worker.next_plan += 1
        worker.in_flight.append(plan)
        return plan

    def _deltas(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
        """(hold, resume, chunks): what differs from "every sequence that decodes goes on"."""
        worker = self.worker
        now = {item.sequence_id for item in self._scheduled}
        hold = tuple(sorted(worker.decoding - worker.held - now))
        resume = tuple(sorted(worker.held & now))
        chunks = tuple(
            (item.sequence_id, item.num_tokens) for item in self._scheduled if item.sequence_id not in worker.decoding
        )
        worker.held |= set(hold)
        worker.held -= set(resume)
        for item in self._scheduled:
            if item.samples and item.sequence.remaining:
                worker.decoding.add(item.sequence_id)
            else:
                worker.decoding.discard(item.sequence_id)
        return hold, resume, chunks

    def _grow(self, sequence: Sequence, num_blocks: int) -> bool:
        missing = num_blocks - len(sequence.block_table)
        if missing <= 0:
            return True
        blocks = self.worker.pool.allocate(missing)
        if blocks is None:
            return False
        sequence.block_table += blocks
        self._granted.setdefault(sequence.sequence_id, []).extend(blocks)
        return True

    def _schedule(self, sequence: Sequence, num_tokens: int) -> Scheduled:
        samples = num_tokens == sequence.remaining
        item = Scheduled(sequence, sequence.sequence_id, num_tokens, samples)
        sequence.in_flight += num_tokens
        sequence.promised += samples
        sequence.steps_in_flight += 1
        self.budget -= num_tokens
        self._scheduled.append(item)
        return item
