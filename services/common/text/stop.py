"""Stop strings. The worker asks whether text has one; the router also holds back what may still become one."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the earliest stop string in text that arrives in pieces.

    A pure fold: any cutting of the same text into pieces gives the same answers at the end.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is certain to be output. After a match, nothing more: see `matched`."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            # The match that is complete first counts, so that one token more or less in a piece changes nothing.
            index, self.matched = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            out, self._held = self._held[:index], ""
            return out
        keep = self._longest_prefix_at_end()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What was held back, once generation has ended without a match."""
        out, self._held = self._held, ""
        return out

    def _longest_prefix_at_end(self) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
