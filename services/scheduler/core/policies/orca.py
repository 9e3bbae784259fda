"""Orca's own policy (OSDI'22, Algorithm 1), and how much memory it reserves for a request."""

from abc import abstractmethod

from services.scheduler.core.block_manager import blocks_for
from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.policies.base import BatchingPolicy
from services.scheduler.core.request import Sequence
from services.scheduler.core.step import WorkerLimits


class Orca(BatchingPolicy):
    """Oldest first up to max_bs; prompt + max_tokens reserved at first scheduling.

    The scan stops at the first request that does not fit: it does not skip to a smaller one, which is what
    keeps the order first-come-first-served by iteration. A request in flight is not selected again before its
    result. n_workers (pipeline stages) batches are in flight at once; a whole prompt is one iteration.
    """

    name = "orca"
    reserves = True

    def max_in_flight(self, limits: WorkerLimits) -> int:
        return limits.stages

    def reserve(self, sequence: Sequence, limits: WorkerLimits) -> int:
        return sequence.total_slots

    def fill(self, step: StepBuilder) -> None:
        step.decode(step.limits.max_num_seqs)
        for sequence in step.candidates():
            reserve = self.reserve(sequence, step.limits)
            if not step.start(sequence, sequence.num_tokens, reserve):
                return


class Buddy(Orca):
    """Orca as the vLLM paper measures it (SOSP'23, section 6.1): memory from a buddy allocator, in powers of two."""

    def reserve(self, sequence: Sequence, limits: WorkerLimits) -> int:
        tokens = sequence.num_prompt_tokens + self.output_room(sequence, limits)
        blocks = blocks_for(min(tokens, limits.max_model_len), limits.block_size)
        return min(1 << (blocks - 1).bit_length(), limits.num_blocks) * limits.block_size

    @abstractmethod
    def output_room(self, sequence: Sequence, limits: WorkerLimits) -> int:
        """Tokens of output that are reserved."""


class OrcaMax(Buddy):
    """The model's maximum for every request: "Orca (Max)"."""

    name = "orca-max"

    def output_room(self, sequence: Sequence, limits: WorkerLimits) -> int:
        return limits.max_model_len


class OrcaPow2(Buddy):
    """The output's next power of two, at most twice what is needed: "Orca (Pow2)"."""

    name = "orca-pow2"

    def output_room(self, sequence: Sequence, limits: WorkerLimits) -> int:
        return 1 << (expected(sequence) - 1).bit_length()


class OrcaOracle(Buddy):
    """Exactly what will be needed: "Orca (Oracle)"."""

    name = "orca-oracle"

    def output_room(self, sequence: Sequence, limits: WorkerLimits) -> int:
        return expected(sequence)


def expected(sequence: Sequence) -> int:
    """Tokens that it will generate, where that is known: in a simulator. A real system knows max_tokens, no more."""
    return sequence.expected_output or sequence.max_tokens
