"""A router process: wires store, backend, tokenizer and HTTP together."""

import asyncio
import json
import logging
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import uvicorn
from prometheus_client import CollectorRegistry

from services.common import log as logs
from services.common import metrics, process, telemetry
from services.common.admission import AdmissionLimits
from services.common.errors import ConfigurationError
from services.common.health import Health
from services.common.models.resolve import ModelFiles, resolve_model
from services.common.redis.store import CONNECTION_ERRORS, Store, connect
from services.common.settings import parse
from services.common.text.detokenizer import TokenBytes
from services.common.text.tokenizer import TextEncoder
from services.router.adapters.backend import Backend, Windows
from services.router.adapters.batch_runner import BatchRunner
from services.router.adapters.grammar_checker import GrammarChecker
from services.router.adapters.http import BoundedConnection, until_quiet
from services.router.adapters.keys import KeyFile, key_file
from services.router.adapters.redis_shelf import RedisShelf
from services.router.adapters.tokenizing import TokenizingPool
from services.router.api.service import Service
from services.router.api.shelf import ShelfLimits
from services.router.app import Readiness, create_app
from services.router.core.chat import ChatEncoder
from services.router.settings import RouterSettings

if TYPE_CHECKING:
    from services.common.telemetry.tracing import Tracing
    from services.router.api.spans import Spans

log = logging.getLogger(__name__)

# Longer than clients keep theirs, so that it is never we who close a connection that one of them is about to use.
KEEP_ALIVE_S = 75


def make_service(
    settings: RouterSettings,
    files: ModelFiles,
    backend: Backend,
    registry: CollectorRegistry,
    pool: TokenizingPool,
    usage: Callable[[], Awaitable[dict[str, dict[str, int]]]],
    tracing: "Tracing | None",
    keys: KeyFile | None,
    grammars: GrammarChecker,
) -> Service:
    encoder = TextEncoder(files.tokenizer_json)
    return Service(
        backend=backend,
        files=files,
        encoder=encoder,
        chat=ChatEncoder(files, encoder),
        grammars=grammars,
        table=TokenBytes(files.tokenizer_json),
        metrics=metrics.RouterMetrics(registry),
        offload=pool.run,
        usage=usage,
        max_body_bytes=settings.max_body_bytes,
        keep_alive_s=settings.keep_alive,
        timeout_s=settings.request_timeout,
        model_names=frozenset({files.name, settings.model}),
        started=int(time.time()),
        spans=make_spans(tracing) if tracing else None,
        ring=lambda: keys.ring if keys else None,
    )


def shelf_limits(settings: RouterSettings) -> ShelfLimits:
    return ShelfLimits(
        file_bytes=settings.max_file_bytes,
        tenant_files=settings.tenant_files,
        tenant_bytes=settings.tenant_file_bytes,
        tenant_batches=settings.tenant_batches,
        ttl_s=int(settings.file_days * 86_400),
    )


def make_spans(tracing: "Tracing") -> "Spans":
    from services.router.api.spans import Spans  # imports OpenTelemetry

    return Spans(tracing)


class _Server(uvicorn.Server):
    """uvicorn, without its own signal handlers: ours drain."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


async def serve(settings: RouterSettings) -> None:
    """Serve until a signal; then not ready, open streams finish, exit."""
    stop = process.Stop()
    process.on_signals(stop)
    keys = key_file(settings.api_keys, settings.allow_anonymous, settings.host)
    files = await asyncio.to_thread(resolve_model, settings.model)
    incarnation = f"{settings.name}-{uuid.uuid4().hex[:12]}"
    redis = connect(settings.redis_url.get_secret_value())
    store = Store(redis, settings.partition)
    limits = AdmissionLimits(
        settings.max_requests, settings.max_tokens, settings.tenant_requests, settings.tenant_tokens
    )
    windows = Windows(settings.resume_window, settings.idempotency_window)
    backend = Backend(store, incarnation, limits, windows)
    registry = CollectorRegistry()
    pool = TokenizingPool()
    grammars = GrammarChecker(files.tokenizer_json, files.vocab_size, files.eos_token_ids)
    tracing = telemetry.configure(settings, "router", settings.name, registry)
    service = make_service(settings, files, backend, registry, pool, store.usage, tracing, keys, grammars)
    readiness = Readiness(backend)
    ports = [port for port in settings.fleet_metrics.split(",") if port]
    kept = shelf_limits(settings)
    shelf = RedisShelf(redis, settings.partition, incarnation, kept)
    batches = BatchRunner(service, shelf, kept, settings.batch_in_flight)
    app = create_app(service, readiness, registry, ports, shelf, kept)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        http=BoundedConnection,
    )
    server = _Server(config)

    async def drain() -> None:
        """Not ready, and nobody new; what is open, and what still comes on open connections, is served to its end. When
        the whole system ends, what comes is refused."""
        backend.draining = BoundedConnection.closing = True
        await batches.stop()
        backend.closed = stop.at_once
        if not stop.at_once:
            for listener in server.servers:
                listener.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(settings.drain):
                    await until_quiet(server.server_state.connections)
        await backend.idle_within(settings.drain if stop.at_once else 0)
        for connection in list(server.server_state.connections):
            connection.shutdown()  # idle ones now, the others with their last event
        await backend.hand_on()
        server.should_exit = True
        await serving
        await backend.settle()

    async def beat() -> None:
        """Registered is who answers."""
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
        await process.heartbeat(store, "routers", incarnation, lambda: json.dumps({"name": settings.name}), Health())

    serving = asyncio.ensure_future(_serve_http(server, listening_socket(settings)))
    try:
        watching = [keys.watch()] if keys else []
        await process.run_until(stop, _forever(serving), backend.run(), batches.run(), beat(), *watching, drain=drain)
        await store.register("routers", incarnation, "", 0)
    except CONNECTION_ERRORS as error:
        log.warning("could not sign off: %s", error)
    finally:
        pool.close()
        await grammars.close()
        await store.aclose()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


async def _forever(serving: "asyncio.Future[None]") -> None:
    await asyncio.shield(serving)


def listening_socket(settings: RouterSettings) -> list[socket.socket] | None:
    """The socket that a supervisor has opened, for it to outlive us; None to open one. Raises ConfigurationError."""
    if settings.listen_fd < 0:
        return None
    try:
        return [socket.socket(fileno=settings.listen_fd)]
    except OSError:
        raise ConfigurationError(f"--listen-fd: {settings.listen_fd} is no socket") from None


async def _serve_http(server: uvicorn.Server, sockets: list[socket.socket] | None) -> None:
    try:
        await server.serve(sockets)
    except SystemExit:
        raise ConfigurationError(
            f"cannot listen on {server.config.host}:{server.config.port}: the port is taken"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `orca router`."""
    try:
        settings = parse(RouterSettings, sys.argv[1:] if argv is None else argv, "orca router")
    except ConfigurationError as error:
        sys.stderr.write(f"orca router: {error.message}\n")
        return 2
    logs.configure(settings.name, settings.log_level, settings.log_format)
    return process.run(serve(settings), "orca router")


if __name__ == "__main__":
    sys.exit(main())
