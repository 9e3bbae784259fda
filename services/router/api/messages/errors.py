"""Errors as Anthropic's clients expect them, from the one error tree."""

import re
import uuid
from typing import Any

import orjson
from fastapi import Request
from starlette.responses import Response

from services.common.errors import OrcaError, Overloaded
from services.router.api.errors import JSON

PREFIX = "/v1/messages"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
REQUEST_ID = re.compile(r"[^A-Za-z0-9._-]")


def applies(request: Request) -> bool:
    """Whether this request came by Anthropic's API."""
    return request.url.path.startswith(PREFIX)


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_response(request: Request, error: OrcaError) -> Response:
    """What was refused. Without a request in the system, its id is the client's own or a new one."""
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
    return _response(request, error.status, error.message, headers)


def plain(request: Request, status: int, message: str) -> Response:
    """An error that the framework found: no such path, wrong method."""
    return _response(request, status, message, {})


def _response(request: Request, status: int, message: str, headers: dict[str, str]) -> Response:
    theirs = REQUEST_ID.sub("", request.headers.get("x-request-id", ""))[:128]
    request_id = theirs or f"req_{uuid.uuid4().hex}"
    body = error_body(status, message, request_id)
    return Response(orjson.dumps(body), status, headers | {"request-id": request_id}, media_type=JSON)
