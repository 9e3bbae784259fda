"""What both benchmarks report of their steps. No imports of ours: vLLM's virtual environment runs it too."""

import statistics


def summary(times: list[tuple[float, float]], sequences: int) -> dict[str, float]:
    """times: seconds of (schedule, apply) of each step, all with so many sequences. Milliseconds, and microseconds per
    sequence-step."""
    total = sorted(a + b for a, b in times)
    return {
        "schedule_ms": statistics.median(a for a, _ in times) * 1e3,
        "apply_ms": statistics.median(b for _, b in times) * 1e3,
        "sum_ms": statistics.median(total) * 1e3,
        "mean_ms": statistics.fmean(total) * 1e3,
        "p99_ms": total[int(len(total) * 0.99)] * 1e3,
        "us_per_sequence_step": statistics.median(total) * 1e6 / sequences,
    }
