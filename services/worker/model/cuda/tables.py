"""What a step is to an attention over pages: plain lists, and so tested where there is no device.

With `query_starts` and `page_starts` as its two index pointers this is the ragged layout that FlashInfer reads (Ye et
al., MLSys'25, section 3.1).
"""

from dataclasses import dataclass, replace

from services.worker.model.backend import FlatStep


@dataclass(frozen=True, slots=True)
class StepTables:
    """tokens, positions, slots: [rows]; a slot is block x block_size + offset, where a row's key and value go.
    query_starts, page_starts: [sequences + 1] where each sequence's rows and pages begin. pages: block ids.
    last_page: [sequences] positions used of a sequence's last page, the step's own included.
    wanted: rows whose logits are sampled from.
    """

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    query_starts: list[int]
    page_starts: list[int]
    pages: list[int]
    last_page: list[int]
    wanted: list[int]
    block_size: int

    @property
    def contexts(self) -> list[int]:
        """[sequences] positions that each sequence has with this step."""
        counts = [end - start for start, end in zip(self.page_starts, self.page_starts[1:], strict=False)]
        size = self.block_size
        return [(count - 1) * size + last for count, last in zip(counts, self.last_page, strict=True)]


def build_tables(step: FlatStep, block_size: int) -> StepTables:
    positions: list[int] = []
    slots: list[int] = []
    query_starts, page_starts = [0], [0]
    pages: list[int] = []
    last_page: list[int] = []
    for span in step.spans:
        own = range(span.context - span.length, span.context)
        positions += own
        slots += (span.block_table[p // block_size] * block_size + p % block_size for p in own)
        pages += span.block_table[: -(-span.context // block_size)]  # the table may hold blocks for later
        query_starts.append(span.start + span.length)
        page_starts.append(len(pages))
        last_page.append((span.context - 1) % block_size + 1)
    return StepTables(
        step.tokens, positions, slots, query_starts, page_starts, pages, last_page, step.wanted, block_size
    )


def only_decodes(step: FlatStep) -> bool:
    """Every sequence has one row, and that one is sampled from."""
    return len(step.tokens) == len(step.spans) == len(step.wanted)


def graph_sizes(most: int) -> tuple[int, ...]:
    """Numbers of decodes for which there is a graph: fine where a step is short, so that padding costs little."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, most + 1, 32)]
    return (*(size for size in sizes if size < most), most)


def size_for(rows: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest that holds so many; None if none does."""
    return next((size for size in sizes if size >= rows), None)


def padded(tables: StepTables, size: int, spare_block: int) -> StepTables:
    """Decodes with further ones up to `size`, each a sequence of one token in a block that belongs to nobody."""
    missing = size - len(tables.tokens)
    rows, pages = len(tables.tokens), len(tables.pages)
    return replace(
        tables,
        tokens=tables.tokens + [0] * missing,
        positions=tables.positions + [0] * missing,
        slots=tables.slots + [spare_block * tables.block_size] * missing,
        query_starts=tables.query_starts + list(range(rows + 1, size + 1)),
        page_starts=tables.page_starts + list(range(pages + 1, pages + missing + 1)),
        pages=tables.pages + [spare_block] * missing,
        last_page=tables.last_page + [1] * missing,
    )
