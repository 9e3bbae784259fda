"""The CPU kernels against the reference back end and the sampler, on random weights."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.models.resolve import resolve_model
from services.common.request import SamplingParams
from services.worker.core.plan import BatchRow, SequenceState
from services.worker.executor.torch_executor import TorchExecutor
from services.worker.model import paged
from services.worker.model.backend import FlatStep, SequenceSpan
from services.worker.model.cpu.decoder import CpuDecoder
from services.worker.model.loader import load_model
from tests.golden.conftest import needs_fast_kernels
from tests.golden.test_families import make_folder

pytestmark = needs_fast_kernels
ROWS = 96


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A vocabulary that fills neither a panel of the kernels nor a span of the draws, and flat enough to draw from.
        make_folder(tmp_path / "m", "llama", vocab_size=1003, initializer_range=0.15)
    return tmp_path / "m"


def make(folder: Path, kernels: str, **more: Any) -> TorchExecutor:
    return TorchExecutor(
        resolve_model(str(folder)), torch.float32, torch.device("cpu"), 128, 16, kernels=kernels, **more
    )


def make_decoder(folder: Path, weights: str, wide: bool) -> CpuDecoder:
    paged.register()
    files = resolve_model(str(folder))
    made = CpuDecoder(
        load_model(files, torch.float32, torch.device("cpu")), weights, 16, files.max_model_len, threads=2, wide=wide
    )
    made.allocate(128)
    return made


@pytest.mark.parametrize(
    ("weights", "wide", "most"),
    [
        ("float32", False, 1e-4),
        ("bfloat16", False, 0.03),
        ("bfloat16", True, 0.03),
        ("int8", False, 0.08),
        ("int8", True, 0.08),
    ],
)
def test_logits_of_mixed_steps_are_the_reference_s(folder: Path, weights: str, wide: bool, most: float) -> None:
    """Chunks that begin and end within blocks, decodes, contexts of one token and of many blocks, step after step."""
    fast, reference = make_decoder(folder, weights, wide), make(folder, "reference").backend
    generator = torch.Generator().manual_seed(5)
    lengths = [(5, 1, 17), (16, 40, 1), (33, 3, 30), (1, 1, 1), (70, 1, 100)]
    contexts = [0, 0, 0]
    for step in lengths:
        tokens: list[int] = []
        spans = []
        for index, length in enumerate(step):
            contexts[index] += length
            table = list(range(index * 40, index * 40 + math.ceil(contexts[index] / 16)))
            spans.append(SequenceSpan(len(tokens), length, contexts[index], table))
            tokens += torch.randint(0, 1003, (length,), generator=generator).tolist()
        wanted = [span.start + span.length - 1 for span in spans]
        flat = FlatStep(tokens, spans, wanted, [None] * len(wanted))
        got, want = fast.forward(flat), reference.forward(flat)
        assert got.values is not None
        assert want.values is not None
        assert (got.values - want.values).norm() < most * want.values.norm()
        if weights == "float32":
            assert got.chosen == want.chosen


def rows(**params: Any) -> list[BatchRow]:
    """One prompt, as often as it is drawn from."""
    tokens = [7, 11, 13]
    return [
        BatchRow(
            SequenceState(i, f"r{i}", 0, 0, 0, 0, SamplingParams(max_tokens=1, seed=i, **params), 3, tokens, 0, [i]),
            0,
            3,
        )
        for i in range(ROWS)
    ]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_p": 0.3},
        {"temperature": 1.5, "top_p": 0.99},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 2.0, "top_k": 200, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 3.0, "min_p": 0.001, "top_p": 0.999},
    ],
)
def test_tokens_are_drawn_as_the_sampler_draws_them(folder: Path, params: dict[str, Any]) -> None:
    """Same uniform number, same token; but for what lies within rounding of a border."""
    executor = make(folder, "fast", threads=2)
    drawn = [one.token_id for one in executor.execute(rows(**params), [[]] * ROWS)]
    asked_for_more = [one.token_id for one in executor.execute(rows(logprobs=0, **params), [[]] * ROWS)]
    assert len(set(drawn)) > 2
    assert sum(a != b for a, b in zip(drawn, asked_for_more, strict=True)) <= 1


class Only:
    """A constraint that lets only some tokens follow; without any it has failed."""

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def fill(self, mask: np.ndarray) -> bool:
        for token in self.allowed:
            mask[token // 32] |= np.int32(1 << token % 32 if token % 32 < 31 else -(1 << 31))
        return bool(self.allowed)

    def accept(self, token: int) -> bool:
        return False


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.1},
        {"temperature": 1.5, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 3.0, "min_p": 0.01},
    ],
)
def test_under_a_constraint_too(folder: Path, params: dict[str, Any]) -> None:
    """And neighbours without one are drawn as before."""
    executor = make(folder, "fast", threads=2)
    choices = [[1002], [0, 31, 32, 1000], list(range(200, 900)), [5, 6, 7], list(range(1003)), [], [255, 256]]

    def constrained(**more: Any) -> list[BatchRow]:
        made = rows(**params, **more)
        for i, row in enumerate(made[:-8]):
            row.sequence.constraint = Only(choices[i % len(choices)])
        return made

    drawn = [one.token_id for one in executor.execute(constrained(), [[]] * ROWS)]
    asked_for_more = [one.token_id for one in executor.execute(constrained(logprobs=0), [[]] * ROWS)]
    free = [one.token_id for one in executor.execute(rows(**params), [[]] * ROWS)]
    assert sum(a != b for a, b in zip(drawn, asked_for_more, strict=True)) <= 1
    assert drawn[-8:] == free[-8:]
    assert drawn != free
    for i, token in enumerate(drawn[:-8]):
        allowed = choices[i % len(choices)]
        assert token in allowed if allowed else token is None


def test_a_row_that_is_not_numbers_says_so_and_no_other_does(folder: Path) -> None:
    """And its blocks, used again, spoil nobody."""
    executor = make(folder, "fast", threads=2)
    clean = [one.token_id for one in executor.execute(rows(temperature=0.0)[:2], [[]] * 2)]
    keys, values = executor.backend.caches[0]
    keys[1].fill_(math.nan)
    values[1].fill_(math.nan)
    again = [one.token_id for one in executor.execute(rows(temperature=0.0)[:2], [[]] * 2)]
    assert again == clean, "a block's first token clears what was in it"
    keys[1].fill_(math.nan)
    later = rows(temperature=0.0)[:2]
    for row in later:
        row.sequence.tokens = [*row.sequence.tokens, 17]
    executor.execute([BatchRow(later[0].sequence, 3, 1), BatchRow(later[1].sequence, 3, 1)], [[]] * 2)
    keys[1].fill_(math.nan)
    spoilt = executor.execute([BatchRow(later[0].sequence, 3, 1), BatchRow(later[1].sequence, 3, 1)], [[]] * 2)
    assert spoilt[0].token_id is not None
    assert spoilt[1].token_id is None
