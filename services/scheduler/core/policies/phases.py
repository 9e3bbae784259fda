"""What policies that page on demand have in common."""

from services.scheduler.core.builder import StepBuilder


def decode_limit(step: StepBuilder) -> int:
    """Sequences that may decode. If others have prompts to compute, a token of the budget is left for them."""
    left = step.limits.token_budget - step.has_prefills()
    return max(1, min(step.limits.max_num_seqs, left))


def continue_prefills(step: StepBuilder) -> None:
    """Go on with prompts that are part done."""
    for sequence in step.prefills():
        tokens = min(sequence.remaining, step.prefill_budget())
        if tokens <= 0 or not step.has_slot:
            return
        step.advance(sequence, tokens)


def admit(step: StepBuilder) -> None:
    """Start waiting sequences, with blocks for the tokens known now; stops at the first that does not fit."""
    short = step.num_preempted > 0
    for sequence in step.candidates():
        if short and not step.may_displace(sequence):
            return  # what was just taken must not be given to a newcomer
        budget = step.prefill_budget()
        if budget <= 0:
            step.lacks_budget(sequence)
            return
        if not step.start(sequence, budget, reserve=sequence.num_tokens):
            return
