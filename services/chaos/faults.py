"""Which faults a run has: a function of its seed. Pure."""

import random
from dataclasses import dataclass

MID = "mid"
KILL, STOP, RESTART = "kill", "stop", "restart"
TARGETS = ("router", "leader", "worker", "redis")
# Places in the shipped code where a process can be told to kill or stop itself, with the most that is let pass before.
POINTS: dict[str, dict[str, int]] = {
    "router": {"enqueue.before": 15, "enqueue.after": 15, "stream.event": 400},
    "leader": {
        "lead.taken": 0,
        "accept.fenced": 30,
        "recover.fenced": 5,
        "plan.sent": 60,
        "finish.before": 1,
        "finish.after": 1,
    },
    "worker": {"step.before": 60, "step.after": 60, "publish.before": 60, "publish.after": 60},
    "redis": {},
}
PROCESSES = {"router": "router", "leader": "scheduler", "worker": "worker", "redis": "valkey"}
# Points that are only passed after something else has happened.
COMPANIONS = {"lead.taken": "leader", "recover.fenced": "worker"}
MAX_FAULTS = 5
MAX_DELAY_S = 1.0
STOPPED_S = (0.5, 5.0)
REDIS_STOPPED_S = (1.0, 4.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """kind: kill, stop or restart (SIGTERM). where: a failpoint, or `mid`: while many streams are under way.

    skip: how often the failpoint is passed before. delay_s: after `mid`, or after the fault before. stopped_s: after
    so long a stopped process continues.
    """

    kind: str
    target: str
    where: str
    skip: int = 0
    delay_s: float = 0.0
    stopped_s: float = 0.0

    @property
    def process(self) -> str:
        """The start of the name of the processes that it can hit."""
        return PROCESSES[self.target]

    @property
    def label(self) -> str:
        return f"{self.kind} {self.target} at {self.where}"


def catalogue(only: str = "", failpoints: bool = True) -> list[tuple[str, str, str]]:
    """Every kind x target x place that there is."""
    out = []
    for target in TARGETS:
        if only and target != only:
            continue
        kinds = (KILL, STOP) if target == "redis" else (KILL, STOP, RESTART)
        out += [(kind, target, MID) for kind in kinds]
        if failpoints:
            out += [(kind, target, point) for point in POINTS[target] for kind in (KILL, STOP)]
    return out


def schedule(seed: int, only: str = "", failpoints: bool = True) -> list[Fault]:
    """1 to 5 faults. Any len(catalogue()) seeds in a row have each entry of the catalogue first once."""
    entries = catalogue(only, failpoints)
    order = random.Random("catalogue").sample(range(len(entries)), len(entries))
    rng = random.Random(f"faults {seed}")
    chosen = [entries[order[seed % len(entries)]]]
    chosen += rng.choices(entries, k=rng.choice((0, 0, 1, 1, 2, 3, 4)))
    faults: list[Fault] = []
    for kind, target, where in chosen:
        _add(faults, _draw(kind, target, where, rng))
        if where in COMPANIONS:  # also where --only names another: without it the point is never passed
            _add(faults, _draw(KILL, COMPANIONS[where], MID, rng))
    return faults[:MAX_FAULTS]


def _add(faults: list[Fault], fault: Fault) -> None:
    """A failpoint holds one fault, and Redis has one fault a run: each costs seconds in which nothing else happens."""
    taken = {other.where for other in faults if other.where != MID}
    has_redis = any(other.target == "redis" for other in faults)
    if fault.where in taken or (fault.target == "redis" and has_redis):
        return
    faults.append(fault)


def _draw(kind: str, target: str, where: str, rng: random.Random) -> Fault:
    low, high = REDIS_STOPPED_S if target == "redis" else STOPPED_S
    return Fault(
        kind,
        target,
        where,
        skip=rng.randint(0, POINTS[target][where]) if where != MID else 0,
        delay_s=round(rng.uniform(0, MAX_DELAY_S), 2),
        stopped_s=round(rng.uniform(low, high), 2) if kind == STOP else 0.0,
    )
