"""The router's backend on a real Valkey: nothing is lost when its inbox is trimmed, gone, or Redis is emptied."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from services.common import process
from services.common.admission import AdmissionLimits
from services.common.errors import GenerationFailed, Overloaded, StreamNotFound
from services.common.journal import FenceAnswer, PublishItem
from services.common.metrics import RouterMetrics
from services.common.redis.store import Store
from services.common.request import GenerateRequest, SamplingParams
from services.common.text.detokenizer import TokenBytes
from services.router.adapters.backend import Backend, Windows
from services.router.api.format import formatter_for
from services.router.api.generation import Generation
from services.router.api.stream import MAX_BUFFERED, Stream
from services.router.core.document import Document
from services.router.core.position import Position
from services.router.core.tenants import NO_QUOTA
from tests.unit.tiny_tokenizer import BYTES_JSON

REQUEST = GenerateRequest("r1", "m", ((1, 2, 3),), SamplingParams(max_tokens=50))
WINDOWS = Windows(60, 60)
TABLE = TokenBytes(BYTES_JSON)


async def submit(backend: Backend, request: GenerateRequest = REQUEST, resumable: bool = False) -> Stream:
    document = Document.of(request, "completion", 0, True, False)
    return await backend.submit(request, document, None, resumable, NO_QUOTA)


@asynccontextmanager
async def running(backend: Backend) -> AsyncIterator[None]:
    task = asyncio.create_task(backend.run())
    try:
        yield
    finally:
        await process.end(task)
        await backend.settle()


async def publish(store: Store, first: int, last: int, finish_at: int | None = None) -> None:
    for index in range(first, last):
        finish = "length" if index == finish_at else ""
        item = PublishItem("r1", 1, 1, 0, index, (index,), index + 1, finish)
        assert await store.publish("w0", [item]) == ["ok"]


async def collect(stream: Stream) -> list[int]:
    tokens: list[int] = []
    while True:
        entry = await stream.next(10)
        assert entry is not None, "the stream has fallen silent"
        tokens += [token for item in entry.items for token in item.token_ids]
        if entry.usage:
            return tokens


@pytest.mark.parametrize("lost", [(2, 5), (0, 3), (15, 20)])
async def test_lost_frames_come_from_the_journal(store: Store, lost: tuple[int, int]) -> None:
    backend = Backend(store, "router-a", AdmissionLimits(10), WINDOWS)
    stream = await submit(backend)
    assert isinstance(await store.fence("r1", 1), FenceAnswer)
    await publish(store, 0, 20, finish_at=19)
    inbox = store.inbox_key("router-a")
    frames = await store._redis.xrange(inbox)
    for frame in frames[lost[0] : lost[1]]:
        await store._redis.xdel(inbox, frame[0])
    async with running(backend):
        assert await collect(stream) == list(range(20))
    backend.leave(stream)


async def test_a_slow_reader_costs_bounded_memory_and_gets_everything(store: Store) -> None:
    backend = Backend(store, "router-a", AdmissionLimits(10), WINDOWS)
    stream = await submit(backend)
    assert isinstance(await store.fence("r1", 1), FenceAnswer)
    async with running(backend):
        await publish(store, 0, 3 * MAX_BUFFERED, finish_at=3 * MAX_BUFFERED - 1)
        while not stream.behind:  # noqa: ASYNC110 - the inbox is read behind
            await asyncio.sleep(0.01)
        assert len(stream._entries) <= MAX_BUFFERED
        assert await collect(stream) == list(range(3 * MAX_BUFFERED))
    backend.leave(stream)


async def test_an_emptied_redis_ends_open_streams_within_seconds(store: Store) -> None:
    backend = Backend(store, "router-a", AdmissionLimits(10), WINDOWS)
    async with running(backend):
        stream = await submit(backend)
        for key in await store._redis.keys(store._prefix + "*"):
            await store._redis.delete(key)
        with pytest.raises(GenerationFailed):
            await stream.next(10)
        backend.leave(stream)


async def test_refusal_queues_nothing_and_leaving_aborts(store: Store) -> None:
    backend = Backend(store, "router-a", AdmissionLimits(1), WINDOWS)
    stream = await submit(backend)
    with pytest.raises(Overloaded):
        await submit(backend, GenerateRequest("r2", "m", ((1,),), SamplingParams(max_tokens=5)))
    assert await store.num_requests() == 1
    backend.leave(stream)
    backend.leave(stream)
    await backend.settle()
    await backend.idle()
    assert await store.is_aborted("r1")


async def test_a_reader_that_comes_as_another_leaves_is_not_forgotten(store: Store) -> None:
    backend = Backend(store, "router-a", AdmissionLimits(10), WINDOWS)
    first = await submit(backend, resumable=True)
    for _ in range(20):  # whichever call Redis sees first
        backend.leave(first)
        second = await backend.attach("r1", "")
        await backend.settle()
        assert await store.readers(["r1"]) == [{"router-a"}]
        first = second
    backend.leave(first)
    await backend.settle()
    assert await store.readers(["r1"]) == [set()]


async def test_a_look_is_no_reading(store: Store) -> None:
    backend = Backend(store, "router-a", AdmissionLimits(10), Windows(60, 600))
    request = replace(REQUEST, tenant="a")
    document = Document.of(request, "completion", 0, True, False)
    stream = await backend.submit(request, document, None, False, NO_QUOTA, outlives=True, kept=True)
    assert await backend.look("r1", "a") == (document, [])
    assert isinstance(await store.fence("r1", 1), FenceAnswer)
    await publish(store, 0, 2 * MAX_BUFFERED + 1)
    backend.leave(stream)
    await backend.settle()
    assert not await store.is_aborted("r1")
    other = Backend(store, "router-b", AdmissionLimits(10), WINDOWS)
    found, entries = await other.look("r1", "a")
    assert found == document
    assert [item.token_ids for entry in entries for item in entry.items] == [(i,) for i in range(2 * MAX_BUFFERED + 1)]
    for tenant, name in (("b", "r1"), ("a", "r2")):
        with pytest.raises(StreamNotFound):
            await other.look(name, tenant)
    await other.cancel("r1")
    assert await store.is_aborted("r1")
    await publish(store, 2 * MAX_BUFFERED + 1, 2 * MAX_BUFFERED + 2, finish_at=2 * MAX_BUFFERED + 1)
    assert 500 < await store._redis.ttl(f"{store._prefix}state:r1") <= 600, "kept for the longer window"
    await other.forget("r1")
    with pytest.raises(StreamNotFound):
        await other.look("r1", "a")


async def test_a_position_that_a_failover_lost_is_an_error_and_not_a_repetition(store: Store) -> None:
    backend = Backend(store, "router-a", AdmissionLimits(10), WINDOWS)
    first = await submit(backend)
    assert isinstance(await store.fence("r1", 1), FenceAnswer)
    await publish(store, 0, 5, finish_at=4)
    entries = await store.journal("r1")

    async def resumed(entry_id: str) -> str:
        stream = await backend.attach("r1", "")
        metrics = RouterMetrics(CollectorRegistry())
        generation = Generation(
            backend, stream, formatter_for(stream.document, TABLE), TABLE, metrics, 10, None, Position(entry_id)
        )
        text = b"".join([event async for event in generation.events()]).decode()
        generation.close()
        return text

    assert "generation_failed" not in await resumed(entries[2].entry_id)
    lost = int(entries[0].entry_id.partition("-")[0]) - 1  # an entry that is not there, before others that are
    assert "generation_failed" in await resumed(f"{lost}-0")
    backend.leave(first)
    await backend.settle()
