"""The policies' promises, one by one, on the pure core. Orca's are those of OSDI'22, section 4.2."""

import pytest

from services.scheduler.core import invariants
from services.scheduler.core.policies import BATCHING_POLICIES
from services.scheduler.core.request import FinishReason, Sequence, Status
from services.scheduler.core.scheduler import Scheduler
from tests import builders


class Run:
    """Steps one worker and notes in which steps each request ran."""

    def __init__(self, policy: str, **limits: int) -> None:
        self.core: Scheduler = builders.scheduler(policy, **limits)
        self.steps: dict[str, list[int]] = {}
        self.ended: dict[str, int] = {}
        self.stop_at: dict[str, int] = {}
        self._sequences: list[Sequence] = []

    def add(self, name: str, prompt: int, max_tokens: int) -> Sequence:
        sequence = builders.sequence(name, prompt, max_tokens, len(self._sequences))
        self._sequences.append(sequence)
        self.core.add([sequence])
        return sequence

    def step(self) -> bool:
        while (plan := self.core.schedule("w0")) is not None:
            invariants.check_plan(self.core, plan)
        worker = self.core.workers["w0"]
        if not worker.in_flight:
            return False
        plan = worker.in_flight[0]
        for item in plan.scheduled:
            if item.sequence.status is not Status.FINISHED:
                self.steps.setdefault(item.sequence.request_id, []).append(plan.number)
        ends = {
            name: FinishReason.STOP
            for name, length in self.stop_at.items()
            if any(i.sequence.request_id == name and len(i.sequence.output) + 1 == length for i in plan.scheduled)
        }
        for sequence in self.core.apply("w0", builders.outcome(plan, ends)):
            self.ended[sequence.request_id] = plan.number
            self.core.finish(sequence, FinishReason.STOP, tell_worker=False)
        invariants.check(self.core)
        return True

    def drain(self) -> None:
        while self.step():
            pass
        invariants.check_idle(self.core)


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_the_paper_s_picture(policy: str) -> None:
    """Lengths 2, 5 and 8, three slots: R4 joins in the very step after R1 has ended."""
    run = Run(policy, max_num_seqs=3)
    for name, length in (("R1", 2), ("R2", 5), ("R3", 8)):
        run.add(name, 4, length)
    run.step()
    run.add("R4", 4, 4)
    run.drain()
    assert run.ended["R1"] == run.steps["R1"][-1]
    assert run.steps["R4"][0] == run.ended["R1"] + 1
    assert run.ended == {"R1": 2, "R2": 5, "R4": 6, "R3": 8}


def test_request_level_holds_the_batch_until_its_last_member_ends() -> None:
    run = Run("request-level", max_num_seqs=3)
    for name, length in (("R1", 2), ("R2", 5), ("R3", 8)):
        run.add(name, 4, length)
    run.step()
    run.add("R4", 4, 4)
    run.drain()
    assert run.steps["R4"][0] > run.ended["R3"]


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_an_early_stop_frees_its_slot(policy: str) -> None:
    run = Run(policy, max_num_seqs=1)
    run.stop_at = {"a": 3}
    run.add("a", 4, 50)
    run.add("b", 4, 1)
    run.drain()
    assert len(run.steps["a"]) == 3
    assert run.ended["b"] <= run.ended["a"] + 3


def test_orca_first_come_first_served_by_iteration() -> None:
    """x before y means iterations(x) >= iterations(y), at every moment."""
    run = Run("orca", max_num_seqs=3, num_blocks=40)
    order = []
    for index in range(12):
        order.append(run.add(f"r{index}", 3 + index % 5, 2 + index * 7 % 11).request_id)
        run.step()
        counts = [len(run.steps.get(name, [])) for name in order if name not in run.ended]
        assert counts == sorted(counts, reverse=True)
    run.drain()


def test_orca_head_of_line_blocking_is_designed_in() -> None:
    """A large max_tokens at the head blocks later admissions, though a smaller one would fit; not the running."""
    run = Run("orca", num_blocks=16, block_size=4)
    run.add("running", 4, 20)  # 6 blocks
    run.step()
    run.add("large", 4, 50)  # 14 blocks: does not fit
    run.add("small", 4, 2)
    before = len(run.steps["running"])
    for _ in range(5):
        run.step()
    assert "small" not in run.steps
    assert len(run.steps["running"]) == before + 5
    run.drain()
    assert run.steps["large"][0] > run.ended["running"]
    assert run.steps["small"][0] >= run.steps["large"][0]


def test_orca_reserves_and_so_never_preempts() -> None:
    run = Run("orca", num_blocks=12, block_size=4)
    for index in range(10):
        run.add(f"r{index}", 6, 20)
    run.drain()
    assert run.core.counters.preemptions == 0
    assert len(run.ended) == 10


def test_orca_keeps_one_batch_per_stage_in_flight() -> None:
    """Three stages, max_bs 2: AB, CD, EF go in; when AB returns it is chosen again."""
    core = builders.scheduler("orca", stages=3, max_num_seqs=2)
    for index, name in enumerate("ABCDEF"):
        core.add([builders.sequence(name, 2, 5, index)])
    batches = []
    while (plan := core.schedule("w0")) is not None:
        batches.append("".join(item.sequence.request_id for item in plan.scheduled))
    assert batches == ["AB", "CD", "EF"]
    core.apply("w0", builders.outcome(core.workers["w0"].in_flight[0]))
    again = core.schedule("w0")
    assert again is not None
    assert "".join(item.sequence.request_id for item in again.scheduled) == "AB"


def test_chunked_decodes_first_then_part_done_prefills_then_new() -> None:
    core = builders.scheduler("chunked", token_budget=8, max_in_flight=1)
    core.add([builders.sequence("decoding", 3, 9, 0)])
    core.apply("w0", builders.outcome(_plan(core)))
    core.add([builders.sequence("long", 12, 4, 1)])
    core.add([builders.sequence("later", 4, 4, 2)])
    plan = _plan(core)
    assert [(i.sequence.request_id, i.num_tokens) for i in plan.scheduled] == [("decoding", 1), ("long", 7)]
    core.apply("w0", builders.outcome(plan))
    plan = _plan(core)
    assert [(i.sequence.request_id, i.num_tokens) for i in plan.scheduled] == [
        ("decoding", 1),
        ("long", 5),
        ("later", 2),
    ]


def test_phase_separated_never_mixes_and_prefills_first() -> None:
    core = builders.scheduler("phase-separated", token_budget=8, max_in_flight=1)
    core.add([builders.sequence("decoding", 3, 9, 0)])
    core.apply("w0", builders.outcome(_plan(core)))
    core.add([builders.sequence("long", 12, 4, 1)])
    steps = []
    for _ in range(4):
        plan = _plan(core)
        steps.append(sorted((item.sequence.request_id, item.num_tokens) for item in plan.scheduled))
        core.apply("w0", builders.outcome(plan))
    assert steps == [[("long", 8)], [("long", 4)], [("decoding", 1), ("long", 1)], [("decoding", 1), ("long", 1)]]


def _plan(core: Scheduler):  # type: ignore[no-untyped-def]
    plan = core.schedule("w0")
    assert plan is not None
    return plan


def test_a_plan_is_a_delta() -> None:
    """A sequence that decodes on is not mentioned at all; with depth two it is planned before its result is back."""
    core = builders.scheduler("chunked")
    core.add([builders.sequence("a", 3, 9)])
    first, second = _plan(core), _plan(core)
    assert core.schedule("w0") is None, "two in flight are enough"
    assert first.full
    assert first.chunks == ((1, 3),)
    assert [(i.sequence.request_id, i.num_tokens) for i in second.scheduled] == [("a", 1)]
    assert (second.add, second.chunks, second.hold, second.resume, second.release) == ((), (), (), (), ())


def test_preemption_takes_the_last_and_keeps_its_output() -> None:
    run = Run("chunked", num_blocks=8, block_size=4)
    old = run.add("old", 8, 20)
    young = run.add("young", 8, 20)
    while not young.num_preemptions:
        assert run.step()
    assert young.status is Status.PREEMPTED
    assert not young.block_table
    assert old.status is Status.RUNNING
    kept = len(young.output)
    assert kept > 0
    run.drain()
    assert len(young.output) == 20
    assert len(old.output) == 20
    assert old.num_preemptions == 0


def test_what_can_never_fit_is_known() -> None:
    core = builders.scheduler("chunked", num_blocks=4, block_size=4)
    assert core.can_ever_fit(builders.sequence("a", 10, 7))
    assert not core.can_ever_fit(builders.sequence("b", 10, 8))


@pytest.mark.parametrize("policy", sorted(BATCHING_POLICIES))
def test_work_is_spread_over_workers(policy: str) -> None:
    core = builders.scheduler(policy, workers=2)
    for index in range(4):
        core.add([builders.sequence(f"r{index}", 3, 4, index)])
        for name in core.workers:
            core.schedule(name)
    placed = [len(worker.running) for worker in core.workers.values()]
    assert sum(placed) >= 2
    if policy != "request-level":
        assert min(placed) >= 1
