"""HTTP parsing with a bound on request headers."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n"
    b'{"error":{"message":"the request headers are too large","type":"invalid_request_error","param":null,"code":null}}'
)


class BoundedHeaders(HttpToolsProtocol):
    """httptools keeps header bytes without limit until the headers are complete; this counts them on their way."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._received = 0  # bytes while headers were incomplete, whole reads
        self._header_bytes = 0  # bytes of complete headers
        self._in_headers = True

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._received += len(data)
        super().data_received(data)
        if self._in_headers and self._received > MAX_HEADER_BYTES:
            self._refuse()

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(REFUSAL)
            self.transport.close()

    def _begin(self) -> None:
        self._received = self._header_bytes = 0
        self._in_headers = True

    def on_message_begin(self) -> None:
        self._begin()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()
        self._begin()
