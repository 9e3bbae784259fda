"""The virtual cluster: arrivals and results in order of time; the production core decides everything in between."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.explain import Explain
from services.scheduler.core.order import ORDER_POLICIES, Fair
from services.scheduler.core.policies import BATCHING_POLICIES
from services.scheduler.core.request import FinishReason, Slo
from services.scheduler.core.request import Sequence as CoreSequence
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepPlan, StepResult, WorkerLimits
from services.simulator.costs import CostModel
from services.simulator.fairness import FairnessMeter
from services.simulator.trace import Arrival

TOKEN = 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated. control_s: from a result to the plan that follows it, where none waits on the worker."""

    cost: CostModel
    limits: WorkerLimits
    workers: int = 1
    policy: str = "chunked"
    order: str = "fcfs"
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    slo: Slo = field(default_factory=Slo)
    control_s: float = 0.0


@dataclass(slots=True)
class Served:
    """What became of one request; times in seconds of the virtual clock, -1 before they are known."""

    arrival: Arrival
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    finished_s: float = -1.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Iteration:
    """One step, for the Gantt picture. rows: (request, tokens, whether it decodes)."""

    worker: str
    number: int
    start_s: float
    end_s: float
    rows: tuple[tuple[str, int, bool], ...]


@dataclass(slots=True)
class Outcome:
    """Everything that a report needs. running, used: sums over iterations; see `metrics`."""

    served: list[Served]
    refused: int = 0
    iterations: int = 0
    running_sum: float = 0.0
    scheduled_sum: float = 0.0
    used_share_sum: float = 0.0
    filled_share_sum: float = 0.0
    busy_s: float = 0.0
    end_s: float = 0.0
    preemptions: int = 0
    swaps: int = 0
    moves: int = 0
    hit_tokens: int = 0
    gantt: list[Iteration] = field(default_factory=list)
    fairness: FairnessMeter | None = None
    explain: Explain | None = None


class Simulation:
    """One run of one cluster over one trace. Deterministic."""

    def __init__(
        self,
        cluster: Cluster,
        arrivals: Sequence[Arrival],
        gantt: int = 0,
        explain: bool = False,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._cluster = cluster
        self._core = Scheduler(
            BATCHING_POLICIES[cluster.policy](),
            ORDER_POLICIES[cluster.order](),
            cluster.config,
            Explain() if explain else None,
        )
        for index in range(cluster.workers):
            self._core.add_worker(f"worker-{index}", cluster.limits)
        self._stage_free = {name: [0.0] * cluster.limits.stages for name in self._core.workers}
        # Nobody asks the core's own model of step time otherwise.
        self._learns = bool(cluster.slo.tpot_s or cluster.limits.num_host_blocks or cluster.workers > 1)
        self._together = self._core.batching.returns_together
        self._unreturned: dict[str, list[Served]] = {name: [] for name in self._core.workers}
        self._served = {str(index): Served(arrival) for index, arrival in enumerate(arrivals)}
        self._events: list[tuple[float, int, str, StepPlan | None]] = []
        self._order = count()
        self._outcome = Outcome(list(self._served.values()))
        if self._core.order.counts_service:
            longest = max((arrival.prompt_tokens for arrival in arrivals), default=0)
            memory = cluster.workers * cluster.limits.num_blocks * cluster.limits.block_size
            self._outcome.fairness = FairnessMeter(longest, memory)
        self._gantt = gantt
        self._progress = progress
        self._num_done = 0
        self._prefixes: dict[int, tuple[int, ...]] = {}
        for name, served in self._served.items():
            heapq.heappush(self._events, (served.arrival.arrival_s, next(self._order), name, None))

    def run(self) -> Outcome:
        """Until everything has been served."""
        while self._events:
            now, _, name, plan = heapq.heappop(self._events)
            if plan is None:
                self._arrive(name)
            else:
                self._result(now, name, plan)
            self._pump(now)
        self._take_counts()
        return self._outcome

    def _arrive(self, name: str) -> None:
        arrival = self._served[name].arrival
        room = self._cluster.limits.max_model_len - arrival.prompt_tokens
        sequence = CoreSequence(
            request_id=name,
            choice=0,
            prompt=self._prompt(int(name), arrival),
            max_tokens=arrival.max_tokens or arrival.output_tokens,
            arrival=int(name),
            tenant=arrival.tenant,
            priority=arrival.priority,
            arrived_s=arrival.arrival_s,
            slo=replace(self._cluster.slo, ttft_s=arrival.ttft_s) if arrival.ttft_s else self._cluster.slo,
            expected_output=arrival.output_tokens,
        )
        if room < 1 or not self._core.can_ever_fit(sequence):
            self._outcome.refused += 1
            self._done()
            return
        self._core.add([sequence])

    def _prompt(self, index: int, arrival: Arrival) -> Sequence[int]:
        """Token ids that are like nobody else's, but for a shared prefix."""
        if arrival.prompt is not None:
            return arrival.prompt
        first = (index * 1_000_003) % (1 << 31)
        if arrival.prefix is None:
            return range(first, first + arrival.prompt_tokens)
        shared = range(
            (1 << 31) + arrival.prefix * 100_000, (1 << 31) + arrival.prefix * 100_000 + arrival.prefix_tokens
        )
        return (*shared, *range(first, first + arrival.prompt_tokens - arrival.prefix_tokens))

    def _pump(self, now: float) -> None:
        """Give every worker the plans that it can take, as the production engine does."""
        core = self._core
        core.place()
        while core.awake:
            name, _ = core.awake.popitem()
            while (plan := core.schedule(name)) is not None:
                self._start(now, name, plan)
            for sequence in core.take_moving():  # raising a fence takes no time that would matter here
                core.resume(sequence, sequence.output)

    def _start(self, now: float, name: str, plan: StepPlan) -> None:
        """The plan goes through the worker's stages, each of which does one at a time, in order."""
        free = self._stage_free[name]
        duration = self._cluster.cost.stage_s(plan.features) if plan.features.tokens else 0.0
        copies = sum(len(blocks) for _, blocks in (*plan.swap_out, *plan.swap_in))
        duration += copies * self._cluster.limits.swap_s
        begin = at = max(now + self._cluster.control_s, free[0])
        for stage in range(len(free)):
            at = max(at, free[stage]) + duration
            free[stage] = at
        heapq.heappush(self._events, (at, next(self._order), name, plan))
        if plan.features.tokens:
            self._observe(name, plan, begin, at, duration)

    def _observe(self, name: str, plan: StepPlan, begin: float, end: float, duration: float) -> None:
        outcome, worker = self._outcome, self._core.workers[name]
        outcome.iterations += 1
        outcome.running_sum += worker.num_active
        outcome.scheduled_sum += plan.features.sequences
        outcome.busy_s += duration
        pool = worker.pool
        outcome.used_share_sum += pool.num_used / pool.num_blocks
        outcome.filled_share_sum += plan.features.context / (pool.num_blocks * pool.block_size)
        if len(outcome.gantt) < self._gantt:
            prefills = {item.sequence_id for item in plan.prefills}
            rows = tuple(
                (item.sequence.request_id, item.num_tokens, item.sequence_id not in prefills) for item in plan.scheduled
            )
            outcome.gantt.append(Iteration(name, plan.number, begin, end, rows))

    def _result(self, now: float, name: str, plan: StepPlan) -> None:
        tokens: dict[int, int | None] = dict.fromkeys(plan.decodes.ids, TOKEN)
        finished: dict[int, FinishReason] = {}
        for sequence, sequence_id in zip(plan.decodes.sequences, plan.decodes.ids, strict=True):
            if len(sequence.output) + 1 == sequence.expected_output:
                finished[sequence_id] = FinishReason.STOP
        for item in plan.prefills:
            tokens[item.sequence_id] = TOKEN if item.samples else None
            if item.samples:
                self._first_token(now, item.sequence)
                if len(item.sequence.output) + 1 == item.sequence.expected_output:
                    finished[item.sequence_id] = FinishReason.STOP
        seconds = self._cluster.cost.stage_s(plan.features) if self._learns else 0.0
        result = StepResult(plan.number, tokens, finished, seconds)
        for sequence in self._core.apply(name, result):
            self._finish(now, name, sequence)
        if self._outcome.fairness and isinstance(self._core.order, Fair):
            self._outcome.fairness.observe(self._core.waiting.flows, self._core.order.counters)
        worker = self._core.workers[name]
        if self._together and not worker.running:
            for served in self._unreturned[name]:
                served.finished_s = now
            self._unreturned[name].clear()
        self._outcome.end_s = max(self._outcome.end_s, now)

    def _first_token(self, now: float, sequence: CoreSequence) -> None:
        served = self._served[sequence.request_id]
        if served.first_token_s < 0:
            served.first_token_s = now

    def _finish(self, now: float, name: str, sequence: CoreSequence) -> None:
        self._core.finish(sequence, FinishReason.STOP, tell_worker=False)
        self._core.forget(sequence.request_id)
        served = self._served[sequence.request_id]
        served.last_token_s = served.finished_s = now
        served.preemptions = sequence.num_preemptions
        if self._together:
            self._unreturned[name].append(served)
        self._done()

    def _done(self) -> None:
        self._num_done += 1
        self._progress(self._num_done)

    def _take_counts(self) -> None:
        counters, outcome = self._core.counters, self._outcome
        outcome.preemptions, outcome.swaps = counters.preemptions, counters.swaps
        outcome.moves, outcome.hit_tokens = counters.moves, counters.hit_tokens
        outcome.explain = self._core.explain
