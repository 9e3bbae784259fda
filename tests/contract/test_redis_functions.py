"""The function library, on a real Valkey: every answer that the protocol names."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.common.admission import (
    AdmissionLimits,
    Admitted,
    Allowance,
    Full,
    IdempotencyKey,
    Joined,
    Mismatch,
    Terms,
    Withdrawn,
)
from services.common.codec import details_to_bytes
from services.common.journal import Attached, Crash, FenceAnswer, FencedChoice, Leave, PublishItem, TokenDetail
from services.common.redis.store import Store


def _terms(choices: int = 1, limits: AdmissionLimits | None = None, **other: Any) -> Terms:
    return Terms("router-a", choices, 5, 20, limits or AdmissionLimits(), 60, **other)


async def _request(store: Store, name: str = "r1", **terms: Any) -> FenceAnswer:
    assert await store.enqueue(name, b"payload", _terms(**terms)) == Admitted()
    fence = await store.fence(name, 1)
    assert isinstance(fence, FenceAnswer)
    return fence


def _item(name: str = "r1", index: int = 0, ids: tuple[int, ...] = (7,), **other: object) -> PublishItem:
    values: dict[str, object] = {"epoch": 1, "attempt": 1, "choice": 0, "step": index + 1}
    return PublishItem(name, index=index, token_ids=ids, **{**values, **other})  # type: ignore[arg-type]


async def test_tokens_reach_journal_and_inbox_in_order(store: Store) -> None:
    await _request(store)
    assert await store.publish(
        "w0", [_item(index=0, ids=(7,)), _item(index=1, ids=(8,), payload=details_to_bytes((-0.1, ((8, -0.1),))))]
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
    two = AdmissionLimits(requests=2)
    await _request(store, "r1", limits=two)
    await _request(store, "r2", limits=two)
    assert await store.enqueue("r3", b"", _terms(limits=two)) == Full("requests", 5), "no rate is known yet"
    assert await store.enqueue("r1", b"payload", _terms(limits=two)) == Admitted(), "a retry is not a second request"
    assert await store.num_requests() == 2


@pytest.mark.parametrize(
    ("limit", "mine"),
    [("tokens", False), ("tokens", True), ("tenant_requests", True), ("tenant_tokens", True)],
)
async def test_each_limit_is_kept_and_freed(store: Store, limit: str, mine: bool) -> None:
    limits = AdmissionLimits(**{limit: 1 if limit == "tenant_requests" else 30})
    await _request(store, "r1", limits=limits, tenant="a")
    tenant = "a" if mine else "b"
    refusal = await store.enqueue("r2", b"", _terms(limits=limits, tenant=tenant))
    assert isinstance(refusal, Full)
    assert refusal.limit == limit
    if limit.startswith("tenant"):
        await _request(store, "r3", limits=limits, tenant="b")
    assert await store.publish("w0", [_item(finish="stop")]) == ["ok"]
    await _request(store, "r2", limits=limits, tenant=tenant)


async def test_load_and_usage_are_counted_once(store: Store) -> None:
    await _request(store, "r1", tenant="a")
    item = _item(ids=(1, 2, 3), finish="stop")
    assert await store.publish("w0", [item]) == ["ok"]
    assert await store.publish("w0", [item, _item(ids=(1, 2, 9), finish="length")]) == ["same", "finished"]
    assert await store.usage() == {"a": {"requests": 1, "prompt": 5, "completion": 3}}
    assert not await store._redis.exists(store._prefix + "load")


async def test_an_idempotency_key_joins_replays_or_is_refused(store: Store) -> None:
    key = IdempotencyKey("k", "b")
    await _request(store, "r1", idempotency=key)
    assert await store.enqueue("r2", b"", _terms(idempotency=key)) == Joined("r1")
    assert await store.enqueue("r3", b"", _terms(idempotency=replace(key, body="other"))) == Mismatch()
    assert await store.enqueue("r1", b"", _terms(idempotency=key)) == Admitted(), "its own retry"
    assert await store.publish("w0", [_item(finish="stop")]) == ["ok"]
    assert await store.enqueue("r2", b"", _terms(idempotency=key)) == Joined("r1"), "finished: replayed"
    await store._redis.delete(store._prefix + "state:r1")
    await _request(store, "r2", idempotency=key)
    assert await store.publish("w0", [_item("r2", finish="abort", ids=())]) == ["ok"]
    await _request(store, "r4", idempotency=key)


async def test_a_request_withdrawn_before_it_came_never_comes(store: Store) -> None:
    assert await store.abort("r1", "router-a", Leave.UNBORN) == "gone"
    assert await store.enqueue("r1", b"", _terms()) == Withdrawn()
    assert await store.num_requests() == 0
    assert await store.fence("r1", 1) == "gone"
    assert await store.attach("r1", "router-a") is None


async def test_crashes_alone_are_counted_until_there_is_progress(store: Store) -> None:
    await _request(store)

    async def crash(how: Crash) -> int | None:
        fence = await store.fence("r1", 1, [0], how)
        assert isinstance(fence, FenceAnswer)
        return fence.crashes

    assert [await crash(how) for how in (Crash.NONE, Crash.SHARED, Crash.ALONE, Crash.ALONE)] == [None, 0, 1, 2]
    newer = await store.fence("r1", 2)
    assert isinstance(newer, FenceAnswer)
    assert newer.crashes == 2, "a new leader knows"
    assert await store.publish("w0", [_item(epoch=2, attempt=1)]) == ["ok"]
    again = await store.fence("r1", 2, [0], Crash.ALONE)
    assert isinstance(again, FenceAnswer)
    assert again.crashes == 1, "a token came out: it is not what it was suspected of"


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
    assert await store.attach("r1", "router-b") == Attached("{}", None)
    assert await store.readers(["r1"]) == [{"router-a", "router-b"}]
    assert await store.abort("r1", "router-a") == "kept"
    assert not await store.is_aborted("r1")
    assert await store.abort("r1", "router-b") == "ok"
    assert await store.abort("r1", "router-b") == "ok"
    assert await store.is_aborted("r1")
    bells = await store.read({store.control_key: "0-0"}, 10)
    assert dict(bells[0][2])[b"r"] == b"r1"
    assert await store.publish("", [_item(ids=(), finish="abort")]) == ["ok"]
    assert await store.abort("r1", "router-b") == "finished"
    assert await store.attach("r1", "router-c") == Attached("{}", (await store.journal("r1"))[-1].entry_id)
    assert await store.abort("nobody") == "gone"
    assert await store.attach("nobody", "router-a") is None


async def test_what_is_resumable_or_handed_on_is_not_aborted(store: Store) -> None:
    await _request(store, resumable=True)
    assert await store.abort("r1", "router-a") == "kept"
    await _request(store, "r2")
    assert await store.abort("r2", "router-a", Leave.DETACH) == "kept"
    assert not await store.is_aborted("r1")
    assert not await store.is_aborted("r2")
    assert await store.readers(["r1", "r2"]) == [set(), set()]


async def test_what_outlives_its_readers_is_aborted_by_command_alone(store: Store) -> None:
    await _request(store, outlives=True)
    assert await store.abort("r1", "router-a") == "kept"
    assert not await store.is_aborted("r1")
    await _request(store, "r2")
    assert await store.readers(["r1", "r2", "nobody"]) == [None, {"router-a"}, set()]
    assert await store.abort("r1") == "ok"
    assert await store.is_aborted("r1")


async def test_what_is_over_can_be_forgotten(store: Store) -> None:
    terms = {"document": "{}", "idempotency": IdempotencyKey("k", "b")}
    await _request(store, **terms)
    assert await store.document("r1") == "{}"
    assert await store.forget("r1") == "running"
    assert await store.publish("w0", [_item(finish="stop")]) == ["ok"]
    assert await store.forget("r1") == "ok"
    assert await store.forget("r1") == "gone"
    assert await store.document("r1") is None
    assert await store.journal("r1") == []
    assert await store.attach("r1", "router-a") is None
    assert await store.enqueue("r2", b"", _terms(**terms)) == Admitted(), "its key names nothing"


async def test_a_tenants_minute_is_shared_by_all_routers_and_fills_again(store: Store) -> None:
    two = {"tenant": "a", "rates": (2, 0)}
    assert await store.enqueue("r1", b"", _terms(**two)) == Admitted(Allowance(1, 30, 0, 0))
    assert await store.enqueue("r2", b"", _terms(**two)) == Admitted(Allowance(0, 60, 0, 0))
    assert await store.enqueue("r2", b"", _terms(**two)) == Admitted(), "a retry takes nothing"
    assert await store.enqueue("r3", b"", _terms(**two)) == Full("requests_per_minute", 30)
    assert await store.enqueue("r4", b"", _terms(**two | {"tenant": "b"})) == Admitted(Allowance(1, 30, 0, 0))
    bucket = store._prefix + "bucket:a"
    await store._redis.hincrby(bucket, "at", -45_000)  # three quarters of a minute later
    assert await store.enqueue("r3", b"", _terms(**two)) == Admitted(Allowance(0, 45, 0, 0))

    fifty = {"tenant": "c", "rates": (0, 50)}  # each request may come to hold 20 tokens
    assert await store.enqueue("t1", b"", _terms(**fifty)) == Admitted(Allowance(0, 0, 30, 24))
    assert await store.enqueue("t2", b"", _terms(**fifty)) == Admitted(Allowance(0, 0, 10, 48))
    assert await store.enqueue("t3", b"", _terms(**fifty)) == Full("tokens_per_minute", 12)
    ten = {"tenant": "d", "rates": (0, 10)}
    assert await store.enqueue("u1", b"", _terms(**ten)) == Admitted(Allowance(0, 0, 0, 120)), (
        "larger than a full bucket"
    )
    assert await store.enqueue("u2", b"", _terms(**ten)) == Full("tokens_per_minute", 120), "it is in debt"


async def test_a_move_rings_the_leader(store: Store) -> None:
    await _request(store)
    assert await store.move("r1", "w1")
    assert not await store.move("nobody")
    ((_, _, fields),) = await store.read({store.control_key: "0-0"}, 10)
    assert dict(fields) == {b"r": b"r1", b"w": b"w1"}


async def test_leadership_and_registration(store: Store) -> None:
    assert await store.lead("a", 5_000) == "vacant"
    first = await store.lead("a", 5_000, claim="vacant")
    assert isinstance(first, tuple)
    assert await store.leader() == "a"
    assert await store.lead("b", 5_000, claim="vacant") is None
    assert await store.lead("a", 5_000) == first, "keeping the lead keeps the epoch"
    await store._redis.delete(store._prefix + "leader")  # lapsed, while Redis was away
    assert await store.lead("a", 5_000, first[0]) == first, "whoever was cut off goes on under its epoch"
    await store._redis.delete(store._prefix + "leader")
    assert await store.lead("b", 5_000) == "vacant", "who had it comes first"
    assert await store.lead("a", 5_000, first[0]) == first
    assert await store.lead("a", 0) is None
    second = await store.lead("b", 5_000)
    assert isinstance(second, tuple), "given up: nobody need wait"
    assert second[0] > first[0]
    elected = await store.lead("c", 5_000, claim="elected")
    assert isinstance(elected, tuple), "others than Redis have decided"
    assert elected[0] > second[0]
    assert await store.lead("c", 5_000, claim="elected") == elected, "asked again, the same epoch"
    assert await store.lead("b", 5_000, second[0]) is None, "and the one before is over"
    assert await store.epoch() == elected[0]
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
