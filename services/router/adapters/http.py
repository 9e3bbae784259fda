"""HTTP parsing with a bound on request headers."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
REFUSAL = (
    b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n"
    b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}'
)
TOO_LARGE = REFUSAL % (b"431 Request Header Fields Too Large", b"the request headers are too large")
MALFORMED = REFUSAL % (b"400 Bad Request", b"this is no valid HTTP request")
# What follows its headers is no request, whatever it looks like.
NO_TUNNEL = REFUSAL % (b"405 Method Not Allowed", b"this is no proxy")


# An idle connection that a client may still send on: clients forget theirs after five seconds by default.
IDLE_S = 6.0
# A client that takes nothing for so long is cut off.
STALL_S = 60.0
# How long a refused client may go on sending. Closed at once, its kernel would throw the answer away unread.
LINGER_S = 2.0


class BoundedConnection(HttpToolsProtocol):
    """httptools keeps header bytes without limit until the headers are complete; this counts them on their way. And
    what a server needs that is to go without breaking a request: the answer to a request that comes while `closing`
    says that it is the last one on its connection; connections that stand idle are closed when nobody will use them.
    """

    closing = False  # of the whole process

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.idle_since = time.monotonic()
        self._cut_off: asyncio.TimerHandle | None = None
        self._refused = False
        self._refusal = b""  # that waits for the answers before it
        self._received = 0  # bytes while headers were incomplete, whole reads
        self._header_bytes = 0  # bytes of complete headers
        self._in_headers = True

    def data_received(self, data: bytes) -> None:
        if self._is_over():
            return
        if self._in_headers:
            self._received += len(data)
        super().data_received(data)
        if self._in_headers and self._received > MAX_HEADER_BYTES:
            self._refuse(TOO_LARGE)

    def _is_over(self) -> bool:
        return self._refused or self.transport.is_closing()

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, answer: bytes) -> None:
        """Answer when it is its turn, say no more, and hear no more."""
        if self._is_over():
            return
        self._refused = True
        if not self._is_busy():
            self._tell(answer)
        elif not self.cycle.more_body:
            self._refusal = answer
        elif self.cycle.response_started or self.pipeline:
            self.transport.close()
        else:  # the request whose body is malformed
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._tell(answer)

    def _tell(self, refusal: bytes) -> None:
        self.transport.write(refusal)
        self.transport.write_eof()
        self._cut_off_in(LINGER_S)

    def send_400_response(self, msg: str) -> None:
        self._refuse(MALFORMED)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cut_off_in(STALL_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._refused:
            self._let_live()

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_live()
        super().connection_lost(exc)

    def _cut_off_in(self, seconds: float) -> None:
        self._let_live()
        self._cut_off = self.loop.call_later(seconds, self.transport.abort)

    def _let_live(self) -> None:
        if self._cut_off is not None:
            self._cut_off.cancel()
            self._cut_off = None

    def on_response_complete(self) -> None:
        self.idle_since = time.monotonic()
        super().on_response_complete()
        if self._refusal and not self._is_busy() and not self.transport.is_closing():
            self._tell(self._refusal)

    def is_quiet(self, now: float) -> bool:
        """No request is under way, and none has been for so long that none will come."""
        return not self._is_busy() and now - self.idle_since >= IDLE_S

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(TOO_LARGE)
        elif self.parser.get_method() == b"CONNECT":
            self._refuse(NO_TUNNEL)
        else:
            super().on_headers_complete()
            if BoundedConnection.closing:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self._is_over():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_over():
            super().on_message_complete()
        self._received = self._header_bytes = 0
        self._in_headers = True


async def until_quiet(connections: Iterable[Any]) -> None:
    """Return once every connection is gone, or quiet. `connections` is looked at again and again."""
    while not all(c.is_quiet(time.monotonic()) for c in list(connections)):  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.05)
