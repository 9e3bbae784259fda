"""Linear layers whose result for a row does not depend on the other rows or on the number of threads.

MKL's float32 products change with the number of rows below 16, and for some shapes with the number of threads
(seen: 1536 x 576 on two threads). oneDNN with prepacked weights does not, and is faster at decode sizes.
"""

import torch
from torch import nn


class PackedLinear(nn.Module):
    """nn.Linear on CPU with weights packed once by oneDNN. [..., in] -> [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = linear.bias.detach() if linear.bias is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return result


def pack_linears(model: nn.Module) -> int:
    """Replace every nn.Linear below `model`; returns how many there were."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
                count += 1
    return count
