"""Deltas to the objects of each API, streamed and whole."""

from services.common.text.detokenizer import TokenBytes
from services.router.api.format.base import Call, Formatter, Whole
from services.router.api.format.embedding import EmbeddingFormatter
from services.router.api.format.messages import MessagesFormatter
from services.router.api.format.openai import ChatFormatter, CompletionFormatter
from services.router.api.format.responses import ResponsesFormatter
from services.router.core.document import Document

__all__ = ["Call", "Formatter", "Whole", "formatter_for"]

FORMATTERS: dict[str, type[Formatter]] = {
    "chat": ChatFormatter,
    "completion": CompletionFormatter,
    "embedding": EmbeddingFormatter,
    "messages": MessagesFormatter,
    "responses": ResponsesFormatter,
}


def formatter_for(document: Document, table: TokenBytes) -> Formatter:
    """The formatter of the API that a request came by."""
    return FORMATTERS[document.api](document, table)
