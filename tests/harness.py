"""The real core and real executors in one process, without network: what golden and unit tests drive.

Plans go through protobuf as in production, and with a depth of two a plan is made before the result of the one
before it has come back.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.pb.orca.v1 import worker_pb2
from services.common.request import SamplingParams
from services.scheduler.adapters.codec import plan_to_proto, result_from_proto
from services.scheduler.core import invariants
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES
from services.scheduler.core.request import FinishReason
from services.scheduler.core.request import Sequence as CoreSequence
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepPlan, WorkerLimits
from services.scheduler.engine import Assignment
from services.worker.adapters.codec import plan_from_proto, result_to_proto
from services.worker.core.input_batch import InputBatch
from services.worker.core.plan import Plan, StepOutput, TokenLogprobs
from services.worker.executor.base import Executor


@dataclass
class Generated:
    """What one sequence produced, and in which steps of its worker."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    finish: str | None = None


class LocalWorker:
    """The worker's own core and an executor: plans in, outputs out, through protobuf."""

    def __init__(self, executor: Executor, eos: Sequence[int]) -> None:
        self.executor = executor
        self.batch = InputBatch(executor.num_blocks, executor.block_size, eos, executor.num_host_blocks)
        self.plans: deque[Plan] = deque()
        self.num_copied = 0

    def receive(self, plan: StepPlan, params: Mapping[str, SamplingParams]) -> None:
        added = [Assignment(item, 1, params[item.sequence.request_id]) for item in plan.add]
        message = plan_to_proto(plan, added, epoch=1).SerializeToString()
        self.plans.append(plan_from_proto(worker_pb2.SchedulerMessage.FromString(message).plan))

    def run_next(self) -> StepOutput | None:
        if not self.plans:
            return None
        plan = self.plans.popleft()
        step = self.batch.apply(plan)
        rows = step.rows
        self.executor.copy(step.copies)
        self.num_copied += sum(len(copy.sources) for copy in step.copies)
        if not rows:
            return StepOutput(plan, (), 0, 0, 0, 0)
        calls, counted = self.executor.num_model_calls, self.executor.num_rows
        sampled = self.executor.execute(rows, [self.batch.banned(row.sequence) for row in rows])
        num_rows = sum(row.num_tokens for row in rows)
        assert self.executor.num_model_calls == calls + 1, "one model call per step"
        assert self.executor.num_rows == counted + num_rows, "with as many rows as tokens scheduled"
        return StepOutput(plan, tuple(self.batch.finish_step(rows, sampled)), 0, 0, 0, num_rows)


def record_name(request_id: str, choice: int) -> str:
    return f"{request_id}/{choice}" if choice else request_id


class LocalSystem:
    """A scheduler and its workers, stepped by hand."""

    def __init__(
        self,
        executors: Sequence[Executor],
        policy: str = "chunked",
        eos: Sequence[int] = (),
        max_num_seqs: int = 64,
        token_budget: int = 512,
        max_model_len: int = 8192,
        depth: int = 2,
        headroom: int = 1,
        order: str = "fcfs",
        prefix_cache: bool = True,
        checks: bool = True,
    ) -> None:
        """checks: the invariants, after every step; a benchmark goes without."""
        self._checks = checks
        config = SchedulerConfig(prefix_cache=prefix_cache, watermark=0.0, headroom=headroom)
        self.core = Scheduler(BATCHING_POLICIES[policy](), ORDER_POLICIES[order](), config)
        self.workers: dict[str, LocalWorker] = {}
        for index, executor in enumerate(executors):
            name = f"w{index}"
            self.workers[name] = LocalWorker(executor, eos)
            limits = WorkerLimits(
                executor.num_blocks,
                executor.block_size,
                max_model_len,
                max_num_seqs,
                token_budget,
                depth,
                num_host_blocks=executor.num_host_blocks,
                swap_s=executor.swap_s,
            )
            self.core.add_worker(name, limits)
        self.generated: dict[str, Generated] = {}
        self.batch_sizes: list[int] = []
        self._params: dict[str, SamplingParams] = {}
        self._sequences: dict[tuple[str, int], CoreSequence] = {}

    def submit(
        self, name: str, prompt: Sequence[int], params: SamplingParams, n: int = 1, tenant: str = "", priority: int = 0
    ) -> None:
        """A request with n choices; the record of choice c > 0 is called name/c."""
        arrival = len(self._params)
        choices = [
            CoreSequence(
                name,
                choice,
                list(prompt),
                params.max_tokens,
                arrival,
                tenant,
                priority,
                reuses=not params.prompt_logprobs,
            )
            for choice in range(n)
        ]
        assert all(self.core.can_ever_fit(sequence) for sequence in choices)
        self._params[name] = params
        self._sequences |= {(name, sequence.choice): sequence for sequence in choices}
        self.generated |= {record_name(name, sequence.choice): Generated() for sequence in choices}
        self.core.add(choices)

    def step(self) -> bool:
        """Every worker plans as deep as it may and runs its oldest plan. False when nothing is left to do."""
        moved = False
        for name, worker in self.workers.items():
            while (plan := self.core.schedule(name)) is not None:
                if self._checks:
                    invariants.check_plan(self.core, plan)
                worker.receive(plan, self._params)
            for sequence in self.core.take_moving():  # the journal is what has been recorded
                record = self.generated[record_name(sequence.request_id, sequence.choice)]
                self.core.resume(sequence, record.tokens)
            output = worker.run_next()
            if output is not None:
                moved = True
                self._take(name, output)
        if self._checks:
            invariants.check(self.core)
        return moved

    def _take(self, name: str, output: StepOutput) -> None:
        if output.outputs:
            self.batch_sizes.append(len(output.outputs))
        for item in output.outputs:
            key = (item.sequence.request_id, item.sequence.choice)
            stale = self._sequences[key].sequence_id != item.sequence.sequence_id
            if not stale and (item.token_ids or item.finish_reason):
                record = self.generated[record_name(*key)]
                assert item.index == len(record.tokens), "a token lost or doubled"
                record.tokens += item.token_ids
                record.logprobs += item.logprobs
                record.steps += [output.plan.number] * len(item.token_ids)
                record.finish = item.finish_reason
        for sequence in self.core.apply(name, result_from_proto(result_to_proto(output).result)):
            self.core.finish(sequence, FinishReason.STOP, tell_worker=False)

    def run(self) -> dict[str, Generated]:
        """Step until all is done; asserts that nothing is left behind."""
        while self.step():
            pass
        invariants.check_idle(self.core)
        assert all(not worker.batch.sequences for worker in self.workers.values()), "a worker holds on to a sequence"
        return self.generated
