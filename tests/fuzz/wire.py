"""One raw exchange with the server, judged by h11: an HTTP implementation that shares no code with the server's."""

import asyncio
import itertools
import random
from contextlib import suppress
from dataclasses import dataclass, field

import h11

DEADLINE_S = 5.0
# What a client waits for the answer to a request that is no HTTP, before it hangs up.
PATIENCE_S = 0.3


@dataclass
class Told:
    """What was sent, by h11: complete requests, and whether something that is no HTTP, or only a part, came after."""

    methods: list[str] = field(default_factory=list)
    rest: str = ""  # "", "broken" or "open"


@dataclass
class Heard:
    """What came back. faults: what should not have been. closed: the server closed; reset: on bytes that
    it had not read, which can take its last answer away from us."""

    statuses: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    closed: bool = False
    reset: bool = False


def understood(data: bytes) -> Told:
    """What a strict server reads in these bytes."""
    told = Told()
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    try:
        while (event := connection.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Request):
                method = event.method.decode()
            elif isinstance(event, h11.EndOfMessage):
                told.methods.append(method)
                if connection.their_state is not h11.DONE:
                    return told
                connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return told
                connection.start_next_cycle()
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return told
        told.rest = "open" if connection.their_state is not h11.IDLE or connection.trailing_data[0] else ""
    except h11.RemoteProtocolError:
        told.rest = "broken"
    return told


class _Answers:
    """Reads answers one after another, strictly."""

    def __init__(self, methods: list[str], heard: Heard) -> None:
        self._methods = iter(methods)
        self._heard = heard
        self._connection = self._fresh()

    def _fresh(self) -> h11.Connection:
        """HEAD and CONNECT change how an answer ends; anything else does not."""
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        method = next(self._methods, "GET")
        connection.send(h11.Request(method=method, target="/", headers=[(b"Host", b"a")]))
        connection.send(h11.EndOfMessage())
        return connection

    def take(self, data: bytes) -> None:
        """Raises h11.RemoteProtocolError on what is no HTTP response. Empty data: the connection is closed."""
        self._connection.receive_data(data)
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return
            if isinstance(event, h11.Response):
                self._heard.statuses.append(event.status_code)
            elif isinstance(event, h11.EndOfMessage):
                rest, _ = self._connection.trailing_data
                self._connection = self._fresh()
                if not rest:
                    return
                self._connection.receive_data(rest)

    @property
    def in_middle(self) -> bool:
        """Of an answer: some of it has come, and not its end."""
        return self._connection.their_state is h11.SEND_BODY or bool(self._connection.trailing_data[0])


async def _send(writer: asyncio.StreamWriter, data: bytes, rng: random.Random | None) -> None:
    """Whole, or in pieces, as networks do."""
    cuts = [0, len(data)]
    if rng is not None and rng.random() < 0.3:
        cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.choice((1, 3, 10))))})
    for start, stop in itertools.pairwise(cuts):
        writer.write(data[start:stop])
        await writer.drain()
        if len(cuts) > 2:
            await asyncio.sleep(0)


class _Conversation:
    """Everything about one connection while it lasts."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Told, heard: Heard) -> None:
        self._reader, self._writer, self._told, self._heard = reader, writer, told, heard
        self._answers = _Answers(told.methods, heard)
        self._hung_up = False

    @property
    def _waits(self) -> bool:
        """For an answer that is due, or for the server to close on what was incomplete or no HTTP."""
        missing = len(self._heard.statuses) < len(self._told.methods)
        more = len(self._heard.statuses) > len(self._told.methods)
        return missing or self._answers.in_middle or bool(self._told.rest and not more)

    async def hold(self) -> None:
        """Raises TimeoutError where the server owes something."""
        while self._waits and not self._heard.closed and not self._heard.faults:
            data = await self._read()
            if data is not None:
                self._take(data)

    async def _read(self) -> bytes | None:
        """What comes next; None if nothing came in time, and now we have hung up."""
        owed = self._hung_up or len(self._heard.statuses) < len(self._told.methods)
        try:
            async with asyncio.timeout(DEADLINE_S if owed else PATIENCE_S):
                return await self._reader.read(1 << 16)
        except ConnectionError:
            self._heard.reset = True
            return b""
        except TimeoutError:
            if owed:
                raise
            self._hung_up = True
            self._writer.write_eof()
            return None

    def _take(self, data: bytes) -> None:
        self._heard.closed = not data
        begun = self._answers.in_middle
        if not data and (self._hung_up or not begun):
            return
        try:
            self._answers.take(data)
        except h11.RemoteProtocolError as error:
            self._heard.faults.append(f"no HTTP response: {error}; {data[:200]!r}")


async def exchange(port: int, data: bytes, rng: random.Random | None) -> Heard:
    """Send these bytes; read until every complete request has its answer. What is incomplete, or no HTTP, is given a
    moment, and then we hang up: the server must close then. rng: sends in pieces, sometimes.

    What was refused and reset in the middle of the pieces is sent again as a whole, where the answer must arrive."""
    heard = await _exchange(port, data, rng)
    if rng is not None and heard.reset and not heard.statuses:
        return await _exchange(port, data, None)
    return heard


async def _exchange(port: int, data: bytes, rng: random.Random | None) -> Heard:
    told, heard = understood(data), Heard()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        async with asyncio.timeout(4 * DEADLINE_S):
            with suppress(ConnectionError):  # it did not want all of it; what it has said is read all the same
                await _send(writer, data, rng)
            await _Conversation(reader, writer, told, heard).hold()
    except TimeoutError:
        heard.faults.append(f"silence: {told.rest or 'complete'}, {len(told.methods)} asked, answers {heard.statuses}")
    finally:
        writer.transport.abort()
    _judge(told, heard)
    return heard


def _judge(told: Told, heard: Heard) -> None:
    """A valid request has its answer, whatever comes after it; nothing is answered with a server's error."""
    heard.faults += [f"status {status}" for status in heard.statuses if status >= 500]
    asked, answered = len(told.methods), len(heard.statuses)
    refused = any(status >= 400 for status in heard.statuses)  # after that, a server may close
    if not heard.faults and ((answered < asked and not refused) or (answered > asked and not told.rest)):
        heard.faults.append(f"{answered} answers to {asked} requests")
