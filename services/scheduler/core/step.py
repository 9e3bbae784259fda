"""The two records of a step: what the scheduler decided, and what came of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core.request import FinishReason, Sequence

if TYPE_CHECKING:
    from services.scheduler.core.trials import Trial


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker said in its hello, and what the operator allows on it.

    num_host_blocks: blocks of host memory for KV that is swapped out; swap_s: seconds to copy one block, one way.
    adapters: those resident on the worker.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    max_in_flight: int = 2
    stages: int = 1
    num_host_blocks: int = 0
    swap_s: float = 0.0
    adapters: frozenset[str] = frozenset()

    @property
    def max_active(self) -> int:
        """Sequences that may have a slot: a batch of max_num_seqs in each pipeline stage."""
        return self.max_num_seqs * self.stages


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's share of a step. `sequence_id` is the assignment it ran under.

    num_computed: for a sequence that is new to the worker, the tokens whose KV its first blocks hold already.
    """

    sequence: Sequence
    sequence_id: int
    num_tokens: int
    samples: bool
    num_computed: int = 0


class Decodes(NamedTuple):
    """The decode set of a step: one token each, and each samples. Shared by all plans until the set changes."""

    sequences: tuple[Sequence, ...] = ()
    ids: tuple[int, ...] = ()


class Features(NamedTuple):
    """What a step's duration depends on. attended: sum over its tokens of the positions each attends to (arithmetic);
    context: sum over its sequences of the positions whose KV is read (memory)."""

    tokens: int
    sequences: int
    attended: int
    context: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one worker, as a delta against what the worker already knows.

    decodes and prefills are the whole decision; the other fields are what must be said. A sequence that decodes
    on is in `decodes` only. The worker does, in this order: release, add, swap_out, swap_in, copies, blocks,
    then the step.

    blocks: (sequence, block ids) appended to block tables. copies: (from, to) device blocks.
    swap_out: (sequence, host blocks); the sequence rests until swap_in: (sequence, device blocks).
    grown: sequences of the decode set that got a block, so their blocks before are full.
    trial: the suspects to whom the step belongs alone.
    """

    number: int
    worker: str
    decodes: Decodes
    prefills: tuple[Scheduled, ...]
    features: Features
    add: tuple[Scheduled, ...] = ()
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, tuple[int, ...]], ...] = ()
    swap_in: tuple[tuple[int, tuple[int, ...]], ...] = ()
    hold: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    full: bool = False
    grown: tuple[Sequence, ...] = ()
    trial: "Trial | None" = None

    @property
    def num_tokens(self) -> int:
        return self.features.tokens

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(sequence, tokens) of those that do not merely decode on."""
        return tuple((item.sequence_id, item.num_tokens) for item in self.prefills)

    @property
    def scheduled(self) -> tuple[Scheduled, ...]:
        """The whole decision, an item per sequence."""
        decodes = (Scheduled(s, i, 1, True) for s, i in zip(self.decodes.sequences, self.decodes.ids, strict=True))
        return (*decodes, *self.prefills)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of one plan. Sequences that the worker has dropped meanwhile are absent.

    tokens: the token that each sequence sampled; None for a chunk that is not its prompt's last.
    finished: those that this step ended. seconds: how long the step took, 0 if unknown. ended_s: when it ended, by the
    worker's clock.
    """

    number: int
    tokens: Mapping[int, int | None]
    finished: Mapping[int, FinishReason] = field(default_factory=dict)
    seconds: float = 0.0
    ended_s: float = 0.0


def tokens_by_tenant(plan: StepPlan, result: StepResult) -> Counter[str]:
    """Who got how many of a step's tokens."""
    items = plan.scheduled
    return Counter(item.sequence.tenant for item in items if result.tokens.get(item.sequence_id) is not None)
