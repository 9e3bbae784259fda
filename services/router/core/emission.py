"""From journal entries to what a client sees. A pure fold, never of time: any router gives the same events."""

from dataclasses import dataclass

from services.common.journal import JournalEntry, JournalItem, TokenDetail
from services.common.request import GenerateRequest
from services.common.text.detokenizer import Detokenizer, TokenBytes
from services.common.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one choice. first: its first; finish: how it ended, on its last."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    details: tuple[TokenDetail, ...]
    first: bool
    finish: str | None


class _Choice:
    def __init__(self, table: TokenBytes, request: GenerateRequest) -> None:
        self._detokenizer = Detokenizer(table)
        self._stops = StopMatcher(request.params.stop)
        self._min_tokens = request.params.min_tokens
        self.started = False
        self.finish: str | None = None
        self.num_tokens = 0

    def push(self, item: JournalItem) -> Delta | None:
        first, self.started = not self.started, True
        text = "".join(self._token(item.index + offset, token) for offset, token in enumerate(item.token_ids))
        self.num_tokens += len(item.token_ids)
        self.finish = item.finish
        if item.finish is not None:
            text += self._end()
        if not (text or item.details or first or item.finish):
            return None
        return Delta(item.choice, text, item.token_ids, item.details, first, item.finish)

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

    def __init__(self, request: GenerateRequest, table: TokenBytes) -> None:
        self._choices = [_Choice(table, request) for _ in range(request.num_choices)]
        self.usage: tuple[int, int] | None = None

    def push(self, entry: JournalEntry) -> list[Delta]:
        """What this entry adds. Entries must come in order, each once."""
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
