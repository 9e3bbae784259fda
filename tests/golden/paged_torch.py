"""Stand-ins for what only a GPU has: an attention that reads the same tables, and a capture that runs again."""

from collections.abc import Callable

import torch

from services.worker.model.cuda.attention import AttentionShape, MakeAttention, VarlenAttention
from services.worker.model.cuda.tables import StepTables


class TorchAttention:
    """Sequence by sequence, from nothing but the tables that the device would get. graph: as of `MakeAttention`."""

    def __init__(self, shape: AttentionShape, graph: tuple[int, int] | None) -> None:
        self._shape, self._graph = shape, graph
        self.planned: list[StepTables] = []

    def plan(self, tables: StepTables) -> None:
        if self._graph is not None:
            size, pages = self._graph
            assert tables.query_starts == list(range(size + 1))
            assert len(tables.pages) <= pages
        assert tables.query_starts[-1] == len(tables.tokens)
        assert tables.page_starts[-1] == len(tables.pages)
        self.planned.append(tables)

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        tables, shape = self.planned[-1], self._shape
        out = torch.empty_like(query)
        for index, last in enumerate(tables.last_page):
            pages = tables.pages[tables.page_starts[index] : tables.page_starts[index + 1]]
            begin, end = tables.query_starts[index : index + 2]
            context = (len(pages) - 1) * shape.block_size + last
            assert context == tables.contexts[index]
            key, value = (cache[pages].flatten(0, 1)[:context].transpose(0, 1) for cache in (keys, values))
            seen = torch.ones(end - begin, context, dtype=torch.bool).tril(context - (end - begin))
            out[begin:end] = torch.nn.functional.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1), key, value, seen, scale=shape.scale, enable_gqa=True
            ).transpose(0, 1)
        return out


def torch_attention(shape: AttentionShape, made: list[TorchAttention]) -> MakeAttention:
    def make(graph: tuple[int, int] | None) -> VarlenAttention:
        made.append(TorchAttention(shape, graph))
        return made[-1]

    return make


def rerun(replays: list[int]) -> Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]:
    """Like a graph: the result lies where it lay at first, and what is read is what lies there when it is replayed."""

    def capture(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        result = run().clone()

        def replay() -> None:
            replays.append(len(result))
            result.copy_(run())

        return result, replay

    return capture
