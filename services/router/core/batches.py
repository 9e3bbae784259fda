"""Batches of requests: what their lines must be, what is known of one, and the lines of their results."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.router.core.files import derived_name

WINDOW = "24h"
WINDOW_S = 24 * 3600
MAX_LINES = 50_000
MAX_ID_CHARS = 512
MAX_ERRORS = 100  # of a batch that is refused: the first ones
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

# Why lines were not run, and the status that such a batch ends with.
CANCELLED, EXPIRED, TOO_LARGE = "batch_cancelled", "batch_expired", "output_too_large"
UNRUN = {
    CANCELLED: "this request was not run, because the batch was cancelled",
    EXPIRED: "this request could not be run before the completion window expired",
    TOO_LARGE: "this request was not run, because the results of the batch have become too large",
}
END = {CANCELLED: "cancelled", EXPIRED: "expired"}

TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


@dataclass(frozen=True, slots=True)
class Order:
    """What a batch was made with. Times are unix times in s."""

    name: str
    tenant: str
    endpoint: str
    input_file: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """How far it has come. closed: why no more results are taken, "" if every line has one; None while they are.

    times: when it came to each status that it has had.
    """

    order: Order
    status: str
    total: int = 0
    completed: int = 0
    failed: int = 0
    closed: str | None = None
    output_file: str | None = None
    error_file: str | None = None
    errors: list[dict[str, Any]] | None = None
    times: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.order.name

    def to_object(self) -> dict[str, Any]:
        """As the API shows it."""
        order = self.order
        return {
            "id": order.name,
            "object": "batch",
            "endpoint": order.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": order.input_file,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": order.created_at,
            "expires_at": order.expires_at,
            **{name: self.times.get(name) for name in TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": order.metadata,
        }


# -- what comes in


class Lines:
    """Cuts what is pushed at line ends: (number from 1, text) of each that is not blank. Many take a while."""

    def __init__(self) -> None:
        self._rest = b""
        self._number = 0

    def push(self, data: bytes) -> list[tuple[int, bytes]]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        return list(self._numbered(whole))

    def end(self) -> list[tuple[int, bytes]]:
        """The last line, where no line end follows it."""
        return list(self._numbered([self._rest]))

    def _numbered(self, lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
        for line in lines:
            self._number += 1
            if line.strip():
                yield self._number, line


class _Wrong(Exception):
    """code, message, param."""


class Validation:
    """Looks at the lines of an input file, one after another. errors: as the API shows them, the first ones."""

    def __init__(self, endpoint: str, max_line_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._names: set[str] = set()
        self.total = 0
        self.errors: list[dict[str, Any]] = []

    @property
    def hopeless(self) -> bool:
        """More need not be looked at."""
        return self.total > MAX_LINES or len(self.errors) >= MAX_ERRORS

    def look(self, lines: Iterator[tuple[int, bytes]]) -> None:
        for number, line in lines:
            if self.hopeless:
                return
            self.total += 1
            try:
                self._check(line)
            except _Wrong as wrong:
                self._add(number, *wrong.args)

    def end(self) -> None:
        """There are no more lines."""
        if self.total > MAX_LINES:
            self._add(None, "too_many_lines", f"a batch may have at most {MAX_LINES} requests", None)
        if not self.total:
            self._add(None, "empty_file", "the input file has no requests", None)

    def _add(self, line: int | None, code: str, message: str, param: str | None) -> None:
        self.errors.append({"code": code, "message": message, "param": param, "line": line})

    def _check(self, line: bytes) -> None:
        """Raises _Wrong."""
        if len(line) > self._max_line_bytes:
            raise _Wrong("line_too_large", f"this line is larger than {self._max_line_bytes} bytes", None)
        try:
            data = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise _Wrong("invalid_json_line", "this line is not valid JSON", None) from None
        if not isinstance(data, dict):
            raise _Wrong("invalid_json_line", "this line is not a JSON object", None)
        self._check_name(data.get("custom_id"))
        if data.get("method") != "POST":
            raise _Wrong("invalid_method", 'method must be "POST"', "method")
        if data.get("url") != self._endpoint:
            raise _Wrong("invalid_url", f"url must be the batch's endpoint, {self._endpoint!r}", "url")
        body = data.get("body")
        if not isinstance(body, dict):
            raise _Wrong("missing_required_parameter", "body is missing, or is not an object", "body")
        if body.get("stream"):
            raise _Wrong("invalid_request", "a request of a batch cannot stream", "body.stream")

    def _check_name(self, name: Any) -> None:
        if not isinstance(name, str) or not name:
            raise _Wrong("missing_required_parameter", "custom_id is missing, or is not a string", "custom_id")
        if len(name) > MAX_ID_CHARS:
            raise _Wrong("invalid_custom_id", f"custom_id has more than {MAX_ID_CHARS} characters", "custom_id")
        if name in self._names:
            raise _Wrong("duplicate_custom_id", "another line has this custom_id", "custom_id")
        self._names.add(name)


# -- what comes out


def result_line(batch: str, number: int, custom_id: str, status: int, request_id: str, body: Any) -> bytes:
    """The answer to a line, or the error that its route gives."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(batch, number, custom_id, response, None)


def unrun_line(batch: str, number: int, custom_id: str, why: str) -> bytes:
    """What is told of a line that was not run."""
    return _line(batch, number, custom_id, None, {"code": why, "message": UNRUN[why]})


def _line(batch: str, number: int, custom_id: str, response: Any, error: Any) -> bytes:
    name = derived_name("batch_req_", batch, number)
    return orjson.dumps({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


def reason_to_stop(status: str, expires_at: int, now: float, result_bytes: int, most_bytes: int) -> str | None:
    """Why a batch is to run no more lines, or None."""
    if status == "cancelling":
        return CANCELLED
    if now >= expires_at:
        return EXPIRED
    return TOO_LARGE if most_bytes and result_bytes >= most_bytes else None


def metadata_fault(metadata: Mapping[str, str] | None) -> str | None:
    """What is wrong with it, or None."""
    if metadata is None:
        return None
    if len(metadata) > MAX_METADATA:
        return f"at most {MAX_METADATA} entries"
    if any(len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in metadata.items()):
        return f"keys of at most {MAX_METADATA_KEY} characters, values of at most {MAX_METADATA_VALUE}"
    return None
