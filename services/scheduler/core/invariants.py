"""The invariants of the core, checked after every operation in property tests and when idle in production."""

from collections import Counter

from services.scheduler.core.block_manager import BlockPool
from services.scheduler.core.order import Fair
from services.scheduler.core.request import Sequence, Status
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepPlan
from services.scheduler.core.worker_state import WorkerState


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError naming the first invariant that does not hold."""
    for worker in scheduler.workers.values():
        _check_blocks(worker)
        _check_sets(worker)
        for sequence in worker.running.values():
            _check_running(worker, sequence)
        for sequence in worker.queue:
            assert sequence.worker == worker.name
            assert sequence.status in (Status.WAITING, Status.PREEMPTED)
            assert not sequence.block_table, "a sequence that does not run holds blocks"
        for sequence in worker.ended.values():
            assert sequence.status is Status.ENDED
            assert not sequence.block_table, "an ended sequence holds blocks"
    assert len(scheduler.waiting) == sum(1 for _ in scheduler.waiting)
    for sequence in scheduler.waiting:
        assert sequence.status is Status.WAITING
        assert sequence.worker is None
        assert not sequence.block_table, "a waiting sequence holds blocks"
        assert sequence.num_computed == sequence.num_scheduled == 0
    waiting = set(scheduler.waiting)
    for sequences in scheduler.by_request.values():
        for sequence in sequences:
            _check_trial(scheduler, sequence, waiting)
    for flow in scheduler.waiting.flows.values():
        keys = [scheduler.order.key(sequence) for sequence in flow]
        assert keys == sorted(keys), "the queue is out of order"
    if isinstance(scheduler.order, Fair):
        assert all(counter >= 0 for counter in scheduler.order.counters.values())


def _check_trial(scheduler: Scheduler, sequence: Sequence, waiting: set[Sequence]) -> None:
    trial = sequence.trial
    if trial is None:
        return
    assert sequence in trial.suspects
    assert sequence not in waiting, "a suspect waits among the others"
    assert sequence.status is not Status.FINISHED
    workers = [worker for worker in scheduler.workers.values() if worker.trial is trial]
    assert len(workers) == 1 - (trial in scheduler.trials), "a trial is on one worker, or waits for one"


def _check_running(worker: WorkerState, sequence: Sequence) -> None:
    size = worker.limits.block_size
    assert sequence.status is Status.RUNNING, "only running sequences hold blocks"
    assert sequence.worker == worker.name
    assert 0 <= sequence.num_computed <= sequence.num_scheduled
    assert sequence.num_scheduled <= sequence.num_tokens + sequence.promised, "more scheduled than known or promised"
    assert sequence.num_scheduled <= len(sequence.block_table) * size, "a token without a slot"
    assert sequence.num_scheduled <= sequence.total_slots, "more than max_tokens promised"
    assert sequence.num_hashed * size <= sequence.num_computed, "a block is known before it is full"


def _check_sets(worker: WorkerState) -> None:
    """Each running sequence is in one state, and the sums kept along the way are those counted afresh."""
    drained = {sequence_id for sequence_id, sequence in worker.running.items() if sequence.drained}
    states = [set(worker.prefilling), set(worker.decoding), set(worker.held), drained]
    assert sum(map(len, states)) == len(worker.running), "a running sequence is in two states, or in none"
    assert set().union(*states) == set(worker.running)
    assert worker.num_drained == len(drained)
    attended = sum(sequence.num_scheduled + 1 for sequence in worker.decoding.values())
    assert worker.attended == attended, "the decode set's context is miscounted"
    assert worker.queued_blocks == sum(claim.blocks for claim in worker.queue.values())
    assert worker.queued_tokens == sum(claim.tokens for claim in worker.queue.values())
    assert sum(worker.tpot_targets.values()) == len(worker.running)
    for sequence in worker.decoding.values():
        has_slot = sequence.num_scheduled < len(sequence.block_table) * worker.limits.block_size
        assert has_slot or sequence in worker.needs_block, "a decoding sequence has no slot and nobody knows"
        assert sequence.num_scheduled < sequence.total_slots, "the last token is planned, but it decodes on"


def _check_blocks(worker: WorkerState) -> None:
    _check_pool(worker.pool, [s.block_table for s in worker.running.values()])
    _check_pool(worker.host, [s.host_table for s in worker.queue])


def _check_pool(pool: BlockPool, tables: list[list[int]]) -> None:
    held = Counter(block for table in tables for block in table)
    assert pool.num_free + len(held) == pool.num_blocks, "blocks leaked or doubled"
    for block, count in held.items():
        assert pool.ref_cnt(block) == count, "ref_cnt is not the number of tables"
        assert count == 1 or pool.digest(block) is not None, "a shared block is full and hashed"
    for table in tables:
        assert len(table) == len(set(table)), "a block twice in a table"


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """The limits of one step."""
    worker = scheduler.workers[plan.worker]
    scheduled = plan.scheduled
    assert all(item.num_tokens >= 1 for item in scheduled), "a scheduled sequence without a token"
    assert len(scheduled) <= worker.limits.max_num_seqs, "too many sequences"
    tokens = sum(item.num_tokens for item in scheduled)
    assert (tokens, len(scheduled)) == (plan.features.tokens, plan.features.sequences)
    if scheduler.batching.uses_budget:
        assert tokens <= worker.limits.token_budget, "over the token budget"
    ids = [item.sequence_id for item in scheduled]
    assert len(ids) == len(set(ids)), "a sequence twice in one step"
    assert all(plan.trial is None or item.sequence.trial is plan.trial for item in scheduled), "a bystander in a trial"


def check_idle(scheduler: Scheduler) -> None:
    """After drain every count equals that of a fresh start."""
    assert not scheduler.num_waiting
    assert not scheduler.trials.num_suspects
    assert not scheduler.num_running
    for worker in scheduler.workers.values():
        assert worker.pool.num_free == worker.pool.num_blocks
        assert worker.host.num_free == worker.host.num_blocks
        assert not worker.in_flight
        assert not worker.decoding
        assert not worker.held
        assert not worker.ended
        assert not worker.incoming
        assert worker.load == 0
        assert worker.attended == 0
        assert not worker.to_hold
        assert not worker.to_resume
