"""What came of the runs, as one object and as a table for people. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.chaos.checker import KINDS

MAX_DETAILS = 12


@dataclass(slots=True)
class FaultReport:
    """at_s: from the run's start; None if it was missed. recovery_s: the longest gap in any stream around it."""

    kind: str
    target: str
    where: str
    process: str = ""
    at_s: float | None = None
    recovery_s: float = 0.0


@dataclass(slots=True)
class RunReport:
    """One run. verdicts: streams per kind of failure. violations: what must never be; none means that it passed."""

    seed: int
    streams: int
    scenario: str = "faults"
    faults: list[FaultReport] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    reconnects: int = 0
    refused: int = 0
    took_s: float = 0.0
    settle_s: float = 0.0
    violations: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The run in one line."""
        faults = ", ".join(
            f"{f.kind} {f.target} at {f.where}{'' if f.at_s is not None else ' (missed)'}" for f in self.faults
        )
        verdict = "ok" if not self.violations else "; ".join(self.violations[:3])
        return (
            f"seed {self.seed}: {self.took_s:.1f} s, {self.reconnects} reconnects [{faults or self.scenario}] {verdict}"
        )


@dataclass(slots=True)
class Report:
    """All runs. violations: what no single run has done."""

    runs: list[RunReport] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations and not any(run.violations for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        faults = [fault for run in self.runs for fault in run.faults]
        hit = [fault for fault in faults if fault.at_s is not None]
        verdicts: Counter[str] = sum((run.verdicts for run in self.runs), Counter())
        recovery: dict[str, float] = {}
        for fault in hit:
            key = f"{fault.kind} {fault.target}"
            recovery[key] = round(max(recovery.get(key, 0.0), fault.recovery_s), 2)
        return {
            "passed": self.passed,
            "runs": len(self.runs),
            "streams": sum(run.streams for run in self.runs),
            "faults": len(hit),
            "missed": dict(Counter(f"{f.kind} {f.target} at {f.where}" for f in faults if f.at_s is None)),
            "faults_by_kind": dict(Counter(f"{fault.kind} {fault.target}" for fault in hit)),
            "failpoint_hits": dict(Counter(fault.where for fault in hit if fault.where != "mid")),
            "reconnects": sum(run.reconnects for run in self.runs),
            "refused": sum(run.refused for run in self.runs),
            **{kind: verdicts[kind] for kind in KINDS},
            "recovery_s": recovery,
            "longest_settle_s": round(max((run.settle_s for run in self.runs), default=0.0), 2),
            "general": self.violations,
            "violations": [
                {"seed": run.seed, "scenario": run.scenario, "violations": run.violations}
                for run in self.runs
                if run.violations
            ],
        }

    def table(self) -> str:
        total = self.to_json()
        lines = [
            f"{total['runs']} runs, {total['streams']} streams, {total['faults']} faults, "
            f"{sum(total['missed'].values())} missed, {total['reconnects']} reconnects, {total['refused']} refusals",
            "  ".join(f"{kind} {total[kind]}" for kind in KINDS),
            "",
            f"{'fault':<20}{'times':>7}{'longest gap':>14}",
        ]
        for name, count in sorted(total["faults_by_kind"].items()):
            lines.append(f"{name:<20}{count:>7}{total['recovery_s'][name]:>12.2f} s")
        lines += _counts("failpoint", "hits", total["failpoint_hits"]) + _counts("missed", "times", total["missed"])
        for entry in total["violations"]:
            lines += ["", f"seed {entry['seed']} ({entry['scenario']}):"]
            lines += [f"  {violation}" for violation in entry["violations"]]
        lines += ["", *self.violations] if self.violations else []
        return "\n".join([*lines, "", "passed" if total["passed"] else "FAILED"])


def _counts(name: str, what: str, counts: Mapping[str, int]) -> list[str]:
    if not counts:
        return []
    width = max(20, *(len(key) + 2 for key in counts))
    return ["", f"{name:<{width}}{what:>7}", *(f"{key:<{width}}{counts[key]:>7}" for key in sorted(counts))]
