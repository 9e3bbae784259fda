"""Masks of the tokens that constraints allow, computed while the model computes."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from services.worker.core.plan import BatchRow, allowed_tokens


class PendingMasks:
    """Under way for one step."""

    def __init__(self, filled: "Mapping[int, Future[np.ndarray | None]]") -> None:
        self._filled = filled

    def result(self, device: torch.device) -> dict[int, torch.Tensor | None]:
        """By row: bool [vocabulary], or None where the constraint has failed."""
        masks = {row: future.result() for row, future in self._filled.items()}
        return {
            row: None if mask is None else torch.from_numpy(mask).to(device, non_blocking=True)
            for row, mask in masks.items()
        }


class Masks:
    """Fills them on a thread of its own."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "masks")

    def begin(self, rows: Mapping[int, BatchRow]) -> PendingMasks:
        """For those of the rows that have a constraint."""
        return PendingMasks(
            {index: self._thread.submit(self._fill, row) for index, row in rows.items() if row.sequence.constraint}
        )

    def _fill(self, row: BatchRow) -> np.ndarray | None:
        assert row.sequence.constraint is not None
        return allowed_tokens(row.sequence.constraint, self._vocab_size)
