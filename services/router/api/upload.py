"""Reading a multipart form with one file: pushed through as it comes, never held as a whole."""

import asyncio
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from services.common.errors import BodyTooLarge, InvalidRequest, RequestTimeout
from services.router.api.body import DISCARD_LIMIT
from services.router.api.shelf import Shelf
from services.router.api.sse import ClientGone
from services.router.core.files import Pieces

UPLOAD_TIMEOUT_S = 300
# Of the form beside the file.
MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_FORM_BYTES = 64 << 10
MAX_FILENAME_CHARS = 255


@dataclass
class _Part:
    name: str = ""
    filename: str | None = None
    header: tuple[bytes, bytes] = (b"", b"")


@dataclass
class Upload:
    """A form: its fields as text, the file's name, and its size when all of it has come."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0


class _Form:
    """A multipart body, pushed in. What came of the file since the last look is in `fresh`."""

    def __init__(self, boundary: bytes) -> None:
        self.upload = Upload()
        self.fresh = bytearray()
        self.ended = False
        self._part = _Part()
        self._value = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._all,
            },
        )

    def push(self, data: bytes) -> None:
        """Raises InvalidRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the form is not valid: {str(error)[:200]}") from None

    def _begin(self) -> None:
        self._part = _Part()
        self._value.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        name, value = self._part.header
        self._part.header = (name + data[start:end], value)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        name, value = self._part.header
        self._part.header = (name, value + data[start:end])

    def _header_end(self) -> None:
        name, value = self._part.header
        self._part.header = (b"", b"")
        if name.lower() == b"content-disposition":
            _, options = parse_options_header(value)
            self._part.name = options.get(b"name", b"").decode("utf-8", "replace")
            if b"filename" in options:
                self._part.filename = options[b"filename"].decode("utf-8", "replace")

    def _headers_finished(self) -> None:
        if self._part.filename is None:
            return
        if self._part.name != "file" or self.upload.filename is not None:
            raise InvalidRequest("the form may have one file, called file", "file")
        self.upload.filename = self._part.filename[:MAX_FILENAME_CHARS]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.filename is not None:
            self.fresh += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"a field of the form is larger than {MAX_FIELD_BYTES} bytes", self._part.name[:64])

    def _end(self) -> None:
        if self._part.filename is None:
            self.upload.fields[self._part.name] = self._value.decode("utf-8", "replace")
            if len(self.upload.fields) > MAX_FIELDS:
                raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields")

    def _all(self) -> None:
        self.ended = True


def _boundary(request: Request) -> bytes:
    """Raises InvalidRequest."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidRequest("a multipart/form-data body is needed")
    return options[b"boundary"]


async def receive(request: Request, shelf: Shelf, name: str, limit: int) -> Upload:
    """Put the file of a form onto the shelf, in chunks, under this name. Raises BodyTooLarge, InvalidRequest,
    RequestTimeout, Unavailable, or ClientGone."""
    form = _Form(_boundary(request))
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            await _read(request, form, shelf, name, limit)
    except TimeoutError:
        raise RequestTimeout(f"the file did not arrive within {UPLOAD_TIMEOUT_S} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    if not form.ended:
        raise InvalidRequest("the form does not end")
    if form.upload.filename is None:
        raise InvalidRequest("file is missing", "file")
    return form.upload


async def _read(request: Request, form: _Form, shelf: Shelf, name: str, limit: int) -> None:
    too_large = BodyTooLarge(f"the file is larger than {limit} bytes", "file")
    announced = int(request.headers.get("content-length", "0"))
    if announced > DISCARD_LIMIT or (announced > limit + MAX_FORM_BYTES and "expect" in request.headers):
        raise too_large
    pieces, count, received = Pieces(), 0, 0
    async for data in request.stream():
        received += len(data)
        if received > DISCARD_LIMIT:
            break
        if received > limit + MAX_FORM_BYTES or pieces.size > limit:
            continue  # read on and thrown away, so that the client hears the answer
        form.push(data)
        full = pieces.push(bytes(form.fresh))
        form.fresh.clear()
        for chunk in full if pieces.size <= limit else ():
            await shelf.put_chunk(name, count, chunk)
            count += 1
    if received > limit + MAX_FORM_BYTES or pieces.size > limit:
        raise too_large
    for chunk in pieces.rest():
        await shelf.put_chunk(name, count, chunk)
    form.upload.size = pieces.size
