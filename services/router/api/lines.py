"""One line of a batch, run like a request that came by HTTP, at the lowest priority."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.errors import GenerationFailed, OrcaError, Overloaded, StreamNotFound, Unavailable
from services.router.api.embeddings import EmbeddingRequest, prepare_embeddings
from services.router.api.endpoint import Prepare, generate_request
from services.router.api.errors import error_body
from services.router.api.format import formatter_for
from services.router.api.generation import Generation
from services.router.api.prepare import prepare_chat, prepare_completion
from services.router.api.service import Service
from services.router.api.wire import ChatRequest, CompletionRequest
from services.router.core.batches import Order, result_line
from services.router.core.document import Document
from services.router.core.limits import require
from services.router.core.tenants import MAX_PRIORITY, Tenant

# One that failed is tried again: what it failed by may have been its router's or its worker's end.
MAX_TRIES = 3
RETRY_S = 1.0
# A refusal may name a minute; the queue may have room sooner.
MAX_RETRY_S = 5.0


@dataclass(frozen=True)
class Route:
    """How a line's body becomes a request."""

    api: str
    wire: type[Any]
    prepare: Prepare[Any]


# By the path of the endpoint.
ROUTES = {
    "/v1/chat/completions": Route("chat", ChatRequest, prepare_chat),
    "/v1/completions": Route("completion", CompletionRequest, prepare_completion),
    "/v1/embeddings": Route("embedding", EmbeddingRequest, prepare_embeddings),
}


@dataclass(frozen=True, slots=True)
class Line:
    """number: in its file, from 1."""

    number: int
    custom_id: str
    body: dict[str, Any]

    @classmethod
    def parse(cls, number: int, text: bytes) -> "Line":
        """Of a line that was validated."""
        data = orjson.loads(text)
        return cls(number, data["custom_id"], data["body"])


class LineRunner:
    """Runs lines of one batch. running: the request of each line under way."""

    def __init__(self, service: Service, order: Order, tenant: Callable[[], Tenant]) -> None:
        self._service = service
        self._order = order
        self._tenant = tenant
        self.running: dict[int, str] = {}

    async def run(self, line: Line) -> tuple[bool, bytes]:
        """Whether it went well, and its result; waits while the system is full, or away."""
        well, text = await self._run(line)
        self.running.pop(line.number, None)  # not when it is cancelled: then it is for others to end it
        return well, text

    async def _run(self, line: Line) -> tuple[bool, bytes]:
        failures = 0
        while True:
            try:
                return True, await self._answer(line)
            except Overloaded as error:
                await asyncio.sleep(min(error.retry_after_s, MAX_RETRY_S))
            except (Unavailable, StreamNotFound):
                await asyncio.sleep(RETRY_S)
            except OrcaError as error:
                failures += 1
                if not isinstance(error, GenerationFailed) or failures == MAX_TRIES:
                    return False, self._result(line, error.status, "", error_body(error))

    def _result(self, line: Line, status: int, request_id: str, body: Any) -> bytes:
        return result_line(self._order.name, line.number, line.custom_id, status, request_id, body)

    def _key(self, line: Line) -> tuple[str, str]:
        """Whoever works on the batch joins the line's request, running or finished. No client's key has spaces."""
        order = self._order
        key = hashlib.sha256(f"{order.tenant}\0batch {order.name} {line.number}".encode()).hexdigest()
        asked = orjson.dumps([order.endpoint, line.body], option=orjson.OPT_SORT_KEYS)
        return key, hashlib.sha256(asked).hexdigest()

    async def _answer(self, line: Line) -> bytes:
        """Raises OrcaError."""
        service, order = self._service, self._order
        route = ROUTES[order.endpoint]
        service.backend.check_open()
        body = service.parse(line.body, route.wire)
        prepared = await route.prepare(service, body, require(service.backend.limits))
        generate = generate_request(prepared, order.tenant, -MAX_PRIORITY, self._tenant().weight)
        self.running[line.number] = generate.request_id
        document = Document.of(generate, route.api, int(time.time()), False, False, prepared.view)
        stream = await service.backend.submit(generate, document, self._key(line), False, self._tenant().quota)
        if stream.document is document:
            service.metrics.prompt_tokens.inc(generate.num_prompt_tokens)
        # Not timed: a line waits for all others, and would spoil the latencies of those that do not.
        formatter = formatter_for(stream.document, service.table)
        generation = Generation(
            service.backend, stream, formatter, service.table, service.metrics, service.keep_alive_s, None
        )
        request_id = stream.document.request_id
        self.running[line.number] = request_id
        try:
            response = await generation.whole()
        finally:
            generation.close()
        return self._result(line, 200, request_id, orjson.loads(bytes(response.body)))
