"""Trials: finding the request that crashes workers, by running suspects apart from everybody else.

A worker that crashes in a step makes suspects of those that the step ran. They run again in halves, each half with
nobody else in its steps; if a worker crashes again the half is halved, until a request that crashes does so alone. A
suspect that gets a token is cleared. Group testing finds one in n with about log2(n) more crashes, and costs an
innocent a step or two of waiting.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.policies.base import BatchingPolicy
from services.scheduler.core.request import Sequence, Status


@dataclass(eq=False)
class Trial:
    """Suspects who run together. output: how much each had when it came under suspicion."""

    suspects: dict[Sequence, int] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """All have come back from their recovery."""
        return all(sequence.status is Status.WAITING for sequence in self.suspects)

    def cleared(self) -> list[Sequence]:
        """Those that got a token."""
        return [sequence for sequence, known in self.suspects.items() if len(sequence.output) > known]


class Trials:
    """The trials that wait for a worker, the first in line first."""

    def __init__(self) -> None:
        self._waiting: deque[Trial] = deque()

    def __contains__(self, trial: Trial) -> bool:
        return trial in self._waiting

    @property
    def num_suspects(self) -> int:
        """Sequences in waiting trials."""
        return sum(len(trial.suspects) for trial in self._waiting)

    def accuse(self, sequences: Iterable[Sequence]) -> None:
        """A worker crashed while it ran these: each half of their requests gets a trial."""
        by_request: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            by_request.setdefault(sequence.request_id, []).append(sequence)
        requests = list(by_request.values())
        middle = (len(requests) + 1) // 2
        for half in (requests[middle:], requests[:middle]):
            if half:
                self._put_first([sequence for choices in half for sequence in choices])

    def _put_first(self, sequences: list[Sequence]) -> None:
        trial = Trial()
        for sequence in sequences:
            self.acquit(sequence)
            trial.suspects[sequence] = len(sequence.output)
            sequence.trial = trial
        self._waiting.appendleft(trial)

    def put_back(self, trial: Trial) -> None:
        """Its worker has gone before it began."""
        self._waiting.appendleft(trial)

    def acquit(self, sequence: Sequence) -> None:
        """It is no suspect, or has ended."""
        trial = sequence.trial
        sequence.trial = None
        if trial is not None:
            trial.suspects.pop(sequence, None)
            if not trial.suspects and trial in self._waiting:
                self._waiting.remove(trial)

    def next_ready(self, fits: Callable[[Sequence], bool]) -> Trial | None:
        """Take the first trial that can begin, and whose suspects all fit."""
        for trial in self._waiting:
            if trial.is_ready and all(map(fits, trial.suspects)):
                self._waiting.remove(trial)
                return trial
        return None


def fill(step: StepBuilder, trial: Trial, batching: BatchingPolicy) -> None:
    """Decide a step of a trial: suspects only, as far as they fit; whoever else runs here sits it out."""
    suspects = trial.suspects
    step.decode_only(suspects)
    for sequence in step.prefills():
        tokens = min(sequence.remaining, step.budget)
        if sequence in suspects and tokens > 0 and step.has_slot:
            step.advance(sequence, tokens)
    for sequence in step.returned(suspects):
        reserve = batching.reserve(sequence, step.limits)
        if step.budget <= 0 or not step.displace(sequence, step.budget, reserve, suspects):
            return
