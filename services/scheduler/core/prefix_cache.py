"""Which blocks hold what. Only full blocks have a digest, and they get it when the step that filled them succeeded."""

from array import array
from collections.abc import Iterator

from services.common import digest as digests
from services.scheduler.core.request import Sequence


def block_digests(sequence: Sequence, block_size: int, count: int) -> list[bytes]:
    """Digests of the sequence's first `count` blocks, which its known tokens must fill. Computed once, kept with it."""
    if sequence.hash_block_size != block_size:
        sequence.hashes, sequence.hash_block_size = [], block_size
    known = sequence.hashes
    if len(known) < count:
        digest = known[-1] if known else cache_root(sequence)
        first = len(known)
        content = array("I", sequence.tokens(first * block_size, count * block_size)).tobytes()
        size = len(content) // (count - first)
        for start in range(0, len(content), size):
            digest = digests.chain(digest, content[start : start + size])
            known.append(digest)
    return known if len(known) == count else known[:count]


def reusable_digests(sequence: Sequence, block_size: int) -> list[bytes]:
    """Of the blocks that it need not compute if they are cached: at least one token is left, for its logits."""
    if not sequence.reuses:
        return []
    return block_digests(sequence, block_size, (sequence.num_tokens - 1) // block_size)


def cache_root(sequence: Sequence) -> bytes:
    """What the sequence's digests are chained to."""
    return digests.root(sequence.tenant, sequence.adapter)


class PrefixIndex:
    """Which workers hold which cached block, over all workers."""

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[str, None]] = {}

    def change(self, worker: str, digest: bytes, cached: bool) -> None:
        holders = self._holders.setdefault(digest, {})
        if cached:
            holders[worker] = None
        else:
            holders.pop(worker, None)
            if not holders:
                del self._holders[digest]

    def deepest(self, digests: list[bytes]) -> Iterator[str]:
        """The workers that hold the longest part of this prefix that anybody holds."""
        found: dict[str, None] = {}
        for digest in digests:
            holders = self._holders.get(digest)
            if holders is None:
                break
            found = holders
        return iter(found)
