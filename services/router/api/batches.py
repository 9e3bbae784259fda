"""OpenAI's /v1/batches: files of requests that are answered when there is time."""

import time
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, ValidationError

from services.common.errors import InvalidRequest
from services.router.api.body import read_json
from services.router.api.errors import from_validation
from services.router.api.files import paging
from services.router.api.lines import ROUTES
from services.router.api.service import Service
from services.router.api.shelf import Shelf
from services.router.api.wire import Strict
from services.router.core.batches import WINDOW_S, Order, metadata_fault
from services.router.core.files import BATCH_INPUT, page

DEFAULT_PAGE = 20
MAX_PAGE = 100


class BatchRequest(Strict):
    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


def build(service: Service, shelf: Shelf) -> APIRouter:
    """All routes over one shelf."""
    router = APIRouter()

    @router.post("/v1/batches")
    async def create(request: Request) -> Any:
        tenant = service.caller(request).tenant
        body = _parse(await read_json(request, service.max_body_bytes))
        file = await shelf.file(tenant, body.input_file_id)
        if file.purpose != BATCH_INPUT:
            raise InvalidRequest(f"the file's purpose is not {BATCH_INPUT!r}", "input_file_id")
        now = time.time()
        # Names sort by time: of those that wait, the oldest is worked on first.
        name = f"batch_{int(now * 1000):012x}{uuid.uuid4().hex[:12]}"
        made, ends = int(now), int(now) + WINDOW_S
        order = Order(name, tenant, body.endpoint, file.name, made, ends, body.metadata)
        return (await shelf.create_batch(order)).to_object()

    @router.get("/v1/batches")
    async def listed(request: Request) -> Any:
        tenant = service.caller(request).tenant
        limit, after = paging(request, DEFAULT_PAGE, MAX_PAGE)
        return page(await shelf.batches(tenant, after, limit + 1), limit)

    @router.get("/v1/batches/{name}")
    async def retrieve(request: Request, name: str) -> Any:
        return (await shelf.batch(service.caller(request).tenant, name)).to_object()

    @router.post("/v1/batches/{name}/cancel")
    async def cancel(request: Request, name: str) -> Any:
        tenant = service.caller(request).tenant
        await shelf.cancel_batch(tenant, name)
        return (await shelf.batch(tenant, name)).to_object()

    return router


def _parse(data: dict[str, Any]) -> BatchRequest:
    """Raises InvalidRequest."""
    try:
        body = BatchRequest.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None
    if body.endpoint not in ROUTES:
        raise InvalidRequest(f"endpoint: one of {', '.join(ROUTES)}", "endpoint")
    if fault := metadata_fault(body.metadata):
        raise InvalidRequest(f"metadata: {fault}", "metadata")
    return body
