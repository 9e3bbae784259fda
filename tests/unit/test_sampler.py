"""The sampler: each row by itself, by its own parameters."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from services.common.request import SamplingParams
from services.worker.model.sampler import SampleRow, sample, uniform

VOCAB = 300
PLAIN = SamplingParams(max_tokens=10, temperature=1.0, seed=1)


def row(params: SamplingParams, output: tuple[int, ...] = (), banned: tuple[int, ...] = ()) -> SampleRow:
    return SampleRow(params, 0, 0, (1, 2, 3, *output), 3, banned)


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(params: SamplingParams, times: int = 400, source: torch.Tensor | None = None) -> Counter[int | None]:
    base = logits() if source is None else source
    rows = [row(replace(params, seed=seed)) for seed in range(times)]
    return Counter(s.token_id for s in sample(base.expand(times, -1).clone(), rows))


def test_greedy_is_the_argmax_and_a_tiny_temperature_is_greedy() -> None:
    want = int(logits().argmax())
    for temperature in (0.0, 1e-4, 1e-30, 5e-324):
        assert sample(logits(), [row(replace(PLAIN, temperature=temperature))])[0].token_id == want


def test_what_a_constraint_allows_is_absolute() -> None:
    """Whatever bias, bans and penalties say of it: of what is left over, something must be chosen."""
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[7, 8]] = True
    for temperature in (0.0, 1.0):
        for bias in ({7: -100.0, 8: -100.0}, {9: 100.0}, {7: -100.0}, {}):
            for banned in ((), (8,), (7, 8), (9,)):
                params = replace(PLAIN, temperature=temperature, logit_bias=bias, repetition_penalty=1.5)
                constrained = replace(row(params, (7,), banned), constrained=True)
                (got,) = sample(logits(), [constrained], {0: allowed})
                assert got.token_id in (7, 8)
                if bias == {7: -100.0} and not banned:
                    assert got.token_id == 8, "a ban counts where there is another"
    (failed,) = sample(logits(), [replace(row(PLAIN), constrained=True)], {0: None})
    assert failed.token_id is None


def test_a_neighbour_changes_nothing() -> None:
    variants = [
        PLAIN,
        replace(PLAIN, temperature=0.0),
        replace(PLAIN, top_p=0.9),
        replace(PLAIN, top_k=5, seed=9),
        replace(PLAIN, min_p=0.1, repetition_penalty=1.3),
        replace(PLAIN, top_p=0.999999, logprobs=3),
    ]
    base = logits(len(variants))
    together = sample(base.clone(), [row(p, (5, 5, 9)) for p in variants])
    alone = [sample(base[i : i + 1].clone(), [row(p, (5, 5, 9))])[0] for i, p in enumerate(variants)]
    assert together == alone


def test_uniform_depends_on_each_of_its_arguments_and_is_spread() -> None:
    base = uniform(7, 0, 0, 0)
    assert base == uniform(7, 0, 0, 0)
    assert len({base, uniform(8, 0, 0, 0), uniform(7, 1, 0, 0), uniform(7, 0, 1, 0), uniform(7, 0, 0, 1)}) == 5
    numbers = [uniform(3, 0, 0, position) for position in range(4000)]
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02


def test_plain_temperature_follows_the_distribution() -> None:
    source = torch.full((1, VOCAB), -50.0)
    source[0, 10], source[0, 20] = math.log(0.7), math.log(0.3)
    counts = draw(PLAIN, 2000, source)
    assert set(counts) == {10, 20}
    assert abs(counts[10] / 2000 - 0.7) < 0.04


def test_top_k_top_p_and_min_p_keep_only_their_candidates() -> None:
    order = logits()[0].argsort(descending=True).tolist()
    assert set(draw(replace(PLAIN, top_k=3))) <= set(order[:3])
    assert set(draw(replace(PLAIN, top_k=1))) == {order[0]}
    probabilities = torch.softmax(logits()[0], -1)
    cumulated, kept = 0.0, set()
    for token in order:
        if cumulated >= 0.5:
            break
        kept.add(token)
        cumulated += float(probabilities[token])
    assert set(draw(replace(PLAIN, top_p=0.5), 1000)) <= kept
    floor = 0.2 * float(probabilities.max())
    assert all(float(probabilities[t]) >= floor * 0.999 for t in draw(replace(PLAIN, min_p=0.2)) if t is not None)


def test_top_p_finds_more_candidates_when_the_first_are_not_enough() -> None:
    flat = torch.zeros(1, VOCAB)
    assert len(draw(replace(PLAIN, top_p=0.95), 2000, flat)) > 200


def test_bias_bans_and_forces_also_when_greedy() -> None:
    greedy = replace(PLAIN, temperature=0.0)
    best = int(logits().argmax())
    assert sample(logits(), [row(replace(greedy, logit_bias={17: 100.0}))])[0].token_id == 17
    assert sample(logits(), [row(replace(greedy, logit_bias={best: -100.0}))])[0].token_id != best
    assert sample(logits(), [row(greedy, banned=(best,))])[0].token_id != best


def test_penalties() -> None:
    greedy = replace(PLAIN, temperature=0.0)
    source = torch.zeros(1, VOCAB)
    source[0, 5], source[0, 6] = 2.0, 1.5
    assert sample(source.clone(), [row(greedy, (5,))])[0].token_id == 5
    assert sample(source.clone(), [row(replace(greedy, presence_penalty=1.0), (5,))])[0].token_id == 6
    assert sample(source.clone(), [row(replace(greedy, frequency_penalty=0.3), (5, 5))])[0].token_id == 6
    assert sample(source.clone(), [row(replace(greedy, repetition_penalty=2.0), (5,))])[0].token_id == 6


@pytest.mark.parametrize("params", [PLAIN, replace(PLAIN, temperature=0.0), replace(PLAIN, top_p=0.5)])
def test_a_row_of_nan_fails_alone(params: SamplingParams) -> None:
    base = logits(2)
    good = sample(base[1:].clone(), [row(params)])[0]
    base[0] = float("nan")
    assert [s.token_id for s in sample(base, [row(params), row(params)])] == [None, good.token_id]


def test_logprobs_are_of_the_model_before_bias_and_always_have_the_chosen() -> None:
    params = replace(PLAIN, temperature=0.0, logit_bias={17: 100.0}, logprobs=2)
    result = sample(logits(), [row(params)])[0]
    want = torch.log_softmax(logits()[0], -1)
    assert result.logprobs is not None
    assert result.logprobs.chosen == pytest.approx(float(want[17]))
    assert [token for token, _ in result.logprobs.top] == want.topk(2).indices.tolist()
