"""The scheduler under random adds, aborts, results and worker losses, with tiny pools: every invariant, every time."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.scheduler.core import invariants
from services.scheduler.core.policies import BATCHING_POLICIES
from services.scheduler.core.request import FinishReason, Sequence, Status
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import SequenceOutput, StepResult
from tests import builders

OVER = (Status.ENDED, Status.FINISHED)


class FakeFleet:
    """Drives a scheduler as engine and workers would, remembering what they would know."""

    def __init__(self, policy: str, workers: int, num_blocks: int, stages: int = 1) -> None:
        self.limits = {"num_blocks": num_blocks, "block_size": 4, "max_num_seqs": 4, "token_budget": 8}
        self.scheduler: Scheduler = builders.scheduler(policy, workers, stages=stages, **self.limits)
        self.stages = stages
        self.arrivals = 0
        self.live: dict[str, Sequence] = {}
        self.known: dict[str, set[int]] = {name: set() for name in self.scheduler.workers}
        self.finished: list[Sequence] = []
        self.recovering: list[Sequence] = []
        self.ended: list[Sequence] = []

    def add(self, prompt: int, max_tokens: int) -> None:
        self.arrivals += 1
        sequence = builders.sequence(f"r{self.arrivals}", prompt, max_tokens, self.arrivals)
        if self.scheduler.can_ever_fit(sequence):
            self.scheduler.add([sequence])
            self.live[sequence.request_id] = sequence

    def plan(self, name: str) -> bool:
        plan = self.scheduler.schedule(name)
        if plan is None:
            return False
        invariants.check_plan(self.scheduler, plan)
        self._worker_learns(name, plan)
        return True

    def _worker_learns(self, name: str, plan) -> None:  # type: ignore[no-untyped-def]
        """The delta, read as a worker reads it, must give back the decision itself."""
        known = self.known[name]
        if plan.full:
            known.clear()
        known -= set(plan.release)
        known |= {item.sequence_id for item in plan.add}
        assert {item.sequence_id for item in plan.scheduled} <= known
        assert {sequence_id for sequence_id, _ in plan.chunks} <= known
        assert set(plan.resume) <= {item.sequence_id for item in plan.scheduled}

    def result(self, name: str, rng: random.Random) -> bool:
        worker = self.scheduler.workers[name]
        if not worker.in_flight:
            return False
        plan = worker.in_flight[0]
        ends = {
            item.sequence.request_id: FinishReason.STOP
            for item in plan.scheduled
            if item.samples and rng.random() < 0.1
        }
        result = builders.outcome(plan, ends, token=rng.randrange(100))
        still = tuple(o for o in result.outputs if self._by_id(plan, o).status not in OVER)
        self.ended += self.scheduler.apply(name, StepResult(plan.number, still))
        if rng.random() < 0.7:  # the finish is acknowledged at once, or later, or after the worker is lost
            self.acknowledge()
        return True

    def acknowledge(self) -> None:
        """The finishes are in the journal."""
        for sequence in self.ended:
            if sequence.status is Status.ENDED:
                self.scheduler.finish(sequence, FinishReason.STOP, tell_worker=False)
                self.finished.append(sequence)
                self.live.pop(sequence.request_id, None)
        self.ended = []

    @staticmethod
    def _by_id(plan, output: SequenceOutput) -> Sequence:  # type: ignore[no-untyped-def]
        return next(item.sequence for item in plan.scheduled if item.sequence_id == output.sequence_id)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.live.pop(request_id, None)
        assert self.scheduler.abort(request_id) == []

    def lose(self, name: str) -> None:
        self.recovering += self.scheduler.remove_worker(name)
        assert all(sequence.status is not Status.RUNNING for sequence in self.recovering)
        self.scheduler.add_worker(name, builders.limits(stages=self.stages, **self.limits))

    def suspend(self, request_id: str) -> None:
        sequence = self.live[request_id]
        if sequence.status is not Status.RECOVERING:
            self.scheduler.suspend(sequence)
            self.recovering.append(sequence)

    def recover(self) -> None:
        """The fences are raised: all that recovers continues, from a journal that may lack the last token."""
        for sequence in self.recovering:
            if sequence.status is Status.RECOVERING:
                self.scheduler.resume(sequence, sequence.output)
        self.recovering = []

    def drain(self, rng: random.Random) -> None:
        self.recover()
        for _ in range(20_000):
            moved = False
            for name in self.scheduler.workers:
                moved |= self.plan(name)
                invariants.check(self.scheduler)
                moved |= self.result(name, rng)
                invariants.check(self.scheduler)
            self.acknowledge()
            if not self.live and not any(w.in_flight for w in self.scheduler.workers.values()):
                break
            assert moved, "something waits or runs, but no step was made"
        assert not self.live, "the system did not drain"
        for name in self.scheduler.workers:  # let go of what was aborted last
            while self.plan(name):
                self.result(name, rng)
        invariants.check_idle(self.scheduler)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(sorted(BATCHING_POLICIES)),
        workers=st.integers(1, 3),
        num_blocks=st.integers(2, 12),
        stages=st.integers(1, 3),
        seed=st.integers(0, 2**32),
    )
    def start(self, policy: str, workers: int, num_blocks: int, stages: int, seed: int) -> None:
        self.fleet = FakeFleet(policy, workers, num_blocks, stages)
        self.rng = random.Random(seed)

    @rule(prompt=st.integers(1, 30), max_tokens=st.integers(1, 20))
    def add(self, prompt: int, max_tokens: int) -> None:
        self.fleet.add(prompt, max_tokens)

    @rule(index=st.integers(0, 2))
    def plan(self, index: int) -> None:
        names = sorted(self.fleet.scheduler.workers)
        self.fleet.plan(names[index % len(names)])

    @rule(index=st.integers(0, 2))
    def result(self, index: int) -> None:
        names = sorted(self.fleet.scheduler.workers)
        self.fleet.result(names[index % len(names)], self.rng)

    @rule(index=st.integers(0, 2))
    def lose_worker(self, index: int) -> None:
        names = sorted(self.fleet.scheduler.workers)
        self.fleet.lose(names[index % len(names)])

    @rule(index=st.integers(0, 1000))
    def suspend(self, index: int) -> None:
        if self.fleet.live:
            names = sorted(self.fleet.live)
            self.fleet.suspend(names[index % len(names)])

    @rule()
    def recover(self) -> None:
        self.fleet.recover()

    @rule(index=st.integers(0, 1000))
    def abort(self, index: int) -> None:
        if self.fleet.live:
            names = sorted(self.fleet.live)
            self.fleet.abort(names[index % len(names)])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "fleet"):
            invariants.check(self.fleet.scheduler)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.drain(self.rng)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("policy", sorted(BATCHING_POLICIES))
def test_long_random_run_preempts_and_drains(policy: str) -> None:
    rng = random.Random(1)
    fleet = FakeFleet(policy, workers=2, num_blocks=14)
    for _ in range(5_000):
        name = rng.choice(["w0", "w1"])
        action = rng.random()
        if action < 0.15 and len(fleet.live) < 20:
            fleet.add(rng.randrange(1, 24), rng.randrange(1, 24))
        elif action < 0.17 and fleet.live:
            fleet.abort(rng.choice(sorted(fleet.live)))
        elif action < 0.6:
            fleet.plan(name)
        else:
            fleet.result(name, rng)
        invariants.check(fleet.scheduler)
    fleet.drain(rng)
    assert len(fleet.finished) > 100
    if policy in ("chunked", "phase-separated"):
        assert fleet.scheduler.num_preemptions > 0
    else:
        assert fleet.scheduler.num_preemptions == 0


def test_same_inputs_same_plans() -> None:
    def plans() -> list[object]:
        rng = random.Random(7)
        fleet = FakeFleet("chunked", 2, 14)
        seen: list[object] = []
        for _ in range(400):
            if rng.random() < 0.2:
                fleet.add(rng.randrange(1, 24), rng.randrange(1, 24))
            for name in ("w0", "w1"):
                fleet.plan(name)
                worker = fleet.scheduler.workers[name]
                seen += [(p.number, p.chunks, p.blocks, p.hold, p.resume, p.release) for p in worker.in_flight]
                fleet.result(name, rng)
        return seen

    assert plans() == plans()
