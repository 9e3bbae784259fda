"""Exact output on the real weights in float32.

(A) Against transformers' own generate, one by one. (B) Bit-equal to our own one-by-one run, whatever the batch.
"""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from services.common.models.resolve import ModelFiles
from services.common.request import SamplingParams
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES
from services.worker.core.plan import BlockCopy, Copy
from services.worker.executor.torch_executor import TorchExecutor
from tests.golden.conftest import FULL_TOKENS, NUM_TOKENS, needs_fast_kernels
from tests.harness import Generated, LocalSystem

pytestmark = pytest.mark.golden
Prompts = tuple[tuple[int, ...], ...]
CLOSE = 1e-3
# (name, prompt, sampled): short ones and a long one.
FEW = [("g2", 2, False), ("s3", 3, True), ("g15", 15, False), ("s16", 16, True), ("g23", 23, False)]


class SmallPool:
    """The same executor, of which the scheduler is shown fewer blocks."""

    def __init__(self, executor: TorchExecutor, first: int, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._executor = executor
        self._first = first
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.swap_s = 0.0  # whatever a copy takes here: where there is host memory, it is used
        self.block_size = executor.block_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def copy(self, copies: list[BlockCopy]) -> None:
        def shifted(blocks: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(block + self._first for block in blocks)

        self._executor.copy(
            [
                BlockCopy(
                    copy.kind,
                    copy.sources if copy.kind is Copy.TO_DEVICE else shifted(copy.sources),
                    copy.targets if copy.kind is Copy.TO_HOST else shifted(copy.targets),
                )
                for copy in copies
            ]
        )

    def execute(self, rows: list[Any], banned: list[list[int]]) -> list[Any]:
        tables = [row.sequence.block_table for row in rows]
        for row in rows:
            row.sequence.block_table = [block + self._first for block in row.sequence.block_table]
        try:
            return self._executor.execute(rows, banned)
        finally:
            for row, table in zip(rows, tables, strict=True):
                row.sequence.block_table = table


def params(index: int, sampled: bool) -> SamplingParams:
    """Greedy, or temperature 0.8 with a seed of its own and, now and then, a filter."""
    if not sampled:
        return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.8,
        seed=1000 + index,
        ignore_eos=True,
        logprobs=0,
        top_p=0.9 if index % 3 == 1 else 1.0,
        top_k=40 if index % 3 == 2 else 0,
    )


def names(prompts: Prompts) -> Iterator[tuple[str, int, bool]]:
    """(name, prompt, sampled) of every prompt, greedy and sampled."""
    for index in range(len(prompts)):
        yield f"g{index}", index, False
        yield f"s{index}", index, True


def some(prompts: Prompts) -> list[tuple[str, int, bool]]:
    """All of them in the full profile; every third, the long prompts among them, in the quick one."""
    return list(names(prompts))[:: 1 if NUM_TOKENS == FULL_TOKENS else 3]


@pytest.fixture(scope="module")
def alone(executor: TorchExecutor, prompts: Prompts) -> dict[str, Generated]:
    """Every prompt by itself, greedy and sampled."""
    out = {}
    for name, index, sampled in names(prompts):
        system = LocalSystem([executor], prefix_cache=False)
        system.submit(name, prompts[index], params(index, sampled))
        out |= system.run()
    return out


def compare(got: dict[str, Generated], want: dict[str, Generated]) -> None:
    assert got.keys() == want.keys()
    wrong = [
        name for name in want if (got[name].tokens, got[name].logprobs) != (want[name].tokens, want[name].logprobs)
    ]
    assert not wrong, f"{len(wrong)} of {len(want)} differ: {wrong}"
    assert all(record.finish == "length" for record in got.values())


def staggered(system: LocalSystem, prompts: Prompts, which: Iterable[tuple[str, int, bool]]) -> dict[str, Generated]:
    """A new request every step."""
    for name, index, sampled in which:
        system.submit(name, prompts[index], params(index, sampled))
        system.step()
    return system.run()


def only(which: Iterable[tuple[str, int, bool]], alone: dict[str, Generated]) -> dict[str, Generated]:
    return {name: alone[name] for name, _, _ in which}


def test_equals_transformers_generate(
    transformers_model: Any, prompts: Prompts, alone: dict[str, Generated], capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close: list[str] = []
        compared = 0
        for index, prompt in enumerate(prompts):
            result = transformers_model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            want = result.sequences[0, len(prompt) :].tolist()
            ours = alone[f"g{index}"].tokens
            for position, logits in enumerate(result.logits):
                best = logits[0].topk(2).values
                compared += 1
                if float(best[0] - best[1]) < CLOSE:
                    close.append(f"prompt {index}, position {position}: gap {float(best[0] - best[1]):.2e}")
                    break
                assert ours[position] == want[position], f"prompt {index} differs at position {position}"
    with capsys.disabled():
        print(f"\n{compared} tokens compared with transformers; close calls: {close or 'none'}")
    assert len(close) <= max(1, compared // 1000)


@pytest.mark.parametrize("policy", sorted(BATCHING_POLICIES))
def test_all_at_once(
    executor: TorchExecutor,
    prompts: Prompts,
    alone: dict[str, Generated],
    policy: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything = policy == "chunked" or (policy == "orca" and NUM_TOKENS == FULL_TOKENS)
    which = list(names(prompts)) if everything else some(prompts)
    if policy == "request-level" and NUM_TOKENS < FULL_TOKENS:  # a prompt takes as many steps as it has tokens
        which = [one for one in which if len(prompts[one[1]]) < 40]
    system = LocalSystem([executor], policy)
    compare(staggered(system, prompts, which), only(which, alone))
    mean = sum(system.batch_sizes) / len(system.batch_sizes)
    with capsys.disabled():
        print(f"\n{policy}: mean batch {mean:.1f} sequences over {len(system.batch_sizes)} steps")
    assert mean > 1


def test_prefill_in_chunks_of_16(executor: TorchExecutor, prompts: Prompts, alone: dict[str, Generated]) -> None:
    """A budget that leaves prefill 16 tokens at most; each prompt's chunks mix with others' decodes."""
    system = LocalSystem([executor], token_budget=16, max_num_seqs=8)
    which = some(prompts)
    for name, index, sampled in which:
        system.submit(name, prompts[index], params(index, sampled))
    compare(system.run(), only(which, alone))


def test_with_preemptions(executor: TorchExecutor, prompts: Prompts, alone: dict[str, Generated]) -> None:
    """A pool just larger than the longest request needs, filled to the brim at admission."""
    longest = max(map(len, prompts)) + NUM_TOKENS
    pool = SmallPool(executor, 100, longest // 16 + 4)
    system = LocalSystem([pool], headroom=0)
    compare(staggered(system, prompts, names(prompts)), alone)
    assert system.core.counters.preemptions > 0


@pytest.mark.parametrize("order", sorted(ORDER_POLICIES) if NUM_TOKENS == FULL_TOKENS else ["fair", "priority"])
def test_every_order(executor: TorchExecutor, prompts: Prompts, alone: dict[str, Generated], order: str) -> None:
    """Two tenants and three priorities in a pool that is too small: who waits and gives way differs, no text does."""
    longest = max(map(len, prompts)) + NUM_TOKENS
    system = LocalSystem([SmallPool(executor, 100, longest // 16 + 1)], order=order, headroom=0)
    which = some(prompts)
    for number, (name, index, sampled) in enumerate(which):
        system.submit(name, prompts[index], params(index, sampled), tenant="ab"[number % 2], priority=number % 3)
    compare(system.run(), only(which, alone))
    # Ten tokens hardly fill a block; the property tests preempt under every order with few blocks and many tokens.
    assert system.core.counters.preemptions > 0 or NUM_TOKENS < FULL_TOKENS


def test_swapped_to_host_memory_and_back(
    executor: TorchExecutor, prompts: Prompts, alone: dict[str, Generated]
) -> None:
    longest = max(map(len, prompts)) + NUM_TOKENS
    pool = SmallPool(executor, 100, longest // 16 + 4, num_host_blocks=executor.num_host_blocks)
    system = LocalSystem([pool], headroom=0, prefix_cache=False)
    compare(staggered(system, prompts, names(prompts)), alone)
    assert system.core.counters.swaps > 0


def test_shared_prompts(executor: TorchExecutor, prompts: Prompts) -> None:
    """Three choices of every prompt, each prompt asked for twice: shared, copied on write, found in the cache; the
    same as if everyone had computed it all."""

    def run(prefix_cache: bool) -> tuple[LocalSystem, dict[str, Generated]]:
        system = LocalSystem([executor], prefix_cache=prefix_cache)
        for again in range(2):
            for _, index, _ in some(prompts)[1::4]:
                system.submit(f"{index}-{again}", prompts[index], params(index, sampled=True), n=3)
            system.run()
        return system, system.generated

    system, shared = run(prefix_cache=True)
    _, apart = run(prefix_cache=False)
    compare(shared, apart)
    asked = {index for _, index, _ in some(prompts)[1::4]}
    assert system.core.counters.hit_tokens > 3 * sum(len(prompts[index]) // 16 * 16 for index in asked)
    assert system.workers["w0"].num_copied > 0
    assert any(shared[f"{i}-0"].tokens != shared[f"{i}-0/1"].tokens for _, i, _ in some(prompts)[1::4])


def test_two_workers(executor: TorchExecutor, prompts: Prompts, alone: dict[str, Generated]) -> None:
    system = LocalSystem([SmallPool(executor, 0, 500), SmallPool(executor, 600, 500)])
    which = some(prompts)
    compare(staggered(system, prompts, which), only(which, alone))


@needs_fast_kernels
def test_one_thread_gives_the_same_bits(files: ModelFiles, prompts: Prompts, alone: dict[str, Generated]) -> None:
    """Workers that share a machine have fewer threads than one alone."""
    system = LocalSystem([TorchExecutor(files, torch.float32, torch.device("cpu"), 200, 16, kernels="fast", threads=1)])
    compare(staggered(system, prompts, FEW), only(FEW, alone))


@needs_fast_kernels
def test_the_reference_back_end_says_the_same(files: ModelFiles, prompts: Prompts, alone: dict[str, Generated]) -> None:
    """Other products and sums, the same tokens, and bit-equal in company and alone."""
    executor = TorchExecutor(files, torch.float32, torch.device("cpu"), 200, 16, kernels="reference")
    assert executor.batch_invariant
    together = staggered(LocalSystem([executor]), prompts, FEW)
    one_by_one: dict[str, Generated] = {}
    for name in FEW:
        one_by_one |= staggered(LocalSystem([executor]), prompts, [name])
    compare(together, one_by_one)
    assert {name: record.tokens for name, record in together.items()} == {
        name: record.tokens for name, record in only(FEW, alone).items()
    }


@needs_fast_kernels
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_sixteen_bits_and_eight_are_batch_invariant_too(files: ModelFiles, prompts: Prompts, quantize: str) -> None:
    """And close to float32: the sum of rounding errors is told by loadtest/quality.py."""
    executor = TorchExecutor(
        files, torch.bfloat16, torch.device("cpu"), 200, 16, kernels="fast", quantize=quantize, threads=2
    )
    together = staggered(LocalSystem([executor]), prompts, FEW)
    one_by_one: dict[str, Generated] = {}
    for name in FEW:
        one_by_one |= staggered(LocalSystem([executor]), prompts, [name])
    compare(together, one_by_one)
