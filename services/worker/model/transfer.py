"""Small tensors to a device without waiting for it: copied from pinned memory, in the order of the stream.

Memory that a copy reads must stay as it is until that is done. torch keeps it from being used anew until then.
"""

from collections.abc import Sequence

import torch


def pinned(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[len(values)] in host memory that `device` can read by itself."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def staged(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[len(values)] on the device."""
    return pinned(values, dtype, device).to(device, non_blocking=True)
