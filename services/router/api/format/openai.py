"""Chat and completions, as OpenAI's API has them."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from services.common.journal import TokenDetail
from services.common.text.detokenizer import Detokenizer, TokenBytes
from services.router.api.format.base import FINGERPRINT, Formatter, Whole
from services.router.core.calls import CallDelta
from services.router.core.document import Document
from services.router.core.emission import Delta, Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


class OpenAIFormatter(Formatter):
    """What chat and completions share."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, document: Document, table: TokenBytes) -> None:
        super().__init__(document, table)
        self._chunk_head = self._head(self.chunk_name) | ({"usage": None} if document.include_usage else {})

    def _head(self, name: str) -> dict[str, Any]:
        document = self.document
        head = {
            "id": f"{self.prefix}-{document.request_id}",
            "object": name,
            "created": document.created,
            "model": document.model,
            "system_fingerprint": FINGERPRINT,
        }
        return head | {"service_tier": document.view.tier} if document.view.tier else head

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._chunk_head, "choices": choices}  # one a token

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_object(usage._replace(completion=0) if self.document.view.scores_only else usage)

    def end(self, usage: Usage) -> list[dict[str, Any]]:
        if not self.document.include_usage:
            return []
        return [self._head(self.chunk_name) | {"choices": [], "usage": self._usage(usage)}]

    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        objects = [self._whole_choice(index, choice) for index, choice in enumerate(self._best(choices))]
        return self._head(self.object_name) | {"choices": objects, "usage": self._usage(usage)}

    def _best(self, choices: Sequence[Whole]) -> list[Whole]:
        """Of each prompt's choices those that are shown."""
        shown, n = self.document.view.shown, self.document.n
        if not shown:
            return list(choices)
        prompts = [choices[start : start + n] for start in range(0, len(choices), n)]
        return [best for group in prompts for best in sorted(group, key=lambda c: -c.mean_logprob)[:shown]]

    @abstractmethod
    def _whole_choice(self, index: int, choice: Whole) -> dict[str, Any]:
        """One choice as an object, under the number that it is shown by."""


class ChatFormatter(OpenAIFormatter):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prefix = "chatcmpl"

    def _logprobs(self, token_ids: Sequence[int], details: Sequence[TokenDetail]) -> dict[str, Any] | None:
        if not self.document.logprobs:
            return None
        content = [
            self._entry(token, detail.logprob) | {"top_logprobs": [self._entry(t, p) for t, p in detail.top]}
            for token, detail in zip(token_ids, details, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, value = self.shown(token_id, logprob)
        return {"token": text, "logprob": value, "bytes": list(self.table.of(token_id))}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        def choice(content: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            return {"index": delta.choice, "delta": content, "logprobs": logprobs, "finish_reason": finish}

        out = []
        if delta.first:
            out.append(choice({"role": "assistant", "content": ""}))
        if delta.reasoning:
            out.append(choice({"reasoning_content": delta.reasoning}))
        if delta.text or (delta.details and self.document.logprobs):
            out.append(choice({"content": delta.text}, logprobs=self._logprobs(delta.token_ids, delta.details)))
        out += [choice({"tool_calls": [_call_chunk(call)]}) for call in delta.calls]
        if delta.finish:
            out.append(choice({}, delta.finish))
        return [self._chunk([item]) for item in out]

    def _whole_choice(self, index: int, choice: Whole) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.token_ids, choice.details),
            "finish_reason": choice.finish,
        }


def _call_chunk(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


@dataclass
class _Decoded:
    """How much text a choice's tokens have made so far, in characters."""

    detokenizer: Detokenizer
    length: int = 0


class CompletionFormatter(OpenAIFormatter):
    object_name = "text_completion"
    chunk_name = "text_completion"
    prefix = "cmpl"

    def __init__(self, document: Document, table: TokenBytes) -> None:
        super().__init__(document, table)
        self._decoded: dict[int, _Decoded] = {}
        self._scores: dict[int, Sequence[TokenDetail]] = {}  # of the prompts, by their first choice
        self._waiting: dict[int, list[Delta]] = {}  # first deltas that came before those

    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        self._scores = {choice.index: choice.prompt for choice in choices}
        return super().whole(choices, usage)

    def _echoed(self, choice: int) -> tuple[int, ...]:
        """The prompt that is shown before this choice."""
        echo = self.document.view.echo
        return echo[choice // self.document.n] if echo else ()

    def _logprobs(self, choice: int, token_ids: Sequence[int], details: Sequence[TokenDetail | None]) -> Any:
        if not self.document.logprobs:
            return None
        tokens, values, tops, offsets = [], [], [], []
        decoded = self._decoded.setdefault(choice, _Decoded(Detokenizer(self.table)))
        for token, detail in zip(token_ids, details, strict=True):
            text, value = self.shown(token, detail.logprob if detail else 0.0)
            tokens.append(text)
            values.append(value if detail else None)
            offsets.append(decoded.length)
            decoded.length += len(decoded.detokenizer.push(token))
            # Room for the alternatives asked for and, always, for the chosen token.
            top = dict(self.shown(t, p) for t, p in reversed(detail.top)) if detail else {}
            tops.append({text: value} | top if detail else None)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _with_prompt(
        self,
        choice: int,
        text: str,
        token_ids: Sequence[int],
        details: Sequence[TokenDetail],
        prompt: Sequence[TokenDetail],
    ) -> tuple[str, Any]:
        """Text and log-probabilities of a choice from its beginning, its prompt before it where that is shown."""
        echoed = self._echoed(choice)
        if self.document.view.scores_only:
            text, token_ids, details = "", (), ()
        shown = Detokenizer(self.table)
        before = "".join(map(shown.push, echoed)) + shown.flush()
        first: list[TokenDetail | None] = [None, *prompt] if echoed else []
        return before + text, self._logprobs(choice, [*echoed, *token_ids], [*first, *details])

    def _choice(self, index: int, text: str, finish: str | None, logprobs: Any) -> dict[str, Any]:
        finish = "length" if finish and self.document.view.scores_only else finish
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """A prompt's scores come with its first choice alone: the others' beginnings wait for them."""
        first = delta.choice - delta.choice % self.document.n
        if not (self.document.view.echo and self.document.logprobs) or first in self._scores:
            return self._told(delta)
        if delta.choice != first:
            self._waiting.setdefault(first, []).append(delta)
            return []
        self._scores[first] = delta.prompt
        return [chunk for news in (delta, *self._waiting.pop(first, ())) for chunk in self._told(news)]

    def _told(self, delta: Delta) -> list[dict[str, Any]]:
        if delta.first and self.document.view.echo:
            scores = self._scores.get(delta.choice - delta.choice % self.document.n, ())
            text, logprobs = self._with_prompt(delta.choice, delta.text, delta.token_ids, delta.details, scores)
        elif not (delta.text or delta.finish or (delta.details and self.document.logprobs)):
            return []
        else:
            text, logprobs = delta.text, self._logprobs(delta.choice, delta.token_ids, delta.details)
        return [self._chunk([self._choice(delta.choice, text, delta.finish, logprobs)])]

    def _whole_choice(self, index: int, choice: Whole) -> dict[str, Any]:
        scores = self._scores.get(choice.index - choice.index % self.document.n, ())
        text, logprobs = self._with_prompt(choice.index, choice.text, choice.token_ids, choice.details, scores)
        return self._choice(index, text, choice.finish, logprobs)
