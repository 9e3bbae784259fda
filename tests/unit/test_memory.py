"""Prefix cache, copy on write, swap: the memory features of the core, one promise each."""

from dataclasses import replace

import pytest

from services.common.request import SamplingParams
from services.scheduler.core import invariants
from services.scheduler.core.block_manager import BlockPool
from services.scheduler.core.prefix_cache import block_digests
from services.scheduler.core.request import FinishReason, Sequence
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepPlan
from services.worker.executor.fake import FakeExecutor
from tests import builders
from tests.harness import LocalSystem


def sequence(name: str, prompt: tuple[int, ...], max_tokens: int = 4, arrival: int = 0, **more: object) -> Sequence:
    return replace(Sequence(name, 0, prompt, max_tokens, arrival), **more)


def run_all(core: Scheduler) -> list[StepPlan]:
    plans = []
    while (plan := core.schedule("w0")) is not None:
        plans.append(plan)
        for ended in core.apply("w0", builders.outcome(plan)):
            core.finish(ended, FinishReason.LENGTH, tell_worker=False)
        invariants.check(core)
    return plans


PROMPT = tuple(range(100, 114))  # 14 tokens: 3 full blocks of 4, and a bit


def test_a_prefix_is_computed_once() -> None:
    core = builders.scheduler()
    core.add([sequence("a", PROMPT)])
    run_all(core)
    core.add([sequence("b", (*PROMPT[:8], 1, 2, 3))])
    plan = run_all(core)[0]
    assert [(item.num_computed, item.num_tokens) for item in plan.add] == [(8, 3)]
    assert core.counters.hit_tokens == 8


def test_the_last_token_is_always_computed() -> None:
    """Its logits are needed, though its block is cached."""
    core = builders.scheduler()
    core.add([sequence("a", PROMPT[:12])])
    run_all(core)
    core.add([sequence("b", PROMPT[:12])])
    assert [(item.num_computed, item.num_tokens) for item in run_all(core)[0].add] == [(8, 4)]


def test_answers_are_cached_too() -> None:
    """The next turn of a chat begins with the last turn's answer."""
    core = builders.scheduler()
    first = sequence("a", PROMPT, max_tokens=6)
    core.add([first])
    run_all(core)
    core.add([sequence("b", (*PROMPT, *first.output, 1, 2))])
    assert run_all(core)[0].add[0].num_computed == 16


@pytest.mark.parametrize("more", [{"tenant": "other"}, {"adapter": "other"}])
def test_nobody_sees_another_tenant_s_or_adapter_s_prefix(more: dict[str, str]) -> None:
    core = builders.scheduler()
    core.add([sequence("a", PROMPT)])
    run_all(core)
    core.add([sequence("b", PROMPT, **more)])
    assert run_all(core)[0].add[0].num_computed == 0


def test_digests_are_chained_and_salted() -> None:
    def digests(prompt: tuple[int, ...], **more: str) -> list[bytes]:
        return block_digests(sequence("x", prompt, **more), 4, 2)

    base = digests(tuple(range(8)))
    assert base == digests(tuple(range(8)))
    assert base[1] != digests((9, 1, 2, 3, 4, 5, 6, 7))[1], "an equal block after another beginning is another block"
    assert digests(tuple(range(8)), tenant="ab", adapter="c") != digests(tuple(range(8)), tenant="a", adapter="bc")


def test_eviction_takes_what_was_used_least_recently() -> None:
    pool = BlockPool(4, 4)
    for digest in (b"old", b"new"):
        (block,) = pool.allocate(1) or []
        pool.remember(block, digest)
        pool.free([block])
    pool.share(pool.find([b"old"]))  # used again
    pool.free(pool.find([b"old"]))
    pool.allocate(3)
    assert pool.find([b"old"])
    assert not pool.find([b"new"])


def test_a_prefix_outlives_its_continuation() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(3) or []
    for block, digest in zip(table, (b"1", b"2", b"3"), strict=True):
        pool.remember(block, digest)
    pool.free(reversed(table))
    pool.allocate(1)
    assert len(pool.find([b"1", b"2", b"3"])) == 2


def test_choices_share_their_prompt_and_copy_what_they_write() -> None:
    core = builders.scheduler(num_blocks=16)
    choices = [replace(sequence("a", PROMPT, max_tokens=8), choice=choice) for choice in range(3)]
    core.add(choices)
    first = core.schedule("w0")
    assert first is not None
    assert [item.sequence.choice for item in first.add] == [0], "the others wait for the prompt"
    core.apply("w0", builders.outcome(first))
    second = core.schedule("w0")
    assert second is not None
    assert [(item.num_computed, item.num_tokens) for item in second.add] == [(13, 1), (13, 1)]
    source = choices[0].block_table[3]
    assert second.copies == ((source, choices[1].block_table[3]), (source, choices[2].block_table[3]))
    assert len({tuple(choice.block_table[:3]) for choice in choices}) == 1
    invariants.check(core)
    core.apply("w0", builders.outcome(second))
    run_all(core)
    invariants.check_idle(core)


def test_without_the_cache_nothing_is_shared() -> None:
    core = builders.scheduler(config=replace(builders.scheduler().config, prefix_cache=False))
    core.add([replace(sequence("a", PROMPT), choice=choice) for choice in range(3)])
    plans = run_all(core)
    assert [item.num_computed for item in plans[0].add] == [0, 0, 0]
    assert core.counters.hit_tokens == 0


@pytest.mark.parametrize("swap_s", [0.0, 1e6])
def test_swap_or_recompute_whichever_costs_less(swap_s: float) -> None:
    prompts = {f"r{i}": [50 * i + j for j in range(9)] for i in range(4)}
    params = SamplingParams(max_tokens=20, temperature=0.0)
    want = {}
    for name, prompt in prompts.items():
        alone = LocalSystem([FakeExecutor(64, 4, 1000)])
        alone.submit(name, prompt, params)
        want[name] = alone.run()[name].tokens
    executor = FakeExecutor(14, 4, 1000, num_host_blocks=20)
    executor.swap_s = swap_s
    system = LocalSystem([executor], headroom=0)
    for name, prompt in prompts.items():
        system.submit(name, prompt, params)
    assert {name: record.tokens for name, record in system.run().items()} == want
    counters = system.core.counters
    assert counters.preemptions > 0
    assert counters.swaps == (counters.preemptions if not swap_s else 0)
