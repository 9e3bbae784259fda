"""The routes of Anthropic's Messages API."""

from typing import Any

from fastapi import APIRouter, Request

from services.router.api.body import read_json
from services.router.api.endpoint import Endpoint
from services.router.api.messages.translate import count_tokens, prepare_messages
from services.router.api.messages.wire import CountRequest, MessagesRequest
from services.router.api.service import Service


def build(service: Service) -> APIRouter:
    """Both routes over one service."""
    router = APIRouter()
    create = Endpoint(service, "messages", MessagesRequest, prepare_messages)

    @router.post("/v1/messages")
    async def messages(request: Request) -> Any:
        return await create(request)

    @router.post("/v1/messages/count_tokens")
    async def count(request: Request) -> Any:
        service.caller(request)
        body = service.parse(await read_json(request, service.max_body_bytes), CountRequest)
        return {"input_tokens": await count_tokens(service, body)}

    return router
