"""Chunked prefill within a token budget (Sarathi-Serve, OSDI'24): decodes never stall."""

from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.step import WorkerLimits


class Chunked:
    """Decodes first, then part-done prefills, then new ones, within the token budget.

    Blocks for the tokens known at admission are taken then; later ones on demand, from the last in order if
    need be (PagedAttention, SOSP'23, section 4.5).
    """

    name = "chunked"
    uses_budget = True

    def max_in_flight(self, limits: WorkerLimits) -> int:
        return limits.max_in_flight

    def fill(self, step: StepBuilder) -> None:
        running = step.in_order()
        for sequence in running:
            if sequence.is_decoding and step.budget and step.num_scheduled < step.limits.max_num_seqs:
                step.advance(sequence, 1)
        for sequence in running:
            unfinished_prefill = sequence.block_table and sequence.remaining and not sequence.is_decoding
            if unfinished_prefill and step.budget and step.num_scheduled < step.limits.max_num_seqs:
                step.advance(sequence, min(sequence.remaining, step.budget))
        if step.num_preempted:
            return  # what was just taken must not be given to a newcomer
        for sequence in step.candidates():
            if not step.budget or step.num_scheduled >= step.limits.max_num_seqs:
                return
            tokens = min(sequence.remaining, step.budget)
            if not step.admit(sequence, tokens, reserve=sequence.num_tokens):
                return
