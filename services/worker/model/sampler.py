"""Sampling: a function of (seed, prompt, choice, position), row by row, vectorised over the rows of a step.

One counter-based uniform per row and inverse CDF. Never a full sort: candidates come from top-k first. Greedy rows
skip all of it. Whatever is reduced is reduced along a row, so a neighbour cannot change a row's result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.common.request import SamplingParams
from services.worker.core.plan import Sampled, TokenLogprobs
from services.worker.model.backend import Draw
from services.worker.model.transfer import staged

GREEDY_BELOW = 1e-3
FIRST_CANDIDATES = 64
SPAN = 256
FORCED = 1e9  # more than any two logits are apart
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: how to sample it, and the history that penalties look at."""

    params: SamplingParams
    prompt_index: int
    choice: int
    tokens: Sequence[int]  # prompt and output
    num_prompt: int
    banned: Sequence[int]
    constrained: bool = False

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def draw(self) -> Draw | None:
        """The whole of it, but for a constraint, if nothing is asked of the logits but a token at a temperature."""
        params = self.params
        changed = params.logit_bias or params.presence_penalty or params.frequency_penalty or self.banned
        if changed or params.logprobs is not None or params.repetition_penalty != 1.0:
            return None
        return Draw(0.0) if self.greedy else self.by_temperature

    @property
    def by_temperature(self) -> Draw:
        params = self.params
        return Draw(params.temperature, self.uniform, params.top_k, params.top_p, params.min_p)

    @property
    def uniform(self) -> float:
        return uniform(self.params.seed, self.prompt_index, self.choice, self.num_output)


def _mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, prompt_index: int, choice: int, position: int) -> float:
    """A number in [0, 1) for one position of one choice; the same wherever and whenever it is asked for."""
    key = _mix(_mix(seed & _MASK) ^ _mix((prompt_index << 32) | choice))
    return (_mix(key ^ _mix(position)) >> 11) / (1 << 53)


# Tokens that constrained rows may have, by row: bool [vocabulary]. None of one whose constraint has failed.
Allowed = Mapping[int, torch.Tensor | None]


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], allowed: Allowed | None = None) -> list[Sampled]:
    """logits: [rows, vocabulary] float32, changed in place. One Sampled per row."""
    allowed = allowed or {}
    finite = ~torch.isnan(logits.amax(dim=-1))
    wanting = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    logprobs = torch.log_softmax(logits[wanting], dim=-1) if wanting else None
    for index, row in enumerate(rows):
        _adjust(logits[index], row, allowed.get(index))
    failed = {index for index, mask in allowed.items() if mask is None}
    tokens = torch.argmax(logits, dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.greedy and bool(finite[index])]
    if drawn:
        tokens[drawn] = draw_tokens(logits[drawn], [rows[index].by_temperature for index in drawn])
    chosen = tokens.tolist()
    details = dict(zip(wanting, _details(logprobs, wanting, chosen, rows), strict=True)) if logprobs is not None else {}
    return [
        Sampled(chosen[index], details.get(index)) if ok and index not in failed else Sampled(None)
        for index, ok in enumerate(finite.tolist())
    ]


def _adjust(logits: torch.Tensor, row: SampleRow, allowed: torch.Tensor | None = None) -> None:
    """Penalties, bias, bans and constraint of one row, in place; does nothing for a plain row."""
    params = row.params
    # Where a constraint says what may come, that alone is absolute: of what it leaves, all may be banned.
    low = -FORCED if allowed is not None else float("-inf")
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.num_output:
        output = list(row.tokens[row.num_prompt :])
        ids, counts = torch.unique(torch.tensor(output, device=logits.device), return_counts=True)
        logits[ids] -= counts * params.frequency_penalty + params.presence_penalty
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device, dtype=logits.dtype)
        # -100 bans and +100 forces, as users of the API expect, whatever the logits' scale.
        for token, bias in params.logit_bias.items():
            if abs(bias) >= 100:
                logits[token] += low if bias < 0 else FORCED
    if row.banned:
        logits[list(row.banned)] += low
    if allowed is not None:
        logits.masked_fill_(~allowed, float("-inf"))


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Token ids, [rows], at temperatures above 0. On a GPU nothing here waits for the device."""
    device = logits.device
    temperature = staged([draw.temperature for draw in draws], logits.dtype, device)
    scaled = logits / temperature.unsqueeze(1)
    u = staged([draw.uniform for draw in draws], torch.float64, device)
    out = torch.empty(len(draws), dtype=torch.long, device=device)
    filtered = [bool(draw.top_k > 0 or draw.top_p < 1.0 or draw.min_p > 0.0) for draw in draws]
    for wanted, function in ((False, _draw_plain), (True, _draw_filtered)):
        chosen = [index for index, flag in enumerate(filtered) if flag is wanted]
        if chosen:
            at = staged(chosen, torch.int64, device)
            tokens = function(scaled.index_select(0, at), [draws[index] for index in chosen], u.index_select(0, at))
            out.index_copy_(0, at, tokens)
    return out


def _draw_plain(scaled: torch.Tensor, _: Sequence[Draw], u: torch.Tensor) -> torch.Tensor:
    """Inverse CDF in two levels: which span of the vocabulary, then which token of it. Sums in float64."""
    probabilities = torch.softmax(scaled, dim=-1)
    vocabulary = probabilities.shape[1]
    spans = torch.nn.functional.pad(probabilities, (0, -vocabulary % SPAN)).unflatten(1, (-1, SPAN))  # type: ignore[no-untyped-call]
    ends = spans.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = (u * ends[:, -1]).unsqueeze(1)
    span = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[1] - 1)
    before = torch.where(span > 0, ends.gather(1, (span - 1).clamp(min=0)), 0.0)
    chosen = spans[torch.arange(len(spans), device=spans.device), span.squeeze(1)].double().cumsum(dim=-1)
    within = torch.searchsorted(chosen, target - before, right=True).squeeze(1)
    # Rounding may leave the target at the span's very end: its last token that can be.
    last = SPAN - 1 - (chosen.diff(dim=-1, prepend=torch.zeros_like(chosen[:, :1])) > 0).flip(1).int().argmax(dim=-1)
    return (span.squeeze(1) * SPAN + torch.minimum(within, last)).clamp(max=vocabulary - 1)


def _invert(cdf: torch.Tensor, total: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """First index whose cumulated weight passes u x total."""
    index = torch.searchsorted(cdf, (u * total).unsqueeze(1), right=True).squeeze(1)
    return index.clamp(max=cdf.shape[1] - 1)


def _draw_filtered(scaled: torch.Tensor, draws: Sequence[Draw], u: torch.Tensor) -> torch.Tensor:
    """Rows with top-k, top-p or min-p: on a CPU only as many candidates as the widest of them needs. On a GPU to ask
    whether they were enough would be to wait, and sorting all of them is cheap."""
    vocabulary = scaled.shape[1]
    device = scaled.device
    norm = torch.logsumexp(scaled, dim=-1, keepdim=True)
    limits = staged([draw.top_k or vocabulary for draw in draws], torch.int64, device)
    top_p = staged([draw.top_p for draw in draws], torch.float64, device)
    min_p = staged([draw.min_p for draw in draws], torch.float64, device)
    width = vocabulary
    if device.type == "cpu":
        width = min(vocabulary, max(FIRST_CANDIDATES, *(draw.top_k for draw in draws)))
    while True:
        values, ids = _candidates(scaled, width)
        probabilities = torch.exp(values - norm).double()
        before = probabilities.cumsum(dim=-1) - probabilities
        keep = (torch.arange(width, device=device) < limits.unsqueeze(1)) & (before < top_p.unsqueeze(1))
        keep &= probabilities >= min_p.unsqueeze(1) * probabilities[:, :1]
        keep[:, 0] = True
        if width == vocabulary or not bool(keep[:, -1].logical_and(limits > width).any()):
            break
        width = min(vocabulary, width * 8)
    cdf = (probabilities * keep).cumsum(dim=-1)
    last = keep.sum(dim=-1, keepdim=True) - 1  # kept candidates are a prefix
    index = _invert(cdf, cdf.gather(1, last).squeeze(1), u).unsqueeze(1)
    return ids.gather(1, torch.minimum(index, last)).squeeze(1)


def _candidates(scaled: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` best of each row, best first, equals by lower id, so that the width changes no order."""
    values, ids = scaled.topk(width, dim=-1)
    by_id = ids.argsort(dim=-1)
    values, ids = values.gather(1, by_id), ids.gather(1, by_id)
    order = values.argsort(dim=-1, descending=True, stable=True)
    return values.gather(1, order), ids.gather(1, order)


def _details(
    logprobs: torch.Tensor | None, wanting: list[int], chosen: list[int], rows: Sequence[SampleRow]
) -> list[TokenLogprobs]:
    if logprobs is None:
        return []
    most = max(rows[index].params.logprobs or 0 for index in wanting)
    values, ids = logprobs.topk(most, dim=-1) if most else (None, None)
    out = []
    for position, index in enumerate(wanting):
        count = rows[index].params.logprobs or 0
        top: tuple[tuple[int, float], ...] = ()
        if values is not None and ids is not None and count:
            top = tuple(zip(ids[position, :count].tolist(), values[position, :count].tolist(), strict=True))
        out.append(TokenLogprobs(float(logprobs[position, chosen[index]]), top))
    return out


def score(logits: torch.Tensor, following: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of tokens that are known: logits [rows, vocabulary] of the positions before them, `count` alternatives each."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs[torch.arange(len(following)), torch.tensor(following, device=logprobs.device)].tolist()
    if not count:
        return [TokenLogprobs(value, ()) for value in chosen]
    values, ids = (part.tolist() for part in logprobs.topk(count, dim=-1))
    return [TokenLogprobs(value, tuple(zip(ids[row], values[row], strict=True))) for row, value in enumerate(chosen)]
