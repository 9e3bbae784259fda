"""What policies that page on demand have in common."""

from services.scheduler.core.builder import StepBuilder


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
        if budget <= 0 or not step.start(sequence, budget, reserve=sequence.num_tokens):
            return
