"""What a scheduler is told at its start, and what it counts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """watermark: blocks held back at admission, as a share of the pool, so that decodes do not preempt at once;
    headroom: and as blocks per running sequence, whichever is more. max_moves: per sequence.
    first_id: where assignment ids begin, so that no other leader's are met again.
    """

    prefix_cache: bool = True
    watermark: float = 0.01
    headroom: int = 1
    max_moves: int = 2
    first_id: int = 1


@dataclass(slots=True)
class Counters:
    """What has happened so far."""

    preemptions: int = 0
    swaps: int = 0
    moves: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    trials: int = 0
    displaced: int = 0  # preempted by a trial
