"""`orca simulate`: the production scheduler on a virtual clock."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.common.errors import ConfigurationError
from services.common.settings import parse
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES
from services.scheduler.core.request import Slo
from services.scheduler.core.step import WorkerLimits
from services.simulator import costs, plots, trace
from services.simulator.engine import Cluster
from services.simulator.metrics import Measures
from services.simulator.presets import PRESETS, Preset
from services.simulator.settings import SimulateSettings
from services.simulator.study import Load, Study, Within
from services.simulator.trace import Arrival

DEFAULT_PRESET = Preset("", "llama3-8b", "h100", policies=("chunked",), trace="chat")
DEFAULT_BATCH = 256
MIN_REQUESTS = 20
GANTT_ITERATIONS = 60
SWEEP = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of the comparison. Variants of one group differ in max_num_seqs alone, and the best counts."""

    group: str
    study: Study
    trace: str
    rate: float

    @property
    def label(self) -> str:
        return f"{self.group} (max_bs {self.study.cluster.limits.max_num_seqs})"


class Plan:
    """What the flags and the preset ask for. Raises ConfigurationError on what cannot be."""

    def __init__(self, settings: SimulateSettings, on_run: Callable[[str, int], Callable[[int], None]]) -> None:
        self.settings = settings
        if settings.preset and settings.preset not in PRESETS:
            raise ConfigurationError(f"--preset: there is no {settings.preset!r}; there are {', '.join(PRESETS)}")
        self.preset = PRESETS.get(settings.preset, DEFAULT_PRESET)
        self.target_ms = settings.target_ms or self.preset.target_ms
        self.slo = Slo(settings.ttft_slo_ms / 1000, settings.tpot_slo_ms / 1000)
        self._on_run = on_run
        self._cost = self._cost_model()
        if (settings.find_rate or settings.find_workers) and not (self.target_ms or self.slo != Slo()):
            raise ConfigurationError("a search needs --target-ms, --ttft-slo-ms or --tpot-slo-ms")
        if settings.find_workers and not settings.rate:
            raise ConfigurationError("--find-workers needs --rate")

    def _cost_model(self) -> costs.CostModel:
        settings, preset = self.settings, self.preset
        if settings.cost == "measured":
            if not settings.steps:
                raise ConfigurationError("--cost measured needs --steps")
            return costs.fit(costs.read_steps(Path(settings.steps)))
        return costs.Roofline(
            costs.model_of(settings.model or preset.model),
            costs.device_of(settings.device or preset.device),
            settings.shards or preset.shards,
            settings.stages or preset.stages,
        )

    def _limits(self, max_num_seqs: int) -> WorkerLimits:
        settings, cost = self.settings, self._cost
        blocks = settings.kv_blocks or self.preset.kv_blocks
        length = 1 << 20
        if isinstance(cost, costs.Roofline):
            blocks = blocks or cost.num_blocks(settings.block_size, settings.memory_share)
            length = cost.model.max_model_len
        elif not blocks:
            raise ConfigurationError("--cost measured needs --kv-blocks")
        return WorkerLimits(
            num_blocks=blocks,
            block_size=settings.block_size,
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            token_budget=settings.token_budget,
            max_in_flight=2,
            stages=cost.stages,
            num_host_blocks=settings.host_blocks,
            swap_s=cost.swap_s(settings.block_size),
        )

    def _batch_sizes(self, policy: str) -> list[int]:
        if not self.settings.max_num_seqs:
            return list(self.preset.batch_sizes.get(policy, (DEFAULT_BATCH,)))
        try:
            sizes = [int(part) for part in self.settings.max_num_seqs.split(",")]
        except ValueError:
            sizes = [0]
        if min(sizes) < 1:
            raise ConfigurationError("--max-num-seqs: whole numbers of at least 1, with commas")
        return sizes

    def _workloads(self) -> list[tuple[str, float]]:
        settings, preset = self.settings, self.preset
        if preset.workloads and not settings.trace:
            return [(name, settings.rate or rate) for name, rate in preset.workloads]
        return [(settings.trace or preset.trace, settings.rate)]

    def load(self, name: str) -> tuple[Load, float]:
        """Arrivals at a rate, and the rate to run at where none is given."""
        settings = self.settings
        if Path(name).is_file():
            recorded = trace.read_jsonl(Path(name))
            own = trace.rate_of(recorded)
            return lambda rate, seed: trace.scaled(recorded, rate) if rate != own else recorded, own
        trace.lengths_of(name)
        tenants = trace.tenants_of(settings.tenants)

        def arrivals(rate: float, seed: int) -> Sequence[Arrival]:
            count = settings.requests or self.preset.requests
            if self.preset.duration_s and not settings.requests:
                count = min(count, max(MIN_REQUESTS, round(rate * self.preset.duration_s)))
            return trace.synthetic(name, rate, count, settings.seed + seed, settings.burstiness, tenants)

        return arrivals, 1.0

    def variants(self) -> list[Variant]:
        """Every combination that is asked for."""
        settings, preset, out = self.settings, self.preset, []
        policies = _names("--policy", settings.policy, BATCHING_POLICIES) or list(preset.policies)
        orders = _names("--order", settings.order, ORDER_POLICIES)
        workloads = self._workloads()
        for name, given in workloads:
            load, usual = self.load(name)
            for policy in policies:
                for order in orders:
                    group = policy if len(orders) == 1 else f"{policy}/{order}"
                    group = group if len(workloads) == 1 else f"{group}/{name}"
                    for size in self._batch_sizes(policy):
                        cluster = self._cluster(policy, order, size)
                        seeds = range(1 if Path(name).is_file() else preset.seeds)
                        study = Study(cluster, load, seeds, settings.short_tokens, self._on_run)
                        out.append(Variant(group, study, name, given or usual))
        return out

    def _cluster(self, policy: str, order: str, max_num_seqs: int) -> Cluster:
        cache = self.preset.prefix_cache if self.settings.prefix_cache is None else self.settings.prefix_cache
        return Cluster(
            cost=self._cost,
            limits=self._limits(max_num_seqs),
            workers=self.settings.workers,
            policy=policy,
            order=order,
            config=SchedulerConfig(prefix_cache=cache),
            slo=self.slo,
            control_s=self.settings.control_ms / 1000,
        )

    def within(self) -> Within:
        """The target of a search."""
        target, attainment = self.target_ms / 1000, self.settings.attainment
        if target:
            return lambda found: bool(found["normalised_latency_s"]["p50"] <= target and found["requests"])
        return lambda found: bool(found["slo_attainment"] >= attainment)

    @property
    def searches_rate(self) -> bool:
        """A latency target asks for the rate at which it is met, unless a rate is given."""
        return self.settings.find_rate or bool(self.target_ms and not self.settings.rate)


def _names(flag: str, text: str, known: dict[str, Any]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"{flag}: there is no {name!r}; there are {', '.join(known)}")
    return names


def answer(plan: Plan, variant: Variant) -> Measures:
    """One variant's results."""
    settings, study = plan.settings, variant.study
    base = {"max_num_seqs": study.cluster.limits.max_num_seqs, "kv_blocks": study.cluster.limits.num_blocks}
    if settings.find_workers:
        workers, found = study.fewest_workers(plan.within(), variant.rate)
        return base | {"workers": workers, "rate": variant.rate} | found
    base |= {"workers": study.cluster.workers}
    if plan.searches_rate:
        peak = study.peak()
        rate, found = study.highest_rate(plan.within(), start=peak)
        return base | {"rate": rate, "req_s_at_target": rate, "peak_req_s": peak} | found
    _, found = study.run(variant.rate)
    return base | {"rate": variant.rate} | found


def best_of(group: list[Measures]) -> Measures:
    """The batch size that does best counts, as in the papers; the others are told beside it."""
    best = max(group, key=lambda found: float(found["req_s_at_target" if "req_s_at_target" in found else "req_s"]))
    if len(group) == 1:
        return best
    peak = {"peak_req_s": max(found["peak_req_s"] for found in group)} if "peak_req_s" in best else {}
    names = ("max_num_seqs", "req_s_at_target", "peak_req_s", "req_s", "normalised_latency_s")
    others = [{name: found[name] for name in names if name in found} for found in group]
    return best | peak | {"variants": others}


def run(plan: Plan) -> dict[str, Any]:
    """All variants, grouped."""
    groups: dict[str, list[Measures]] = {}
    for variant in plan.variants():
        groups.setdefault(variant.group, []).append(answer(plan, variant))
    result: dict[str, Any] = {"results": {name: best_of(group) for name, group in groups.items()}}
    result["preset"] = plan.settings.preset or None
    result["target_ms"] = plan.target_ms or None
    return result


def sweep(plan: Plan, results: dict[str, Any]) -> list[plots.Curve]:
    """Latency against rate of every variant."""
    curves: list[plots.Curve] = []
    for variant in plan.variants():
        around = results[variant.group]["rate"]
        policy = variant.study.cluster.policy
        rates = plan.preset.rates.get(policy) or [around * factor for factor in SWEEP]
        found = [variant.study.run(rate)[1] for rate in rates]
        curves.append((variant.label, rates, [1000 * one["normalised_latency_s"]["p50"] for one in found]))
    return curves


COLUMNS: tuple[tuple[str, Callable[[Measures], str]], ...] = (
    ("max_bs", lambda m: str(m["max_num_seqs"])),
    ("workers", lambda m: str(m["workers"])),
    ("rate", lambda m: f"{m['rate']:.4g}"),
    ("req/s", lambda m: f"{m['req_s']:.4g}"),
    ("tok/s", lambda m: f"{m['output_tok_s']:.0f}"),
    ("TTFT p50/p90/p99 s", lambda m: _spread(m["ttft_s"], 1)),
    ("TPOT p50/p90/p99 ms", lambda m: _spread(m["tpot_s"], 1000)),
    ("norm. p50/p90/p99 ms", lambda m: _spread(m["normalised_latency_s"], 1000)),
    ("in SLO", lambda m: f"{m['slo_attainment']:.1%}"),
    ("running", lambda m: f"{m['mean_running']:.2f}"),
    ("batch", lambda m: f"{m['mean_batch']:.2f}"),
    ("KV used", lambda m: f"{m['kv_used']:.0%}"),
    ("preempted", lambda m: str(m["preemptions"])),
)


def _spread(found: dict[str, float], unit: float) -> str:
    return "/".join(f"{found[name] * unit:.3g}" for name in ("p50", "p90", "p99"))


def rows(results: dict[str, Measures]) -> Iterator[list[str]]:
    for name, found in results.items():
        yield [name, *(show(found) for _, show in COLUMNS)]
        for part in ("short", *found.get("tenants", {})):
            inner = found.get("tenants", {}).get(part) or found.get("short")
            if inner and (part != "short" or "short" in found):
                merged = dict.fromkeys(("max_num_seqs", "workers", "preemptions"), "") | found | inner
                yield [f"  {part}", *(show(merged) if title in PER_PART else "" for title, show in COLUMNS)]


PER_PART = {"TTFT p50/p90/p99 s", "TPOT p50/p90/p99 ms", "norm. p50/p90/p99 ms", "in SLO"}


def print_tables(console: Console, result: dict[str, Any]) -> None:
    table = Table("policy", *(title for title, _ in COLUMNS), box=None, header_style="bold")
    for row in rows(result["results"]):
        table.add_row(*row)
    console.print(table)
    for name, found in result["results"].items():
        if "fairness" in found:
            widest, bound = found["fairness"]["widest"], found["fairness"]["bound"]
            console.print(
                f"{name}: service of two backlogged tenants differed by {widest:.0f} at most (bound {bound:.0f})"
            )
    if result["target_ms"]:
        for name, found in result["results"].items():
            if "req_s_at_target" in found:
                console.print(
                    f"{name}: {found['req_s_at_target']:.4g} req/s at {result['target_ms']:g} ms/token (median), "
                    f"peak {found['peak_req_s']:.4g} req/s"
                )


def report(plan: Plan, result: dict[str, Any]) -> str:
    """The HTML file."""
    results = result["results"]
    parts = [("Results", plots.table_html(["policy", *(title for title, _ in COLUMNS)], list(rows(results))))]
    if plan.settings.sweep or plan.preset.rates:
        parts.append(("Latency against rate", plots.latency_plot(sweep(plan, results), plan.target_ms)))
    seen: set[str] = set()
    for variant in plan.variants():
        if variant.group not in seen:
            seen.add(variant.group)
            outcome, _ = variant.study.run(results[variant.group]["rate"], gantt=GANTT_ITERATIONS)
            title = f"{variant.label}: the first {len(outcome.gantt)} iterations"
            parts.append((f"Iterations: {variant.group}", plots.gantt_plot(outcome.gantt, title)))
    command = "orca simulate " + " ".join(f"--preset {plan.settings.preset}" if plan.settings.preset else "")
    title = plan.preset.text or "Simulation"
    return plots.page(title, [*parts, ("How", f"<pre>{command}</pre>")])


def explain(plan: Plan, console: Console) -> None:
    """One request's own account, under every variant."""
    for variant in plan.variants():
        outcome, _ = variant.study.run(variant.rate, explain=True)
        assert outcome.explain is not None
        decisions = outcome.explain.of(plan.settings.explain)
        if not decisions:
            raise ConfigurationError(
                f"--explain: nothing is kept about request {plan.settings.explain!r} "
                f"(of the last {outcome.explain.decisions.maxlen} decisions)"
            )
        console.print(f"[bold]{variant.label}, request {plan.settings.explain}[/bold]")
        for decision in decisions:
            console.print(f"  plan {decision.plan:>6} {decision.worker:<10} {decision.reason.value} {decision.detail}")


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """A bar per run, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=1)

        def on_run(what: str, total: int) -> Callable[[int], None]:
            progress.reset(task, description=what, total=total)
            return lambda done: progress.update(task, completed=done) if done % 16 == 0 else None

        yield on_run


def simulate(settings: SimulateSettings) -> None:
    """Do what the flags ask for. Raises ConfigurationError."""
    out = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    with progress_bar(Console(stderr=True)) as on_run:
        plan = Plan(settings, on_run)
        if settings.explain:
            explain(plan, out)
            return
        result = run(plan)
        page = report(plan, result) if settings.html else ""
    if settings.html:
        try:
            Path(settings.html).write_text(page, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--html {settings.html}: {error.strerror}") from None
    if settings.json_output:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        print_tables(out, result)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `orca simulate`."""
    try:
        simulate(parse(SimulateSettings, sys.argv[1:] if argv is None else argv, "orca simulate"))
    except ConfigurationError as error:
        sys.stderr.write(f"orca simulate: {error.message}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
