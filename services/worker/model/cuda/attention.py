"""Attention of ragged sequences over paged KV, from a library; what it must do is one small protocol."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from services.worker.model.backend import Unavailable
from services.worker.model.cuda.tables import StepTables
from services.worker.model.transfer import pinned, staged

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


class _FlashInfer:
    """One of the library's wrappers. ragged: sequences may have any number of rows, not one each."""

    def __init__(self, wrapper: Any, shape: AttentionShape, ragged: bool) -> None:
        self._wrapper, self._shape, self._ragged = wrapper, shape, ragged

    def plan(self, tables: StepTables) -> None:
        shape = self._shape

        def on_host(values: list[int]) -> torch.Tensor:
            return pinned(values, torch.int32, shape.device)

        self._wrapper.plan(
            *([on_host(tables.query_starts)] if self._ragged else []),
            on_host(tables.page_starts),
            staged(tables.pages, torch.int32, shape.device),
            on_host(tables.last_page),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_size,
            **({"causal": True} if self._ragged else {}),
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            non_blocking=True,
            seq_lens=on_host(tables.contexts),  # else read back from pageable memory
        )

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(query, (keys, values))
        return out


def _decode_wrapper(library: Any, workspace: torch.Tensor, size: int, pages: torch.Tensor) -> Any:
    """For a fixed number of decodes, its tables at fixed places. Tensor cores take any number of heads a key head."""

    def table(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=workspace.device)

    return library.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=table(size + 1),
        paged_kv_indices_buffer=pages,
        paged_kv_last_page_len_buffer=table(size),
    )


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
    pages: list[torch.Tensor] = []  # graphs never run together: the table of the first, and largest, does for all

    def make(graph: tuple[int, int] | None) -> VarlenAttention:
        if graph is None:
            return _FlashInfer(flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"), shape, ragged=True)
        size, most = graph
        if not pages or pages[0].numel() < most:
            pages[:] = [torch.zeros(most, dtype=torch.int32, device=shape.device)]
        return _FlashInfer(_decode_wrapper(flashinfer, workspace, size, pages[0]), shape, ragged=False)

    return make
