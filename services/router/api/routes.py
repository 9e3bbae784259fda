"""The OpenAI-compatible routes."""

import re
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from services.common.errors import ContextLengthError, InvalidRequest, ModelNotFound, OrcaError
from services.common.metrics import RouterMetrics
from services.common.models.resolve import ModelFiles
from services.common.request import GenerateRequest, SamplingParams
from services.common.text.detokenizer import TokenBytes
from services.common.text.tokenizer import TextEncoder
from services.router.api import sse
from services.router.api.body import read_json
from services.router.api.caller import Caller, allowance_headers, caller
from services.router.api.errors import from_validation
from services.router.api.format import formatter_for
from services.router.api.generation import Generation
from services.router.api.intent import intent, stream_position, traceparent
from services.router.api.stream import Backend, Stream
from services.router.api.wire import ChatRequest, CompletionRequest, SamplingFields
from services.router.core.chat import ChatEncoder
from services.router.core.document import Document
from services.router.core.limits import FleetLimits, check_token_ids, output_limit, require
from services.router.core.position import START, Position
from services.router.core.tenants import NO_QUOTA, KeyRing, Quota

if TYPE_CHECKING:
    from services.router.api.spans import Spans, StreamSpan

W = TypeVar("W", bound=SamplingFields)

# Runs an encoder on a thread, so that the event loop goes on. Raises Overloaded.
Tokenize = Callable[[Callable[[Any], list[int]], Any], Awaitable[list[int]]]
REQUEST_ID = re.compile(r"[^A-Za-z0-9._-]")
NO_USAGE = {"requests": 0, "prompt": 0, "completion": 0}

Prepared = tuple[list[list[int]], SamplingParams]
Prepare = Callable[["Service", W, FleetLimits], Awaitable[Prepared]]


@dataclass(frozen=True)
class Service:
    """What the routes need; wired by the app."""

    backend: Backend
    files: ModelFiles
    encoder: TextEncoder
    chat: ChatEncoder
    table: TokenBytes
    metrics: RouterMetrics
    tokenize: Tokenize
    usage: Callable[[], Awaitable[dict[str, dict[str, int]]]]
    max_body_bytes: int
    keep_alive_s: float
    timeout_s: float
    model_names: frozenset[str]
    started: int
    spans: "Spans | None" = None
    ring: Callable[[], KeyRing | None] = lambda: None

    def caller(self, request: Request) -> Caller:
        """Raises Unauthenticated or InvalidRequest."""
        return caller(request, self.ring())

    def parse(self, data: dict[str, Any], wire: type[W]) -> W:
        """The validated body. Raises InvalidRequest or ModelNotFound."""
        try:
            body = wire.model_validate(data)
        except ValidationError as error:
            raise from_validation(error) from None
        self.check_model(body.model)
        return body

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name not in self.model_names:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist; there is {self.files.name!r}", "model")

    def check_length(self, text_bytes: int, max_tokens: int, param: str) -> None:
        """Refuse what is too long for any tokenization, before the work of tokenizing."""
        if text_bytes > max_tokens * self.table.longest:
            raise ContextLengthError(f"{param} cannot fit into {max_tokens} tokens", param)


def sampling(body: SamplingFields, max_tokens: int, logprobs: int | None, limits: FleetLimits) -> SamplingParams:
    """Wire fields to sampling parameters; the seed is drawn here where none was given."""
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest("min_tokens is larger than max_tokens", "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=(secrets.randbits(63) if body.seed is None else body.seed) & ((1 << 64) - 1),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=min(max(body.top_k or 0, 0), limits.vocab_size),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_bias(body.logit_bias or {}, limits),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop=tuple(body.stop or ()),
        stop_token_ids=_stop_tokens(body.stop_token_ids or [], limits),
        logprobs=logprobs,
    )


def _stop_tokens(ids: list[int], limits: FleetLimits) -> tuple[int, ...]:
    if any(token >= limits.vocab_size for token in ids):
        raise InvalidRequest(f"stop_token_ids: not all within 0 .. {limits.vocab_size - 1}", "stop_token_ids")
    return tuple(ids)


def _bias(bias: dict[str, float], limits: FleetLimits) -> dict[int, float]:
    out = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < limits.vocab_size):
            raise InvalidRequest(f"logit_bias: {key[:32]!r} is not a token id of this model", "logit_bias")
        out[int(key)] = value
    return out


async def _chat_prompt(service: Service, body: ChatRequest, limits: FleetLimits) -> list[int]:
    messages = [message.for_template() for message in body.messages]
    service.check_length(sum(len(m["content"].encode()) for m in messages), limits.max_model_len, "messages")
    ids = await service.tokenize(service.chat.encode, messages)
    check_token_ids(ids, limits, "messages")
    return ids


async def _completion_prompts(service: Service, body: CompletionRequest, limits: FleetLimits) -> list[list[int]]:
    out = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            service.check_length(len(prompt.encode()), limits.max_model_len, "prompt")
            prompt = await service.tokenize(service.encoder.encode_raw, prompt)
        check_token_ids(prompt, limits, "prompt")
        output_limit(limits, len(prompt), body.max_tokens, "prompt")  # before the next one is even looked at
        out.append(prompt)
    return out


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
        prompts, params = await self._prepare(service, body, require(service.backend.limits))
        generate = GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=body.model,
            prompts=tuple(map(tuple, prompts)),
            params=params,
            n=body.n or 1,
            tenant=asker.tenant,
            priority=asker.priority,
            timeout_s=wants.timeout_s,
            traceparent=traceparent(request),
        )
        span = service.spans.begin(self._api, generate, received) if service.spans else None
        if span is not None:
            generate = replace(generate, traceparent=span.traceparent)
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        document = Document.of(generate, self._api, int(time.time()), bool(body.stream), include_usage)
        key = wants.digests(asker.tenant, request.url.path, data)
        try:
            stream = await service.backend.submit(generate, document, key, wants.resumable, asker.quota)
        except BaseException as error:
            if span is not None:
                span.refused(error.code if isinstance(error, OrcaError) else "abort")
            raise
        if stream.document is document:
            service.metrics.prompt_tokens.inc(generate.num_prompt_tokens)
            return await answer(service, request, stream, received, span=span, quota=asker.quota)
        return await answer(service, request, stream, None, span=span)


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


async def prepare_chat(service: Service, body: ChatRequest, limits: FleetLimits) -> Prepared:
    prompt = await _chat_prompt(service, body, limits)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most = output_limit(limits, len(prompt), asked, "messages", name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return [prompt], sampling(body, most, logprobs, limits)


async def prepare_completion(service: Service, body: CompletionRequest, limits: FleetLimits) -> Prepared:
    prompts = await _completion_prompts(service, body, limits)
    most = min(output_limit(limits, len(prompt), body.max_tokens, "prompt") for prompt in prompts)
    return prompts, sampling(body, most, body.logprobs, limits)


def build(service: Service) -> APIRouter:
    """All routes over one service."""
    router = APIRouter()
    chat = Endpoint(service, "chat", ChatRequest, prepare_chat)
    completion = Endpoint(service, "completion", CompletionRequest, prepare_completion)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await chat(request)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await completion(request)

    @router.get("/v1/streams/{request_id}")
    async def streams(request: Request, request_id: str) -> Any:
        position = stream_position(request, request_id)
        return await resume(service, request, request_id[:64], position, service.caller(request).tenant)

    @router.get("/v1/usage")
    async def usage(request: Request) -> Any:
        tenant = service.caller(request).tenant
        return {"object": "usage", "tenant": tenant, **(await service.usage()).get(tenant, NO_USAGE)}

    @router.get("/v1/models")
    async def models(request: Request) -> Any:
        service.caller(request)
        return {"object": "list", "data": [_model_object(service)]}

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Any:
        service.caller(request)
        service.check_model(name)
        return _model_object(service)

    return router


def _model_object(service: Service) -> dict[str, Any]:
    return {
        "id": service.files.name,
        "object": "model",
        "created": service.started,
        "owned_by": "orca",
        "max_model_len": service.files.max_model_len,
    }
