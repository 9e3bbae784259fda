"""Sees every journal after every change, remembers all of it, and says what must hold."""

from dataclasses import dataclass, field

from services.common.journal import JournalEntry, JournalItem
from services.common.redis.store import Store
from services.common.request import GenerateRequest
from tests.protocol import oracle


class Violation(AssertionError):
    """The journal says what it must never say."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise Violation(message)


@dataclass
class Seen:
    """One request's journal as far as anybody could have read it."""

    request: GenerateRequest
    aborted: bool = False
    entries: list[JournalEntry] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    finishes: list[str | None] = field(default_factory=list)
    usage: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.outputs = [()] * self.request.num_choices
        self.finishes = [None] * self.request.num_choices


class Observer:
    """Raises Violation. salts: of all workers that there have ever been."""

    def __init__(self, store: Store, salts: list[int]) -> None:
        self._store = store
        self._salts = salts
        self.seen: dict[str, Seen] = {}

    def expect(self, request: GenerateRequest) -> None:
        self.seen[request.request_id] = Seen(request)

    async def look(self, ended_too: bool = False) -> None:
        """Read anew, from the first entry on, all journals; those that have had their last entry only if asked."""
        for request_id, seen in self.seen.items():
            if seen.usage is not None and not ended_too:
                continue
            entries = await self._store.journal(request_id)
            known = len(seen.entries)
            require(entries[:known] == seen.entries, f"{request_id}: what a client saw has changed")
            for entry in entries[known:]:
                self._take(seen, entry)

    def _take(self, seen: Seen, entry: JournalEntry) -> None:
        name = entry.request_id
        require(seen.usage is None, f"{name}: an entry after the last")
        seen.entries.append(entry)
        for item in entry.items:
            self._take_item(seen, item, f"{name}/{item.choice} index {item.index}")
        if entry.usage is not None:
            seen.usage = entry.usage
            counted = (seen.request.num_prompt_tokens, sum(map(len, seen.outputs)))
            require(entry.usage == counted, f"{name}: usage {entry.usage} instead of {counted}")
        all_ended = None not in seen.finishes
        require(all_ended == (seen.usage is not None), f"{name}: usage comes with the last finish, and only then")

    def _take_item(self, seen: Seen, item: JournalItem, name: str) -> None:
        choice = item.choice
        require(seen.finishes[choice] is None, f"{name}: something after the finish")
        if item.token_ids:
            require(item.index == len(seen.outputs[choice]), f"{name}: {len(seen.outputs[choice])} was next")
        for token in item.token_ids:
            require(oracle.end_of(seen.request, seen.outputs[choice]) is None, f"{name}: goes on after its end")
            seen.outputs[choice] += (token,)
            valid = oracle.is_valid(seen.request, choice, seen.outputs[choice], self._salts)
            require(valid, f"{name}: {token} does not follow from the journal")
        end = oracle.end_of(seen.request, seen.outputs[choice])
        if item.finish is None or end is not None:
            require(item.finish == end, f"{name}: finish {item.finish} where {end} is right")
        elif item.finish == "abort":
            require(seen.aborted, f"{name}: aborted though nobody asked")
        else:
            require(item.finish == "error", f"{name}: finish {item.finish} before any end")
        seen.finishes[choice] = item.finish
