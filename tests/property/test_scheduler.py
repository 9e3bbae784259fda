"""The scheduler under random adds, aborts, results, moves and worker losses, with tiny pools: every invariant after
every operation, and every text right at the end."""

import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES
from tests.property.fleet import BLOCK_SIZE, Fleet

POLICIES, ORDERS = sorted(BATCHING_POLICIES), sorted(ORDER_POLICIES)
PAGED = ("chunked", "phase-separated")
# `make test-nightly` asks for more of everything.
NIGHTLY = os.environ.get("ORCA_PROPERTY") == "nightly"


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        order=st.sampled_from(ORDERS),
        workers=st.integers(1, 3),
        num_blocks=st.integers(3, 14),
        stages=st.integers(1, 3),
        host=st.sampled_from((0, 0, 4, 12)),
        prefix_cache=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        policy: str,
        order: str,
        workers: int,
        num_blocks: int,
        stages: int,
        host: int,
        prefix_cache: bool,
        seed: int,
    ) -> None:
        self.fleet = Fleet(policy, order, workers, num_blocks, stages, host, prefix_cache)
        self.rng = random.Random(seed)

    def _name(self, index: int) -> str:
        names = sorted(self.fleet.scheduler.workers)
        return names[index % len(names)]

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        for _ in range(count):
            self.fleet.add_random(self.rng)

    @rule(index=st.integers(0, 2))
    def plan(self, index: int) -> None:
        self.fleet.plan(self._name(index))

    @rule(index=st.integers(0, 2))
    def result(self, index: int) -> None:
        self.fleet.result(self._name(index), self.rng)

    @rule()
    def pump(self) -> None:
        self.fleet.pump()

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            for name in self.fleet.scheduler.workers:
                self.fleet.plan(name)
                self.fleet.check()
                self.fleet.result(name, self.rng)
                self.fleet.check()

    @rule(index=st.integers(0, 2))
    def lose_worker(self, index: int) -> None:
        self.fleet.lose(self._name(index), self.rng)

    @rule(index=st.integers(0, 2))
    def operate(self, index: int) -> None:
        self.fleet.operate(self._name(index), self.rng)

    @rule(index=st.integers(0, 1000))
    def suspend(self, index: int) -> None:
        if self.fleet.live:
            live = sorted(self.fleet.live)
            self.fleet.suspend(self.fleet.live[live[index % len(live)]])

    @rule()
    def stop_string(self) -> None:
        self.fleet.stop_string(self.rng)

    @rule()
    def recover(self) -> None:
        self.fleet.recover(self.rng)

    @rule(index=st.integers(0, 1000))
    def abort(self, index: int) -> None:
        if self.fleet.live:
            live = sorted(self.fleet.live)
            self.fleet.abort(live[index % len(live)][0])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check()

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.drain(self.rng)


SchedulerMachine.TestCase.settings = settings(
    max_examples=5_000 if NIGHTLY else 150, stateful_step_count=50, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase


def long_run(fleet: Fleet, steps: int, seed: int) -> None:
    """Random operations, most of them plans and results, then everything drains."""
    rng = random.Random(seed)
    names = sorted(fleet.scheduler.workers)
    for _ in range(steps):
        name = rng.choice(names)
        action = rng.random()
        if action < 0.08 and len(fleet.live) < 20:
            fleet.add_random(rng)
        elif action < 0.09 and fleet.live:
            fleet.abort(rng.choice(sorted(fleet.live))[0])
        elif action < 0.095:
            fleet.stop_string(rng)
        elif action < 0.097:
            fleet.lose(name, rng)
        elif action < 0.099:
            fleet.operate(name, rng)
        elif action < 0.2:
            fleet.recover(rng)
        elif action < 0.5:
            fleet.plan(name)
        elif action < 0.6:
            fleet.pump()
        else:
            fleet.result(name, rng)
        fleet.check()
    fleet.drain(rng)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_long_random_run(policy: str, order: str) -> None:
    """Preemptions, swaps and prefix hits must really have come up, where the policy can have them."""
    fleet = Fleet(policy, order, workers=2, num_blocks=14, num_host_blocks=6)
    long_run(fleet, steps=20_000 if NIGHTLY else 2_000, seed=1)
    counters = fleet.scheduler.counters
    assert len(fleet.finished) > (400 if NIGHTLY else 40)
    assert counters.hit_tokens >= 4 * BLOCK_SIZE
    if policy in PAGED:
        assert counters.preemptions > counters.swaps > 0
    elif order != "priority":
        assert counters.preemptions == counters.displaced, "only a trial preempts"
    assert counters.trials > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_same_inputs_same_plans(policy: str) -> None:
    def plans() -> list[object]:
        rng = random.Random(7)
        fleet = Fleet(policy, workers=2, num_host_blocks=6)
        seen: list[object] = []
        for _ in range(400):
            if rng.random() < 0.2:
                fleet.add_random(rng)
            fleet.recover(rng)
            for name in ("w0", "w1"):
                fleet.plan(name)
                for plan in fleet.scheduler.workers[name].in_flight:
                    seen.append((plan.number, plan.chunks, plan.blocks, plan.hold, plan.resume, plan.release))
                    seen.append((plan.copies, plan.swap_out, plan.swap_in, plan.decodes.ids))
                fleet.result(name, rng)
        return seen

    assert plans() == plans()
