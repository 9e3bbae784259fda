"""The FastAPI application: routes, health, metrics, errors."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.exceptions import HTTPException

from services.common.errors import OrcaError
from services.router.adapters.backend import Backend
from services.router.adapters.fleet_metrics import exposition
from services.router.api import batches, embeddings, errors, files, openapi, routes, tokens
from services.router.api.messages import errors as anthropic_errors
from services.router.api.messages import routes as messages
from services.router.api.responses import routes as responses
from services.router.api.service import Service
from services.router.api.shelf import Shelf, ShelfLimits
from services.router.api.sse import ClientGone

log = logging.getLogger(__name__)


class Readiness:
    """Whether this router takes new work."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def reason(self) -> str | None:
        """Why not, or None."""
        if self._backend.draining:
            return "draining"
        if not self._backend.reachable:
            return "the queue does not answer"
        return None if self._backend.limits else "no worker is ready"


def create_app(
    service: Service,
    readiness: Readiness,
    registry: CollectorRegistry,
    fleet_ports: list[str],
    shelf: Shelf,
    limits: ShelfLimits,
) -> FastAPI:
    """The application over one service."""
    app = FastAPIOffline(title="Orca", version="0.1.0", redoc_url=None)
    app.openapi = openapi.describer(app)  # type: ignore[method-assign]
    app.include_router(routes.build(service))
    app.include_router(tokens.build(service))
    app.include_router(embeddings.build(service))
    app.include_router(messages.build(service))
    app.include_router(responses.build(service))
    app.include_router(files.build(service, shelf, limits))
    app.include_router(batches.build(service, shelf))

    @app.get("/health/started")
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health/ready")
    @app.get("/health")
    async def ready() -> JSONResponse:
        reason = readiness.reason
        return JSONResponse({"status": reason or "ok"}, 503 if reason else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await exposition(registry, fleet_ports), media_type=CONTENT_TYPE_LATEST)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, OrcaError)
        if request.method == "POST":
            service.metrics.requests.labels("refused" if error.status < 500 else "error").inc()
        if anthropic_errors.applies(request):
            return anthropic_errors.error_response(request, error)
        return await errors.handle_orca_error(request, error)

    async def gone(_: Request, __: Exception) -> Response:
        service.metrics.requests.labels("abort").inc()
        return Response(status_code=499)

    def plain(request: Request, status: int, message: str) -> Response:
        if anthropic_errors.applies(request):
            return anthropic_errors.plain(request, status, message)
        return errors.plain(status, message)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return plain(request, error.status_code, str(error.detail))

    async def invalid(request: Request, __: Exception) -> Response:
        return plain(request, 400, "the request is not valid")

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return plain(request, 500, "internal error")

    app.add_exception_handler(OrcaError, refused)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)
    return app
