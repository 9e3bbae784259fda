"""Publishes tokens to Redis: one round trip per step, off the step's critical path, in order, never dropping."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.common.codec import details_to_bytes
from services.common.failpoints import failpoint
from services.common.journal import PublishItem
from services.common.redis.store import CONNECTION_ERRORS, Store, backoff
from services.worker.core.plan import SequenceState, StepOutput
from services.worker.core.publishing import Item, PublishBook, Token

log = logging.getLogger(__name__)

# Steps published in one call when catching up: bounds how long Redis works on it.
MAX_STEPS = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the scheduler must know of a sequence's tokens in Redis. finish_reason is set when it is in the journal."""

    sequence_id: int
    answer: str
    finish_reason: str | None


def _payload(token: Token, sequence: SequenceState) -> bytes:
    """What is kept beside a token; with the first comes what was asked of the prompt."""
    logprobs = token.logprobs
    scored = (logprobs.chosen, logprobs.top) if logprobs else None
    if token.index == 0 and (sequence.scores or sequence.embedding or sequence.num_cached):
        prompt = [(s.chosen, s.top) for s in sequence.scores]
        return details_to_bytes(scored, prompt, sequence.embedding, sequence.num_cached)
    return details_to_bytes(scored) if scored else b""


def _to_publish(item: Item) -> PublishItem:
    sequence, token = item.sequence, item.token
    return PublishItem(
        request_id=sequence.request_id,
        epoch=sequence.epoch,
        attempt=sequence.attempt,
        choice=sequence.choice,
        index=item.index,
        token_ids=(token.token_id,) if token else (),
        step=item.step,
        finish=item.finish or "",
        payload=_payload(token, sequence) if token else b"",
    )


class Publisher:
    """Takes step outputs, publishes them, reports outcomes.

    on_outcomes: what the scheduler must know. on_published: these steps have left the backlog.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        book: PublishBook,
        on_outcomes: Callable[[list[Outcome]], None],
        on_published: Callable[[list[StepOutput]], None],
    ) -> None:
        self._store = store
        self._worker = worker
        self._book = book
        self._on_outcomes = on_outcomes
        self._on_published = on_published
        self._queue: asyncio.Queue[StepOutput] = asyncio.Queue()
        self.num_round_trips = 0

    def put(self, step: StepOutput) -> None:
        """Accept a step's output; bounded by the step loop's backlog."""
        self._queue.put_nowait(step)

    async def run(self) -> None:
        while True:
            steps = [await self._queue.get()]
            while len(steps) < MAX_STEPS and not self._queue.empty():  # Redis was slower than the steps: catch up
                steps.append(self._queue.get_nowait())
            items = []
            for step in steps:
                items += self._book.take(step)
            await self._publish(items)
            self._on_published(steps)
            for _ in steps:
                self._queue.task_done()

    async def drained(self) -> None:
        """Everything that was put is published."""
        await self._queue.join()

    async def _publish(self, items: list[Item]) -> None:
        while items:
            answers = await self._call(items)
            items = self._handle(items, answers)

    async def _call(self, items: list[Item]) -> list[str]:
        """One round trip, tried until Redis answers: the functions are idempotent."""
        records = [_to_publish(item) for item in items]
        waits = backoff()
        failures = 0
        while True:
            try:
                self.num_round_trips += 1
                failpoint("publish.before")
                answers = await self._store.publish(self._worker, records)
                failpoint("publish.after")
                if failures:
                    log.warning("Redis is back after %d tries", failures)
                return answers
            except CONNECTION_ERRORS as error:
                failures += 1
                if failures == 1:
                    log.warning("Redis does not answer (%s); tokens are kept and publishing goes on trying", error)
                await anext(waits)

    def _handle(self, items: list[Item], answers: list[str]) -> list[Item]:
        """Act on the answers; returns what must be sent again."""
        outcomes: list[Outcome] = []
        again: list[Item] = []
        closed: dict[int, SequenceState] = {}
        resent: set[int] = set()
        for item, answer in zip(items, answers, strict=True):
            sequence_id = item.sequence.sequence_id
            if sequence_id in closed or sequence_id in resent:
                continue
            if answer in ("ok", "same"):
                if item.finish:
                    outcomes.append(Outcome(sequence_id, answer, item.finish))
                    closed[sequence_id] = item.sequence
                continue
            if answer.startswith("gap:"):
                missing = self._book.resend(sequence_id, int(answer.removeprefix("gap:")))
                if missing:
                    again += missing
                    resent.add(sequence_id)  # later items of it are among those sent again
                    continue
                answer = "gap"
            log.info("request %s: publish answered %s", item.sequence.request_id, answer)
            outcomes.append(Outcome(sequence_id, answer, None))
            closed[sequence_id] = item.sequence
        for sequence in closed.values():
            self._book.close(sequence)
        if outcomes:
            self._on_outcomes(outcomes)
        return again
