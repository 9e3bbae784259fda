"""Files and batches on a real Valkey: every answer that the functions give."""

import asyncio
import time
from dataclasses import replace

import pytest

from services.common.errors import Conflict, InvalidRequest, NotFound, Overloaded
from services.common.redis.store import Store
from services.router.adapters.redis_shelf import RedisShelf
from services.router.api.shelf import Claim, LeaseLost, ShelfLimits
from services.router.core.batches import CANCELLED, Order
from services.router.core.files import File

NOW = int(time.time())
ORDER = Order("batch_1", "a", "/v1/completions", "file-in", NOW, NOW + 86_400, {"k": "v"})
LIMITS = ShelfLimits(tenant_files=2, tenant_bytes=100, tenant_batches=2, ttl_s=1000)
LEASE_MS = 60_000


@pytest.fixture
def shelf(store: Store) -> RedisShelf:
    """On the partition of the test."""
    partition = store._prefix.removeprefix("orca:{").removesuffix("}:")
    return RedisShelf(store._redis, partition, "router-a", LIMITS)


def _file(name: str, size: int = 10, expires_at: int = NOW + 5000) -> File:
    return File(name, "in.jsonl", "batch", size, NOW, expires_at)


async def _claimed(shelf: RedisShelf, order: Order = ORDER) -> Claim:
    await shelf.create_batch(order)
    claim = await shelf.claim(LEASE_MS)
    assert claim is not None
    return claim


async def _running(shelf: RedisShelf) -> Claim:
    claim = await _claimed(shelf)
    assert await shelf.advance(claim, "validating", "in_progress", total=2)
    return claim


async def test_a_file_is_there_until_its_time_is_over(shelf: RedisShelf) -> None:
    await shelf.put_chunk("f1", 0, b"abc")
    assert 0 < await shelf._redis.ttl(shelf._key("file", "f1")) <= 900, "one that never comes is forgotten"
    await shelf.put_file("a", _file("f1"))
    await shelf.put_file("a", _file("f1"))
    await shelf.put_chunk("f1", 1, b"late")
    assert await shelf.file("a", "f1") == _file("f1")
    assert await shelf.chunk("f1", 0) == b"abc"
    assert await shelf.chunk("f1", 2) is None
    for key in (shelf._key("file", "f1"), shelf._key("files", "a")):
        assert abs(await shelf._redis.expiretime(key) - (NOW + 5000)) < 100
    with pytest.raises(NotFound):
        await shelf.file("b", "f1")
    with pytest.raises(NotFound):
        await shelf.delete_file("b", "f1")
    await shelf.put_file("a", _file("f0", expires_at=NOW - 1))
    with pytest.raises(NotFound):
        await shelf.file("a", "f0")
    assert await shelf.files("a") == [_file("f1")]
    await shelf.delete_file("a", "f1")
    assert await shelf.chunk("f1", 0) is None
    assert await shelf.files("a") == []


async def test_the_files_of_a_tenant_are_bounded(shelf: RedisShelf) -> None:
    await shelf.put_file("a", _file("f0", expires_at=NOW - 1))
    await shelf.put_file("a", _file("f1", 60))
    with pytest.raises(InvalidRequest, match="100 bytes"):
        await shelf.put_file("a", _file("f2", 41))
    await shelf.put_file("a", _file("f2", 40))
    with pytest.raises(InvalidRequest, match="as many files"):
        await shelf.put_file("a", _file("f3", 0))
    await shelf.put_file("b", _file("f3", 100))
    claim = await _claimed(shelf)
    await shelf.put_file("a", _file("f4", 1000), claim)
    assert len(await shelf.files("a")) == 3, "results are not refused"
    with pytest.raises(LeaseLost):
        await shelf.put_file("a", _file("f5"), replace(claim, fence="0"))


async def test_a_batch_is_made_once_and_they_are_bounded(shelf: RedisShelf) -> None:
    await shelf.put_chunk("file-in", 0, b"abc")
    batch = await shelf.create_batch(ORDER)
    assert (batch.order, batch.status, batch.total) == (ORDER, "validating", 0)
    assert await shelf._redis.ttl(shelf._key("file", "file-in")) > 86_000, "the input lives as long as it may be needed"
    await shelf.create_batch(ORDER)
    later = replace(ORDER, name="batch_2", created_at=NOW + 1)
    await shelf.create_batch(later)
    with pytest.raises(Overloaded):
        await shelf.create_batch(replace(ORDER, name="batch_3"))
    assert [one.name for one in await shelf.batches("a", "", 5)] == ["batch_2", "batch_1"]
    assert [one.name for one in await shelf.batches("a", "batch_2", 5)] == ["batch_1"]
    assert await shelf.batches("a", "unknown", 5) == await shelf.batches("b", "", 5) == []
    with pytest.raises(NotFound):
        await shelf.batch("b", "batch_1")
    await shelf._redis.delete(shelf._key("batch", "batch_2"))
    assert [one.name for one in await shelf.batches("a", "", 1)] == ["batch_1"]
    await shelf.create_batch(replace(ORDER, name="batch_3"))


async def test_one_works_on_a_batch_and_the_next_raises_the_fence(shelf: RedisShelf) -> None:
    first = await _claimed(shelf)
    assert await shelf.claim(LEASE_MS) is None
    assert await shelf.renew(first, 1) == ("validating", 0)
    await asyncio.sleep(0.005)  # longer than its lease
    second = await shelf.claim(LEASE_MS)
    assert second == Claim("batch_1", str(int(first.fence) + 1))
    for call in (
        shelf.renew(first, LEASE_MS),
        shelf.advance(first, "validating", "in_progress"),
        shelf.put_result(first, 1, True, b"x"),
    ):
        with pytest.raises(LeaseLost):
            await call
    assert await shelf.claim(LEASE_MS) is None, "the earlier owner has changed nothing"
    assert second is not None
    await shelf.renew(second, 0)
    assert await shelf.claim(LEASE_MS) is not None, "given back, it is free at once"


async def test_the_first_result_of_a_line_stays(shelf: RedisShelf) -> None:
    claim = await _running(shelf)
    await shelf.put_result(claim, 1, True, b"one")
    await shelf.put_result(claim, 1, True, b"another")
    await shelf.put_result(claim, 3, False, b"three")
    assert await shelf.results("batch_1", [1, 2, 3]) == [(True, b"one"), None, (False, b"three")]
    assert await shelf.done("batch_1") == {1, 3}
    batch = await shelf.batch("a", "batch_1")
    assert (batch.total, batch.completed, batch.failed) == (2, 1, 1)
    assert await shelf.renew(claim, LEASE_MS) == ("in_progress", 10)
    assert await shelf.advance(claim, "in_progress", "finalizing", closed="")
    with pytest.raises(LeaseLost):
        await shelf.put_result(claim, 2, True, b"two")
    assert await shelf.advance(claim, "finalizing", "completed", over=True, output_file="f")
    assert await shelf.advance(claim, "finalizing", "completed", over=True, output_file="f"), "a retry"
    assert await shelf.done("batch_1") == set()
    assert 900 < await shelf._redis.ttl(shelf._key("batch", "batch_1")) <= 1000
    assert await shelf.claim(LEASE_MS) is None
    over = await shelf.batch("a", "batch_1")
    assert (over.status, over.closed, over.output_file) == ("completed", "", "f")
    assert set(over.times) == {"in_progress_at", "finalizing_at", "completed_at"}


async def test_a_cancelled_batch_does_not_go_on(shelf: RedisShelf) -> None:
    claim = await _claimed(shelf)
    with pytest.raises(NotFound):
        await shelf.cancel_batch("b", "batch_1")
    await shelf.cancel_batch("a", "batch_1")
    await shelf.cancel_batch("a", "batch_1")
    assert not await shelf.advance(claim, "validating", "in_progress")
    assert await shelf.renew(claim, LEASE_MS) == ("cancelling", 0)
    assert await shelf.advance(claim, "cancelling", "cancelling", closed=CANCELLED)
    assert await shelf.advance(claim, "cancelling", "cancelled", over=True)
    with pytest.raises(Conflict, match="'cancelled'"):
        await shelf.cancel_batch("a", "batch_1")


async def test_a_batch_that_is_gone_is_not_claimed(shelf: RedisShelf) -> None:
    await shelf.create_batch(ORDER)
    await shelf._redis.delete(shelf._key("batch", "batch_1"))
    assert await shelf.claim(LEASE_MS) is None
    assert await shelf._redis.exists(shelf._prefix + "work") == 0
