"""The protocol of executors."""

from typing import Protocol

from services.worker.core.plan import BatchRow, Sampled


class Executor(Protocol):
    """Runs steps, one at a time, on one thread.

    num_model_calls and num_rows count what was really run: one call and the sum of the rows' tokens per step.
    """

    num_blocks: int
    block_size: int
    num_model_calls: int
    num_rows: int

    def execute(self, rows: list[BatchRow], banned: list[list[int]]) -> list[Sampled]:
        """Run one step with one model call. `banned` has an entry per row. One sample per row that samples."""
        ...
