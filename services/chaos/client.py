"""One client: sends a request, resumes a broken stream, and writes down all that it saw."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from services.chaos.requests import Request

RETRY_STATUSES = (429, 503)
INTERRUPTED = "stream_interrupted"  # the code of a router that goes: the stream continues at another
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 0.5
GAP_S = 0.1  # shorter ones are not kept


@dataclass(frozen=True, slots=True)
class Patience:
    """When a client gives up: after so long without a byte, without an event, and altogether."""

    silent_s: float = 60.0
    no_event_s: float = 120.0
    total_s: float = 300.0
    connect_s: float = 5.0


@dataclass(slots=True)
class Choice:
    """One choice as the client has it. pieces: the text as it came. tokens: what the log-probability entries name."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    finish: str | None = None
    num_roles: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Outcome:
    """Everything that one client saw. gaps: (from, to) between two events, on the monotonic clock."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    num_done: int = 0
    num_events: int = 0
    num_reconnects: int = 0
    num_refused: int = 0  # connections that were not made, and answers of 429 and 503
    request_id: str = ""
    anomalies: list[str] = field(default_factory=list)
    hung: str = ""
    failed: str = ""
    ended: bool = False
    gaps: list[tuple[float, float]] = field(default_factory=list)
    took_s: float = 0.0

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())


class Broken(Exception):
    """The connection ended before the answer did."""


class Hung(Exception):
    """Nothing came for too long."""


class Failed(Exception):
    """The system answered that it will not answer."""


def split_events(buffer: bytearray) -> Iterator[tuple[str, str]]:
    """The complete events at the start of the buffer, taken out of it, as (id, data). Comments are none.

    By bytes, as the format says: text may well contain what Unicode counts as line ends.
    """
    while (end := buffer.find(b"\n\n")) >= 0:
        frame = bytes(buffer[:end])
        del buffer[: end + 2]
        event_id, data = "", []
        for line in frame.split(b"\n"):
            name, _, value = line.partition(b":")
            if name == b"id":
                event_id = value.strip().decode()
            elif name == b"data":
                data.append(value.removeprefix(b" ").decode())
        if data:
            yield event_id, "\n".join(data)


class Client:
    """Runs one request to its end, over as many connections as that takes.

    key: its idempotency key; without one it is a client that does not come back.
    """

    def __init__(self, http: httpx.AsyncClient, request: Request, key: str, patience: Patience) -> None:
        self._http = http
        self._request = request
        self._key = key
        self._patience = patience
        self._last_id = ""
        self._seen: set[str] = set()
        # Events since the last id: a resumed stream sends them again, so they count only once an id has come.
        self._pending: list[dict[str, Any]] = []
        self._started = self._heard = self._last_event = time.monotonic()
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        outcome = self.outcome
        self._started = self._heard = self._last_event = time.monotonic()
        try:
            async with asyncio.timeout(self._patience.total_s):
                await self._until_ended()
        except TimeoutError:
            outcome.hung = f"not ended after {self._patience.total_s:g} s"
        except Hung as error:
            outcome.hung = str(error)
        except Failed as error:
            outcome.failed = str(error)
        outcome.ended = True
        outcome.took_s = time.monotonic() - self._started
        return outcome

    async def _until_ended(self) -> None:
        delay = FIRST_BACKOFF_S
        while not self.outcome.ended:
            before = self._heard
            try:
                await (self._stream() if self._request.is_stream else self._whole())
                return
            except (Broken, httpx.TransportError) as error:
                if isinstance(error, httpx.ReadTimeout):
                    raise Hung(f"no byte for {self._read_s:g} s") from None
            if self._heard > before:
                self.outcome.num_reconnects += 1
                delay = FIRST_BACKOFF_S
            else:
                self.outcome.num_refused += 1
            if time.monotonic() - self._heard > self._patience.silent_s:
                raise Hung(f"no connection for {self._patience.silent_s:g} s")
            await asyncio.sleep(delay)
            delay = min(delay * 2, MAX_BACKOFF_S)

    @property
    def _read_s(self) -> float:
        """An answer in one piece is silent while it is made."""
        return self._patience.silent_s if self._request.is_stream else self._patience.no_event_s

    def _open(self) -> Any:
        """The next connection: the request itself, or the rest of its stream."""
        headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
        timeout = httpx.Timeout(self._patience.connect_s, read=self._read_s)
        if self._request.is_stream and self.outcome.request_id and self._request.resume_by == "get":
            return self._http.stream("GET", f"/v1/streams/{self.outcome.request_id}", headers=headers, timeout=timeout)
        if self._key:
            headers["Idempotency-Key"] = self._key
        return self._http.stream("POST", self._request.path, json=self._request.body, headers=headers, timeout=timeout)

    async def _check(self, response: httpx.Response) -> None:
        """Raises Broken if it is to be tried again, Failed if there is no use."""
        if response.status_code in RETRY_STATUSES:
            raise Broken(f"status {response.status_code}")
        if response.status_code != 200:
            body = (await response.aread())[:300].decode(errors="replace")
            method = response.request.method
            raise Failed(f"{method} {response.request.url.path}: {response.status_code} {body}")
        self._heard = time.monotonic()
        request_id = response.headers.get("x-orca-request-id", "")
        if self.outcome.request_id and request_id and request_id != self.outcome.request_id:
            self.outcome.anomalies.append(f"the request id changed to {request_id}")
        self.outcome.request_id = self.outcome.request_id or request_id

    # -- streamed

    async def _stream(self) -> None:
        self._pending.clear()
        async with self._open() as response:
            if response.status_code == 204 and self._last_id:  # all events were here before the connection broke
                self.outcome.num_done += 1
                return
            await self._check(response)
            async for event_id, data in self._events(response):
                self._on_event(event_id, data)
                if self._leaves():
                    return
        if not self.outcome.num_done:
            raise Broken("the stream ended without [DONE]")

    def _leaves(self) -> bool:
        after = self._request.leave_after
        return after is not None and self.outcome.num_events >= after

    async def _events(self, response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
        buffer = bytearray()
        async for chunk in response.aiter_raw():
            self._heard = time.monotonic()
            buffer += chunk
            for event in split_events(buffer):
                yield event
            if self._heard - self._last_event > self._patience.no_event_s:
                raise Hung(f"only keep-alives for {self._patience.no_event_s:g} s")

    def _on_event(self, event_id: str, data: str) -> None:
        outcome = self.outcome
        if outcome.num_done:
            outcome.anomalies.append("an event after [DONE]")
        if data == "[DONE]":
            self._commit()
            outcome.num_done += 1
            return
        event = orjson.loads(data)
        if "error" in event:
            self._on_error(event["error"])
            return
        self._pending.append(event)
        if event_id:
            if event_id in self._seen:
                outcome.anomalies.append(f"the event id {event_id} came twice")
            self._seen.add(event_id)
            self._last_id = event_id
            self._commit()

    def _on_error(self, error: dict[str, Any]) -> None:
        if error.get("code") == INTERRUPTED:
            raise Broken(INTERRUPTED)
        self._commit()
        self.outcome.anomalies.append(f"an error event: {error.get('code')}")
        raise Failed(f"error event: {error.get('code')}: {error.get('message')}")

    def _commit(self) -> None:
        for event in self._pending:
            self._note_time()
            self._apply(event)
        self._pending.clear()

    def _note_time(self) -> None:
        now = time.monotonic()
        if self.outcome.num_events and now - self._last_event >= GAP_S:
            self.outcome.gaps.append((self._last_event, now))
        self._last_event = now
        self.outcome.num_events += 1

    def _apply(self, event: dict[str, Any]) -> None:
        outcome = self.outcome
        usage = event.get("usage")
        if usage is not None:
            if outcome.usage is not None:
                outcome.anomalies.append("two usage chunks")
            outcome.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        for wire in event["choices"]:
            choice = outcome.choice(wire["index"])
            if choice.finish is not None:
                what = "two finishes" if wire["finish_reason"] else "an event after the finish"
                outcome.anomalies.append(f"choice {wire['index']}: {what}")
            self._take(choice, wire, wire["delta"] if self._request.is_chat else wire)

    def _take(self, choice: Choice, wire: dict[str, Any], content: dict[str, Any]) -> None:
        """content: where the text is. That differs between the two APIs, and between whole and streamed chat."""
        text = content.get("content" if self._request.is_chat else "text") or ""
        if text:
            choice.pieces.append(text)
        if "role" in content:
            choice.num_roles += 1
            if choice.num_roles > 1:
                self.outcome.anomalies.append(f"choice {wire['index']}: two roles")
        choice.tokens += _tokens(wire.get("logprobs"), self._request.is_chat)
        choice.finish = wire["finish_reason"] or choice.finish

    # -- whole

    async def _whole(self) -> None:
        async with self._open() as response:
            await self._check(response)
            body = orjson.loads(await response.aread())
        self.outcome.usage = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        for wire in body["choices"]:
            self._take(self.outcome.choice(wire["index"]), wire, wire["message"] if self._request.is_chat else wire)
        self.outcome.num_events += 1
        self.outcome.num_done += 1


def _tokens(logprobs: dict[str, Any] | None, is_chat: bool) -> list[str]:
    """One string per entry: the token, and for completions where it stands."""
    if not logprobs:
        return []
    if is_chat:
        return [entry["token"] for entry in logprobs["content"]]
    return [f"{offset}:{token}" for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
