"""The protocol of executors."""

from typing import Protocol

from services.worker.core.plan import BatchRow, BlockCopy, Sampled


class Executor(Protocol):
    """Runs steps, one at a time, on one thread.

    num_host_blocks: blocks of host memory for KV that is swapped out; swap_s: seconds to copy one, one way.
    num_model_calls and num_rows count what was really run: one call and the sum of the rows' tokens per step.
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int
    swap_s: float
    num_model_calls: int
    num_rows: int

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy KV blocks, in this order, before the step that comes next."""
        ...

    def execute(self, rows: list[BatchRow], banned: list[list[int]]) -> list[Sampled]:
        """Run one step with one model call. `banned` has an entry per row. One sample per row that samples."""
        ...
