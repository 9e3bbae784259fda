"""What clients send. Everything is bounded here, before anything is allocated in proportion to it."""

from services.router.api.wire.base import (
    MAX_PROMPT_IDS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingFields,
    Strict,
    TokenId,
    described,
    refused,
)
from services.router.api.wire.chat import MAX_MESSAGES, ChatRequest, Message, Tool
from services.router.api.wire.completion import CompletionRequest, Prompts

__all__ = [
    "MAX_MESSAGES",
    "MAX_PROMPT_IDS",
    "MAX_STOPS",
    "MAX_STOP_CHARS",
    "ChatRequest",
    "CompletionRequest",
    "Message",
    "Prompts",
    "SamplingFields",
    "Strict",
    "TokenId",
    "Tool",
    "described",
    "refused",
]
