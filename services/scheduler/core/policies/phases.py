"""What policies that page on demand have in common: the three kinds of work that a step can hold."""

from services.scheduler.core.builder import StepBuilder


def _has_room(step: StepBuilder) -> bool:
    return step.budget > 0 and step.num_scheduled < step.limits.max_num_seqs


def decode(step: StepBuilder) -> None:
    """One token of every sequence that decodes; blocks on demand, from the last in order if need be
    (PagedAttention, SOSP'23, section 4.5)."""
    for sequence in step.in_order():
        if sequence.is_decoding and _has_room(step):
            step.advance(sequence, 1)


def continue_prefills(step: StepBuilder) -> None:
    """Go on with prompts that are part done."""
    for sequence in step.in_order():
        if sequence.remaining and not sequence.is_decoding and _has_room(step):
            step.advance(sequence, min(sequence.remaining, step.budget))


def admit(step: StepBuilder) -> None:
    """Start waiting sequences, with blocks for the tokens known now; stops at the first that does not fit."""
    if step.num_preempted:
        return  # what was just taken must not be given to a newcomer
    for sequence in step.candidates():
        if not _has_room(step):
            return
        if not step.admit(sequence, min(sequence.remaining, step.budget), reserve=sequence.num_tokens):
            return
