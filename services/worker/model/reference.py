"""The reference back end: transformers' own model code with the paged attention, on any device."""

import logging
from typing import Any

import torch

from services.worker.model import paged
from services.worker.model.attention import build_tile_groups
from services.worker.model.backend import Caches, FlatStep, HeadInput, Logits, SequenceSpan
from services.worker.model.linear import pack_linears

log = logging.getLogger(__name__)

# Below this number of rows some float32 products change with it; checked at start, doubled if need be.
MIN_ROWS = 16
MAX_MIN_ROWS = 128


class ReferenceBackend:
    """One call of the model's own forward per step, on the flat [1, sum of lengths] input.

    Batch-invariant in float32 where a padding can be found under which it is.
    """

    has_own_threads = False
    draws = False
    masks = False

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device, block_size: int) -> None:
        config: Any = model.config
        has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        if device.type == "cpu" and dtype == torch.float32 and has_onednn:
            pack_linears(model)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._model = model
        self._dtype, self._device = dtype, device
        self._block_size = block_size
        self._group_size = int(config.num_attention_heads) // kv_heads
        self._layers = int(config.num_hidden_layers)
        self._head_input = HeadInput(model)
        self._vocab_size = int(config.vocab_size)
        self._block_shape = (kv_heads, block_size, head_dim)
        self._min_rows = MIN_ROWS
        self.block_bytes = 2 * self._layers * kv_heads * block_size * head_dim * dtype.itemsize
        self.caches: Caches = []
        self.batch_invariant = False

    def allocate(self, num_blocks: int) -> None:
        def empty() -> torch.Tensor:
            return torch.zeros((num_blocks, *self._block_shape), dtype=self._dtype, device=self._device)

        self.caches = [(empty(), empty()) for _ in range(self._layers)]

    def prepare(self) -> None:
        enough = bool(self.caches) and len(self.caches[0][0]) >= 2
        self.batch_invariant = self._dtype == torch.float32 and enough and self._make_invariant()

    @torch.inference_mode()
    def forward(self, step: FlatStep) -> Logits:
        count = len(step.tokens)
        positions: list[int] = []
        blocks: list[int] = []
        for span in step.spans:
            own = range(span.context - span.length, span.context)
            positions += own
            blocks += (span.block_table[position // self._block_size] for position in own)
        padding = [0] * (self._min_rows - count)
        keep = step.wanted + [0] * (self._min_rows - len(step.wanted))
        offsets = torch.tensor(positions) % self._block_size
        paged_step = paged.PagedStep(
            caches=self.caches,
            slot_blocks=torch.tensor(blocks, device=self._device),
            slot_offsets=offsets.to(self._device),
            num_tokens=count,
            groups=build_tile_groups(step.spans, self._block_size, self._group_size, self._device),
        )
        result = self._model(
            input_ids=torch.tensor([step.tokens + padding], device=self._device),
            position_ids=torch.tensor([positions + padding], device=self._device),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, device=self._device),
            orca_step=paged_step,
        )
        logits: torch.Tensor = result.logits[0, : len(step.wanted)].float()
        states = self._head_input.take(len(step.wanted)) if step.states else None
        return Logits(torch.where(logits.isnan().any(dim=-1), -1, logits.argmax(dim=-1)).tolist(), logits, states)

    def _make_invariant(self) -> bool:
        """Find the padding under which a row alone equals the row in company. False if none does."""
        while self._min_rows <= MAX_MIN_ROWS:
            if self._is_invariant():
                return True
            self._min_rows *= 2
        self._min_rows = MIN_ROWS
        log.warning("batch invariance does not hold on this machine: texts may depend on the batch")
        return False

    def _is_invariant(self) -> bool:
        """One prompt alone, token by token, and as one chunk beside others, must give the same bits."""
        length = min(6, self._block_size)
        tokens = [(i * 7919) % self._vocab_size for i in range(length)]
        for position in range(length):
            alone = self.forward(FlatStep([tokens[position]], [SequenceSpan(0, 1, position + 1, [0])], [0], [None]))
        spans = [SequenceSpan(0, length, length, [1]), SequenceSpan(length, length, length, [0])]
        together = self.forward(
            FlatStep([*reversed(tokens), *tokens], spans, [length - 1, 2 * length - 1], [None, None])
        )
        assert alone.values is not None
        assert together.values is not None
        return torch.equal(alone.values[0], together.values[1])
