"""The OpenAI-compatible routes."""

from typing import Any

from fastapi import APIRouter, Request

from services.router.api.endpoint import Endpoint, resume
from services.router.api.intent import stream_position
from services.router.api.prepare import prepare_chat, prepare_completion
from services.router.api.service import Service
from services.router.api.wire import ChatRequest, CompletionRequest

NO_USAGE = {"requests": 0, "prompt": 0, "completion": 0}


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
