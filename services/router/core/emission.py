"""From journal entries to what a client sees. A pure fold, never of time: any router gives the same events."""

from dataclasses import dataclass, replace

from services.common.errors import GenerationFailed
from services.common.journal import JournalEntry, JournalItem, TokenDetail
from services.common.text.detokenizer import Detokenizer, TokenBytes
from services.common.text.stop import StopMatcher
from services.router.core.document import Document


@dataclass(frozen=True, slots=True)
class CallDelta:
    """News of one tool call. index: which of its choice's. name: on its first. arguments: the next piece of JSON."""

    index: int
    call_id: str
    name: str | None
    arguments: str


@dataclass(slots=True)  # one a token
class Delta:
    """News of one choice. first: its first; finish: how it ended, on its last: "tool_calls" instead of "stop" if it
    made any. details: of its tokens; prompt: of the tokens of its prompt, but for the first, on its first. reasoning:
    text, but of the model's thoughts."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    details: tuple[TokenDetail, ...]
    first: bool
    finish: str | None
    prompt: tuple[TokenDetail, ...] = ()
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class _Choice:
    def __init__(self, table: TokenBytes, document: Document) -> None:
        self._detokenizer = Detokenizer(table)
        self._stops = StopMatcher(document.stop)
        self._min_tokens = document.min_tokens
        self._ids: list[int] = []
        self.started = False
        self.finish: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def push(self, item: JournalItem) -> Delta | None:
        item = self._news_of(item)
        first, self.started = not self.started, True
        text = "".join(self._token(item.index + offset, token) for offset, token in enumerate(item.token_ids))
        self._ids += item.token_ids
        self.finish = item.finish
        if item.finish is not None:
            text += self._end()
        if not (text or item.details or first or item.finish):
            return None
        return Delta(item.choice, text, item.token_ids, item.details, first, item.finish)

    def _news_of(self, item: JournalItem) -> JournalItem:
        """What of an item was not shown yet. A journal that lost its end, in a failover, is written anew: what comes
        again must be what was shown. Raises GenerationFailed if it is not, or if something is missing."""
        if item.token_ids and item.index != len(self._ids):
            known = self._ids[item.index : item.index + len(item.token_ids)]
            if item.index > len(self._ids) or tuple(known) != item.token_ids[: len(known)]:
                raise GenerationFailed("part of this answer was lost, and what replaces it is not the same")
            new = item.token_ids[len(known) :]
            return replace(item, index=len(self._ids), token_ids=new, details=item.details[len(known) :])
        return item

    def _token(self, index: int, token: int) -> str:
        text = self._detokenizer.push(token)
        # The worker looks for stop strings in what follows min_tokens, and so must we.
        return text if index < self._min_tokens else self._stops.push(text)

    def _end(self) -> str:
        if self._stops.matched is not None:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()


class Fold:
    """The state of one request's stream."""

    def __init__(self, document: Document, table: TokenBytes) -> None:
        self._choices = [_Choice(table, document) for _ in range(document.choices)]
        self.usage: tuple[int, int] | None = None

    def push(self, entry: JournalEntry) -> list[Delta]:
        """What this entry adds. Entries must come in order. Raises GenerationFailed if they contradict each other."""
        if entry.usage is not None:
            self.usage = entry.usage
        deltas = (self._choices[item.choice].push(item) for item in entry.items)
        return [delta for delta in deltas if delta is not None]

    @property
    def done(self) -> bool:
        return self.usage is not None

    @property
    def num_generated(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)
