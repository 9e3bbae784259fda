"""The one attention function registered with transformers, and the step that it hands its rows to.

Within a layer all slots of the step are written before any sequence attends.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from services.worker.model.attention import TileGroup, paged_attention
from services.worker.model.loader import ATTENTION

# Keywords that say nothing about the result.
IGNORED = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "is_causal"}


class AttentionStep(Protocol):
    """A step's attention, as a back end does it."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [heads, rows, head_dim], key and value [kv_heads, rows, head_dim] -> [rows, heads, head_dim]."""
        ...


@dataclass(frozen=True)
class PagedStep:
    """What the reference's attention must know of the step.

    caches: per layer (keys, values), each [num_blocks, num_kv_heads, block_size, head_dim].
    slot_blocks, slot_offsets: [tokens] where each scheduled token's key and value go.
    num_tokens: rows that are real; the rest is padding.
    """

    caches: list[tuple[torch.Tensor, torch.Tensor]]
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    num_tokens: int
    groups: list[TileGroup]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self.caches[layer]
        real = self.num_tokens
        keys[self.slot_blocks, :, self.slot_offsets] = key[:, :real].transpose(0, 1)
        values[self.slot_blocks, :, self.slot_offsets] = value[:, :real].transpose(0, 1)
        return paged_attention(query.transpose(0, 1), keys, values, self.groups, scaling)


def orca_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    orca_step: AttentionStep,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim] -> [1, rows, heads, head_dim].

    Raises ValueError on any keyword that changes attention and is not implemented.
    """
    unknown = {name for name, value in others.items() if value is not None and name not in IGNORED}
    if unknown or dropout or attention_mask is not None:
        raise ValueError(f"attention keywords not implemented: {sorted(unknown) or 'mask, dropout'}")
    out = orca_step.attend(int(module.layer_idx), query[0], key[0], value[0], scaling)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


def register() -> None:
    """Make the function known to transformers; no mask is built for it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, orca_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
