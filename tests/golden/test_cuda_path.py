"""All of the CUDA back end but its kernels, on a CPU: tables, padding, staging and draws against the reference."""

import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigurationError
from services.common.models.resolve import resolve_model
from services.worker.model import paged
from services.worker.model.backend import Draw, FlatStep, SequenceSpan, Unavailable
from services.worker.model.cuda import memory, tables
from services.worker.model.cuda.attention import AttentionShape, flashinfer_attention
from services.worker.model.cuda.backend import CudaBackend
from services.worker.model.loader import load_model
from services.worker.model.reference import ReferenceBackend
from services.worker.model.sampler import draw_tokens
from tests.golden.paged_torch import TorchAttention, rerun, torch_attention
from tests.golden.test_families import make_folder

CPU = torch.device("cpu")
BLOCK, BLOCKS = 16, 120


class Both:
    """The same random model on both back ends."""

    def __init__(self, folder: Path, family: str = "llama") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_folder(folder, family, initializer_range=0.15)
            files = resolve_model(str(folder))
            paged.register()
            self.reference = ReferenceBackend(load_model(files, torch.float32, CPU), torch.float32, CPU, BLOCK)
            model = load_model(files, torch.float32, CPU)
        attention = model.model.layers[0].self_attn
        shape = AttentionShape(4, 2, attention.head_dim, BLOCK, attention.scaling, torch.float32, CPU)
        self.made: list[TorchAttention] = []
        self.replays: list[int] = []
        self.cuda = CudaBackend(model, shape, torch_attention(shape, self.made), rerun(self.replays))
        for backend in (self.reference, self.cuda):
            backend.allocate(BLOCKS)
            backend.prepare()

    def step(self, step: FlatStep) -> None:
        got, want = self.cuda.forward(step), self.reference.forward(step)
        assert got.values is not None
        assert want.values is not None
        assert got.values.shape == want.values.shape
        assert (got.values - want.values).abs().max() < 1e-4 * want.values.abs().max()
        assert got.chosen == want.chosen


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return Both(tmp_path / "m")


def flat(
    lengths: list[int], contexts: list[int], pools: list[list[int]], generator: torch.Generator, wanted: bool = True
) -> FlatStep:
    """The next `lengths` tokens of each sequence; those of length 0 rest. Tables may hold a block for later."""
    tokens: list[int] = []
    spans = []
    for index, length in enumerate(lengths):
        if not length:
            continue
        contexts[index] += length
        held = math.ceil(contexts[index] / BLOCK) + index % 2
        spans.append(SequenceSpan(len(tokens), length, contexts[index], pools[index][:held]))
        tokens += torch.randint(0, 256, (length,), generator=generator).tolist()
    rows = [span.start + span.length - 1 for span in spans] if wanted else []
    return FlatStep(tokens, spans, rows, [None] * len(rows))


def scattered(count: int, generator: torch.Generator) -> list[list[int]]:
    """Blocks of each sequence, in no order."""
    order = torch.randperm(BLOCKS, generator=generator).tolist()
    share = BLOCKS // count
    return [order[index * share : (index + 1) * share] for index in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_mixed_steps_and_padded_decodes_are_the_reference_s(tmp_path: Path, family: str) -> None:
    both = Both(tmp_path / "m", family)
    generator = torch.Generator().manual_seed(5)
    contexts, pools = [0] * 5, scattered(5, generator)
    for lengths in ([5, 1, 17, 0, 33], [16, 40, 1, 3, 1], [1, 1, 1, 13, 0]):
        both.step(flat(lengths, contexts, pools, generator))
    assert not both.replays
    for lengths in ([1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 1, 0, 0, 0], [1, 1, 0, 1, 1]):
        both.step(flat(lengths, contexts, pools, generator))
    assert both.replays == [8, 4, 1, 4]  # the next larger graph each
    both.step(flat([2, 1, 1, 1, 1], contexts, pools, generator))  # what padding wrote is in nobody's way
    assert len(both.replays) == 4


def test_padding_writes_only_where_nobody_reads(both: Both) -> None:
    generator = torch.Generator().manual_seed(6)
    contexts, pools = [0] * 3, scattered(3, generator)
    both.step(flat([20, 30, 16], contexts, pools, generator))
    before = [(keys.clone(), values.clone()) for keys, values in both.cuda.caches]
    step = flat([1, 1, 1], contexts, pools, generator)
    both.step(step)
    assert both.replays == [4]
    written = {span.block_table[(span.context - 1) // BLOCK] for span in step.spans} | {BLOCKS}
    for (keys, values), (old_keys, old_values) in zip(both.cuda.caches, before, strict=True):
        changed = (keys != old_keys).flatten(1).any(1) | (values != old_values).flatten(1).any(1)
        assert set(changed.nonzero().flatten().tolist()) <= written


def test_a_step_that_samples_nothing_and_one_that_is_larger_than_the_staging(both: Both) -> None:
    generator = torch.Generator().manual_seed(7)
    contexts, pools = [0], [list(range(BLOCKS))]
    assert both.cuda.forward(flat([40], contexts, pools, generator, wanted=False)).chosen == []
    both.cuda._staging = type(both.cuda._staging)(8, CPU)
    both.reference.forward(flat([40], [0], pools, torch.Generator().manual_seed(7), wanted=False))
    both.step(flat([21], contexts, pools, generator))


def test_draws_of_a_graph_s_rows_are_the_sampler_s(both: Both) -> None:
    """Greedy, plain, filtered and adjusted rows side by side; each is what it is alone."""
    generator = torch.Generator().manual_seed(8)
    contexts, pools = [0] * 6, scattered(6, generator)
    both.step(flat([9] * 6, contexts, pools, generator))
    step = flat([1] * 6, contexts, pools, generator)
    draws = [Draw(0.0), Draw(0.8, 0.3), Draw(1.0, 0.9, 5), Draw(1.5, 0.5, 0, 0.7), Draw(0.9, 0.1, 0, 1.0, 0.05), None]
    want = both.reference.forward(step)
    assert want.values is not None
    got = both.cuda.forward(FlatStep(step.tokens, step.spans, step.wanted, draws))
    for index, draw in enumerate(draws):
        greedy = draw is None or not draw.temperature
        alone = want.chosen[index] if greedy else int(draw_tokens(want.values[index : index + 1], [draw])[0])  # type: ignore[list-item]
        assert got.chosen[index] == alone
    assert both.replays == [8]


def test_logits_that_are_no_numbers_choose_nothing(both: Both) -> None:
    generator = torch.Generator().manual_seed(9)
    contexts, pools = [0] * 2, scattered(2, generator)
    both.step(flat([9, 9], contexts, pools, generator))
    for keys, _ in both.cuda.caches:
        keys[pools[1][0]] = float("nan")
    step = flat([1, 1], contexts, pools, generator)
    chosen = both.cuda.forward(FlatStep(step.tokens, step.spans, step.wanted, [Draw(0.7, 0.5)] * 2)).chosen
    assert chosen[0] >= 0
    assert chosen[1] == -1


def test_what_the_library_cannot_do_is_said_in_a_line() -> None:
    shape = AttentionShape(4, 2, 64, BLOCK, 0.1, torch.float32, CPU)
    with pytest.raises(Unavailable, match="not in torch"):
        flashinfer_attention(shape)
    with pytest.raises(Unavailable, match="head size 96"):
        flashinfer_attention(replace(shape, dtype=torch.bfloat16, head_dim=96))


spans_of_steps = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), min_size=1, max_size=12)


@given(shape=spans_of_steps, block_size=st.sampled_from([1, 16, 32]))
def test_tables_say_where_every_row_is(shape: list[tuple[int, int]], block_size: int) -> None:
    spans, tokens, first = [], 0, 100
    for length, before in shape:
        count = -(-(length + before) // block_size)
        spans.append(SequenceSpan(tokens, length, length + before, list(range(first, first + count))))
        tokens, first = tokens + length, first + count
    step = FlatStep(list(range(tokens)), spans, [span.start + span.length - 1 for span in spans], [None] * len(spans))
    made = tables.build_tables(step, block_size)
    assert made.contexts == [length + before for length, before in shape]
    assert len(set(made.slots)) == tokens
    for index, span in enumerate(spans):
        assert made.query_starts[index : index + 2] == [span.start, span.start + span.length]
        pages = made.pages[made.page_starts[index] : made.page_starts[index + 1]]
        assert pages == span.block_table
        for row in range(span.start, span.start + span.length):
            position = made.positions[row]
            assert position == span.context - span.length + row - span.start
            assert made.slots[row] == pages[position // block_size] * block_size + position % block_size


@given(rows=st.integers(1, 300), most=st.integers(1, 256))
def test_graphs_are_the_smallest_that_hold_the_rows(rows: int, most: int) -> None:
    sizes = tables.graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    size = tables.size_for(rows, sizes)
    assert (size is None) == (rows > most)
    assert size is None or (size >= rows and all(other < rows for other in sizes if other < size))


def test_padding_makes_further_sequences_of_one_token() -> None:
    step = FlatStep([7, 8], [SequenceSpan(0, 1, 17, [3, 4]), SequenceSpan(1, 1, 1, [9, 5])], [0, 1], [None, None])
    made = tables.padded(tables.build_tables(step, 16), 4, spare_block=50)
    assert made.tokens == [7, 8, 0, 0]
    assert made.slots == [64, 144, 800, 800]
    assert made.query_starts == [0, 1, 2, 3, 4]
    assert made.page_starts == [0, 2, 3, 4, 5]
    assert made.pages == [3, 4, 9, 50, 50]
    assert made.last_page == [1, 1, 1, 1]
    assert made.contexts == [17, 1, 1, 1]


def test_blocks_by_memory() -> None:
    gib = 1 << 30
    blocks = memory.blocks_that_fit(80 * gib, 0.9, 20 * gib, 2 * gib, 2 << 20, least=64)
    assert blocks == 50 * 512
    with pytest.raises(ConfigurationError, match=r"90% of 81920 MiB leaves 0 MiB, and one sequence .* takes 128 MiB"):
        memory.blocks_that_fit(80 * gib, 0.9, 75 * gib, 2 * gib, 2 << 20, least=64)


def test_the_step_that_memory_is_measured_with_runs(both: Both) -> None:
    step = memory.profile_step(96, 6, BLOCK)
    assert len(step.tokens) == 96
    assert sum(len(span.block_table) for span in step.spans) == 6
    both.step(step)
