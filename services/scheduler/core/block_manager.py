"""The block pool: who owns which KV block. Integers only; it never sees a tensor."""

from collections import deque
from collections.abc import Iterable


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens token positions."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Blocks 0 .. num_blocks-1 with reference counts and a free queue in reuse order.

    Memory by conservation: free blocks + referenced blocks = pool, at all times.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_cnt = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_cnt(self, block: int) -> int:
        return self._ref_cnt[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or None when that many are not free: never half."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._ref_cnt[block] = 1
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block. Raises ValueError on a block that nobody holds."""
        for block in blocks:
            if self._ref_cnt[block] <= 0:
                raise ValueError(f"block {block} is not held")
            self._ref_cnt[block] -= 1
            if self._ref_cnt[block] == 0:
                self._free.append(block)
