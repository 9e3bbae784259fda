"""The scheduler: sequences in, plans out, results applied. One object for all workers of a partition."""

from bisect import insort
from collections.abc import Iterable
from itertools import count

from services.scheduler.core import placement
from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.order import OrderPolicy
from services.scheduler.core.policies.base import BatchingPolicy
from services.scheduler.core.request import FinishReason, Sequence, Status
from services.scheduler.core.step import Scheduled, SequenceOutput, StepPlan, StepResult, WorkerLimits
from services.scheduler.core.worker_state import WorkerState

# Blocks held back at admission, as a share of the pool, so that decodes do not preempt at once.
WATERMARK = 0.01
# And as blocks per running sequence, whichever is more.
HEADROOM = 1


class OutOfOrder(Exception):
    """A worker answered another plan than the oldest in flight."""


class Scheduler:
    """Decides each worker's next step.

    Raises nothing on results of sequences that have ended meanwhile. first_id: where assignment ids begin, so that no
    other leader's are met again.
    """

    def __init__(
        self,
        batching: BatchingPolicy,
        order: OrderPolicy,
        watermark: float = WATERMARK,
        headroom: int = HEADROOM,
        first_id: int = 1,
    ) -> None:
        self.batching = batching
        self.order = order
        self.workers: dict[str, WorkerState] = {}
        self.waiting: list[Sequence] = []
        self.num_preemptions = 0
        self._watermark = watermark
        self._headroom = headroom
        self._ids = count(first_id)
        self._requests: dict[str, list[Sequence]] = {}

    # -- workers

    def add_worker(self, name: str, limits: WorkerLimits) -> None:
        """A worker is connected. Its first plan will be full. Raises ValueError if the name is taken."""
        if name in self.workers:
            raise ValueError(f"worker {name} is already there")
        self.workers[name] = WorkerState(name, limits)

    def remove_worker(self, name: str) -> list[Sequence]:
        """A worker is lost. Returns its sequences, which recover: raise their fence, then `resume` each."""
        self.workers.pop(name, None)
        homeless = [s for s in self._all() if s.worker == name and s.status is not Status.FINISHED]
        for sequence in homeless:
            if sequence.status is Status.PREEMPTED:
                self.waiting.remove(sequence)
            self._begin_recovery(sequence)
        return homeless

    def suspend(self, sequence: Sequence) -> None:
        """Take one sequence off its worker to recover; then `resume` it. Its blocks are free at once."""
        self._leave(sequence, tell_worker=True)
        self._begin_recovery(sequence)

    @staticmethod
    def _begin_recovery(sequence: Sequence) -> None:
        sequence.move_to(Status.RECOVERING)
        sequence.worker = None
        sequence.sequence_id = 0  # results still under way are for nobody
        sequence.block_table = []
        sequence.finish_reason = None
        sequence.num_computed = sequence.in_flight = sequence.promised = sequence.steps_in_flight = 0

    def resume(self, sequence: Sequence, output: Iterable[int]) -> None:
        """Let a recovering sequence continue from the journal's output, on any worker."""
        sequence.move_to(Status.WAITING)
        sequence.output = list(output)
        insort(self.waiting, sequence, key=self.order.key)

    # -- requests

    def add(self, sequences: list[Sequence]) -> None:
        """A request's sequences join the queue."""
        self._requests.setdefault(sequences[0].request_id, []).extend(sequences)
        for sequence in sequences:
            insort(self.waiting, sequence, key=self.order.key)

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """False when no connected worker could run it even alone. True while none is connected: nothing is known."""
        return not self.workers or any(placement.can_ever_fit(sequence, worker) for worker in self.workers.values())

    def sequences(self, request_id: str) -> list[Sequence]:
        return self._requests.get(request_id, [])

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
        sequence.move_to(Status.FINISHED)
        sequence.finish_reason = sequence.finish_reason or reason

    def _leave(self, sequence: Sequence, tell_worker: bool) -> None:
        """Take a sequence out of wherever it is: its worker's blocks, or the queue."""
        if sequence.status is Status.RUNNING:
            self.workers[sequence.worker or ""].forget(sequence, tell_worker)
        elif sequence.status in (Status.WAITING, Status.PREEMPTED):
            self.waiting.remove(sequence)

    def forget(self, request_id: str) -> None:
        """The request's end is in the journal. Raises ValueError if a sequence of it still runs."""
        if any(s.status is not Status.FINISHED for s in self.sequences(request_id)):
            raise ValueError(f"{request_id} has not ended")
        self._requests.pop(request_id, None)

    # -- the step

    def schedule(self, worker_name: str) -> StepPlan | None:
        """The worker's next plan; None if it has enough in flight or nothing to do."""
        worker = self.workers[worker_name]
        if len(worker.in_flight) >= self.batching.max_in_flight(worker.limits):
            return None
        step = StepBuilder(
            worker,
            self.waiting,
            self.order,
            place=lambda sequence: placement.pick(sequence, self.workers.values()),
            next_id=lambda: next(self._ids),
            watermark=self._watermark,
            headroom=self._headroom,
        )
        self.batching.fill(step)
        self.num_preemptions += step.num_preempted
        return step.build(full=worker.next_plan == 1)

    def apply(self, worker_name: str, result: StepResult) -> list[Sequence]:
        """Take the result of the oldest plan in flight. Returns the sequences that it ended; `finish` each when
        that is in the journal.

        A sequence preempted meanwhile keeps its token; its KV is gone. Raises OutOfOrder.
        """
        worker = self.workers[worker_name]
        if not worker.in_flight or worker.in_flight[0].number != result.number:
            raise OutOfOrder(f"{worker_name}: result {result.number} is not the next one")
        plan = worker.in_flight.popleft()
        outputs = {output.sequence_id: output for output in result.outputs}
        ended = []
        for item in plan.scheduled:
            if self._apply_one(item, outputs.get(item.sequence_id)):
                ended.append(item.sequence)
        return ended

    def _apply_one(self, item: Scheduled, output: SequenceOutput | None) -> bool:
        """True if this ended the sequence."""
        sequence = item.sequence
        if sequence.status in (Status.ENDED, Status.FINISHED) or not self._is_current(item):
            return False
        sequence.steps_in_flight -= 1
        sequence.promised -= item.samples
        if sequence.status is Status.RUNNING and sequence.sequence_id == item.sequence_id:
            sequence.in_flight -= item.num_tokens
            sequence.num_computed += item.num_tokens
        if output is None:
            return False  # the worker dropped it; its publish outcome says why
        sequence.output.extend(output.token_ids)
        if output.finish_reason is None:
            return False
        self._leave(sequence, tell_worker=False)
        sequence.move_to(Status.ENDED)
        sequence.finish_reason = output.finish_reason
        return True

    @staticmethod
    def _is_current(item: Scheduled) -> bool:
        """False for a sequence that recovered since: its output was reset to the journal."""
        return item.sequence.sequence_id == item.sequence_id

    # -- what can be seen

    def _all(self) -> Iterable[Sequence]:
        return (sequence for sequences in self._requests.values() for sequence in sequences)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return sum(len(worker.running) for worker in self.workers.values())
