"""OpenAI's /v1/files: what batches read and write."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from services.common.errors import InvalidRequest, Overloaded
from services.router.api.service import Service
from services.router.api.shelf import Shelf, ShelfLimits
from services.router.api.sse import ClientGone
from services.router.api.upload import Upload, receive
from services.router.core.files import BATCH_INPUT, File, following, page

MAX_PAGE = 10_000
# What one router takes in at a time; each holds a chunk or two.
MAX_UPLOADS = 8
MIN_LIFE_S = 3600

ReadChunk = Callable[[str, int], Awaitable[bytes | None]]


def build(service: Service, shelf: Shelf, limits: ShelfLimits) -> APIRouter:
    """All routes over one shelf."""
    router = APIRouter()
    uploads = asyncio.Semaphore(MAX_UPLOADS)

    @router.post("/v1/files")
    async def create(request: Request) -> Any:
        tenant = service.caller(request).tenant
        if uploads.locked():
            raise Overloaded("too many files are being uploaded; try again later")
        async with uploads:
            name = f"file-{uuid.uuid4().hex[:24]}"
            try:
                upload = await receive(request, shelf, name, limits.file_bytes)
                file = _file(name, upload, limits)
                await shelf.put_file(tenant, file)
            except (InvalidRequest, ClientGone):  # after any other end, what is there of it expires
                await shelf.drop_chunks(name)
                raise
        return file.to_object()

    @router.get("/v1/files")
    async def listed(request: Request) -> Any:
        tenant = service.caller(request).tenant
        limit, after = paging(request, MAX_PAGE, MAX_PAGE)
        order, purpose = request.query_params.get("order", "desc"), request.query_params.get("purpose")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: asc or desc", "order")
        files = [file for file in await shelf.files(tenant) if purpose in (None, file.purpose)]
        return page(following(files if order == "desc" else files[::-1], after), limit)

    @router.get("/v1/files/{name}")
    async def retrieve(request: Request, name: str) -> Any:
        return (await shelf.file(service.caller(request).tenant, name)).to_object()

    @router.get("/v1/files/{name}/content")
    async def content(request: Request, name: str) -> Any:
        file = await shelf.file(service.caller(request).tenant, name)
        headers = {"Content-Length": str(file.size)}  # one that is deleted meanwhile ends early, and this tells
        return StreamingResponse(chunks(shelf.chunk, file), headers=headers, media_type="application/octet-stream")

    @router.delete("/v1/files/{name}")
    async def delete(request: Request, name: str) -> Any:
        await shelf.delete_file(service.caller(request).tenant, name)
        return {"id": name, "object": "file", "deleted": True}

    return router


async def chunks(read: ReadChunk, file: File) -> AsyncIterator[bytes]:
    """A file's bytes; they end early if it is deleted meanwhile."""
    for index in range(file.num_chunks):
        chunk = await read(file.name, index)
        if chunk is None:
            return
        yield chunk


def paging(request: Request, default: int, most: int) -> tuple[int, str]:
    """limit and after. Raises InvalidRequest."""
    text = request.query_params.get("limit", str(default))
    if not (text is not None and text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise InvalidRequest(f"limit: a whole number from 1 to {most}", "limit")
    return int(text), request.query_params.get("after", "")


def _file(name: str, upload: Upload, limits: ShelfLimits) -> File:
    """Raises InvalidRequest."""
    if (purpose := upload.fields.get("purpose")) != BATCH_INPUT:
        raise InvalidRequest(f"purpose: only {BATCH_INPUT!r}" if purpose else "purpose is missing", "purpose")
    if not upload.size:
        raise InvalidRequest("the file is empty", "file")
    now = int(time.time())
    file = File(name, upload.filename or "", purpose, upload.size, now, now + limits.ttl_s)
    text = upload.fields.get("expires_after[seconds]")
    if text is None and "expires_after[anchor]" not in upload.fields:
        return file
    if upload.fields.get("expires_after[anchor]") != "created_at":
        raise InvalidRequest("expires_after: anchor must be created_at", "expires_after")
    if not (text is not None and text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= MIN_LIFE_S):
        raise InvalidRequest(f"expires_after: seconds must be a whole number from {MIN_LIFE_S}", "expires_after")
    return replace(file, expires_at=now + min(int(text), limits.ttl_s))
