"""Attention of ragged sequences over paged KV, from a library; what it must do is one small protocol."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from services.worker.model.backend import Unavailable
from services.worker.model.cuda.staging import pinned, staged
from services.worker.model.cuda.tables import StepTables

WORKSPACE_BYTES = 256 << 20
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """scale: what scores are multiplied by before the softmax."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device


class VarlenAttention(Protocol):
    """plan: once a step, outside of any graph. run: once a layer."""

    def plan(self, tables: StepTables) -> None: ...

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """query: [rows, heads, head_dim]; keys, values: [blocks, block_size, kv_heads, head_dim], with the step's own
        in them. Returns [rows, heads, head_dim], causal."""
        ...


# For a graph of so many decodes over at most so many pages; None for steps of any kind.
MakeAttention = Callable[[tuple[int, int] | None], VarlenAttention]


class _Mixed:
    """Chunks and decodes in one call."""

    def __init__(self, library: Any, shape: AttentionShape, workspace: torch.Tensor) -> None:
        self._shape = shape
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, tables: StepTables) -> None:
        shape = self._shape
        self._wrapper.plan(
            pinned(tables.query_starts, torch.int32, shape.device),
            pinned(tables.page_starts, torch.int32, shape.device),
            staged(tables.pages, torch.int32, shape.device),
            pinned(tables.last_page, torch.int32, shape.device),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_size,
            causal=True,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            non_blocking=True,
            seq_lens=pinned(tables.contexts, torch.int32, shape.device),  # else read back from pageable memory
        )

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(query, (keys, values))
        return out


class _Decodes:
    """A fixed number of decodes, with its tables at fixed places. Tensor cores take any number of heads a key head."""

    def __init__(
        self, library: Any, shape: AttentionShape, workspace: torch.Tensor, size: int, pages: torch.Tensor
    ) -> None:
        self._shape = shape

        def table(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=shape.device)

        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=table(size + 1),
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=table(size),
        )

    def plan(self, tables: StepTables) -> None:
        shape = self._shape
        self._wrapper.plan(
            pinned(tables.page_starts, torch.int32, shape.device),
            staged(tables.pages, torch.int32, shape.device),
            pinned(tables.last_page, torch.int32, shape.device),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_size,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            non_blocking=True,
            seq_lens=pinned(tables.contexts, torch.int32, shape.device),
        )

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(query, (keys, values))
        return out


def flashinfer_attention(shape: AttentionShape) -> MakeAttention:
    """Raises Unavailable."""
    if shape.dtype not in (torch.bfloat16, torch.float16):
        raise Unavailable(f"FlashInfer computes in bfloat16 and float16, not in {shape.dtype}")
    if shape.head_dim not in HEAD_DIMS:
        raise Unavailable(f"head size {shape.head_dim}")
    try:
        import flashinfer
    except ImportError:
        raise Unavailable("FlashInfer is not installed: pip install 'orca[cuda]'") from None
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
    shared: list[
        torch.Tensor
    ] = []  # graphs never run together, so one table of pages does for all; the largest is first

    def make(graph: tuple[int, int] | None) -> VarlenAttention:
        if graph is None:
            return _Mixed(flashinfer, shape, workspace)
        size, pages = graph
        if not shared or shared[0].numel() < pages:
            shared[:] = [torch.zeros(pages, dtype=torch.int32, device=shape.device)]
        return _Decodes(flashinfer, shape, workspace, size, shared[0])

    return make
