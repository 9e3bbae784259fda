"""Errors as OpenAI's clients expect them, from the one error tree."""

from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from pydantic import ValidationError

from services.common.errors import InvalidRequest, OrcaError, Overloaded, Unauthenticated

JSON = "application/json"


def error_body(error: OrcaError) -> dict[str, Any]:
    return {
        "error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code},
    }


def error_response(error: OrcaError) -> Response:
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(orjson.dumps(error_body(error)), error.status, headers, media_type=JSON)


async def handle_orca_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, OrcaError)
    return error_response(error)


def plain(status: int, message: str) -> Response:
    """An error that the framework found: no such path, wrong method."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return Response(orjson.dumps(body), status, media_type=JSON)


def from_validation(error: ValidationError) -> InvalidRequest:
    """One error alone, without the input: a small answer whatever was sent. Of a field that may have several forms the
    one that was nearly met."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    same_field = [item for item in errors if item["loc"][:1] == errors[0]["loc"][:1]]
    nearest = max(same_field, key=lambda item: len(item["loc"]))
    path = [str(part) for part in nearest["loc"]]
    param = ".".join(path[:6])[:200] or None
    message = nearest["msg"].removeprefix("Value error, ")
    if nearest["type"] == "extra_forbidden":
        message = "this parameter is not known here"
    return InvalidRequest(f"{param}: {message}" if param else message, path[0] if path else None)
