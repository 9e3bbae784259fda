"""The report as one HTML file: tables and plots, nothing fetched from anywhere."""

import html
import io
from collections.abc import Sequence
from typing import Any

from services.common.errors import ConfigurationError
from services.simulator.engine import Iteration

Curve = tuple[str, Sequence[float], Sequence[float]]  # label, requests per second, milliseconds per token

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .3rem .7rem; text-align: right;
border-bottom: 1px solid #d8dee6 } th:first-child, td:first-child { text-align: left }
svg { max-width: 100%; height: auto }
pre { background: #f4f6f8; padding: .7rem; overflow-x: auto }
"""
MAX_GANTT_ROWS = 40


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError("--html needs the 'simulator' extra (matplotlib)") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def latency_plot(curves: Sequence[Curve], target_ms: float) -> str:
    """Latency against rate, one line per variant, as in Orca's figure 10."""
    figure, axes = _figure(8, 4.5)
    for label, rates, latencies in curves:
        axes.plot(rates, latencies, marker="o", markersize=4, label=label)
    if target_ms:
        axes.axhline(target_ms, linestyle="--", linewidth=1, color="#777", label=f"target {target_ms:g} ms")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
        axis.set_tick_params(which="both", labelsize=7)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("median normalised latency, ms per token")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    return _svg(figure)


def gantt_plot(iterations: Sequence[Iteration], title: str) -> str:
    """Who ran in which iteration: dark where a prompt was computed, light where a token was."""
    figure, axes = _figure(9, 4.5)
    rows: dict[str, int] = {}
    for iteration in iterations:
        for request, tokens, decodes in iteration.rows:
            row = rows.setdefault(request, len(rows))
            if row >= MAX_GANTT_ROWS:
                continue
            width = iteration.end_s - iteration.start_s
            axes.barh(
                row,
                width,
                left=iteration.start_s,
                height=0.8,
                color="#9ec5e8" if decodes else "#1f4e79",
                edgecolor="white",
                linewidth=0.3,
            )
            if not decodes and tokens > 1:
                axes.text(
                    iteration.start_s + width / 2, row, str(tokens), color="white", fontsize=6, ha="center", va="center"
                )
    axes.set_yticks(range(min(len(rows), MAX_GANTT_ROWS)))
    axes.set_yticklabels([f"request {name}" for name in list(rows)[:MAX_GANTT_ROWS]], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    return _svg(figure)


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def page(title: str, parts: Sequence[tuple[str, str]]) -> str:
    """The whole file. parts: (heading, HTML)."""
    body = "".join(f"<h2>{html.escape(heading)}</h2>{content}" for heading, content in parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>"
    )
