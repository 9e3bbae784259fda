"""Our scheduler core alone: schedule + apply, without model, worker or network. Prints one JSON object.

python -m loadtest.scheduler.ours --case steady|mixed|waiting|fleet|grow
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

from loadtest.scheduler.summary import summary
from services.scheduler.core import invariants
from services.scheduler.core.order import Fcfs
from services.scheduler.core.policies.chunked import Chunked
from services.scheduler.core.request import FinishReason, Sequence
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepPlan, StepResult, WorkerLimits

PROMPT, SHARED, BLOCK_SIZE, MAX_TOKENS = 128, 64, 16, 4000


class Bench:
    """One scheduler and, off the clock, what workers would answer."""

    def __init__(self, workers: int, max_num_seqs: int, num_blocks: int) -> None:
        self.core = Scheduler(Chunked(), Fcfs())
        limits = WorkerLimits(num_blocks, BLOCK_SIZE, 8192, max_num_seqs, 8192, max_in_flight=1)
        self.names = [f"w{index}" for index in range(workers)]
        for name in self.names:
            self.core.add_worker(name, limits)
        self.arrivals = 0
        self.rng = random.Random(0)

    def request(self, head: tuple[int, ...] = (), max_tokens: int = MAX_TOKENS) -> Sequence:
        self.arrivals += 1
        prompt = (*head, *(self.rng.randrange(3, 32_000) for _ in range(PROMPT - len(head))))
        return Sequence(f"r{self.arrivals}", 0, prompt, max_tokens, self.arrivals)

    def step(self, name: str) -> tuple[float, float, StepPlan]:
        """Seconds of schedule and of apply."""
        started = time.perf_counter()
        plan = self.core.schedule(name)
        planned = time.perf_counter()
        assert plan is not None
        result = self._answer(plan)
        answered = time.perf_counter()
        ended = self.core.apply(name, result)
        applied = time.perf_counter()
        for sequence in ended:
            self.core.finish(sequence, FinishReason.LENGTH, tell_worker=False)
            self.core.forget(sequence.request_id)
        return planned - started, applied - answered, plan

    def _answer(self, plan: StepPlan) -> StepResult:
        tokens: dict[int, int | None] = {i: self.rng.randrange(3, 32_000) for i in plan.decodes.ids}
        finished = {}
        for item in plan.prefills:
            tokens[item.sequence_id] = 5 if item.samples else None
            if item.sequence.max_tokens == 1:
                finished[item.sequence_id] = FinishReason.LENGTH
        return StepResult(plan.number, tokens, finished, seconds=0.02)

    def fill(self, per_worker: int) -> None:
        """Requests that decode on, admitted over a block's length of steps, so that every step has its share of those
        that fill a block."""
        for _ in range(BLOCK_SIZE):
            for _ in range(len(self.names) * per_worker // BLOCK_SIZE):
                self.core.add([self.request()])
            for name in self.names:
                self.step(name)
        assert all(len(worker.decoding) == per_worker for worker in self.core.workers.values())


def steady(steps: int, sequences: int = 256, waiting: int = 0) -> dict[str, float]:
    """One worker, every sequence decodes; `waiting` more cannot be admitted."""
    bench = Bench(1, sequences, sequences * 512)
    bench.fill(sequences)
    for _ in range(waiting):
        bench.core.add([bench.request()])
    times = [bench.step("w0")[:2] for _ in range(steps)]
    assert bench.core.num_waiting == waiting
    invariants.check(bench.core)
    return summary(times, sequences)


def mixed(steps: int, sequences: int = 256, new: int = 32) -> dict[str, float]:
    """Beside the decodes, 32 prompts a step, of which half is cached; they end with their first token."""
    bench = Bench(1, sequences + new, 131_072)
    bench.fill(sequences)
    heads = [s.prompt[:SHARED] for s in bench.core.workers["w0"].decoding.values()]
    times, adding = [], []
    for _ in range(steps):
        requests = [bench.request(tuple(bench.rng.choice(heads)), max_tokens=1) for _ in range(new)]
        hits = bench.core.counters.hit_tokens
        started = time.perf_counter()
        for request in requests:
            bench.core.add([request])
        adding.append(time.perf_counter() - started)
        schedule, apply, plan = bench.step("w0")
        assert len(plan.prefills) == new
        assert bench.core.counters.hit_tokens - hits == new * SHARED
        times.append((schedule, apply))
    invariants.check(bench.core)
    with_add = statistics.median(sum(pair) + add for pair, add in zip(times, adding, strict=True)) * 1e3
    return summary(times, sequences + new) | {"with_add_ms": with_add}


def fleet(rounds: int, workers: int = 1000, sequences: int = 64) -> dict[str, float]:
    """A steady step of every worker, in turn."""
    bench = Bench(workers, sequences, sequences * 64)
    bench.fill(sequences)
    times = []
    for _ in range(rounds):
        steps = [bench.step(name)[:2] for name in bench.names]
        times.append((sum(a for a, _ in steps), sum(b for _, b in steps)))
    invariants.check(bench.core)
    return summary(times, workers * sequences)


CASES: dict[str, Callable[[int], dict[str, float]]] = {
    "steady": steady,
    "waiting": lambda steps: steady(steps, waiting=10_000),
    "mixed": mixed,
    "fleet": lambda steps: fleet(max(3, steps // 60)),
    "grow-32": lambda steps: steady(steps, sequences=32),
    "grow-64": lambda steps: steady(steps, sequences=64),
    "grow-128": lambda steps: steady(steps, sequences=128),
    "grow-512": lambda steps: steady(steps, sequences=512),
    "fleet-100": lambda steps: fleet(max(3, steps // 6), workers=100),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    print(json.dumps(CASES[arguments.case](arguments.steps)))


if __name__ == "__main__":
    main()
