"""The two records of a step: what the scheduler decided, and what came of it."""

from dataclasses import dataclass

from services.scheduler.core.request import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker said in its hello, and what the operator allows on it."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    max_in_flight: int = 2
    stages: int = 1

    @property
    def max_active(self) -> int:
        """Sequences that may have a slot: a batch of max_num_seqs in each pipeline stage."""
        return self.max_num_seqs * self.stages


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's share of a step. `sequence_id` is the assignment it ran under."""

    sequence: Sequence
    sequence_id: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one worker, as a delta against what the worker already knows.

    scheduled is the whole decision; the other fields are what must be said. A sequence that decodes on
    is in `scheduled` only.
    """

    number: int
    worker: str
    scheduled: tuple[Scheduled, ...]
    add: tuple[Scheduled, ...] = ()
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    hold: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    full: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step sampled for one sequence; empty for a chunk that is not the prompt's last."""

    sequence_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outputs of one plan. Sequences that the worker has dropped meanwhile are absent."""

    number: int
    outputs: tuple[SequenceOutput, ...]
