"""The block pool: who owns which KV block, and what it holds. Integers and digests; it never sees a tensor."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens token positions."""
    return -(-num_tokens // block_size)


def _ignore(digest: bytes, cached: bool) -> None:
    pass


class BlockPool:
    """Blocks 0 .. num_blocks-1 with reference counts, a free queue in reuse order, and the prefix cache.

    Memory by conservation: free blocks + referenced blocks = pool, at all times. A free block may still hold a
    cached prefix; it is found by its digest until it is given out again, the least recently used first
    (PagedAttention, SOSP'23, section 4; blocks without a digest go before any that has one).

    on_change(digest, cached) is told of every digest that enters or leaves the cache.
    """

    def __init__(self, num_blocks: int, block_size: int, on_change: Callable[[bytes, bool], None] = _ignore) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_change = on_change
        self._ref_cnt = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digests: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks, free or not, that can be found by their digest."""
        return len(self._cached)

    def ref_cnt(self, block: int) -> int:
        return self._ref_cnt[block]

    def digest(self, block: int) -> bytes | None:
        return self._digests[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or None when that many are not free: never half."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._ref_cnt[block] = 1
            self._evict(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that the cache knows, free or not."""
        for block in blocks:
            if self._ref_cnt[block] == 0:
                del self._free[block]
            self._ref_cnt[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block: the last of a table first, so that prefixes outlive their
        continuations. Raises ValueError on a block that nobody holds."""
        for block in blocks:
            if self._ref_cnt[block] <= 0:
                raise ValueError(f"block {block} is not held")
            self._ref_cnt[block] -= 1
            if self._ref_cnt[block] == 0:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix."""
        found = []
        for digest in digests:
            block = self._cached.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds: sharing them takes them from the free queue."""
        return sum(self._ref_cnt[block] == 0 for block in blocks)

    def remember(self, block: int, digest: bytes) -> None:
        """A held block is full, and this is what it holds. Of equal blocks the first is the one that is found."""
        if self._digests[block] is None and digest not in self._cached:
            self._digests[block] = digest
            self._cached[digest] = block
            self._on_change(digest, True)

    def adopt(self, block: int, digest: bytes) -> None:
        """A free block holds this already."""
        if self._ref_cnt[block] == 0 and self._digests[block] is None and digest not in self._cached:
            self._free.move_to_end(block)
            self._digests[block] = digest
            self._cached[digest] = block
            self._on_change(digest, True)

    def forget_all(self) -> None:
        """Drop the whole cache; held blocks stay held."""
        for block in list(self._cached.values()):
            self._evict(block)

    def _evict(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            self._digests[block] = None
            del self._cached[digest]
            self._on_change(digest, False)
