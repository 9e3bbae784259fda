"""OpenAI's Responses API: a response of items, told item after item."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import DeadlineExceeded, GenerationFailed, OrcaError, Overloaded, StreamInterrupted
from services.common.journal import TokenDetail
from services.common.text.detokenizer import TokenBytes
from services.router.api.format.base import Formatter, Whole
from services.router.core.calls import CallDelta
from services.router.core.document import Document
from services.router.core.emission import Delta, Usage

STATUSES = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "abort": "cancelled"}
IDS = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
PREFIX = "resp_"

Event = dict[str, Any]


@dataclass
class Item:
    """One item of the output. pieces: of its text, or of its call's arguments."""

    kind: str
    item_id: str
    index: int
    call_id: str = ""
    name: str = ""
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def where(self) -> dict[str, Any]:
        """What events say of the item that they are about."""
        return {"item_id": self.item_id, "output_index": self.index}

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def shown(self, begun: bool = True) -> dict[str, Any]:
        """The item as it stands; not begun, it has no part yet."""
        head = {"id": self.item_id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return head | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [self.part()] if begun else []
        if self.kind == "reasoning":
            return head | {"summary": [], "content": content}
        return head | {"role": "assistant", "content": content}


class ResponsesFormatter(Formatter):
    """There is one choice. A reader that has some events already asks for those after a sequence number."""

    closing = b""

    def __init__(self, document: Document, table: TokenBytes) -> None:
        super().__init__(document, table)
        self._after: int = document.view.detail.get("after", -1)
        self._sequence = 0
        self._started = False
        self._items: list[Item] = []
        self._open: Item | None = None  # the last one, while it goes on
        self._held = ""  # white space that begins no message by itself
        self._pending: list[dict[str, Any]] = []  # log-probabilities of tokens whose text has not come out yet
        self._finish: str | None = None

    # -- streamed

    def frame(self, data: dict[str, Any], event_id: str | None = None) -> bytes:
        if data["sequence_number"] <= self._after:
            return b""
        return f"event: {data['type']}\n".encode() + super().frame(data, event_id)

    def failed(self, error: OrcaError) -> bytes:
        """A response that goes on elsewhere has not failed: only this stream of it ends."""
        if isinstance(error, StreamInterrupted):
            told = {"code": error.code, "message": error.message, "param": error.param}
            return self.frame(self._event("error", **told))
        events = [] if self._started else self._start()
        response = self._response("failed", None, error)
        events.append(self._event("response.failed", response=response))
        return b"".join(map(self.frame, events))

    def chunks(self, delta: Delta) -> list[Event]:
        out = self._start() if delta.first else []
        out += self._thought(delta.reasoning) if delta.reasoning else []
        out += self._said(delta)
        for call in delta.calls:
            out += self._called(call)
        if delta.finish:
            self._finish = delta.finish
            out += self._last(delta.finish)
        return out

    def end(self, usage: Usage) -> list[Event]:
        response = self.stands(usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _start(self) -> list[Event]:
        self._started = True
        first = "queued" if self._shown["background"] else "in_progress"
        return [
            self._event("response.created", response=self._response(first)),
            self._event("response.in_progress", response=self._response("in_progress")),
        ]

    def _thought(self, text: str) -> list[Event]:
        out, item = self._reach("reasoning")
        item.pieces.append(text)
        return [*out, self._event("response.reasoning_text.delta", **item.where, content_index=0, delta=text)]

    def _said(self, delta: Delta) -> list[Event]:
        """White space between calls, or before them, is no message of its own."""
        if self.document.logprobs and not delta.reasoning and not delta.calls:
            self._pending += self._logprobs(delta.token_ids, delta.details)
        self._held += delta.text
        begun = self._open is not None and self._open.kind == "message"
        if not self._held or (not begun and self._held.isspace()):
            return []
        return self._text()

    def _text(self) -> list[Event]:
        """What is held back comes out."""
        out, item = self._reach("message")
        text, self._held = self._held, ""
        logprobs, self._pending = self._pending, []
        item.pieces.append(text)
        item.logprobs += logprobs
        more = {"content_index": 0, "delta": text, "logprobs": logprobs}
        return [*out, self._event("response.output_text.delta", **item.where, **more)]

    def _called(self, call: CallDelta) -> list[Event]:
        out: list[Event] = []
        if call.name is not None:
            out, item = self._begin("function_call", call.call_id, call.name)
        else:
            item = self._items[-1]
        if call.arguments:
            item.pieces.append(call.arguments)
            out.append(self._event("response.function_call_arguments.delta", **item.where, delta=call.arguments))
        return out

    def _last(self, finish: str) -> list[Event]:
        """Every response that came to an end of its own has something in it, if only an empty message."""
        out: list[Event] = []
        called = any(item.kind == "function_call" for item in self._items)
        if (self._held and not called) or (self._pending and self._open and self._open.kind == "message"):
            out = self._text()
        elif not self._items:
            out, _ = self._reach("message")
        return out + self._close("completed" if finish in ("stop", "tool_calls") else "incomplete")

    def _reach(self, kind: str) -> tuple[list[Event], Item]:
        """The item of this kind that goes on, or begins."""
        if self._open is not None and self._open.kind == kind:
            return [], self._open
        return self._begin(kind)

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> tuple[list[Event], Item]:
        out = self._close("completed")
        index = len(self._items)
        item = Item(kind, f"{IDS[kind]}_{self.document.request_id}_{index}", index, call_id, name)
        self._items.append(item)
        self._open = item
        out.append(self._event("response.output_item.added", output_index=index, item=item.shown(begun=False)))
        if kind != "function_call":
            out.append(self._event("response.content_part.added", **item.where, content_index=0, part=item.part()))
        return out, item

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        return [
            *self._done(item),
            self._event("response.output_item.done", output_index=item.index, item=item.shown()),
        ]

    def _done(self, item: Item) -> list[Event]:
        if item.kind == "function_call":
            more = {"name": item.name, "arguments": item.text}
            return [self._event("response.function_call_arguments.done", **item.where, **more)]
        where = item.where | {"content_index": 0}
        if item.kind == "reasoning":
            done = self._event("response.reasoning_text.done", **where, text=item.text)
        else:
            done = self._event("response.output_text.done", **where, text=item.text, logprobs=list(item.logprobs))
        return [done, self._event("response.content_part.done", **where, part=item.part())]

    # -- whole

    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        """The fold of all deltas is that of one which has everything."""
        (choice,) = choices
        calls = tuple(CallDelta(i, call.call_id, call.name, call.arguments) for i, call in enumerate(choice.calls))
        ids, details = tuple(choice.token_ids), tuple(choice.details)
        self._pending = self._logprobs(ids, details) if self.document.logprobs else []
        self.chunks(Delta(0, choice.text, (), (), True, choice.finish, (), choice.reasoning, calls))
        return self.stands(usage)

    # -- as it stands

    @property
    def _shown(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.document.view.detail["shown"]
        return shown

    def queued(self) -> dict[str, Any]:
        """A response that runs in the background, as its caller hears of it first."""
        return self._response("queued")

    def stands(self, usage: Usage | None = None) -> dict[str, Any]:
        """The response with what has come of it so far. usage: once it is over."""
        if self._finish is None:
            return self._response("in_progress" if self._started or not self._shown["background"] else "queued")
        return self._response(STATUSES.get(self._finish, "failed"), usage, _failure(self._finish))

    def _response(self, status: str, usage: Usage | None = None, error: OrcaError | None = None) -> dict[str, Any]:
        document = self.document
        return {
            "id": PREFIX + document.request_id,
            "object": "response",
            "created_at": document.created,
            "status": status,
            "error": {"code": _code(error), "message": error.message} if error else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": document.model,
            "output": [item.shown() for item in self._items],
            "usage": _usage(usage) if usage else None,
            **self._shown,
        }

    def _logprobs(self, token_ids: Sequence[int], details: Sequence[TokenDetail]) -> list[dict[str, Any]]:
        return [
            self._entry(token, detail.logprob) | {"top_logprobs": [self._entry(t, p) for t, p in detail.top]}
            for token, detail in zip(token_ids, details, strict=True)
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, value = self.shown(token_id, logprob)
        return {"token": text, "logprob": value, "bytes": list(self.table.of(token_id))}


def _failure(finish: str) -> OrcaError | None:
    if finish == "deadline":
        return DeadlineExceeded("the generation did not end in time")
    return GenerationFailed("the generation failed") if finish == "error" else None


def _code(error: OrcaError) -> str:
    """One of the few that the API has."""
    return "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"


def _usage(usage: Usage) -> dict[str, Any]:
    prompt, completion, cached = usage
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
