"""What a client says in headers about its stream: how to go on with it, and how long it may take."""

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request

from services.common.errors import InvalidRequest
from services.router.core.position import START, Position, parse_event_id

KEY_HEADER = "Idempotency-Key"
RESUME_HEADER = "X-Orca-Resumable"
TIMEOUT_HEADER = "X-Orca-Timeout"
LAST_EVENT_HEADER = "Last-Event-ID"
TRACE_HEADER = "traceparent"
TRACE = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
KEY = re.compile(r"[\x21-\x7e]{1,255}")
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Intent:
    """resumes: the request whose stream is to go on after `position`. resumable: it outlives a broken connection.
    timeout_s: 0 is none."""

    key: str = ""
    resumes: str | None = None
    position: Position = START
    resumable: bool = False
    timeout_s: float = 0.0

    def digests(self, tenant: str, path: str, body: dict[str, Any]) -> tuple[str, str] | None:
        """Of the idempotency key, within its tenant, and of what is asked; None without a key."""
        if not self.key:
            return None
        asked = orjson.dumps([path, body], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(f"{tenant}\0{self.key}".encode()).hexdigest(), hashlib.sha256(asked).hexdigest()


def intent(request: Request, default_timeout_s: float = 0.0) -> Intent:
    """From the headers. Raises InvalidRequest."""
    headers = request.headers
    key = headers.get(KEY_HEADER, "")
    if KEY_HEADER in headers and not KEY.fullmatch(key):
        raise InvalidRequest(f"{KEY_HEADER}: 1 to 255 printable ASCII characters without spaces", KEY_HEADER)
    resumes, position = None, START
    if LAST_EVENT_HEADER in headers:
        resumes, position = parse_event_id(headers[LAST_EVENT_HEADER])
        if resumes is None:
            raise InvalidRequest(f"{LAST_EVENT_HEADER} does not name a request", LAST_EVENT_HEADER)
    return Intent(
        key=key,
        resumes=resumes,
        position=position,
        resumable=_flag(headers.get(RESUME_HEADER, "false")),
        timeout_s=_timeout(headers.get(TIMEOUT_HEADER), default_timeout_s),
    )


def stream_position(request: Request, request_id: str) -> Position:
    """Where a reader of this request's stream stands. Raises InvalidRequest."""
    if LAST_EVENT_HEADER not in request.headers:
        return START
    named, position = parse_event_id(request.headers[LAST_EVENT_HEADER])
    if named not in (None, request_id):
        raise InvalidRequest(f"{LAST_EVENT_HEADER} is of another request", LAST_EVENT_HEADER)
    return position


def traceparent(request: Request) -> str:
    """The caller's trace, or "": what is none is no reason to refuse a request (W3C Trace Context, 3.3)."""
    text = request.headers.get(TRACE_HEADER, "")
    return text if TRACE.fullmatch(text) else ""


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{RESUME_HEADER}: true or false", RESUME_HEADER)
    return text.lower() in ("true", "1")


def _timeout(text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"{TIMEOUT_HEADER}: seconds, more than 0 and at most {MAX_TIMEOUT_S:g}", TIMEOUT_HEADER)
    return min(seconds, default) if default else seconds
