"""The step loop: takes plans, runs one step each, hands on what came of it. A thread of its own.

Health, drain and publishing never wait for a step: they live on the event loop, and the two meet at queues only.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from services.common.failpoints import failpoint
from services.worker.core.input_batch import InputBatch, PlanError
from services.worker.core.plan import Plan, StepOutput
from services.worker.executor.base import Executor

log = logging.getLogger(__name__)

# Steps whose tokens wait to be published; when Redis is away this long the loop pauses. It never drops.
MAX_BACKLOG = 256


class StepLoop(threading.Thread):
    """Runs plans in the order in which they come. `emit` is called on this thread, once per plan.
    `on_failure` is called, on this thread too, when a step failed in a way that no plan explains; the loop has ended.

    A repeated plan number is answered with the kept result.
    """

    def __init__(
        self,
        executor: Executor,
        batch: InputBatch,
        emit: Callable[[StepOutput], None],
        on_failure: Callable[[BaseException], None],
        keep_results: int,
    ) -> None:
        super().__init__(name="step-loop", daemon=True)
        self.batch = batch
        self.executor = executor
        self.last_plan = 0
        self.highest_epoch = 0
        self._emit = emit
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Plan | Callable[[], None] | None] = queue.SimpleQueue()
        self._backlog = threading.Semaphore(MAX_BACKLOG)
        self._kept: dict[int, StepOutput] = {}
        self._keep_results = keep_results
        self._last_end_ns = 0
        self._output: StepOutput | None = None  # of the step that has ended, not yet handed on
        # Plans of an older session than this are not run: their scheduler has gone, or starts anew.
        self.session = 0
        self.paused = False
        self._failed_session = 0

    # -- called from the event loop

    def submit(self, plan: Plan) -> bool:
        """Queue a plan. False if its epoch is older than one already seen: a stale leader."""
        if plan.epoch < self.highest_epoch:
            return False
        self.highest_epoch = plan.epoch
        self._inbox.put(plan)
        return True

    def published(self, steps: list[StepOutput]) -> None:
        """Steps have left the backlog."""
        self._backlog.release(len(steps))

    def stop(self) -> None:
        self._inbox.put(None)

    def contents(self) -> "Future[dict[int, bytes]]":
        """What the KV blocks hold, once the step under way has ended. Called as a session begins: the sequences of the
        one before are forgotten."""
        future: Future[dict[int, bytes]] = Future()

        def answer() -> None:
            self.batch.sequences.clear()
            if future.set_running_or_notify_cancel():  # who asked may have gone meanwhile
                future.set_result(dict(self.batch.contents))

        self._inbox.put(answer)
        return future

    # -- the thread

    def run(self) -> None:
        try:
            while (item := self._inbox.get()) is not None:
                self.take(item)
            self._hand_on()
        except BaseException as error:  # noqa: BLE001 - handed on: the process must not live on without its loop
            self._on_failure(error)

    def take(self, item: Plan | Callable[[], None]) -> None:
        """Run a plan of the current session, or answer a question."""
        if not isinstance(item, Plan):
            self._hand_on()
            item()
        elif item.session == self.session and item.session != self._failed_session:
            self._run_plan(item)
        if self._inbox.empty():
            self._hand_on()

    def _hand_on(self) -> None:
        """Emit what the last step came to. With a next plan at hand this is done as that one's step begins: the event
        loop's thread then works while the model does, and not against this one for the interpreter between two."""
        output, self._output = self._output, None
        if output is not None:
            self._emit(output)

    def _run_plan(self, plan: Plan) -> None:
        kept = self._kept.get(plan.number)
        if kept is not None and not plan.full and kept.plan.epoch == plan.epoch:
            self._hand_on()
            self._emit(replace(kept, repeated=True))
            return
        if plan.full:
            self._kept.clear()
        if not self._backlog.acquire(blocking=False):
            self._hand_on()
            self.paused = True
            self._backlog.acquire()
            self.paused = False
        output = self._step(plan)
        failpoint("step.after")
        self.last_plan = plan.number
        self._kept[plan.number] = output
        self._kept.pop(plan.number - self._keep_results, None)
        self._hand_on()  # of a step before, if this one had no rows
        self._output = output

    def _step(self, plan: Plan) -> StepOutput:
        started = time.monotonic_ns()
        try:
            step = self.batch.apply(plan)
            rows = step.rows
            banned = [self.batch.banned(row.sequence) for row in rows]
            started = time.monotonic_ns()
            self.executor.copy(step.copies)
            if not rows:
                return StepOutput(plan, (), started, started, 0, 0)
            self._hand_on()
            failpoint("step.before")
            sampled = self.executor.execute(rows, banned)
            finished = time.monotonic_ns()
            idle = started - self._last_end_ns if self._last_end_ns else 0
            self._last_end_ns = finished
            num_rows = sum(row.num_tokens for row in rows)
            outputs = self.batch.finish_step(rows, sampled)
        except PlanError as error:
            # What the plan changed before it failed is not known: nothing of this session runs any more.
            log.error("plan %d refused: %s", plan.number, error)
            self._failed_session = plan.session
            self.batch.contents.clear()
            return StepOutput(plan, (), started, time.monotonic_ns(), 0, 0, str(error))
        return StepOutput(plan, tuple(outputs), started, finished, idle, num_rows)
