"""Reading a request's body: bounded, then parsed strictly."""

from typing import Any

import orjson
from fastapi import Request

from services.common.errors import BodyTooLarge, InvalidRequest

# A body that is too large is read on and thrown away up to here, so that the client hears the answer.
DISCARD_LIMIT = 128 << 20


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object. Raises BodyTooLarge or InvalidRequest (also on NaN, lone surrogates, bad UTF-8)."""
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
        raise BodyTooLarge(f"the body is larger than {limit} bytes")
    try:
        data = orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body is not a JSON object")
    return data
