"""Whether what a client measured and what the server counted are the same: quantile by quantile, within a bucket."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Histogram:
    """bounds: upper ones in seconds, the last infinite. counts: of each bucket by itself."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    def since(self, before: "Histogram") -> "Histogram":
        """What was added after `before`."""
        return Histogram(self.bounds, tuple(a - b for a, b in zip(self.counts, before.counts, strict=True)))

    def bucket(self, q: float) -> int:
        """Index of the bucket that the quantile is in."""
        wanted, seen = q * sum(self.counts), 0.0
        for index, count in enumerate(self.counts):
            seen += count
            if seen >= wanted and count:
                return index
        return len(self.counts) - 1

    def edges(self, index: int) -> tuple[float, float]:
        return (self.bounds[index - 1] if index else 0.0), self.bounds[index]


def histograms(text: str) -> dict[str, Histogram]:
    """Those in a /metrics page that have no labels."""
    out = {}
    for family in text_string_to_metric_families(text):
        samples = [s for s in family.samples if s.name.endswith("_bucket") and set(s.labels) == {"le"}]
        if family.type == "histogram" and samples:
            up_to = sorted((float(s.labels["le"]), s.value) for s in samples)
            counts = [value - before for (_, value), (_, before) in zip(up_to, [(0.0, 0.0), *up_to], strict=False)]
            out[family.name] = Histogram(tuple(bound for bound, _ in up_to), tuple(counts))
    return out


@dataclass(frozen=True, slots=True)
class Line:
    """One quantile as both saw it, in seconds. apart: buckets between them; 0 is the same one."""

    name: str
    quantile: float
    client_s: float
    low_s: float
    high_s: float
    apart: int

    def __str__(self) -> str:
        server = f"{1e3 * self.low_s:.0f} to {1e3 * self.high_s:.0f} ms" if math.isfinite(self.high_s) else "more"
        verdict = "same bucket" if not self.apart else f"{self.apart} bucket(s) apart"
        client = f"{self.name:5} p{100 * self.quantile:<4g} client {1e3 * self.client_s:8.1f} ms"
        return f"{client}   server {server:18} {verdict}"


def compare(name: str, client_s: Callable[[float], float], server: Histogram) -> Sequence[Line]:
    """client_s: the client's own quantiles, in seconds."""
    lines = []
    for q in QUANTILES:
        index, seen = server.bucket(q), client_s(q)
        low, high = server.edges(index)
        lines.append(Line(name, q, seen, low, high, abs(bisect_left(server.bounds, seen) - index)))
    return lines
