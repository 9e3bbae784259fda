"""The function library, on a real Valkey: every answer that the protocol names."""

import asyncio
from dataclasses import replace

from services.common.codec import details_to_bytes
from services.common.journal import FenceAnswer, FencedChoice, PublishItem, TokenDetail
from services.common.redis.store import Store


async def _request(store: Store, name: str = "r1", choices: int = 1, limit: int = 10) -> FenceAnswer:
    assert await store.enqueue(name, b"payload", "router-a", choices, 5, limit, 60)
    fence = await store.fence(name, 1)
    assert isinstance(fence, FenceAnswer)
    return fence


def _item(name: str = "r1", index: int = 0, ids: tuple[int, ...] = (7,), **other: object) -> PublishItem:
    values: dict[str, object] = {"epoch": 1, "attempt": 1, "choice": 0, "step": index + 1}
    return PublishItem(name, index=index, token_ids=ids, **{**values, **other})  # type: ignore[arg-type]


async def test_tokens_reach_journal_and_inbox_in_order(store: Store) -> None:
    await _request(store)
    assert await store.publish(
        "w0", [_item(index=0, ids=(7,)), _item(index=1, ids=(8,), payload=details_to_bytes(-0.1, ((8, -0.1),)))]
    ) == [
        "ok",
        "ok",
    ]
    entries = await store.journal("r1")
    assert [(e.worker, e.step, e.items[0].index, e.items[0].token_ids) for e in entries] == [
        ("w0", 1, 0, (7,)),
        ("w0", 2, 1, (8,)),
    ]
    assert entries[1].items[0].details == (TokenDetail(-0.1, ((8, -0.1),)),)
    inbox = store.inbox_key("router-a")
    frames = await store.read({inbox: "0-0"}, 10)
    assert [dict(fields)[b"j"].decode() for _, _, fields in frames] == [entry.entry_id for entry in entries]
    assert await store.last_entries(["r1", "unknown"]) == [entries[-1].entry_id, None]


async def test_enqueue_is_bounded_and_idempotent(store: Store) -> None:
    await _request(store, "r1", limit=2)
    await _request(store, "r2", limit=2)
    assert not await store.enqueue("r3", b"", "router-a", 1, 5, 2, 60)
    assert await store.enqueue("r1", b"payload", "router-a", 1, 5, 2, 60), "a retry is not a second request"
    assert await store.num_requests() == 2


async def test_retry_after_a_lost_answer_is_same(store: Store) -> None:
    await _request(store)
    item = _item(finish="length")
    assert await store.publish("w0", [item]) == ["ok"]
    assert await store.publish("w0", [item]) == ["same"]
    assert len(await store.journal("r1")) == 1


async def test_differs_gap_stale_finished_gone(store: Store) -> None:
    await _request(store)
    assert await store.publish("w0", [_item(index=2)]) == ["gap:0"]
    assert await store.publish("w0", [_item(ids=(7, 8))]) == ["ok"]
    assert await store.publish("w0", [_item(ids=(7, 9))]) == ["differs"]
    assert await store.publish("w0", [_item(index=1, ids=(8, 9))]) == ["gap:2"]
    fence = await store.fence("r1", 1, [0])
    assert isinstance(fence, FenceAnswer)
    assert fence.choices == (FencedChoice(2, (7, 8), None),)
    assert await store.publish("w0", [_item(index=2)]) == ["stale"]
    second = _item(index=2, attempt=2, finish="stop")
    assert await store.publish("w1", [second]) == ["ok"]
    assert await store.publish("w1", [replace(second, index=3, finish="length")]) == ["finished"]
    assert await store.publish("w1", [_item("other")]) == ["gone"]


async def test_choices_are_fenced_one_by_one(store: Store) -> None:
    await _request(store, choices=2)
    fence = await store.fence("r1", 1, [1])
    assert isinstance(fence, FenceAnswer)
    assert [choice.attempt for choice in fence.choices] == [1, 2]
    assert await store.publish("w0", [_item(), _item(choice=1), _item(choice=1, attempt=2)]) == ["ok", "stale", "ok"]


async def test_a_new_epoch_fences_the_old_leader(store: Store) -> None:
    await _request(store)
    newer = await store.fence("r1", 2)
    assert isinstance(newer, FenceAnswer)
    assert newer.choices[0].attempt == 1
    assert await store.fence("r1", 1) == "stale"
    assert await store.publish("w0", [_item()]) == ["stale"]
    assert await store.publish("w0", [_item(epoch=2)]) == ["ok"]


async def test_the_last_finish_writes_usage_and_empties_the_queue(store: Store) -> None:
    await _request(store, choices=2)
    first = _item(ids=(1, 2), finish="stop")
    second = _item(ids=(3,), choice=1, finish="length")
    assert await store.publish("w0", [first]) == ["ok"]
    assert (await store.journal("r1"))[-1].usage is None
    assert await store.num_requests() == 1
    assert await store.publish("w0", [second]) == ["ok"]
    assert (await store.journal("r1"))[-1].usage == (5, 3)
    assert await store.num_requests() == 0
    assert await store.fence("r1", 1) == "gone"
    for key in await store._redis.keys("orca:{" + store._prefix.split("{")[1] + "*r1"):
        assert 0 < await store._redis.ttl(key) <= 60, f"{key!r} would stay"


async def test_abort_only_when_the_last_reader_leaves(store: Store) -> None:
    await _request(store)
    assert await store.attach("r1", "router-b")
    assert await store.abort("r1", "router-a") == "kept"
    assert not await store.is_aborted("r1")
    assert await store.abort("r1", "router-b") == "ok"
    assert await store.abort("r1", "router-b") == "ok"
    assert await store.is_aborted("r1")
    bells = await store.read({store.control_key: "0-0"}, 10)
    assert dict(bells[0][2])[b"r"] == b"r1"
    assert await store.publish("", [_item(ids=(), finish="abort")]) == ["ok"]
    assert await store.abort("r1", "router-b") == "finished"
    assert await store.abort("nobody") == "gone"
    assert not await store.attach("nobody", "router-a")


async def test_leadership_and_registration(store: Store) -> None:
    first = await store.lead("a", 5_000)
    assert first is not None
    assert await store.lead("b", 5_000) is None
    assert await store.lead("a", 5_000) == first, "keeping the lead keeps the epoch"
    await store._redis.delete(store._prefix + "leader")  # lapsed, while Redis was away
    assert await store.lead("a", 5_000, first[0]) == first, "whoever was cut off goes on under its epoch"
    assert await store.lead("a", 0) is None
    second = await store.lead("b", 5_000)
    assert second is not None
    assert second[0] > first[0]
    await store.register("workers", "w0", '{"a": 1}', 5_000)
    await store.register("workers", "w1", "{}", 1)
    await asyncio.sleep(0.01)  # the time to live of w1, by Redis' clock
    assert await store.registered("workers") == {"w0": '{"a": 1}'}
    await store.register("workers", "w0", "", 0)
    assert await store.registered("workers") == {}


async def test_concurrent_publishers_write_each_token_once(store: Store) -> None:
    await _request(store)
    items = [_item(index=i, ids=(i,)) for i in range(20)]

    async def publisher() -> None:
        position = 0
        while position < len(items):
            (answer,) = await store.publish("w", [items[position]])
            assert answer in ("ok", "same")
            position += 1

    await asyncio.gather(*(publisher() for _ in range(4)))
    tokens = [item.token_ids[0] for entry in await store.journal("r1") for item in entry.items]
    assert tokens == list(range(20))
