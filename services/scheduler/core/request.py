"""Sequences: the unit of scheduling, and the one place where their status changes."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.core.trials import Trial


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    RECOVERING = "recovering"  # off its worker; its fence is being raised and the journal read
    ENDED = "ended"  # its worker said so, and its blocks are free; the finish is not in the journal yet
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"


LEGAL_MOVES = {
    Status.WAITING: {Status.RUNNING, Status.RECOVERING, Status.FINISHED},
    Status.RUNNING: {Status.PREEMPTED, Status.RECOVERING, Status.ENDED, Status.FINISHED},
    Status.PREEMPTED: {Status.RUNNING, Status.RECOVERING, Status.ENDED, Status.FINISHED},
    Status.RECOVERING: {Status.WAITING, Status.FINISHED},
    Status.ENDED: {Status.RECOVERING, Status.FINISHED},
    Status.FINISHED: set(),
}


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds: time to the first token, and time per token after it. 0 is none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


@dataclass(slots=True)
class DecodeClock:
    """Counts the plans of one worker that ran its decode set. Members of the set read their position from it, so
    that a steady decode step touches none of them. last_plan: number of the newest of those plans."""

    count: int = 0
    last_plan: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of token ids: the prompt, then the output so far.

    Counters, no phases: prefill and decode differ only in how many tokens remain to be computed.

    num_computed: tokens whose KV is in the blocks, by results already applied.
    num_scheduled: those, and the tokens of plans whose results have not come back.
    promised: output tokens that those plans will sample.
    arrival: place in the order of arrival; arrived_s: when, in seconds of any one clock.
    prompt_index, leader: choices of one prompt share its blocks; the leader is the first of them.
    weight: its tenant's share of service, where that is shared out.
    reuses: it takes what others computed of its prompt; one that wants all logits of it does not.
    expected_output: tokens that it will produce, where that is known (a simulator's oracle).
    """

    request_id: str
    choice: int
    prompt: Tokens[int]
    max_tokens: int
    arrival: int
    tenant: str = ""
    priority: int = 0
    arrived_s: float = 0.0
    slo: Slo = Slo()
    adapter: str = ""
    prompt_index: int = 0
    expected_output: int | None = None
    weight: float = 1.0
    reuses: bool = True
    leader: "Sequence | None" = None
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    worker: str | None = None
    sequence_id: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    charged: bool = False  # its prompt has been counted as service to its tenant
    refundable: bool = False  # so far for a start that has not happened
    drained: bool = False  # needs no more steps, only the results of those planned
    moving_to: str | None = None
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)  # its KV, swapped out
    hashes: list[bytes] = field(default_factory=list)  # chained, of its full blocks; see prefix_cache
    hash_block_size: int = 0
    num_hashed: int = 0  # blocks of the table that are known to the prefix cache
    num_lost: int = 0  # tokens whose KV was computed, and is gone
    trial: "Trial | None" = None  # it may have crashed a worker; see trials
    due: int = 0  # when, by the decode clock, its table is full or its last token planned
    _scheduled: int = 0
    _last_plan: int = 0
    _clock: DecodeClock | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens known to the scheduler: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def total_tokens(self) -> int:
        """The most tokens that this sequence can come to hold."""
        return len(self.prompt) + self.max_tokens

    @property
    def total_slots(self) -> int:
        """The most KV slots that it can come to fill: the last token is sampled, never written."""
        return self.total_tokens - 1

    @property
    def num_scheduled(self) -> int:
        return self._scheduled + self._clock.count if self._clock else self._scheduled

    @property
    def last_plan(self) -> int:
        """Number of the newest plan that it is in."""
        return max(self._last_plan, self._clock.last_plan) if self._clock else self._last_plan

    @property
    def promised(self) -> int:
        """A step samples when it reaches the end of what is known or promised already."""
        return max(0, self.num_scheduled - self.num_tokens + 1)

    @property
    def remaining(self) -> int:
        """Tokens that the next step could compute: known or promised, and not yet scheduled."""
        scheduled = self.num_scheduled
        if self.drained or scheduled >= self.total_slots:
            return 0
        return max(1, self.num_tokens - scheduled)

    def tokens(self, start: int, stop: int) -> Tokens[int]:
        """The known tokens of positions start .. stop-1."""
        prompt = len(self.prompt)
        if stop <= prompt:
            return self.prompt[start:stop]
        if start >= prompt:
            return self.output[start - prompt : stop - prompt]
        return list(chain(islice(self.prompt, start, None), self.output[: stop - prompt]))

    def schedule(self, num_tokens: int, plan: int) -> None:
        """Count tokens as scheduled in a plan."""
        self._scheduled += num_tokens
        self._last_plan = plan

    def follow(self, clock: DecodeClock) -> None:
        """From now on one token per tick is scheduled."""
        self._scheduled -= clock.count
        self._clock = clock

    def unfollow(self) -> None:
        if self._clock:
            self._scheduled, self._last_plan, self._clock = self.num_scheduled, self.last_plan, None

    def restart(self, num_computed: int = 0) -> None:
        """Its KV is gone but for the first num_computed tokens."""
        self._clock = None
        self._scheduled = self.num_computed = num_computed
        self.drained = False
        self.num_hashed = 0

    def begin_recovery(self) -> None:
        """It has left its worker, for whatever reason, and will go on from the journal."""
        self.move_to(Status.RECOVERING)
        self.worker = None
        self.sequence_id = 0  # results still under way are for nobody
        self.block_table, self.host_table = [], []
        self.finish_reason = None
        self.num_lost = max(self.num_lost, self.num_computed)
        self.restart()

    def move_to(self, status: Status) -> None:
        """Change the status. Raises ValueError on a move that is not in LEGAL_MOVES."""
        if status not in LEGAL_MOVES[self.status]:
            raise ValueError(f"{self.request_id}/{self.choice}: {self.status.value} -> {status.value}")
        self.status = status
