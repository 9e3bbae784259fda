"""Masks of the tokens that constraints allow, computed while the model computes."""

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from services.worker.core.plan import Constraint, allowed_words, unpacked

# By row: int32 words of 32 tokens. No bit is set where a constraint has failed.
Words = dict[int, np.ndarray]


class PendingMasks:
    """Under way for one step."""

    def __init__(self, filled: "Future[Words]", vocab_size: int) -> None:
        self._filled = filled
        self._vocab_size = vocab_size

    def words(self) -> Words:
        """Waits for them."""
        return self._filled.result()

    def of(self, rows: Collection[int], device: torch.device) -> dict[int, torch.Tensor | None]:
        """By place in `rows`, for those that have one: bool [vocabulary], or None where the constraint has failed."""
        words = self.words()
        return {
            place: torch.from_numpy(unpacked(words[row], self._vocab_size)).to(device, non_blocking=True)
            if words[row].any()
            else None
            for place, row in enumerate(rows)
            if row in words
        }


class Masks:
    """Fills them on a thread of its own."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "masks")

    def begin(self, constraints: Mapping[int, Constraint]) -> PendingMasks:
        return PendingMasks(self._thread.submit(self._fill, constraints), self._vocab_size)

    def _fill(self, constraints: Mapping[int, Constraint]) -> Words:
        return {row: allowed_words(constraint, self._vocab_size) for row, constraint in constraints.items()}
