"""Deltas to OpenAI's objects: chat and completions, streamed and whole."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from services.common.journal import TokenDetail
from services.common.text.detokenizer import Detokenizer, TokenBytes
from services.router.core.document import Document
from services.router.core.emission import Delta

FINGERPRINT = "orca-0.1.0"
LOGPROB_FLOOR = -9999.0  # minus infinity is no JSON


def usage_object(usage: tuple[int, int]) -> dict[str, Any]:
    prompt, completion = usage
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass
class _Decoded:
    """How much text a choice's tokens have made so far, in characters."""

    detokenizer: Detokenizer
    length: int = 0


@dataclass
class Formatter(ABC):
    """What the two APIs share. One per request."""

    response_id: str
    created: int
    model: str
    table: TokenBytes
    wants_logprobs: bool
    include_usage: bool = False
    decoded: dict[int, "_Decoded"] = field(default_factory=dict)

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head(self.chunk_name) | {"choices": choices} | ({"usage": None} if self.include_usage else {})

    def usage_chunk(self, usage: tuple[int, int]) -> dict[str, Any]:
        return self._head(self.chunk_name) | {"choices": [], "usage": usage_object(usage)}

    def whole(self, choices: Sequence["Whole"], usage: tuple[int, int]) -> dict[str, Any]:
        objects = [self.whole_choice(choice) for choice in choices]
        return self._head(self.object_name) | {"choices": objects, "usage": usage_object(usage)}

    @abstractmethod
    def whole_choice(self, choice: "Whole") -> dict[str, Any]: ...

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]: ...

    def _shown(self, token_id: int, logprob: float) -> tuple[str, float]:
        return self.table.shown(token_id), max(logprob, LOGPROB_FLOOR)


@dataclass
class Whole:
    """One choice, collected."""

    index: int
    text: str = ""
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list)
    details: list[TokenDetail] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.details += delta.details
        self.finish = delta.finish or self.finish


class ChatFormatter(Formatter):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _logprobs(self, token_ids: Sequence[int], details: Sequence[TokenDetail]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        content = [
            self._entry(token, detail.logprob) | {"top_logprobs": [self._entry(t, p) for t, p in detail.top]}
            for token, detail in zip(token_ids, details, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, value = self._shown(token_id, logprob)
        return {"token": text, "logprob": value, "bytes": list(self.table.of(token_id))}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        def choice(content: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            return {"index": delta.choice, "delta": content, "logprobs": logprobs, "finish_reason": finish}

        out = []
        if delta.first:
            out.append(self._chunk([choice({"role": "assistant", "content": ""})]))
        if delta.text or (delta.details and self.wants_logprobs):
            logprobs = self._logprobs(delta.token_ids, delta.details)
            out.append(self._chunk([choice({"content": delta.text}, logprobs=logprobs)]))
        if delta.finish:
            out.append(self._chunk([choice({}, delta.finish)]))
        return out

    def whole_choice(self, choice: Whole) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.token_ids, choice.details),
            "finish_reason": choice.finish,
        }


class CompletionFormatter(Formatter):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def _logprobs(self, choice: int, token_ids: Sequence[int], details: Sequence[TokenDetail]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        tokens, values, tops, offsets = [], [], [], []
        decoded = self.decoded.setdefault(choice, _Decoded(Detokenizer(self.table)))
        for token, detail in zip(token_ids, details, strict=True):
            text, value = self._shown(token, detail.logprob)
            tokens.append(text)
            values.append(value)
            offsets.append(decoded.length)
            decoded.length += len(decoded.detokenizer.push(token))
            # Room for the alternatives asked for and, always, for the chosen token.
            top = dict(self._shown(t, p) for t, p in reversed(detail.top))
            tops.append({text: value} | top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _choice(self, index: int, text: str, finish: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.finish or (delta.details and self.wants_logprobs)):
            return []
        logprobs = self._logprobs(delta.choice, delta.token_ids, delta.details)
        return [self._chunk([self._choice(delta.choice, delta.text, delta.finish, logprobs)])]

    def whole_choice(self, choice: Whole) -> dict[str, Any]:
        logprobs = self._logprobs(choice.index, choice.token_ids, choice.details)
        return self._choice(choice.index, choice.text, choice.finish, logprobs)


def formatter_for(document: Document, table: TokenBytes) -> Formatter:
    """The formatter of the API that a request came by."""
    kind, prefix = (ChatFormatter, "chatcmpl") if document.api == "chat" else (CompletionFormatter, "cmpl")
    return kind(
        response_id=f"{prefix}-{document.request_id}",
        created=document.created,
        model=document.model,
        table=table,
        wants_logprobs=document.logprobs,
        include_usage=document.include_usage,
    )
