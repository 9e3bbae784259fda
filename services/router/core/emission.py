"""From journal entries to what a client sees. A pure fold, never of time: any router gives the same events."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from services.common.errors import GenerationFailed
from services.common.journal import JournalEntry, JournalItem, TokenDetail
from services.common.text.detokenizer import Detokenizer, TokenBytes
from services.common.text.stop import StopMatcher
from services.router.core.calls import FORMATS, CallDelta, CallParser, ThoughtSplitter, call_ids
from services.router.core.document import Document

# Control tokens that are part of what is parsed: models that have tools or thoughts write them.
MARKS = frozenset({"[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<think>", "</think>"})


@dataclass(slots=True)  # one a token
class Delta:
    """News of one choice. first: its first; finish: how it ended, on its last: "tool_calls" instead of "stop" if it
    made any. details: of its tokens; prompt: of the tokens of its prompt, but for the first, on its first. reasoning:
    text, but of the model's thoughts. embedding: of its prompt. stop: the stop string that
    ended it."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    details: tuple[TokenDetail, ...]
    first: bool
    finish: str | None
    prompt: tuple[TokenDetail, ...] = ()
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    embedding: tuple[float, ...] = ()
    stop: str | None = None


class Usage(NamedTuple):
    """Tokens: of all prompts, made, and of the prompts those that were not computed again."""

    prompt: int
    completion: int
    cached: int = 0


class _Choice:
    def __init__(self, table: TokenBytes, document: Document, number: int) -> None:
        view = document.view
        self._detokenizer = Detokenizer(table, MARKS if view.calls or view.reasoning else (), begins=not view.echo)
        self._stops = StopMatcher(document.stop)
        self._min_tokens = document.min_tokens
        self._ids: list[int] = []
        self._thoughts = ThoughtSplitter(view.reasoning == "inside") if view.reasoning else None
        self._calls: CallParser | None = None
        if view.calls:
            new_id = call_ids(document.request_id, number, FORMATS[view.calls].alphanumeric_ids)
            self._calls = CallParser(view.calls, new_id, view.functions)
        self.started = False
        self.cached = 0
        self.finish: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def push(self, item: JournalItem) -> Delta | None:
        item = self._news_of(item)
        first, self.started = not self.started, True
        self.cached = item.cached or self.cached
        text = "".join(self._token(item.index + offset, token) for offset, token in enumerate(item.token_ids))
        self._ids += item.token_ids
        self.finish = item.finish
        if item.finish is not None:
            text += self._end()
        delta = Delta(item.choice, text, item.token_ids, item.details, first, item.finish, item.prompt)
        delta.embedding = item.embedding
        if item.finish == "stop":
            delta.stop = self._stops.matched
        if self._thoughts is not None or self._calls is not None:
            self._split(delta)
        news = delta.text or delta.details or first or delta.finish or delta.reasoning or delta.calls
        return delta if news else None

    def _split(self, delta: Delta) -> None:
        """Take thoughts and calls out of a delta's text."""
        if self._thoughts is not None:
            delta.reasoning, delta.text = self._thoughts.push(delta.text)
            if delta.finish:
                rest, text = self._thoughts.flush()
                delta.reasoning, delta.text = delta.reasoning + rest, delta.text + text
        if self._calls is None:
            return
        delta.text, calls = self._calls.push(delta.text)
        if delta.finish:
            text, last = self._calls.flush()
            delta.text, calls = delta.text + text, calls + last
            if delta.finish == "stop" and self._calls.num_calls:
                delta.finish = "tool_calls"
        delta.calls = tuple(calls)

    def _news_of(self, item: JournalItem) -> JournalItem:
        """What of an item was not shown yet. A journal that lost its end, in a failover, is written anew: what comes
        again must be what was shown. Raises GenerationFailed if it is not, or if something is missing."""
        if item.token_ids and item.index != len(self._ids):
            known = self._ids[item.index : item.index + len(item.token_ids)]
            if item.index > len(self._ids) or tuple(known) != item.token_ids[: len(known)]:
                raise GenerationFailed("part of this answer was lost, and what replaces it is not the same")
            new = item.token_ids[len(known) :]
            details = item.details[len(known) :]
            return replace(
                item, index=len(self._ids), token_ids=new, details=details, prompt=(), embedding=(), cached=0
            )
        return item

    def _token(self, index: int, token: int) -> str:
        text = self._detokenizer.push(token)
        if self._detokenizer.shows(token):  # a mark, which the worker does not see and so does not stop at
            return self._stops.flush() + text
        # The worker looks for stop strings in what follows min_tokens, and so must we.
        return text if index < self._min_tokens else self._stops.push(text)

    def _end(self) -> str:
        if self._stops.matched is not None:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()


class Fold:
    """The state of one request's stream."""

    def __init__(self, document: Document, table: TokenBytes) -> None:
        self._choices = [_Choice(table, document, number) for number in range(document.choices)]
        self.usage: Usage | None = None
        self._n = document.n

    def push(self, entry: JournalEntry) -> list[Delta]:
        """What this entry adds. Entries must come in order. Raises GenerationFailed if they contradict each other."""
        deltas = [self._choices[item.choice].push(item) for item in entry.items]
        if entry.usage is not None:
            # Choices of one prompt share it: what the first of them found cached is what was cached.
            self.usage = Usage(*entry.usage, sum(choice.cached for choice in self._choices[:: self._n]))
        return [delta for delta in deltas if delta is not None]

    @property
    def done(self) -> bool:
        return self.usage is not None

    @property
    def num_generated(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)
