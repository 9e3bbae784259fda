"""Builders: any object of the system in one line from plain values."""

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES
from services.scheduler.core.request import FinishReason, Sequence
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepPlan, StepResult, WorkerLimits


def limits(
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 256,
    max_num_seqs: int = 8,
    token_budget: int = 32,
    max_in_flight: int = 2,
    stages: int = 1,
    num_host_blocks: int = 0,
) -> WorkerLimits:
    return WorkerLimits(
        num_blocks, block_size, max_model_len, max_num_seqs, token_budget, max_in_flight, stages, num_host_blocks
    )


def scheduler(
    policy: str = "chunked", workers: int = 1, order: str = "fcfs", config: SchedulerConfig | None = None, **of: int
) -> Scheduler:
    made = Scheduler(BATCHING_POLICIES[policy](), ORDER_POLICIES[order](), config or SchedulerConfig())
    for index in range(workers):
        made.add_worker(f"w{index}", limits(**of))
    return made


def sequence(name: str, prompt: int = 4, max_tokens: int = 4, arrival: int = 0, choice: int = 0) -> Sequence:
    """Its prompt is like no other's, so that nothing of it is cached."""
    return Sequence(name, choice, range(1000 * arrival, 1000 * arrival + prompt), max_tokens, arrival)


def outcome(plan: StepPlan, ends: dict[str, FinishReason] | None = None, token: int = 7) -> StepResult:
    """What a well-behaved worker answers: one token for each sequence that samples, `length` at max_tokens."""
    tokens, finished = {}, {}
    for item in plan.scheduled:
        sequence = item.sequence
        tokens[item.sequence_id] = token if item.samples else None
        if item.samples:
            reason = (ends or {}).get(sequence.request_id)
            if reason is None and len(sequence.output) + 1 == sequence.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                finished[item.sequence_id] = reason
    return StepResult(plan.number, tokens, finished)
