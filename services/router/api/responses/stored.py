"""Responses that are read again: what there is of them by now, their input, and how they are taken back."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest, StreamNotFound, Unavailable
from services.common.journal import JournalEntry
from services.common.text.detokenizer import TokenBytes
from services.router.api.format.responses import PREFIX, ResponsesFormatter
from services.router.api.responses.wire import ITEMS_OF_BEFORE, AnyItem
from services.router.api.service import Service
from services.router.api.wire import MAX_MESSAGES
from services.router.core.document import Document
from services.router.core.emission import Fold

RESPONSE_ID = re.compile(PREFIX + r"([0-9a-f]{32})")
# How long an aborted request may take to end.
END_S = 10.0
ENDED = ("completed", "incomplete", "failed", "cancelled")


def request_id_of(response_id: str) -> str:
    """The request behind a response. Raises StreamNotFound on what is none of ours."""
    match = RESPONSE_ID.fullmatch(response_id)
    if match is None:
        raise not_found()
    return match[1]


def not_found() -> StreamNotFound:
    return StreamNotFound("there is no such response, or it has been over for too long", "response_id")


def check_stored(document: Document) -> None:
    """Raises StreamNotFound on what came by another API, or was not to be stored."""
    if document.api != "responses" or not document.view.detail["shown"]["store"]:
        raise not_found()


@dataclass(frozen=True)
class Found:
    """A request as it was found in the journal."""

    document: Document
    entries: Sequence[JournalEntry]
    table: TokenBytes

    def as_it_stands(self) -> dict[str, Any]:
        """The response with what its journal has by now."""
        fold, formatter = Fold(self.document, self.table), ResponsesFormatter(self.document, self.table)
        for entry in self.entries:
            for delta in fold.push(entry):
                formatter.chunks(delta)
        return formatter.stands(fold.usage)


async def look(service: Service, request_id: str, tenant: str) -> tuple[Document, dict[str, Any]]:
    """A stored response as it stands. Raises StreamNotFound, Unavailable or Overloaded."""
    try:
        document, entries = await service.backend.look(request_id, tenant)
    except StreamNotFound:
        raise not_found() from None
    check_stored(document)
    return document, await service.offload(Found.as_it_stands, Found(document, entries, service.table))


async def conversation(service: Service, response_id: str, tenant: str) -> list[AnyItem]:
    """What goes before an input that follows an earlier response. Raises StreamNotFound or InvalidRequest."""
    try:
        document, response = await look(service, request_id_of(response_id), tenant)
    except StreamNotFound as error:
        raise StreamNotFound(f"previous_response_id: {error.message}", "previous_response_id") from None
    if response["status"] not in ("completed", "incomplete"):
        raise InvalidRequest(f"previous_response_id: that response is {response['status']}", "previous_response_id")
    items = document.view.detail["input"] + response["output"]
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest("previous_response_id: that conversation has become too long", "previous_response_id")
    return ITEMS_OF_BEFORE.validate_python(items)


async def cancel(service: Service, request_id: str, tenant: str) -> None:
    """Abort a request and wait for its end. Raises StreamNotFound or Unavailable."""
    stream = await service.backend.attach(request_id, tenant)
    try:
        await service.backend.cancel(request_id)
        async with asyncio.timeout(END_S):
            while not stream.finished:
                await stream.next(END_S)
    except TimeoutError:
        raise Unavailable("the response is being cancelled, and has not ended yet") from None
    finally:
        service.backend.leave(stream)


def input_items(document: Document) -> list[dict[str, Any]]:
    """The conversation that a response answers, in order, each item with an id."""
    items: list[dict[str, Any]] = document.view.detail["input"]
    return [{"id": f"item_{document.request_id}_{index}"} | item for index, item in enumerate(items)]


def page(items: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """A list's part after one of its items. Raises InvalidRequest if that is none of them."""
    start = 0
    if after is not None:
        places = [index + 1 for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest("after is none of this response's items", "after")
        start = places[0]
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(items),
    }
