"""A generating route, whatever API it speaks: from a request to the response of its stream."""

import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from services.common.errors import InvalidRequest, OrcaError
from services.common.request import GenerateRequest, SamplingParams
from services.router.api import sse
from services.router.api.body import read_json
from services.router.api.caller import Caller, allowance_headers
from services.router.api.format import formatter_for
from services.router.api.generation import Generation
from services.router.api.intent import Intent, intent, traceparent
from services.router.api.service import Service
from services.router.api.stream import Stream
from services.router.core.document import PLAIN, Document, View
from services.router.core.limits import FleetLimits, require
from services.router.core.position import START, Position
from services.router.core.tenants import NO_QUOTA, Quota

if TYPE_CHECKING:
    from services.router.api.spans import StreamSpan

W = TypeVar("W", bound=BaseModel)

REQUEST_ID = re.compile(r"[^A-Za-z0-9._-]")
# What the tiers of OpenAI's API add to their caller's priority.
TIERS = {"flex": -10, "priority": 10}


@dataclass(frozen=True)
class Prepared:
    """What a body asks for. n: choices of each prompt. stream, include_usage, view: how they are shown.

    outlives: it is not aborted when nobody reads it. kept: it can be read for the longer window.
    """

    model: str
    prompts: list[list[int]]
    params: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    tier: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    view: View = PLAIN
    outlives: bool = False
    kept: bool = False


Prepare = Callable[[Service, W, FleetLimits], Awaitable[Prepared]]


class Endpoint(Generic[W]):
    """One of the generating routes: what differs between them is how a body becomes prompts and parameters."""

    def __init__(self, service: Service, api: str, wire: type[W], prepare: Prepare[W]) -> None:
        self._service = service
        self._api = api
        self._wire = wire
        self._prepare = prepare

    async def __call__(self, request: Request) -> Response:
        """The route. Raises OrcaError or ClientGone."""
        received = time.monotonic()
        service = self._service
        asker, wants = service.caller(request), intent(request, service.timeout_s)
        if not wants.resumes:
            service.backend.check_open()
        data = await read_json(request, service.max_body_bytes)
        body = service.parse(data, self._wire)
        if wants.resumes:
            return await resume(service, request, wants.resumes, wants.position, asker.tenant, self._api)
        prepared = await self._prepare(service, body, require(service.backend.limits))
        return await submit(service, request, self._api, prepared, asker, wants, data, received)


def generate_request(
    prepared: Prepared, tenant: str, priority: int, weight: float = 1.0, timeout_s: float = 0.0, trace: str = ""
) -> GenerateRequest:
    """A new request of what was prepared."""
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        model=prepared.model,
        prompts=tuple(map(tuple, prepared.prompts)),
        params=prepared.params,
        n=prepared.n,
        tenant=tenant,
        priority=priority,
        weight=weight,
        timeout_s=timeout_s,
        traceparent=trace,
    )


@dataclass(frozen=True)
class Entered:
    """A request in the system, and the stream of its answer. new: it is no other that had its idempotency key."""

    stream: Stream
    new: bool
    span: "StreamSpan | None"


async def enter(
    service: Service,
    request: Request,
    api: str,
    prepared: Prepared,
    asker: Caller,
    wants: Intent,
    data: dict[str, Any],
    received: float,
) -> Entered:
    """Put what was prepared into the system. data: the body, for an idempotency key. Raises OrcaError."""
    priority = asker.tier(TIERS.get(prepared.tier or "", 0))
    generate = generate_request(prepared, asker.tenant, priority, asker.weight, wants.timeout_s, traceparent(request))
    span = service.spans.begin(api, generate, received, prepared.labels) if service.spans else None
    if span is not None:
        generate = replace(generate, traceparent=span.traceparent)
    view = prepared.view
    if prepared.tier == "priority" and priority == asker.priority:
        view = replace(view, tier="default")  # it has no higher
    document = Document.of(generate, api, int(time.time()), prepared.stream, prepared.include_usage, view)
    key = wants.digests(asker.tenant, request.url.path, data)
    try:
        stream = await service.backend.submit(
            generate, document, key, wants.resumable, asker.quota, prepared.outlives, prepared.kept
        )
    except BaseException as error:
        if span is not None:
            span.refused(error.code if isinstance(error, OrcaError) else "abort")
        raise
    new = stream.document is document
    if new:
        service.metrics.prompt_tokens.inc(generate.num_prompt_tokens)
    return Entered(stream, new, span)


async def submit(
    service: Service,
    request: Request,
    api: str,
    prepared: Prepared,
    asker: Caller,
    wants: Intent,
    data: dict[str, Any],
    received: float,
) -> Response:
    """Put what was prepared into the system, and answer. data: the body, for an idempotency key. Raises OrcaError."""
    entered = await enter(service, request, api, prepared, asker, wants, data, received)
    if entered.new:
        return await answer(service, request, entered.stream, received, span=entered.span, quota=asker.quota)
    return await answer(service, request, entered.stream, None, span=entered.span)


async def answer(
    service: Service,
    request: Request,
    stream: Stream,
    received: float | None,
    position: Position = START,
    span: "StreamSpan | None" = None,
    quota: Quota = NO_QUOTA,
) -> Response:
    """A stream's events, or all of it as one object, as it was first asked for."""
    document = stream.document
    formatter = formatter_for(document, service.table)
    generation = Generation(
        service.backend,
        stream,
        formatter,
        service.table,
        service.metrics,
        service.keep_alive_s,
        received,
        position,
        span,
    )
    theirs = REQUEST_ID.sub("", request.headers.get("x-request-id", ""))[:128]
    headers = {"X-Request-Id": theirs or document.request_id, "X-Orca-Request-Id": document.request_id}
    headers |= dict.fromkeys(formatter.id_headers, headers["X-Request-Id"])
    headers |= allowance_headers(quota, stream.allowance)
    if document.stream:
        return sse.EventStream(generation.events(), headers, generation.close)
    try:
        response = await sse.unless_gone(request.receive, generation.whole())
    except sse.ClientGone:
        return Response(status_code=499)
    finally:
        generation.close()
    response.headers.update(headers)
    return response


async def resume(
    service: Service, request: Request, request_id: str, position: Position, tenant: str, api: str | None = None
) -> Response:
    """The rest of a stream, from any router. Raises StreamNotFound or Unavailable."""
    stream = await service.backend.attach(request_id, tenant)
    if api not in (None, stream.document.api):
        service.backend.leave(stream)
        raise InvalidRequest("Last-Event-ID is of a request to another path", "Last-Event-ID")
    if stream.ends_at is not None and position.is_past(stream.ends_at):
        service.backend.leave(stream)
        return Response(status_code=204)  # what tells a browser's EventSource to reconnect no more
    span = service.spans.resumed(stream.document) if service.spans else None
    return await answer(service, request, stream, None, position, span)
