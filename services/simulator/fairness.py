"""Measures what VTC promises: how far apart the service of two tenants gets while both have work waiting."""

from collections.abc import Iterable, Mapping
from itertools import combinations

from services.scheduler.core.order import INPUT_WEIGHT, OUTPUT_WEIGHT


class FairnessMeter:
    """widest: the most that one tenant was served more than another, over any interval in which both were backlogged.

    bound: theorem 4.4 of VTC (OSDI'24), 2 max(w_in L, w_out M): L the longest input, M the tokens that fit into memory.
    """

    def __init__(self, longest_input: int, memory_tokens: int) -> None:
        self.bound = 2 * max(INPUT_WEIGHT * longest_input, OUTPUT_WEIGHT * memory_tokens)
        self.widest = 0.0
        self._spans: dict[tuple[str, str], tuple[float, float]] = {}

    def observe(self, backlogged: Iterable[str], counters: Mapping[str, float]) -> None:
        """Who has work waiting now, and what each has been served so far."""
        spans = {}
        for pair in combinations(sorted(backlogged), 2):
            difference = counters[pair[0]] - counters[pair[1]]
            low, high = self._spans.get(pair, (difference, difference))
            spans[pair] = (min(low, difference), max(high, difference))
            self.widest = max(self.widest, spans[pair][1] - spans[pair][0])
        self._spans = spans
