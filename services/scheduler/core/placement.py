"""Placement: which worker runs a waiting sequence. Filter, score, pick; asked again each iteration."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from services.scheduler.core.block_manager import blocks_for
from services.scheduler.core.policies.base import BatchingPolicy
from services.scheduler.core.prefix_cache import PrefixIndex, reusable_digests
from services.scheduler.core.request import Sequence
from services.scheduler.core.worker_state import WorkerState

# One sequence more on a worker weighs as much as so many tokens of prompt to compute.
LOAD_TOKENS = 16
# Scores of an adapter that would have to be loaded, in the same unit.
ADAPTER_TOKENS = 512
# Of the workers that hold a prefix, so many are compared.
MAX_HOLDERS = 8


def can_ever_fit(sequence: Sequence, worker: WorkerState) -> bool:
    """True if the sequence, alone on the worker, could run to its last token."""
    limits = worker.limits
    needed = blocks_for(sequence.total_slots, limits.block_size)
    return sequence.total_tokens <= limits.max_model_len and needed <= limits.num_blocks


class Loads:
    """Workers by load, the least first, without looking at all of them."""

    def __init__(self, workers: dict[str, WorkerState]) -> None:
        self._workers = workers
        self._heap: list[tuple[int, str]] = []
        self._known: dict[str, int] = {}

    def changed(self, worker: WorkerState) -> None:
        load = worker.load
        if self._known.get(worker.name) != load:
            self._known[worker.name] = load
            heapq.heappush(self._heap, (load, worker.name))
            if len(self._heap) > 64 + 4 * len(self._known):  # mostly outdated
                self._heap = sorted((load, name) for name, load in self._known.items())

    def gone(self, name: str) -> None:
        self._known.pop(name, None)

    def least(self, count: int, wanted: Callable[[WorkerState], bool]) -> list[WorkerState]:
        """The `count` least loaded workers that are wanted, the least first."""
        seen: dict[str, int] = {}
        found: list[WorkerState] = []
        while self._heap and len(found) < count:
            load, name = heapq.heappop(self._heap)
            if self._known.get(name) == load and name not in seen:
                seen[name] = load
                if wanted(self._workers[name]):
                    found.append(self._workers[name])
        for name, load in seen.items():
            heapq.heappush(self._heap, (load, name))
        return found


class Placement:
    """Compares the least loaded worker that has room with those that hold most of the prompt."""

    def __init__(
        self, workers: dict[str, WorkerState], batching: BatchingPolicy, watermark: float, headroom: int
    ) -> None:
        self.loads = Loads(workers)
        self.index = PrefixIndex()
        self.block_sizes: Counter[int] = Counter()  # of the workers that cache prefixes
        self._workers = workers
        self._batching = batching
        self._watermark = watermark
        self._headroom = headroom

    def joined(self, worker: WorkerState) -> None:
        if worker.caches:
            self.block_sizes[worker.limits.block_size] += 1
        self.loads.changed(worker)

    def left(self, worker: WorkerState) -> None:
        worker.pool.forget_all()
        self.loads.gone(worker.name)
        if worker.caches:
            self.block_sizes -= Counter([worker.limits.block_size])

    def pick(self, sequence: Sequence, among: Iterable[WorkerState] | None = None) -> WorkerState | None:
        """The worker that should run the sequence next, of all or of some; None if none has room now."""
        if sequence.moving_to in self._workers and self.has_room(sequence, self._workers[sequence.moving_to]):
            return self._workers[sequence.moving_to]
        if len(self._workers) == 1:  # nothing to compare
            (only,) = self._workers.values()
            return only if self.has_room(sequence, only) else None
        if among is not None:
            candidates = [worker for worker in among if self.has_room(sequence, worker)]
        else:
            candidates = [worker for worker in self._holders(sequence) if self.has_room(sequence, worker)]
            candidates += self.loads.least(1, lambda worker: self.has_room(sequence, worker))
            if sequence.adapter:
                candidates += self.loads.least(
                    1, lambda worker: sequence.adapter in worker.limits.adapters and self.has_room(sequence, worker)
                )
        return min(candidates, key=lambda worker: (self.cost(sequence, worker), worker.name), default=None)

    def has_room(self, sequence: Sequence, worker: WorkerState) -> bool:
        """Filter: the worker could start it in its next plan, as far as is known now."""
        limits = worker.limits
        if (
            not worker.takes_new
            or worker.load - (sequence in worker.incoming) >= limits.max_active
            or not self._batching.accepts(len(worker.running))
        ):
            return False
        if not can_ever_fit(sequence, worker):
            return False
        if self._batching.uses_budget and worker.queued_tokens >= limits.token_budget:
            return False
        needed = blocks_for(self._batching.reserve(sequence, limits), limits.block_size)
        return worker.pool.num_free - worker.queued_blocks - needed >= self.spare(worker) or (
            worker.caches and self._fits_by_hits(sequence, worker, needed)
        )

    def _fits_by_hits(self, sequence: Sequence, worker: WorkerState, needed: int) -> bool:
        hits = worker.pool.find(self._digests(sequence, worker))
        new = needed - len(hits) + worker.pool.num_idle(hits)
        return bool(hits) and worker.pool.num_free - worker.queued_blocks - new >= self.spare(worker)

    def spare(self, worker: WorkerState, leaving: int = 0) -> int:
        """Blocks that an admission leaves free: running sequences may want them soon; an empty worker holds nothing
        back. leaving: running sequences that are about to give way."""
        running = len(worker.running) - leaving
        if self._batching.reserves or not running:
            return 0
        return max(int(worker.limits.num_blocks * self._watermark), running * self._headroom)

    def cost(self, sequence: Sequence, worker: WorkerState) -> int:
        """Score, in tokens to compute: less is better."""
        missing = bool(sequence.adapter) and sequence.adapter not in worker.limits.adapters
        return self.to_compute(sequence, worker) + LOAD_TOKENS * worker.load + ADAPTER_TOKENS * missing

    def to_compute(self, sequence: Sequence, worker: WorkerState) -> int:
        """Its tokens that the worker's prefix cache does not have."""
        hits = len(worker.pool.find(self._digests(sequence, worker))) if worker.caches else 0
        return sequence.num_tokens - hits * worker.limits.block_size

    def _holders(self, sequence: Sequence) -> list[WorkerState]:
        """Workers that hold most of what anybody holds of it."""
        found: dict[str, None] = {}
        for size in self.block_sizes:
            holders = self.index.deepest(reusable_digests(sequence, size))
            found |= dict.fromkeys(islice(holders, MAX_HOLDERS))
        return [self._workers[name] for name in found]

    @staticmethod
    def _digests(sequence: Sequence, worker: WorkerState) -> list[bytes]:
        return reusable_digests(sequence, worker.limits.block_size)
