"""Sequences: the unit of scheduling, and the one place where their status changes."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum


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


LEGAL_MOVES = {
    Status.WAITING: {Status.RUNNING, Status.RECOVERING, Status.FINISHED},
    Status.RUNNING: {Status.PREEMPTED, Status.RECOVERING, Status.ENDED, Status.FINISHED},
    Status.PREEMPTED: {Status.RUNNING, Status.RECOVERING, Status.ENDED, Status.FINISHED},
    Status.RECOVERING: {Status.WAITING, Status.FINISHED},
    Status.ENDED: {Status.RECOVERING, Status.FINISHED},
    Status.FINISHED: set(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of token ids: the prompt, then the output so far.

    Counters, no phases: prefill and decode differ only in how many tokens remain to be computed.

    num_computed: tokens whose KV is in the blocks, by results already applied.
    in_flight: tokens scheduled in plans whose results have not come back.
    promised: output tokens that those plans will sample.
    """

    request_id: str
    choice: int
    prompt: Tokens[int]
    max_tokens: int
    arrival: int
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    worker: str | None = None
    sequence_id: int = 0
    num_computed: int = 0
    in_flight: int = 0
    promised: int = 0
    steps_in_flight: int = 0
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)

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
    def remaining(self) -> int:
        """Tokens that the next step could compute: known or promised, and not yet scheduled."""
        if len(self.output) + self.promised >= self.max_tokens:
            return 0
        return max(0, self.num_tokens + self.promised - self.num_computed - self.in_flight)

    @property
    def is_decoding(self) -> bool:
        """True when its next step is one token long and follows a sampled one."""
        return self.remaining == 1 and self.num_computed + self.in_flight >= self.num_prompt_tokens

    def move_to(self, status: Status) -> None:
        """Change the status. Raises ValueError on a move that is not in LEGAL_MOVES."""
        if status not in LEGAL_MOVES[self.status]:
            raise ValueError(f"{self.request_id}/{self.choice}: {self.status.value} -> {status.value}")
        self.status = status
