"""The order policies' promises on the pure core."""

import random
from dataclasses import replace

import pytest

from services.scheduler.core import invariants
from services.scheduler.core.order import INPUT_WEIGHT, OUTPUT_WEIGHT, Fair
from services.scheduler.core.request import FinishReason, Sequence, Slo, Status
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepPlan
from tests import builders


def sequence(name: str, arrival: int, prompt: int = 4, max_tokens: int = 20, **more: object) -> Sequence:
    return replace(builders.sequence(name, prompt, max_tokens, arrival), **more)


def step(core: Scheduler, worker: str = "w0") -> StepPlan | None:
    """Plan as deep as may be, take one result."""
    made = None
    while (plan := core.schedule(worker)) is not None:
        invariants.check_plan(core, plan)
        made = made or plan
    state = core.workers[worker]
    if state.in_flight:
        for ended in core.apply(worker, builders.outcome(state.in_flight[0])):
            core.finish(ended, FinishReason.LENGTH, tell_worker=False)
            core.forget(ended.request_id)
    invariants.check(core)
    return made


def names(plan: StepPlan | None) -> set[str]:
    assert plan is not None
    return {item.sequence.request_id for item in plan.scheduled}


@pytest.mark.parametrize("policy", ["chunked", "phase-separated", "orca"])
def test_priority_takes_a_running_one_s_place_in_the_next_plan(policy: str) -> None:
    core = builders.scheduler(policy, order="priority", max_num_seqs=2, max_in_flight=1)
    low = [sequence(f"low{i}", i) for i in range(2)]
    for one in low:
        core.add([one])
    step(core)
    step(core)
    core.add([sequence("high", 9, priority=5)])
    assert "high" in names(step(core))
    assert low[1].status is Status.PREEMPTED, "the last in order gives way"
    assert low[0].status is Status.RUNNING
    assert core.counters.preemptions == 1
    while core.num_running or core.num_waiting:
        step(core)
    assert all(len(one.output) == 20 for one in low)
    invariants.check_idle(core)


def test_priority_takes_blocks_too_and_no_more_than_it_needs() -> None:
    core = builders.scheduler(order="priority", num_blocks=12, block_size=4, max_in_flight=1)
    low = [sequence(f"low{i}", i, prompt=8) for i in range(4)]
    for one in low:
        core.add([one])
        step(core)
    running = [one for one in low if one.status is Status.RUNNING]
    high = sequence("high", 9, prompt=12, priority=1)
    core.add([high])
    step(core)
    assert high.status is Status.RUNNING
    assert running[0].status is Status.RUNNING
    assert 1 <= core.counters.preemptions <= 2


def test_equal_priority_never_preempts_for_admission() -> None:
    core = builders.scheduler(order="priority", max_num_seqs=2)
    for i in range(6):
        core.add([sequence(f"r{i}", i, priority=3)])
    while core.num_running or core.num_waiting:
        step(core)
    assert core.counters.preemptions == 0


def test_deadline_is_earliest_first_and_counts_tokens_had() -> None:
    core = builders.scheduler(order="deadline", max_num_seqs=1, max_in_flight=1)
    core.add([sequence("lax", 1, max_tokens=1, arrived_s=0.0, slo=Slo(ttft_s=9.0))])
    core.add([sequence("strict", 2, max_tokens=1, arrived_s=1.0, slo=Slo(ttft_s=0.5))])
    core.add([sequence("middle", 3, max_tokens=1, arrived_s=0.5, slo=Slo(ttft_s=2.0))])
    assert [names(step(core)) for _ in range(3)] == [{"strict"}, {"middle"}, {"lax"}]
    ahead = sequence("ahead", 1, slo=Slo(1.0, 0.1), arrived_s=0.0, output=[1] * 50)
    behind = sequence("behind", 2, slo=Slo(1.0, 0.1), arrived_s=2.0, output=[1])
    assert core.order.urgency(behind) < core.order.urgency(ahead), "who is far ahead of its pace gives way first"


class Backlog:
    """Two tenants that always have work waiting (more than a step can start); what each got, as VTC counts it."""

    def __init__(self, order: str, seed: int, workers: int, weights: tuple[float, float] = (1.0, 1.0)) -> None:
        self.weights = dict(zip(("meek", "greedy"), weights, strict=True))
        self.rng = random.Random(seed)
        self.core = builders.scheduler(
            order=order, workers=workers, num_blocks=24, block_size=4, max_num_seqs=6, token_budget=16, max_in_flight=1
        )
        self.arrivals = 0
        self.longest = 0
        self.service = {"meek": 0.0, "greedy": 0.0}
        self.differences: list[float] = []

    def top_up(self, tenant: str, count: int, prompt: int, tokens: int) -> None:
        waiting = sum(
            s.tenant == tenant
            for s in (*self.core.waiting, *(s for w in self.core.workers.values() for s in w.queue))
            if s.status is Status.WAITING
        )
        for _ in range(count - waiting):
            self.arrivals += 1
            length = self.rng.randint(1, prompt)
            self.longest = max(self.longest, length)
            self.core.add(
                [
                    sequence(
                        f"{tenant}{self.arrivals}",
                        self.arrivals,
                        length,
                        self.rng.randint(1, tokens),
                        tenant=tenant,
                        weight=self.weights[tenant],
                    )
                ]
            )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.top_up("meek", 8, prompt=6, tokens=10)
            self.top_up("greedy", 25, prompt=20, tokens=30)
            worker = self.rng.choice(sorted(self.core.workers))
            plan = step(self.core, worker)
            for item in plan.add if plan else ():
                if not item.sequence.num_preemptions:
                    self.service[item.sequence.tenant] += INPUT_WEIGHT * item.sequence.num_prompt_tokens
            for item in plan.scheduled if plan else ():
                self.service[item.sequence.tenant] += OUTPUT_WEIGHT * item.samples
            self.differences.append(self.service["meek"] - self.service["greedy"])

    @property
    def widest(self) -> float:
        """The most that one tenant got more than the other, over any interval."""
        return max(self.differences) - min(self.differences)

    @property
    def bound(self) -> float:
        """Theorem 4.4: 2 max(w_in L, w_out M), M the tokens that all workers can hold."""
        held = sum(w.limits.num_blocks * w.limits.block_size for w in self.core.workers.values())
        return 2 * max(INPUT_WEIGHT * self.longest, OUTPUT_WEIGHT * held)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.5, 2.0)])
def test_fair_shares_service_by_weight(weights: tuple[float, float]) -> None:
    shared = Backlog("fair", 3, 1, weights)
    shared.run(3000)
    share = shared.service["meek"] / sum(shared.service.values())
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.05)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_fair_keeps_the_vtc_bound_where_fcfs_does_not(seed: int, workers: int) -> None:
    fair = Backlog("fair", seed, workers)
    fair.run(1500)
    assert fair.widest <= fair.bound
    if seed == 0:
        fcfs = Backlog("fcfs", seed, workers)
        fcfs.run(1500)
        assert fcfs.widest > fcfs.bound, "the test could not fail"


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    order = Fair()
    order.on_enter("busy", ())
    order.counters["busy"] = 500.0
    order.on_enter("back", ["busy"])
    assert order.counters["back"] == 500.0
    order.on_leave("busy")
    order.on_enter("late", ())
    assert order.counters["late"] == 500.0, "with nobody waiting, the last one that was counts"


def test_service_is_charged_once_however_often_it_is_computed() -> None:
    core = builders.scheduler(order="fair", num_blocks=8, block_size=4)
    both = [sequence(name, i, prompt=8, tenant=name) for i, name in enumerate("ab")]
    for one in both:
        core.add([one])
    while core.num_running or core.num_waiting:
        step(core)
    assert core.counters.preemptions > 0
    assert isinstance(core.order, Fair)
    assert {name: core.order.counters[name] for name in "ab"} == dict.fromkeys(
        "ab", 8 * INPUT_WEIGHT + 20 * OUTPUT_WEIGHT
    )


def pump(core: Scheduler) -> None:
    """As the engine does it. Must come to an end."""
    core.place()
    for _ in range(100):
        if not core.awake:
            return
        name, _ = core.awake.popitem()
        while core.schedule(name) is not None:
            pass
        invariants.check(core)
    raise AssertionError("the pump does not end")


def test_who_outranks_one_but_needs_the_blocks_of_another_waits_in_peace() -> None:
    core = builders.scheduler(order="priority", num_blocks=8)
    core.add([sequence("high", 1, prompt=16, max_tokens=4, priority=5)])
    core.add([sequence("low", 2, max_tokens=4)])
    pump(core)
    core.add([sequence("middle", 3, prompt=20, max_tokens=4, priority=1)])
    while core.workers["w0"].in_flight:
        for ended in core.apply("w0", builders.outcome(core.workers["w0"].in_flight[0])):
            core.finish(ended, FinishReason.LENGTH, tell_worker=False)
        pump(core)
    invariants.check_idle(core)


def test_displacing_counts_what_is_really_freed() -> None:
    """The whole pool for one that could not start beside anybody, and blocks that only the victims share."""
    core = builders.scheduler(order="priority", num_blocks=16, max_in_flight=1, max_model_len=64)
    core.add([replace(sequence("low", 0, prompt=33, max_tokens=8), choice=choice) for choice in range(2)])
    for _ in range(3):
        step(core)
    assert core.num_running == 2
    high = sequence("high", 9, prompt=58, max_tokens=6, priority=1)
    core.add([high])
    step(core)
    assert high.status is Status.RUNNING


def test_displacing_takes_no_more_than_it_needs_where_a_prefix_is_cached() -> None:
    core = builders.scheduler(order="priority", num_blocks=20, max_in_flight=1)
    shared = sequence("shared", 0, prompt=40, max_tokens=20, priority=5)
    core.add([shared])
    for index in range(2):
        core.add([sequence(f"low{index}", index + 1, prompt=8, max_tokens=20)])
    for _ in range(3):
        step(core)
    high = replace(sequence("high", 9, max_tokens=2, priority=5), prompt=(*shared.prompt, 1))
    core.add([high])
    step(core)
    assert high.status is Status.RUNNING
    assert core.counters.preemptions <= 1


def test_an_aborted_start_costs_a_tenant_nothing_and_work_done_is_not_refunded() -> None:
    core = builders.scheduler(order="fair", max_in_flight=1)
    assert isinstance(core.order, Fair)
    started = sequence("started", 0, prompt=8, tenant="a")
    core.add([started])
    step(core)
    core.suspend(started)
    core.resume(started, [])
    core.place()
    core.abort("started")
    assert core.order.counters["a"] >= 8 * INPUT_WEIGHT
    never = sequence("never", 1, prompt=8, tenant="b")
    before = core.order.counters["b"]
    core.add([never])
    core.place()
    core.abort("never")
    assert core.order.counters["b"] <= max(before, core.order.counters["a"])
