"""The OpenAI-compatible routes."""

import asyncio
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from services.common.errors import (
    ContextLengthError,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    OrcaError,
    Overloaded,
)
from services.common.metrics import RouterMetrics
from services.common.models.resolve import ModelFiles
from services.common.request import GenerateRequest, SamplingParams
from services.common.text.detokenizer import TokenBytes
from services.common.text.tokenizer import TextEncoder
from services.router.api import sse
from services.router.api.body import read_json
from services.router.api.errors import JSON, error_body, from_validation
from services.router.api.format import ChatFormatter, CompletionFormatter, Formatter, Whole
from services.router.api.stream import Backend, Stream
from services.router.api.wire import ChatRequest, CompletionRequest, SamplingFields
from services.router.core.chat import ChatEncoder
from services.router.core.emission import Fold
from services.router.core.limits import FleetLimits, check_token_ids, output_limit, require

W = TypeVar("W", bound=SamplingFields)

MAX_TOKENIZING = 256
REQUEST_ID = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Service:
    """What the routes need; wired by the app."""

    backend: Backend
    files: ModelFiles
    encoder: TextEncoder
    chat: ChatEncoder
    table: TokenBytes
    metrics: RouterMetrics
    tokenizing: ThreadPoolExecutor
    max_body_bytes: int
    keep_alive_s: float
    model_names: frozenset[str]
    started: int

    async def parse(self, request: Request, wire: type[W]) -> W:
        """The validated body. Raises InvalidRequest, BodyTooLarge or ModelNotFound."""
        data = await read_json(request, self.max_body_bytes)
        try:
            body = wire.model_validate(data)
        except ValidationError as error:
            raise from_validation(error) from None
        if body.model not in self.model_names:
            raise ModelNotFound(f"the model {body.model[:100]!r} does not exist; there is {self.files.name!r}", "model")
        return body

    async def tokenize(self, function: Callable[[Any], list[int]], argument: Any) -> list[int]:
        """Encode on a thread: the event loop goes on. Raises Overloaded when too many wait for that."""
        if self.tokenizing._work_queue.qsize() > MAX_TOKENIZING:
            raise Overloaded("too many prompts are being tokenized; try again later")
        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, function, argument)

    def check_length(self, text_bytes: int, limits: FleetLimits, param: str) -> None:
        """Refuse what is too long for any tokenization, before the work of tokenizing."""
        if text_bytes > limits.max_model_len * self.table.longest:
            raise ContextLengthError(f"{param} cannot fit into {limits.max_model_len} tokens", param)


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


def _generate_request(body: SamplingFields, prompts: list[list[int]], params: SamplingParams) -> GenerateRequest:
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        model=body.model,
        prompts=tuple(map(tuple, prompts)),
        params=params,
        n=body.n or 1,
    )


async def _chat_prompt(service: Service, body: ChatRequest, limits: FleetLimits) -> list[int]:
    messages = [message.for_template() for message in body.messages]
    service.check_length(sum(len(m["content"].encode()) for m in messages), limits, "messages")
    ids = await service.tokenize(service.chat.encode, messages)
    check_token_ids(ids, limits, "messages")
    return ids


async def _completion_prompts(service: Service, body: CompletionRequest, limits: FleetLimits) -> list[list[int]]:
    out = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            service.check_length(len(prompt.encode()), limits, "prompt")
            prompt = await service.tokenize(service.encoder.encode_raw, prompt)
        check_token_ids(prompt, limits, "prompt")
        output_limit(limits, len(prompt), body.max_tokens, "prompt")  # before the next one is even looked at
        out.append(prompt)
    return out


class Generation:
    """One accepted request on its way to its client."""

    def __init__(self, service: Service, stream: Stream, formatter: Formatter, received: float) -> None:
        self._service = service
        self._stream = stream
        self._formatter = formatter
        self._received = received
        self._fold = Fold(stream.request, service.table)
        self._last_event: float | None = None
        self._outcome = "abort"

    def _observe(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.monotonic()
        metrics = self._service.metrics
        if self._last_event is None:
            metrics.time_to_first_token.observe(now - self._received)
        else:
            metrics.inter_token_latency.observe(now - self._last_event)
        self._last_event = now
        metrics.generated_tokens.inc(num_tokens)

    def close(self) -> None:
        """Must be called once, however it ended: the reader leaves, the outcome is counted."""
        self._service.backend.leave(self._stream)
        self._service.metrics.requests.labels(self._outcome).inc()

    def _ended(self, finishes: set[str | None]) -> None:
        """All choices have finished. Raises GenerationFailed if one failed."""
        if finishes & {"error", "abort"}:
            self._outcome = "error"
            raise GenerationFailed("the generation failed")
        self._outcome = "ok"

    async def whole(self) -> Response:
        """The answer as one object."""
        choices = [Whole(index) for index in range(self._stream.request.num_choices)]
        try:
            while not self._fold.done:
                entry = await self._stream.next(self._service.keep_alive_s)
                if entry is None:
                    continue
                for delta in self._fold.push(entry):
                    choices[delta.choice].add(delta)
                self._observe(sum(len(item.token_ids) for item in entry.items))
            self._ended({choice.finish for choice in choices})
            assert self._fold.usage is not None
            body = self._formatter.whole(choices, self._fold.usage)
            return Response(orjson.dumps(body), media_type=JSON)
        except OrcaError:
            self._outcome = "error"
            raise

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; a failure is an error event, then [DONE]."""
        try:
            async for chunk in self._events():
                yield chunk
        except OrcaError as error:
            self._outcome = "error"
            yield sse.event(error_body(error))
            yield sse.DONE

    async def _events(self) -> AsyncIterator[bytes]:
        finishes: set[str | None] = set()
        sent = time.monotonic()
        while not self._fold.done:
            # Measured from the last byte: tokens that make no text must not keep the line silent.
            patience = sent + self._service.keep_alive_s - time.monotonic()
            entry = await self._stream.next(patience) if patience > 0 else None
            if entry is None:
                sent = time.monotonic()
                yield sse.KEEP_ALIVE
                continue
            deltas = self._fold.push(entry)
            finishes |= {delta.finish for delta in deltas}
            if finishes & {"error", "abort"}:
                self._ended(finishes)
            objects = [chunk for delta in deltas for chunk in self._formatter.chunks(delta)]
            if self._fold.usage is not None and self._formatter.include_usage:
                objects.append(self._formatter.usage_chunk(self._fold.usage))
            last = len(objects) - 1
            frames = [sse.event(data, entry.entry_id if i == last else None) for i, data in enumerate(objects)]
            self._observe(sum(len(item.token_ids) for item in entry.items))
            if frames:
                sent = time.monotonic()
                yield b"".join(frames)
        self._ended(finishes)
        yield sse.DONE


async def _answer(
    service: Service,
    request: Request,
    body: SamplingFields,
    generate: GenerateRequest,
    formatter: Formatter,
    received: float,
) -> Any:
    formatter.include_usage = bool(body.stream_options and body.stream_options.include_usage)
    stream = await service.backend.submit(generate)
    service.metrics.prompt_tokens.inc(generate.num_prompt_tokens)
    generation = Generation(service, stream, formatter, received)
    theirs = REQUEST_ID.sub("", request.headers.get("x-request-id", ""))[:128]
    headers = {"X-Request-Id": theirs or generate.request_id, "X-Orca-Request-Id": generate.request_id}
    if body.stream:
        return sse.EventStream(generation.events(), headers, generation.close)
    try:
        response = await sse.unless_gone(request.receive, generation.whole())
    except sse.ClientGone:
        return Response(status_code=499)
    finally:
        generation.close()
    response.headers.update(headers)
    return response


def build(service: Service) -> APIRouter:
    """All routes over one service."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        received = time.monotonic()
        body = await service.parse(request, ChatRequest)
        limits = require(service.backend.limits)
        prompt = await _chat_prompt(service, body, limits)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        most = output_limit(limits, len(prompt), asked, "messages", name)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        generate = _generate_request(body, [prompt], sampling(body, most, logprobs, limits))
        formatter = ChatFormatter(
            f"chatcmpl-{generate.request_id}", int(time.time()), body.model, service.table, logprobs is not None
        )
        return await _answer(service, request, body, generate, formatter, received)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Any:
        received = time.monotonic()
        body = await service.parse(request, CompletionRequest)
        limits = require(service.backend.limits)
        prompts = await _completion_prompts(service, body, limits)
        most = min(output_limit(limits, len(prompt), body.max_tokens, "prompt") for prompt in prompts)
        generate = _generate_request(body, prompts, sampling(body, most, body.logprobs, limits))
        formatter = CompletionFormatter(
            f"cmpl-{generate.request_id}", int(time.time()), body.model, service.table, body.logprobs is not None
        )
        return await _answer(service, request, body, generate, formatter, received)

    @router.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [_model_object(service)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if name not in service.model_names:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist; there is {service.files.name!r}", "model")
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
