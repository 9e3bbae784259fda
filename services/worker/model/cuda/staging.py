"""What a step has per row, on the device by one asynchronous copy.

Each step ends by waiting for its tokens, so the memory that the next one writes over was read long ago.
"""

from dataclasses import dataclass

import torch

from services.worker.model.cuda.tables import StepTables


@dataclass(frozen=True, slots=True)
class Rows:
    """[rows] int64 on the device."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class Staging:
    """One copy a step for all that is there per row. The views of a size lie at the same place every time, as a graph
    needs."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._host = torch.zeros(3 * capacity, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(3 * capacity, dtype=torch.int64, device=device)

    def views(self, size: int) -> Rows:
        return Rows(*self._device[: 3 * size].view(3, size))

    def put(self, tables: StepTables) -> Rows:
        """At most `capacity` rows."""
        size = len(tables.tokens)
        self._host[: 3 * size] = torch.tensor([*tables.tokens, *tables.positions, *tables.slots])
        self._device[: 3 * size].copy_(self._host[: 3 * size], non_blocking=True)
        return self.views(size)
