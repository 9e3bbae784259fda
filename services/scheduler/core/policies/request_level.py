"""The baseline that every paper compares with: a batch runs until its last member ends."""

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.policies.base import BatchingPolicy
from services.scheduler.core.request import Sequence
from services.scheduler.core.step import WorkerLimits


class RequestLevelPacked(BatchingPolicy):
    """Nobody joins a batch in progress, and a slot whose request has ended stays empty; a prompt is one chunk.

    Blocks for prompt + max_tokens are reserved at the start, so nothing is ever preempted. One batch at a time, also
    through pipeline stages.
    """

    name = "request-level-packed"
    reserves = True
    returns_together = True

    def max_in_flight(self, limits: WorkerLimits) -> int:
        return 1 if limits.stages > 1 else limits.max_in_flight

    def accepts(self, running: int) -> bool:
        return running == 0

    def reserve(self, sequence: Sequence, limits: WorkerLimits) -> int:
        return sequence.total_slots

    def fill(self, step: StepBuilder) -> None:
        if step.worker.running:
            self.go_on(step)
            return
        candidates = list(step.candidates())[: step.limits.max_num_seqs]
        chunk = self.first_chunk(candidates)
        for sequence in candidates:
            if not step.start(sequence, chunk, reserve=sequence.total_slots):
                return

    def first_chunk(self, candidates: list[Sequence]) -> int:
        """Tokens of each prompt in the batch's first step."""
        return max((sequence.num_tokens for sequence in candidates), default=0)

    def go_on(self, step: StepBuilder) -> None:
        step.decode(step.limits.max_num_seqs)


class RequestLevel(RequestLevelPacked):
    """As FasterTransformer does it in Orca's evaluation (OSDI'22, section 6.2): the first step takes all prompts as if
    they had the length of the shortest; the rest of the longer ones goes in token by token, beside the others' decodes.
    """

    name = "request-level"

    def first_chunk(self, candidates: list[Sequence]) -> int:
        return min((sequence.num_tokens for sequence in candidates), default=0)

    def go_on(self, step: StepBuilder) -> None:
        step.decode(step.limits.max_num_seqs)
        for sequence in step.prefills():
            step.advance(sequence, 1)
