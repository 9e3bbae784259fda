"""Pictures of what `make bench` measured: throughput where requests are kept in flight, latency where they arrive."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.peers.points import Point, medians

# point's name -> server's name -> its rounds
Results = Mapping[str, Mapping[str, Sequence[dict[str, float]]]]
LATENCIES = {"norm_p50": "median", "norm_p99": "P99"}


def draw(points: Sequence[Point], results: Results, path: Path) -> None:
    """An SVG with a panel of bars, and one per latency if there were rates."""
    from matplotlib.figure import Figure

    closed = [point for point in points if point.in_flight]
    opened = [point for point in points if not point.in_flight]
    panels = (1 if closed else 0) + (len(LATENCIES) if opened else 0)
    figure = Figure(figsize=(6 * panels, 4.5), layout="constrained")
    axes: list[Any] = list(figure.subplots(1, panels, squeeze=False)[0])
    if closed:
        _bars(axes.pop(0), closed, results)
    for key, label in LATENCIES.items() if opened else ():
        _curves(axes.pop(0), opened, results, key, label)
    figure.savefig(path)


def _bars(axis: Any, points: Sequence[Point], results: Results) -> None:
    servers = list(results[points[0].name])
    width = 0.8 / len(servers)
    for index, server in enumerate(servers):
        heights = [medians(results[point.name][server])["tok_s"] for point in points]
        axis.bar([place + index * width for place in range(len(points))], heights, width, label=server)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(points))], [p.name for p in points], fontsize=8)
    axis.set_ylabel("output tokens per second")
    axis.legend(fontsize=8)


def _curves(axis: Any, points: Sequence[Point], results: Results, key: str, label: str) -> None:
    for server in results[points[0].name]:
        values = [medians(results[point.name][server])[key] for point in points]
        axis.plot([point.rate for point in points], values, marker="o", label=server)
    axis.set_yscale("log")
    axis.set_xlabel("requests per second")
    axis.set_ylabel(f"{label} latency, ms per output token")
    axis.legend(fontsize=8)
