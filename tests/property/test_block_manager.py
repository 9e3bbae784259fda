"""The block pool conserves blocks under any sequence of allocations and frees."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.block_manager import BlockPool, blocks_for


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_conservation(num_blocks: int, operations: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks, 4)
    tables: list[list[int]] = []
    for allocate, number in operations:
        if allocate:
            free = pool.num_free
            taken = pool.allocate(number)
            assert (taken is None) == (number > free)
            if taken is None:
                assert pool.num_free == free
            else:
                tables.append(taken)
        elif tables:
            pool.free(tables.pop(number % len(tables)))
        held = Counter(block for table in tables for block in table)
        assert all(count == 1 for count in held.values()), "a block given out twice"
        assert pool.num_free + len(held) == num_blocks
        assert all(pool.ref_cnt(block) == held[block] for block in range(num_blocks))
    for table in tables:
        pool.free(table)
    assert pool.num_free == num_blocks


def test_freeing_what_nobody_holds_is_an_error() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(ValueError, match="not held"):
        pool.free([1])


@given(st.integers(0, 1000), st.integers(1, 64))
def test_blocks_for(tokens: int, size: int) -> None:
    blocks = blocks_for(tokens, size)
    assert blocks * size >= tokens > (blocks - 1) * size or tokens == blocks == 0
