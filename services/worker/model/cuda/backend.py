"""Steps on a CUDA device: one model call, one wait.

The host builds the step's tables, sends them by asynchronous copies from pinned memory, starts the model (for decodes a
graph captured before) and the choice of tokens, and waits once: for the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.model.backend import Caches, Draw, FlatStep, HeadInput, Logits, Unavailable
from services.worker.model.cuda.attention import AttentionShape, MakeAttention, VarlenAttention, flashinfer_attention
from services.worker.model.cuda.graphs import Capture, cuda_capture
from services.worker.model.cuda.staging import Rows, Staging
from services.worker.model.cuda.tables import StepTables, build_tables, graph_sizes, only_decodes, padded, size_for
from services.worker.model.sampler import draw_tokens
from services.worker.model.transfer import staged

MOST_DECODES = 256
EAGER_ROWS = 4096


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step's attention. caches: per layer, [blocks, block_size, kv_heads, head_dim]."""

    caches: Caches
    slots: torch.Tensor
    attention: VarlenAttention

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
        keys, values = self.caches[layer]
        keys.flatten(0, 1).index_copy_(0, self.slots, key.transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, self.slots, value.transpose(0, 1))
        return self.attention.run(query.transpose(0, 1).contiguous(), keys, values)


@dataclass(frozen=True, slots=True)
class _Graph:
    attention: VarlenAttention
    logits: torch.Tensor
    replay: Callable[[], None]


class CudaBackend:
    """make_attention, capture: of the device; tests put others in their places.

    Not batch-invariant: the libraries choose their kernels by the size of the step.
    """

    batch_invariant = False
    has_own_threads = False
    draws = True
    masks = False

    def __init__(self, model: Any, shape: AttentionShape, make_attention: MakeAttention, capture: Capture) -> None:
        self._model = model
        self._shape = shape
        self._device = shape.device
        self._make_attention, self._capture = make_attention, capture
        self._layers = int(model.config.num_hidden_layers)
        self._head_input = HeadInput(model)
        self._max_pages = -(-int(model.config.max_position_embeddings) // shape.block_size)
        self._mixed = make_attention(None)
        self._staging = Staging(EAGER_ROWS, self._device)
        self._graph_staging = Staging(MOST_DECODES, self._device)
        self._graphs: dict[int, _Graph] = {}
        self._sizes: tuple[int, ...] = ()
        self._spare_block = 0
        self.caches: Caches = []
        elements = shape.kv_heads * shape.head_dim * shape.block_size
        self.block_bytes = 2 * self._layers * elements * shape.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """One block more than asked for takes what padding writes."""
        self._graphs, self._sizes, self.caches = {}, (), []
        self._spare_block = num_blocks
        shape = (num_blocks + 1, self._shape.block_size, self._shape.kv_heads, self._shape.head_dim)
        for _ in range(self._layers):
            keys, values = (torch.zeros(shape, dtype=self._shape.dtype, device=self._device) for _ in range(2))
            self.caches.append((keys, values))

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture a graph for each number of decodes, the largest first: the others find room in its memory."""
        sizes = graph_sizes(MOST_DECODES)
        empty = StepTables([], [], [], [0], [0], [], [], [], self._shape.block_size)
        most_pages = min(self._spare_block, MOST_DECODES * self._max_pages) + MOST_DECODES
        for size in reversed(sizes):
            attention = self._make_attention((size, most_pages))
            attention.plan(padded(empty, size, self._spare_block))
            rows = self._graph_staging.views(size)
            logits, replay = self._capture(lambda rows=rows, attention=attention: self._run(rows, attention, None))  # type: ignore[misc]
            self._graphs[size] = _Graph(attention, logits, replay)
        self._sizes = sizes

    @torch.inference_mode()
    def forward(self, step: FlatStep) -> Logits:
        tables = build_tables(step, self._shape.block_size)
        size = size_for(len(step.tokens), self._sizes) if only_decodes(step) and not step.states else None
        logits = self._start(tables) if size is None else self._replay(tables, size)
        chosen = self._choose(logits, step.draws)
        states = self._head_input.take(len(step.wanted)) if step.states else None
        # The step's one wait.
        return Logits(chosen.tolist(), logits if None in step.draws else None, states)

    def _start(self, tables: StepTables) -> torch.Tensor:
        if len(tables.tokens) > self._staging.capacity:
            self._staging = Staging(2 * len(tables.tokens), self._device)
        rows = self._staging.put(tables)
        self._mixed.plan(tables)
        return self._run(rows, self._mixed, staged(tables.wanted, torch.int64, self._device))

    def _replay(self, tables: StepTables, size: int) -> torch.Tensor:
        graph = self._graphs[size]
        filled = padded(tables, size, self._spare_block)
        self._graph_staging.put(filled)
        graph.attention.plan(filled)
        graph.replay()
        return graph.logits[: len(tables.tokens)]

    def _run(self, rows: Rows, attention: VarlenAttention, wanted: torch.Tensor | None) -> torch.Tensor:
        """The model over all rows. Returns float32 logits of the wanted ones, or of all."""
        result = self._model(
            input_ids=rows.tokens.unsqueeze(0),
            position_ids=rows.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if wanted is None else wanted,
            orca_step=CudaStep(self.caches, rows.slots, attention),
        )
        logits: torch.Tensor = result.logits[0].float()
        return logits

    def _choose(self, logits: torch.Tensor, draws: Sequence[Draw | None]) -> torch.Tensor:
        """[rows] tokens, -1 where the logits are not all numbers. The most likely of a row that is not drawn."""
        chosen = logits.argmax(dim=-1)
        drawn = [(index, draw) for index, draw in enumerate(draws) if draw is not None and draw.temperature]
        if drawn:
            at = staged([index for index, _ in drawn], torch.int64, self._device)
            chosen.index_copy_(0, at, draw_tokens(logits.index_select(0, at), [draw for _, draw in drawn]))
        return torch.where(logits.isnan().any(dim=-1), -1, chosen)


def cuda_backend(model: Any, dtype: torch.dtype, device: torch.device, block_size: int) -> CudaBackend:
    """Raises Unavailable."""
    attention = model.model.layers[0].self_attn
    shape = AttentionShape(
        heads=int(model.config.num_attention_heads),
        kv_heads=int(model.config.num_key_value_heads),
        head_dim=int(attention.head_dim),
        block_size=block_size,
        scale=float(attention.scaling),
        dtype=dtype,
        device=device,
    )
    if block_size not in (16, 32, 64):
        raise Unavailable(f"block size {block_size}")
    return CudaBackend(model, shape, flashinfer_attention(shape), cuda_capture(device))
