"""What is published of each sequence: which tokens, where its text ends. Pure; the Redis call is the adapter's."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.text.stop import StopMatcher
from services.worker.core.plan import SequenceState, StepOutput, TokenLogprobs


@dataclass(slots=True)
class Token:
    """One token of one sequence, ready to publish."""

    index: int
    token_id: int
    step: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Item:
    """One token or one finish of one sequence, in publishing order."""

    sequence: SequenceState
    index: int
    token: Token | None
    finish: str | None
    step: int


@dataclass(slots=True)
class _Published:
    sequence: SequenceState
    decode: Callable[[int], str] | None
    stops: StopMatcher
    history: list[Item] = field(default_factory=list)


class PublishBook:
    """Remembers every sequence in progress, so that stop strings are found and a gap can be filled again."""

    def __init__(self, new_decoder: Callable[[], Callable[[int], str]]) -> None:
        self._new_decoder = new_decoder
        self._open: dict[int, _Published] = {}

    def take(self, step: StepOutput) -> list[Item]:
        """The items to publish for one step; tokens after a sequence's end are none."""
        if step.plan.full:
            self._open.clear()
        for sequence_id in step.plan.release:
            self._open.pop(sequence_id, None)
        items = []
        for output in step.outputs:
            if output.sequence.ended or not (output.token_ids or output.finish_reason):
                continue
            book = self._open.get(output.sequence.sequence_id)
            if book is None:
                book = self._begin(output.sequence, output.index)
            item = self._item(book, output.index, output.token_ids, output.logprobs, step.plan.number)
            item.finish = item.finish or output.finish_reason
            if item.finish:
                output.sequence.ended = item.finish
            book.history.append(item)
            items.append(item)
        return items

    def _begin(self, sequence: SequenceState, published: int) -> _Published:
        stops = sequence.params.stop
        book = _Published(sequence, self._new_decoder() if stops else None, StopMatcher(stops))
        if book.decode:  # rebuilt from the journal's tokens: a stop string may straddle a move
            for index, token in enumerate(sequence.tokens[sequence.num_prompt :][:published]):
                self._match(book, index, token)
        self._open[sequence.sequence_id] = book
        return book

    def _item(
        self,
        book: _Published,
        index: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        step: int,
    ) -> Item:
        if not token_ids:
            return Item(book.sequence, index, None, None, step)
        token = Token(index, token_ids[0], step, logprobs[0] if logprobs else None)
        item = Item(book.sequence, index, token, None, step)
        if self._match(book, index, token.token_id):
            item.finish = "stop"
        return item

    @staticmethod
    def _match(book: _Published, index: int, token_id: int) -> bool:
        """True once a stop string is complete in the text that comes after min_tokens."""
        if book.decode is None:
            return False
        text = book.decode(token_id)
        if index >= book.sequence.params.min_tokens:
            book.stops.push(text)
        return book.stops.matched is not None

    def resend(self, sequence_id: int, start: int) -> list[Item] | None:
        """Items from output position `start` on; None if this worker never had them."""
        book = self._open.get(sequence_id)
        if book is None or not book.history or book.history[0].index > start:
            return None
        return [item for item in book.history if item.index >= start]

    def close(self, sequence: SequenceState) -> None:
        """The sequence has ended here: published to its end, or fenced. Steps still under way say nothing more."""
        sequence.ended = sequence.ended or "released"
        self._open.pop(sequence.sequence_id, None)

    def __len__(self) -> int:
        return len(self._open)
