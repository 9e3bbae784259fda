"""From what happened to the figures that people compare."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.scheduler.core.request import Slo
from services.simulator.engine import Outcome, Served

Measures = dict[str, Any]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between ranks; 0 of nothing. values: sorted."""
    if not values:
        return 0.0
    position = share * (len(values) - 1)
    index = int(position)
    rest = position - index
    return values[index] + (values[min(index + 1, len(values) - 1)] - values[index]) * rest


@dataclass(frozen=True, slots=True)
class Latency:
    """One request's latencies in seconds. tpot_s: per token after the first; normalised_s: end to end / tokens."""

    ttft_s: float
    tpot_s: float
    normalised_s: float
    total_s: float

    @classmethod
    def of(cls, served: Served) -> "Latency":
        start, tokens = served.arrival.arrival_s, served.arrival.output_tokens
        total = served.finished_s - start
        after = (served.last_token_s - served.first_token_s) / (tokens - 1) if tokens > 1 else 0.0
        return cls(served.first_token_s - start, after, total / tokens, total)

    def holds(self, slo: Slo) -> bool:
        return (not slo.ttft_s or self.ttft_s <= slo.ttft_s) and (not slo.tpot_s or self.tpot_s <= slo.tpot_s)


def _spread(latencies: Iterable[Latency], value: Callable[[Latency], float]) -> dict[str, float]:
    values = sorted(value(latency) for latency in latencies)
    mean = sum(values) / len(values) if values else 0.0
    named = {name: percentile(values, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {"mean": mean, **named}


def spreads(served: Sequence[Served], slo: Slo, duration_s: float) -> Measures:
    """Latencies of some requests, and how many of them were served within the SLO."""
    latencies = [Latency.of(one) for one in served if one.finished_s >= 0]
    good = sum(latency.holds(slo) for latency in latencies)
    return {
        "requests": len(latencies),
        "ttft_s": _spread(latencies, lambda latency: latency.ttft_s),
        "tpot_s": _spread((x for x in latencies if x.tpot_s > 0), lambda latency: latency.tpot_s),
        "normalised_latency_s": _spread(latencies, lambda latency: latency.normalised_s),
        "slo_attainment": good / len(latencies) if latencies else 0.0,
        "goodput_req_s": good / duration_s if duration_s > 0 else 0.0,
    }


def measures(outcome: Outcome, slo: Slo, short_tokens: int = 0) -> Measures:
    """All of a run. short_tokens: requests that generate at most so many are told apart; users feel their tail."""
    done = [one for one in outcome.served if one.finished_s >= 0]
    first = min((one.arrival.arrival_s for one in done), default=0.0)
    duration = max((one.finished_s for one in done), default=0.0) - first
    tokens = sum(one.arrival.output_tokens for one in done)
    steps = max(1, outcome.iterations)
    result = spreads(done, slo, duration)
    result |= {
        "refused": outcome.refused,
        "duration_s": duration,
        "req_s": len(done) / duration if duration > 0 else 0.0,
        "output_tok_s": tokens / duration if duration > 0 else 0.0,
        "iterations": outcome.iterations,
        "mean_running": outcome.running_sum / steps,
        "mean_batch": outcome.scheduled_sum / steps,
        "kv_used": outcome.used_share_sum / steps,
        "kv_filled": outcome.filled_share_sum / steps,
        "preemptions": outcome.preemptions,
        "swaps": outcome.swaps,
        "moves": outcome.moves,
        "prefix_hit_tokens": outcome.hit_tokens,
    }
    tenants = sorted({one.arrival.tenant for one in done})
    if len(tenants) > 1:
        result["tenants"] = {
            tenant: spreads([one for one in done if one.arrival.tenant == tenant], slo, duration) for tenant in tenants
        }
    if outcome.fairness:
        result["fairness"] = {"widest": outcome.fairness.widest, "bound": outcome.fairness.bound}
    if short_tokens:
        short = [one for one in done if one.arrival.output_tokens <= short_tokens]
        result["short"] = spreads(short, slo, duration)
    return result
