"""Questions that take several runs: the highest rate within a target, the fewest workers, a curve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.common.errors import ConfigurationError
from services.simulator.engine import Cluster, Outcome, Simulation
from services.simulator.metrics import Measures, measures
from services.simulator.trace import Arrival

# A search ends when the answer is known to this share of itself.
PRECISION = 0.02
MAX_WORKERS = 4096
MIN_RATE, MAX_RATE = 1e-4, 1e6

# (rate, seed) -> arrivals; the same requests at every rate
Load = Callable[[float, int], Sequence[Arrival]]
# True if a run's measures are within the target
Within = Callable[[Measures], bool]


@dataclass(frozen=True, slots=True)
class Study:
    """One cluster under one kind of load. Of the runs with several seeds, the one with the median latency stands.
    on_run: told before every run, of what it is (for a progress bar)."""

    cluster: Cluster
    load: Load
    seeds: Sequence[int] = (0,)
    short_tokens: int = 0
    on_run: Callable[[str, int], Callable[[int], None]] = lambda what, total: lambda done: None

    def run(
        self, rate: float, workers: int | None = None, gantt: int = 0, explain: bool = False
    ) -> tuple[Outcome, Measures]:
        """What happens at a rate."""
        cluster = replace(self.cluster, workers=workers or self.cluster.workers)
        runs = []
        for seed in self.seeds:
            arrivals = self.load(rate, seed)
            progress = self.on_run(f"{cluster.policy}/{cluster.order} at {rate:.4g} req/s", len(arrivals))
            outcome = Simulation(cluster, arrivals, gantt, explain, progress).run()
            runs.append((outcome, measures(outcome, cluster.slo, self.short_tokens)))
        runs.sort(key=lambda run: float(run[1]["normalised_latency_s"]["p50"]))
        return runs[len(runs) // 2]

    def highest_rate(self, within: Within, start: float) -> tuple[float, Measures]:
        """The highest rate whose run is within the target, by doubling from `start` and bisection. Raises
        ConfigurationError if not even an idle system is."""
        low, best = 0.0, None
        high = start
        while high < MAX_RATE:
            _, found = self.run(high)
            if not within(found):
                break
            low, best, high = high, found, high * 2
        while best is None or high - low > PRECISION * high:
            if high < MIN_RATE:
                raise ConfigurationError("the target is missed at any rate: an idle system does not hold it")
            middle = (low + high) / 2
            _, found = self.run(middle)
            if within(found):
                low, best = middle, found
            else:
                high = middle
        return low, best

    def fewest_workers(self, within: Within, rate: float) -> tuple[int, Measures]:
        """The fewest workers with which a rate is served within the target. Raises ConfigurationError if no number is
        enough."""
        low, high = 0, self.cluster.workers
        while True:
            _, found = self.run(rate, high)
            if within(found):
                break
            if high >= MAX_WORKERS:
                raise ConfigurationError(f"{MAX_WORKERS} workers do not hold the target at {rate:g} req/s")
            low, high = high, min(MAX_WORKERS, high * 2)
        while high - low > 1:
            middle = (low + high) // 2
            _, measured = self.run(rate, middle)
            if within(measured):
                high, found = middle, measured
            else:
                low = middle
        return high, found

    def peak(self) -> float:
        """Requests per second served when all come at once: what the system can do when latency does not matter."""
        _, found = replace(self, seeds=self.seeds[:1]).run(MAX_RATE)
        return float(found["req_s"])
