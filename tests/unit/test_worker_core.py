"""The worker's side of plans, with the fake executor: deltas, end rules, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from services.common.request import SamplingParams
from services.scheduler.core.policies import BATCHING_POLICIES
from services.worker.core.input_batch import InputBatch, PlanError
from services.worker.core.plan import BatchRow, NewSequence, Plan, Sampled, StepOutput
from services.worker.engine import StepLoop
from services.worker.executor.fake import FakeExecutor
from tests.harness import LocalSystem

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


def fake(num_blocks: int = 64) -> FakeExecutor:
    return FakeExecutor(num_blocks, 4, 1000)


def new(sequence_id: int = 1, prompt: tuple[int, ...] = (1, 2, 3)) -> NewSequence:
    return NewSequence(sequence_id, "r", 0, 0, 1, list(prompt), [], PARAMS)


@pytest.mark.parametrize("policy", sorted(BATCHING_POLICIES))
@pytest.mark.parametrize("blocks", [24, 200])
def test_tokens_do_not_depend_on_the_batch(policy: str, blocks: int) -> None:
    """The fake reads through the block table: a wrong prefix or a block reused too early changes its tokens."""
    prompts = {f"r{i}": [7 * i + j for j in range(3 + 5 * i % 13)] for i in range(20)}
    params = replace(PARAMS, max_tokens=25)
    want = {}
    for name, prompt in prompts.items():
        alone = LocalSystem([fake(200)], policy)
        alone.submit(name, prompt, params)
        want[name] = alone.run()[name].tokens
    system = LocalSystem([fake(blocks), fake(blocks)], policy, token_budget=8)
    for name, prompt in prompts.items():
        system.submit(name, prompt, params)
        system.step()
    assert {name: record.tokens for name, record in system.run().items()} == want
    if policy == "chunked" and blocks == 24:
        assert system.core.counters.preemptions > 0


def test_end_rules() -> None:
    def run(params: SamplingParams, eos: tuple[int, ...] = ()) -> tuple[int, str | None]:
        system = LocalSystem([fake()], eos=eos)
        system.submit("r", [1, 2, 3], params)
        record = system.run()["r"]
        return len(record.tokens), record.finish

    system = LocalSystem([fake()])
    system.submit("r", [1, 2, 3], PARAMS)
    third = system.run()["r"].tokens[2]
    assert run(PARAMS) == (6, "length")
    assert run(PARAMS, eos=(third,)) == (3, "stop")
    assert run(replace(PARAMS, stop_token_ids=(third,))) == (3, "stop")
    assert run(replace(PARAMS, ignore_eos=True), eos=(third,)) == (6, "length")
    length, _ = run(replace(PARAMS, min_tokens=4), eos=(third,))
    assert length >= 4, "the end token is banned before min_tokens"


class Countdown:
    """A constraint that lets anything follow, and is complete after so many tokens."""

    def __init__(self, left: int) -> None:
        self.left = left

    def fill(self, mask: np.ndarray) -> bool:
        mask.fill(-1)
        return True

    def accept(self, token: int) -> bool:
        self.left -= 1
        return not self.left


@pytest.mark.parametrize(("complete_after", "want"), [(2, "stop"), (3, "stop"), (4, "length")])
def test_a_text_that_is_complete_with_its_last_token_is_not_cut_off(complete_after: int, want: str) -> None:
    params = replace(PARAMS, max_tokens=3, grammar="any")
    batch = InputBatch(8, 4, (), constrain=lambda grammar, output: Countdown(complete_after - len(output)))
    rows = batch.apply(Plan(1, 1, add=(replace(new(), params=params),), blocks=((1, (0, 1)),), chunks=((1, 3),))).rows
    finishes = []
    for number in range(2, 6):
        finishes += [output.finish_reason for output in batch.finish_step(rows, [Sampled(7)] * len(rows))]
        rows = batch.apply(Plan(number, 1)).rows
    assert finishes == [None] * (min(complete_after, 3) - 1) + [want]
    assert not batch.sequences


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(1, 1, add=(new(),), blocks=((1, (99,)),), chunks=((1, 3),)), "not all within the pool"),
        (Plan(1, 1, add=(new(),), blocks=((1, (0,)),), chunks=((1, 4),)), "more than there are"),
        (Plan(1, 1, add=(new(),), chunks=((1, 3),)), "no slot"),
        (Plan(1, 1, add=(new(), new())), "already here"),
        (Plan(1, 1, add=(new(prompt=()),)), "no prompt"),
    ],
)
def test_a_plan_that_contradicts_is_refused(plan: Plan, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        InputBatch(8, 4, ()).apply(plan)


def test_a_full_plan_forgets_everything_and_releases_are_idempotent() -> None:
    batch = InputBatch(8, 4, ())
    batch.apply(Plan(1, 1, add=(new(),), blocks=((1, (0,)),), chunks=((1, 3),)))
    batch.apply(Plan(2, 1, release=(1, 1, 5)))
    assert not batch.sequences
    batch.apply(Plan(3, 1, add=(new(2),)))
    batch.apply(Plan(1, 2, full=True))
    assert not batch.sequences


def test_a_result_is_handed_on_as_the_next_step_begins_and_none_is_kept_back() -> None:
    """With a plan at hand its step has begun; without one, and at the end, at once."""
    events: list[str] = []

    class Executor(FakeExecutor):
        def execute(self, rows: list[BatchRow], banned: list[list[int]]) -> list[Sampled]:
            events.append(f"step {len(events)}")
            return super().execute(rows, banned)

    def emit(output: StepOutput) -> None:
        events.append(f"result of {output.plan.number}")
        loop.published([output])
        if output.plan.number == 2:
            loop.stop()

    def fail(error: Exception) -> None:
        raise error

    executor = Executor(64, 4, 1000)
    loop = StepLoop(executor, InputBatch(64, 4, ()), emit, fail, keep_results=2)
    loop.session = 1
    first = Plan(1, 1, full=True, add=(new(),), blocks=((1, (0, 1)),), chunks=((1, 3),), session=1)
    for plan in (first, Plan(2, 1, session=1), Plan(3, 1, session=1)):
        assert loop.submit(plan)
    loop.run()  # here, not on its thread
    assert events == ["step 0", "result of 1", "step 2", "result of 2", "step 4", "result of 3"]
