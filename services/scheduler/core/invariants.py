"""The invariants of the core, checked after every operation in property tests and when idle in production."""

from collections import Counter

from services.scheduler.core.block_manager import blocks_for
from services.scheduler.core.request import Status
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepPlan
from services.scheduler.core.worker_state import WorkerState


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError naming the first invariant that does not hold."""
    for worker in scheduler.workers.values():
        _check_blocks(worker)
        for sequence in worker.running:
            assert sequence.status is Status.RUNNING, "only running sequences hold blocks"
            assert sequence.worker == worker.name
            scheduled = sequence.num_computed + sequence.in_flight
            assert scheduled <= sequence.num_tokens + sequence.promised, "more scheduled than known or promised"
            assert scheduled <= len(sequence.block_table) * worker.limits.block_size, "a token without a slot"
            assert len(sequence.output) + sequence.promised <= sequence.max_tokens, "more than max_tokens promised"
            assert len(sequence.block_table) <= blocks_for(sequence.total_tokens, worker.limits.block_size)
    for sequence in scheduler.waiting:
        assert sequence.status in (Status.WAITING, Status.PREEMPTED)
        assert not sequence.block_table, "a waiting sequence holds blocks"
        assert sequence.num_computed == sequence.in_flight == 0
    keys = [scheduler.order.key(sequence) for sequence in scheduler.waiting]
    assert keys == sorted(keys), "the queue is out of order"


def _check_blocks(worker: WorkerState) -> None:
    held = Counter(block for sequence in worker.running for block in sequence.block_table)
    assert worker.pool.num_free + len(held) == worker.pool.num_blocks, "blocks leaked or doubled"
    for block, tables in held.items():
        assert worker.pool.ref_cnt(block) == tables, "ref_cnt is not the number of tables"


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """The limits of one step."""
    worker = scheduler.workers[plan.worker]
    assert all(item.num_tokens >= 1 for item in plan.scheduled), "a scheduled sequence without a token"
    assert len(plan.scheduled) <= worker.limits.max_num_seqs, "too many sequences"
    if scheduler.batching.uses_budget:
        assert plan.num_tokens <= worker.limits.token_budget, "over the token budget"
    ids = [item.sequence_id for item in plan.scheduled]
    assert len(ids) == len(set(ids)), "a sequence twice in one step"


def check_idle(scheduler: Scheduler) -> None:
    """After drain every count equals that of a fresh start."""
    assert not scheduler.waiting
    assert scheduler.num_running == 0
    for worker in scheduler.workers.values():
        assert worker.pool.num_free == worker.pool.num_blocks
        assert not worker.in_flight
        assert not worker.decoding
        assert not worker.held
