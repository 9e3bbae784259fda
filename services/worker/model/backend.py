"""What the executor asks of a way to run the model: a flat step in, logits out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Caches = list[tuple[torch.Tensor, torch.Tensor]]


class Unavailable(Exception):
    """Why a back end cannot run this model here, in one line."""


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's rows in the flat tensor: [start, start + length), at positions context - length .. context - 1."""

    start: int
    length: int
    context: int
    block_table: list[int]


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose a token of a row that needs nothing but this. temperature: 0 takes the most likely. uniform: in
    [0, 1), what is drawn by. top_k: 0 is all."""

    temperature: float
    uniform: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class FlatStep:
    """All scheduled tokens of a step, one sequence after the other.

    tokens: [rows]. wanted: rows whose logits are sampled from. draws: for each of them; None where more is looked at
    than a draw does. states: the last hidden states of the wanted rows are asked for. masks: waits for what rows with a
    draw may choose, by their place in `wanted`: int32, a bit per token; only for a back end that has `masks`.
    """

    tokens: list[int]
    spans: list[SequenceSpan]
    wanted: list[int]
    draws: list[Draw | None]
    states: bool = False
    masks: Callable[[], Mapping[int, np.ndarray]] | None = None


@dataclass(frozen=True, slots=True)
class Logits:
    """Of the wanted rows. chosen: the token drawn, or else the most likely, the first of equals; -1 where the logits
    are not all numbers, or where nothing may be chosen.

    values: [wanted, vocabulary] float32; there may be none if all are drawn. states: [wanted, hidden], after the last
    norm, if they were asked for.
    """

    chosen: list[int]
    values: torch.Tensor | None
    states: torch.Tensor | None = None


class HeadInput:
    """What a transformers model last gave to its head: the last hidden states of the rows whose logits were wanted."""

    def __init__(self, model: Any) -> None:
        self._last: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._note)

    def _note(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._last = inputs[0]

    def take(self, rows: int) -> torch.Tensor:
        """[rows, hidden] float32."""
        states, self._last = self._last, None
        assert states is not None
        return states[0, :rows].float()


class Backend(Protocol):
    """A model with its paged KV cache.

    caches: per layer (keys, values), block first, so that blocks can be copied without knowing what is inside.
    block_bytes: of one KV block over all layers. batch_invariant: a row's bits depend on nothing else in the step.
    has_own_threads: it does not use those of torch. draws: it can do so at any temperature, not only at 0; masks: and
    under a constraint.
    """

    caches: Caches
    block_bytes: int
    batch_invariant: bool
    has_own_threads: bool
    draws: bool
    masks: bool

    def allocate(self, num_blocks: int) -> None:
        """Make the cache, in the place of one that was there. Called before any step."""
        ...

    def prepare(self) -> None:
        """Do ahead, with the cache that stays, what would be in the first requests' way."""
        ...

    def forward(self, step: FlatStep) -> Logits:
        """One model call."""
        ...
