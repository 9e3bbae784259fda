"""Anthropic's Messages API: a message of blocks, told block after block."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from services.common.errors import OrcaError
from services.common.text.detokenizer import TokenBytes
from services.router.api.format.base import Call, Formatter, Whole
from services.router.api.messages.errors import error_body
from services.router.core.calls import CallDelta
from services.router.core.document import Document
from services.router.core.emission import Delta, Usage

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# What a block of each kind begins as, and the piece that goes on with it.
BEGINNINGS: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
PIECES = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


class MessagesFormatter(Formatter):
    """There is one choice."""

    closing = b""
    id_headers = ("request-id",)

    def __init__(self, document: Document, table: TokenBytes) -> None:
        super().__init__(document, table)
        self._open = ""  # the kind of the block that goes on
        self._blocks = 0
        self._called = False
        self._held = ""  # white space that begins no block by itself
        self._matched: str | None = None
        self._finish = "stop"

    # -- streamed

    def frame(self, data: dict[str, Any], event_id: str | None = None) -> bytes:
        return f"event: {data['type']}\n".encode() + super().frame(data, event_id)

    def failed(self, error: OrcaError) -> bytes:
        return self.frame(error_body(error.status, error.message, self.document.request_id))

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        out = [self._start()] if delta.first else []
        out += self._piece("thinking", delta.reasoning) if delta.reasoning else []
        out += self._text(delta.text) if delta.text else []
        for call in delta.calls:
            out += self._call(call)
        if delta.finish:
            self._finish, self._matched = delta.finish, delta.stop
            out += self._last()
        return out

    def end(self, usage: Usage) -> list[dict[str, Any]]:
        delta = {"stop_reason": _reason(self._finish, self._matched), "stop_sequence": self._matched}
        return [{"type": "message_delta", "delta": delta, "usage": _usage(usage)}, {"type": "message_stop"}]

    def _start(self) -> dict[str, Any]:
        usage = _usage(Usage(self.document.view.detail["input_tokens"], 0))
        return {"type": "message_start", "message": self._message([], None, None, usage)}

    def _text(self, text: str) -> list[dict[str, Any]]:
        """White space between calls, or before them, is no block of its own: Anthropic's API takes none back."""
        self._held += text
        if self._open != "text" and self._held.isspace():
            return []
        text, self._held = self._held, ""
        return self._piece("text", text)

    def _piece(self, kind: str, text: str) -> list[dict[str, Any]]:
        out = [] if self._open == kind else [*self._stop(), self._begin(kind, BEGINNINGS[kind])]
        name, field = PIECES[kind]
        return [*out, self._delta({"type": name, field: text})]

    def _call(self, call: CallDelta) -> list[dict[str, Any]]:
        out = []
        if call.name is not None:
            block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            out = [*self._stop(), self._begin("tool_use", block)]
            self._called = True
        if call.arguments:
            out.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return out

    def _last(self) -> list[dict[str, Any]]:
        held = self._piece("text", self._held) if self._held and not self._called else []
        return [*held, *self._stop()]

    def _begin(self, kind: str, block: dict[str, Any]) -> dict[str, Any]:
        self._open = kind
        self._blocks += 1
        return {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _stop(self) -> list[dict[str, Any]]:
        was, self._open = self._open, ""
        return [{"type": "content_block_stop", "index": self._blocks - 1}] if was else []

    # -- whole

    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append(BEGINNINGS["thinking"] | {"thinking": choice.reasoning})
        if choice.text and not (choice.calls and choice.text.isspace()):
            content.append({"type": "text", "text": choice.text})
        content += map(_tool_use, choice.calls)
        reason = _reason(choice.finish or "stop", choice.stop)
        return self._message(content, reason, choice.stop, _usage(usage))

    # -- both

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, matched: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.document.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.document.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": matched,
            "usage": usage,
        }


def _reason(finish: str, matched: str | None) -> str:
    return "stop_sequence" if finish == "stop" and matched is not None else REASONS[finish]


def _usage(usage: Usage) -> dict[str, Any]:
    """Here the input is what was not in the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _tool_use(call: Call) -> dict[str, Any]:
    """A call that max_tokens cut off has as much of its input as is certain, as its clients make of a stream."""
    arguments = from_json(call.arguments or "{}", allow_partial=True)
    return {
        "type": "tool_use",
        "id": call.call_id,
        "name": call.name,
        "input": arguments if isinstance(arguments, dict) else {},
    }
