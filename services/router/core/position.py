"""Where a stream stands: the ids of its events, and what a client says with `Last-Event-ID`."""

import re
from dataclasses import dataclass
from functools import lru_cache

from services.common.errors import InvalidRequest

# entry:request, or entry.event:request when more events of that entry follow. The request may be left out where it is
# known.
EVENT_ID = re.compile(r"([0-9]{1,20}-[0-9]{1,20})(?:\.([0-9]{1,6}))?(?::([A-Za-z0-9]{1,64}))?")


@lru_cache(maxsize=4096)  # the same few are compared again and again
def order_of(entry_id: str) -> tuple[int, int]:
    """Journal entry ids in the order in which Redis made them."""
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)


@dataclass(frozen=True, slots=True)
class Position:
    """The client has everything up to a journal entry: of that entry itself `events` events, or all if that is None."""

    entry_id: str = "0-0"
    events: int | None = None

    def is_past(self, entry_id: str) -> bool:
        """The client has all of this entry."""
        return self.events is None and order_of(self.entry_id) >= order_of(entry_id)

    def skip(self, entry_id: str, num_events: int) -> int:
        """How many of an entry's events the client has already."""
        if order_of(entry_id) != order_of(self.entry_id):
            return num_events if order_of(entry_id) < order_of(self.entry_id) else 0
        return num_events if self.events is None else min(self.events, num_events)


START = Position()


def event_id(request_id: str, entry_id: str, event: int, last: int) -> str:
    """The id of an entry's event number `event`, counted from 0; `last` is the number of its last one."""
    return f"{entry_id}:{request_id}" if event == last else f"{entry_id}.{event}:{request_id}"


def parse_event_id(text: str) -> tuple[str | None, Position]:
    """The request, where it is named, and the position. Raises InvalidRequest."""
    match = EVENT_ID.fullmatch(text)
    if match is None:
        raise InvalidRequest("Last-Event-ID is not an id of one of our events", "Last-Event-ID")
    entry_id, event, request_id = match.groups()
    return request_id, Position(entry_id, None if event is None else int(event) + 1)
