"""HTTP parsing with a bound on request headers."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n"
    b'{"error":{"message":"the request headers are too large","type":"invalid_request_error","param":null,"code":null}}'
)


class BoundedHeaders(HttpToolsProtocol):
    """httptools keeps header bytes without limit until the headers are complete; this counts them."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._header_bytes = 0
        self._in_headers = True

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(REFUSAL)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._header_bytes, self._in_headers = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._header_bytes, self._in_headers = 0, True
