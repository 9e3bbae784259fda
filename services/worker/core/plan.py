"""The records that a worker receives and gives back."""

import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from services.common.request import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    sequence_id: int
    request_id: str
    choice: int
    prompt_index: int
    attempt: int
    prompt: list[int]
    output: list[int]
    params: SamplingParams
    num_computed: int = 0
    cache_root: bytes = b""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, as a delta: a sequence that decodes on is not mentioned."""

    number: int
    epoch: int
    full: bool = False
    release: tuple[int, ...] = ()
    add: tuple[NewSequence, ...] = ()
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    hold: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, tuple[int, ...]], ...] = ()
    swap_in: tuple[tuple[int, tuple[int, ...]], ...] = ()
    session: int = 0  # which session brought it: nobody else is told its result


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the model's own distribution, before temperature, penalties and bias. top: (token id, logprob), best first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


# Those that are made for every row of every step are not frozen dataclasses: they take three times as long to make.
class Sampled(NamedTuple):
    """What the executor chose for one row; token_id is None when the row's logits were not numbers."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


class Constraint(Protocol):
    """What a sequence's text must match, as far as it has come."""

    def fill(self, mask: np.ndarray) -> bool:
        """Set the bits of the tokens that may come next; mask: int32 [words of 32 tokens]. False if it has failed."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by one token. True if nothing can follow: the text is complete."""
        ...


def allowed_words(constraint: Constraint, vocab_size: int) -> np.ndarray:
    """int32 [words of 32 tokens]: a bit per token that may come; none if the constraint has failed."""
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    if not constraint.fill(mask):
        mask.fill(0)
    return mask


def unpacked(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool [vocab_size]."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(bool)


def allowed_tokens(constraint: Constraint, vocab_size: int) -> np.ndarray | None:
    """bool [vocab_size]; None if the constraint has failed."""
    words = allowed_words(constraint, vocab_size)
    return unpacked(words, vocab_size) if words.any() else None


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence as the worker knows it. tokens = prompt + output; the first num_computed have KV in the blocks."""

    sequence_id: int
    request_id: str
    choice: int
    prompt_index: int
    epoch: int
    attempt: int
    params: SamplingParams
    num_prompt: int
    tokens: list[int]
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)
    decoding: bool = False
    held: bool = False
    digest: bytes = b""  # of the last of its first num_digested blocks, or its root
    num_digested: int = 0
    # Its own end rules, as numbers of tokens with the prompt: one of end_tokens ends it at `end_from` or later, and it
    # ends at `end_at` by length.
    end_tokens: frozenset[int] = frozenset()
    end_from: int = 0
    end_at: int = sys.maxsize
    # Asked of its prompt, and told with its first token: log-probabilities of its tokens but the first, as far as
    # computed, or its embedding.
    scores: list[TokenLogprobs] = field(default_factory=list)
    embedding: list[float] = field(default_factory=list)
    num_cached: int = 0  # tokens of its prompt that were in the blocks when it came
    constraint: Constraint | None = None  # what its text must match
    # How it ended outside the step, "" if it did not: it is dropped, and what it still computed is discarded.
    ended: str = ""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


class BatchRow(NamedTuple):
    """One sequence's share of the step: tokens[start : start + num_tokens], then a sample if these are its last."""

    sequence: SequenceState
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == len(self.sequence.tokens)

    @property
    def scored(self) -> range:
        """Positions whose logits are asked for because the prompt's next token is known."""
        sequence = self.sequence
        if not sequence.params.prompt_logprobs or len(sequence.tokens) > sequence.num_prompt:
            return range(0)
        return range(self.start, min(self.start + self.num_tokens, sequence.num_prompt - 1))


class Copy(Enum):
    TO_HOST = "to host"
    WITHIN = "within the device"
    TO_DEVICE = "to the device"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Blocks copied one to one: sources[i] to targets[i]. No block is both."""

    kind: Copy
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepInput:
    """What the executor does for one plan: the copies in this order, then one model call for all rows."""

    rows: list[BatchRow]
    copies: list[BlockCopy]


@dataclass(slots=True)
class SequenceOutput:
    """What one step did for one sequence. index: position of the first new token among the outputs."""

    sequence: SequenceState
    num_computed: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything that came of one plan. Times in ns of the worker's monotonic clock.

    repeated: the answer to a plan number seen before; its tokens have been published.
    """

    plan: Plan
    outputs: tuple[SequenceOutput, ...]
    started_ns: int
    finished_ns: int
    idle_ns: int
    num_rows: int
    error: str = ""
    repeated: bool = False
