"""Reading a request's body: bounded, then parsed strictly."""

import asyncio
from typing import Any

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from services.common.errors import BodyTooLarge, InvalidRequest, RequestTimeout
from services.router.api.sse import ClientGone

# A body that is too large is read on and thrown away up to here, so that the client hears the answer.
DISCARD_LIMIT = 128 << 20
READ_TIMEOUT_S = 60


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object. Raises BodyTooLarge, InvalidRequest (also on NaN, lone surrogates, bad UTF-8),
    RequestTimeout, or ClientGone if the client leaves meanwhile."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            body = await _read(request, limit)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {READ_TIMEOUT_S} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body is not a JSON object")
    return data


async def _read(request: Request, limit: int) -> bytes:
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes")
    announced = int(request.headers.get("content-length", "0"))
    if announced > DISCARD_LIMIT or (announced > limit and "expect" in request.headers):
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
        if size > DISCARD_LIMIT:
            break
    if size > limit:
        raise too_large
    return b"".join(chunks)
