"""One accepted request on its way to its client: journal entries in, one object or a stream of events out."""

import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from services.common.errors import DeadlineExceeded, GenerationFailed, OrcaError, StreamInterrupted
from services.common.failpoints import failpoint
from services.common.journal import JournalEntry
from services.common.log import about
from services.common.metrics import RouterMetrics
from services.common.text.detokenizer import TokenBytes
from services.router.api import sse
from services.router.api.errors import JSON
from services.router.api.format import Formatter, Whole
from services.router.api.stream import Backend, Stream
from services.router.core.emission import Delta, Fold
from services.router.core.position import START, Position, event_id, order_of

if TYPE_CHECKING:
    from services.router.api.spans import StreamSpan

log = logging.getLogger(__name__)

FAILED = {"error", "abort", "deadline"}


class Generation:
    """received: when the request came in, on the monotonic clock; None if it was counted when it first came.
    keep_alive_s: the longest silence on a stream. position: what the client has already."""

    def __init__(
        self,
        backend: Backend,
        stream: Stream,
        formatter: Formatter,
        table: TokenBytes,
        metrics: RouterMetrics,
        keep_alive_s: float,
        received: float | None,
        position: Position = START,
        span: "StreamSpan | None" = None,
    ) -> None:
        self._backend = backend
        self._stream = stream
        self._formatter = formatter
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._received = received
        self._position = position
        self._found = position == START  # the entry up to which the client has everything was met again
        self._fold = Fold(stream.document, table)
        self._span = span
        self._first_event: float | None = None
        self._last_event = 0.0
        self._num_tokens = 0
        self._finishes: dict[int, str] = {}
        self._outcome = "abort"

    def _observe(self, num_tokens: int) -> None:
        """So many tokens go out now."""
        if not num_tokens:
            return
        now = time.monotonic()
        self._num_tokens += num_tokens
        if self._first_event is None:
            self._first_event = now
            if self._span is not None:
                self._span.first_event()
            if self._received is not None:
                self._metrics.time_to_first_token.observe(now - self._received)
        elif self._received is not None:
            self._metrics.inter_token_latency.observe(now - self._last_event)
        self._last_event = now
        if self._received is not None:
            self._metrics.generated_tokens.inc(num_tokens)

    def close(self) -> None:
        """Must be called once, however it ended: the reader leaves, the outcome is counted and told."""
        self._backend.leave(self._stream)
        if self._received is not None:
            self._count(time.monotonic() - self._received)
        if self._span is not None:
            self._span.end(self._outcome, self._num_tokens, self._finishes)
        document = self._stream.document
        log.info(
            "request %s: %s after %d tokens",
            document.request_id,
            self._outcome,
            self._num_tokens,
            extra=about(document.traceparent),
        )

    def _count(self, duration_s: float) -> None:
        self._metrics.requests.labels(self._outcome).inc()
        self._metrics.request_duration.observe(duration_s)
        if self._first_event is not None and self._num_tokens > 1:
            elapsed = self._last_event - self._first_event
            self._metrics.time_per_output_token.observe(elapsed / (self._num_tokens - 1))

    def _push(self, entry: JournalEntry) -> list[Delta]:
        deltas = self._fold.push(entry)
        for delta in deltas:
            if delta.finish is not None:
                self._finishes[delta.choice] = delta.finish
        return deltas

    def _ended(self) -> None:
        """All choices have finished. Raises GenerationFailed or DeadlineExceeded if one failed."""
        finishes = set(self._finishes.values())
        if "deadline" in finishes:
            raise DeadlineExceeded("the generation did not end in time")
        if finishes & FAILED:
            raise GenerationFailed("the generation failed")
        self._outcome = "ok"

    async def whole(self) -> Response:
        """The answer as one object."""
        choices = [Whole(index) for index in range(self._stream.document.choices)]
        try:
            while not self._fold.done:
                entry = await self._stream.next(self._keep_alive_s)
                if entry is None:
                    continue
                for delta in self._push(entry):
                    choices[delta.choice].add(delta)
                self._observe(sum(len(item.token_ids) for item in entry.items))
            self._ended()
            assert self._fold.usage is not None
            body = self._formatter.whole(choices, self._fold.usage)
            return Response(orjson.dumps(body), media_type=JSON)
        except OrcaError:
            self._outcome = "error"
            raise

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; a failure is an error event, then [DONE], unless the stream goes on
        elsewhere."""
        try:
            async for chunk in self._events():
                yield chunk
        except StreamInterrupted as error:
            self._outcome = "interrupted"
            yield self._formatter.failed(error)
        except OrcaError as error:
            self._outcome = "error"
            yield self._formatter.failed(error)
            if self._formatter.closing:
                yield self._formatter.closing

    async def _events(self) -> AsyncIterator[bytes]:
        sent = time.monotonic()
        started = False
        while not self._fold.done:
            # Measured from the last byte: tokens that make no text must not keep the line silent.
            patience = sent + self._keep_alive_s - time.monotonic()
            entry = await self._stream.next(patience) if patience > 0 else None
            if entry is None:
                sent = time.monotonic()
                yield sse.keep_alive(started)
                continue
            deltas = self._push(entry)
            if self._finishes and FAILED & set(self._finishes.values()):
                self._ended()
            frames = self._frames(entry.entry_id, deltas)
            if frames:
                started, sent = True, time.monotonic()
                self._observe(sum(len(item.token_ids) for item in entry.items))
                yield b"".join(frames)
                failpoint("stream.event")
        self._ended()
        if self._formatter.closing:
            yield self._formatter.closing

    def _check_position(self, entry_id: str) -> None:
        """The journal must still have the entry that the client names: where a failover lost it, they were written
        anew, in other entries. Raises GenerationFailed."""
        self._found = self._found or entry_id == self._position.entry_id
        if not self._found and order_of(entry_id) > order_of(self._position.entry_id):
            raise GenerationFailed("the event after which this stream was to go on was lost")

    def _frames(self, entry_id: str, deltas: list[Delta]) -> list[bytes]:
        """The events of one entry, without those that the client has already."""
        objects = [chunk for delta in deltas for chunk in self._formatter.chunks(delta)]
        if self._fold.usage is not None:
            objects += self._formatter.end(self._fold.usage)
        self._check_position(entry_id)
        request_id, last = self._stream.document.request_id, len(objects) - 1
        skipped = self._position.skip(entry_id, len(objects))
        return [
            self._formatter.frame(data, event_id(request_id, entry_id, index, last))
            for index, data in enumerate(objects)
            if index >= skipped
        ]
