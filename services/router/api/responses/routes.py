"""The routes of OpenAI's Responses API."""

import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from services.common.errors import InvalidRequest
from services.router.api.body import read_json
from services.router.api.caller import Caller, allowance_headers
from services.router.api.endpoint import Entered, Prepared, answer, enter, resume, submit
from services.router.api.errors import JSON
from services.router.api.format.responses import ResponsesFormatter
from services.router.api.intent import Intent, intent, stream_position
from services.router.api.responses import stored
from services.router.api.responses.translate import prepare_response
from services.router.api.responses.wire import ResponsesRequest
from services.router.api.service import Service
from services.router.core.limits import require

API = "responses"
MAX_SEQUENCE = 1 << 31
Include = Annotated[list[str] | None, Query(max_length=16)]


@dataclass(frozen=True)
class Asked:
    """One request to create a response, and what is known of it before it is queued."""

    request: Request
    asker: Caller
    wants: Intent
    data: dict[str, Any]
    received: float


def build(service: Service) -> APIRouter:
    """All routes over one service."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def create(request: Request) -> Any:
        return await _create(service, request)

    @router.get("/v1/responses/{response_id}")
    async def retrieve(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, lt=MAX_SEQUENCE)] = None,
        include: Include = None,
        include_obfuscation: bool = False,
    ) -> Any:
        tenant = service.caller(request).tenant
        request_id = stored.request_id_of(response_id)
        if stream:
            return await _stream(service, request, request_id, tenant, starting_after)
        if starting_after is not None:
            raise InvalidRequest("starting_after needs stream=true", "starting_after")
        return _json((await stored.look(service, request_id, tenant))[1])

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Any:
        tenant, request_id = service.caller(request).tenant, stored.request_id_of(response_id)
        document, response = await stored.look(service, request_id, tenant)
        if not document.view.detail["shown"]["background"]:
            raise InvalidRequest("only a response that was created with background: true can be cancelled")
        if response["status"] in stored.ENDED:
            return _json(response)
        await stored.cancel(service, request_id, tenant)
        return _json((await stored.look(service, request_id, tenant))[1])

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Any:
        tenant, request_id = service.caller(request).tenant, stored.request_id_of(response_id)
        _, response = await stored.look(service, request_id, tenant)
        if response["status"] not in stored.ENDED:
            await stored.cancel(service, request_id, tenant)
        await service.backend.forget(request_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        request: Request,
        response_id: str,
        after: Annotated[str | None, Query(max_length=256)] = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        include: Include = None,
    ) -> Any:
        tenant = service.caller(request).tenant
        document, _ = await stored.look(service, stored.request_id_of(response_id), tenant)
        items = stored.input_items(document)
        return _json(stored.page(items if order == "asc" else items[::-1], after, limit))

    return router


def _json(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), headers=headers, media_type=JSON)


async def _create(service: Service, request: Request) -> Response:
    """Raises OrcaError or ClientGone."""
    received = time.monotonic()
    asker, wants = service.caller(request), intent(request, service.timeout_s)
    if not wants.resumes:
        service.backend.check_open()
    data = await read_json(request, service.max_body_bytes)
    body = service.parse(data, ResponsesRequest)
    if wants.resumes:
        return await resume(service, request, wants.resumes, wants.position, asker.tenant, API)
    previous = body.previous_response_id
    before = await stored.conversation(service, previous, asker.tenant) if previous is not None else []
    prepared = await prepare_response(service, body, before, require(service.backend.limits))
    if body.background and not body.stream:
        return await _begin(service, prepared, Asked(request, asker, wants, data, received))
    return await submit(service, request, API, prepared, asker, wants, data, received)


async def _begin(service: Service, prepared: Prepared, asked: Asked) -> Response:
    """Put what runs in the background into the system, and answer at once."""
    entered = await enter(service, asked.request, API, prepared, asked.asker, asked.wants, asked.data, asked.received)
    document = entered.stream.document
    service.backend.leave(entered.stream)
    if entered.span is not None:
        entered.span.end("ok", 0, {})
    if entered.new:
        service.metrics.requests.labels("accepted").inc()
        response = ResponsesFormatter(document, service.table).queued()
    else:
        _, response = await stored.look(service, document.request_id, asked.asker.tenant)
    return _json(response, _headers(asked, entered))


def _headers(asked: Asked, entered: Entered) -> dict[str, str]:
    request_id = entered.stream.document.request_id
    headers = {"X-Request-Id": request_id, "X-Orca-Request-Id": request_id}
    return headers | (allowance_headers(asked.asker.quota, entered.stream.allowance) if entered.new else {})


async def _stream(service: Service, request: Request, request_id: str, tenant: str, after: int | None) -> Response:
    """The events of a response from its beginning, or those after a sequence number. Raises StreamNotFound."""
    position = stream_position(request, request_id)
    await stored.look(service, request_id, tenant)  # whether it may be read at all, before one becomes its reader
    stream = await service.backend.attach(request_id, tenant)
    view = stream.document.view
    detail = view.detail | ({"after": after} if after is not None else {})
    stream.document = replace(stream.document, stream=True, view=replace(view, detail=detail))
    span = service.spans.resumed(stream.document) if service.spans else None
    return await answer(service, request, stream, None, position, span)
