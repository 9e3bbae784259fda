"""Orca's own policy (OSDI'22, Algorithm 1), and how much memory it reserves for a request."""

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


class OrcaMax(Orca):
    """Reserves the model's maximum for every request, as the vLLM paper's "Orca (Max)" (SOSP'23, section 6.1)."""

    name = "orca-max"

    def reserve(self, sequence: Sequence, limits: WorkerLimits) -> int:
        return min(limits.max_model_len, limits.num_blocks * limits.block_size)


class OrcaPow2(Orca):
    """Reserves the output's next power of two: at most twice what is needed ("Orca (Pow2)", section 6.1)."""

    name = "orca-pow2"

    def reserve(self, sequence: Sequence, limits: WorkerLimits) -> int:
        output = sequence.expected_output or sequence.max_tokens
        room = min(limits.max_model_len, limits.num_blocks * limits.block_size)
        return min(room, sequence.num_prompt_tokens + (1 << (output - 1).bit_length()))


class OrcaOracle(Orca):
    """Reserves exactly what will be needed, where that is known: in a simulator ("Orca (Oracle)", section 6.1).
    A real system knows max_tokens, and no more."""

    name = "orca-oracle"

    def reserve(self, sequence: Sequence, limits: WorkerLimits) -> int:
        return sequence.num_prompt_tokens + (sequence.expected_output or sequence.max_tokens) - 1
