"""The loads that servers are compared at."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One load: so many in flight (closed loop), or so many requests a second (Poisson)."""

    trace: str
    count: int
    in_flight: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.trace}, {self.in_flight} in flight" if self.in_flight else f"{self.trace}, {self.rate:g} req/s"


POINTS = {
    "fixed": [Point("fixed", 8, 1), Point("fixed", 24, 8), Point("fixed", 64, 32)],
    "saturated": [Point("orca", 96, 32)],
    "rates": [Point("orca", round(30 * rate), rate=rate) for rate in (0.5, 1.0, 1.5, 2.0, 2.5)],
    "chat": [Point("chat", 64, 32)],
    "shared": [Point("shared", 24, 8), Point("shared", 64, 32)],
}


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
