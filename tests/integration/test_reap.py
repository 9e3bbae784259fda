"""Requests without a living reader: the engine's side of Redis ends them, but for those that need none."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from services.common import process
from services.common.admission import AdmissionLimits, Terms
from services.common.redis.store import Store
from services.common.request import GenerateRequest, SamplingParams
from services.scheduler.adapters import redis_journal
from services.scheduler.adapters.redis_journal import RedisJournal
from services.scheduler.engine import Engine


@dataclass
class Record:
    request: GenerateRequest


@dataclass
class Requests:
    """As much of an engine as a reaper looks at."""

    records: dict[str, Record]
    aborted: set[str] = field(default_factory=set)
    rounds: int = 0
    looked: asyncio.Event = field(default_factory=asyncio.Event)

    def on_abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    def pump(self) -> None:
        self.rounds += 1
        if self.rounds == 5:
            self.looked.set()


async def test_only_what_needs_a_reader_and_has_none_is_aborted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_journal, "REAP_S", 0.01)
    monkeypatch.setattr(redis_journal, "ORPHAN_GRACE_S", 0.0)
    await store.register("routers", "router-a", "{}", 60_000)
    for name, router, outlives in (
        ("read", "router-a", False),
        ("orphan", "gone", False),
        ("background", "gone", True),
    ):
        terms = Terms(router, 1, 1, 1, AdmissionLimits(), 60, outlives=outlives)
        await store.enqueue(name, b"", terms)
    request = GenerateRequest("r", "m", ((1,),), SamplingParams(max_tokens=1))
    engine = Requests({name: Record(request) for name in ("read", "orphan", "background")})
    task = asyncio.create_task(RedisJournal(store, 1).reap(cast(Engine, cast(Any, engine))))
    async with asyncio.timeout(10):
        await engine.looked.wait()
    await process.end(task)
    assert engine.aborted == {"orphan"}
