"""Placement over several workers: where sequences start, and when they move."""

from dataclasses import replace

from services.scheduler.core import invariants
from services.scheduler.core.explain import Explain, Reason
from services.scheduler.core.request import FinishReason, Sequence, Slo, Status
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import Features, StepResult
from tests import builders

PREFIX = tuple(range(64))


def tick(core: Scheduler, seconds: float = 0.0) -> None:
    """A step of every worker, as the engine does it."""
    core.place()
    for name in list(core.workers):
        while core.schedule(name) is not None:
            pass
        for sequence in core.take_moving():
            core.resume(sequence, sequence.output)
    for name, worker in core.workers.items():
        if worker.in_flight:
            result = builders.outcome(worker.in_flight[0])
            for ended in core.apply(name, StepResult(result.number, result.tokens, result.finished, seconds)):
                core.finish(ended, FinishReason.LENGTH, tell_worker=False)
    invariants.check(core)


def drain(core: Scheduler) -> None:
    for _ in range(2000):
        tick(core)
        if not core.num_running and not core.num_waiting and not any(w.in_flight for w in core.workers.values()):
            break
    invariants.check_idle(core)


def test_a_sequence_goes_where_its_prefix_is_cached_unless_that_worker_is_much_busier() -> None:
    core = builders.scheduler(workers=3, num_blocks=200, max_num_seqs=32, token_budget=256)
    core.add([Sequence("first", 0, (*PREFIX, 900), 2, 0)])
    drain(core)
    (home,) = (worker for worker in core.workers.values() if worker.pool.num_cached)
    for index in range(3):
        core.add([Sequence(f"again{index}", 0, (*PREFIX, index), 30, index + 1)])
        tick(core)
    assert len(home.running) == 3, "cached tokens weigh more than a little load"
    for index in range(12):
        core.add([Sequence(f"more{index}", 0, (*PREFIX, 50 + index), 30, 10 + index)])
        tick(core)
    assert len(home.running) < 15, "but not more than any load"
    assert core.counters.hit_tokens > 15 * 48
    drain(core)


def test_a_long_prefix_that_is_cached_does_not_count_against_the_budget() -> None:
    """Prompts longer than a step's tokens, of which but one is new: all of them start in the next plan."""
    core = builders.scheduler(num_blocks=600, max_num_seqs=32, token_budget=48)
    core.add([Sequence("first", 0, (*PREFIX, 900), 2, 0)])
    drain(core)
    for index in range(20):
        core.add([Sequence(f"again{index}", 0, (*PREFIX, index), 2, index + 1)])
    core.place()
    plan = core.schedule("w0")
    assert plan is not None
    assert (len(plan.add), plan.num_tokens) == (20, 20)
    drain(core)


def test_an_adapter_is_scored() -> None:
    core = builders.scheduler(workers=0)
    core.add_worker("w0", builders.limits())
    core.add_worker("w1", replace(builders.limits(), adapters=frozenset({"sql"})))
    core.add([builders.sequence("plain", arrival=1)])
    core.add([replace(builders.sequence("tuned", arrival=2), adapter="sql")])
    core.add([replace(builders.sequence("tuned2", arrival=3), adapter="sql")])
    tick(core)
    assert {s.request_id for s in core.workers["w1"].running.values()} == {"tuned", "tuned2"}
    drain(core)


def test_what_was_preempted_moves_to_where_there_is_room() -> None:
    core = builders.scheduler(workers=0)
    core.add_worker("w0", builders.limits(num_blocks=8))
    sequences = [builders.sequence(f"r{i}", 8, 20, i) for i in range(2)]
    for sequence in sequences:
        core.add([sequence])
    tick(core)
    core.add_worker("w1", builders.limits(num_blocks=8))
    core.explain = Explain()
    while not core.counters.preemptions:
        tick(core)
    while any(s.status is not Status.RUNNING for s in sequences):
        tick(core)
    assert core.counters.moves == 1
    assert {s.worker for s in sequences} == {"w0", "w1"}
    (moved,) = [d for d in core.explain.decisions if d.reason is Reason.MOVED]
    assert moved.detail == "from w0 to w1"
    drain(core)


def test_running_ones_move_to_an_empty_worker_a_bounded_number_of_times() -> None:
    """A new worker joins a busy one: some move, no ping-pong, and all end right."""
    core = builders.scheduler(workers=1, num_blocks=400, max_num_seqs=16, token_budget=64)
    sequences = [builders.sequence(f"r{i}", 4, 120, i) for i in range(12)]
    for sequence in sequences:
        core.add([sequence])
    for _ in range(6):
        tick(core, seconds=0.02)
    core.add_worker("w1", builders.limits(num_blocks=400, max_num_seqs=16, token_budget=64))
    for _ in range(40):
        tick(core, seconds=0.02)
    loads = sorted(len(worker.running) for worker in core.workers.values())
    assert core.counters.moves >= 3
    assert loads[1] - loads[0] <= 5, "until what a move gains no longer pays for it"
    before = core.counters.moves
    for _ in range(40):
        tick(core, seconds=0.02)
    assert core.counters.moves == before, "once balanced, nobody moves"
    assert max(sequence.num_moves for sequence in sequences) <= 2
    drain(core)
    assert all(len(sequence.output) == 120 for sequence in sequences)


def test_a_long_sequence_stays_when_moving_costs_more_than_it_gains() -> None:
    """verl#6533: rebalancing that throws away long prefixes makes everything slower."""
    core = builders.scheduler(workers=1, num_blocks=4000, max_model_len=16_000, max_num_seqs=16, token_budget=8000)
    for index in range(6):
        core.add([builders.sequence(f"r{index}", 1200, 20, index)])
    for _ in range(3):
        tick(core)
    core.add_worker("w1", builders.limits(num_blocks=4000, max_model_len=16_000))
    drain(core)
    assert core.counters.moves == 0


def test_the_budget_follows_the_tpot_target() -> None:
    """Chunked prefill beside decodes is cut so that the step is foreseen to hold the target; it never stops."""

    def prefill_tokens(target_s: float) -> int:
        core = builders.scheduler(num_blocks=4000, max_model_len=16_000, token_budget=512, max_in_flight=1)
        core.add([replace(builders.sequence("decoding", 4, 200, 0), slo=Slo(0.0, target_s))])
        model = core.workers["w0"].model
        for tokens in (1, 64, 128, 256, 512) * 8:  # a step takes 10 ms and 1 ms for every token
            model.observe(Features(tokens, 1, tokens, tokens), 0.010 + 0.001 * tokens)
        tick(core)
        core.add([builders.sequence("long", 4000, 2, 1)])
        plan = core.schedule("w0")
        assert plan is not None
        return plan.num_tokens - 1

    assert prefill_tokens(0.0) == 511, "no target: the operator's limit"
    assert 75 <= prefill_tokens(0.1) <= 85, "0.9 x 100 ms leaves 80 ms"
    assert prefill_tokens(0.001) == builders.limits().block_size, "a block at least"


def test_the_model_of_step_time_learns() -> None:
    core = builders.scheduler()
    model = core.workers["w0"].model
    for step in range(300):
        tokens, sequences, attended = 1 + step * 37 % 500, 1 + step % 50, step * 911 % 60_000
        model.observe(
            Features(tokens, sequences, attended, attended), 0.004 + 2e-5 * tokens + 1e-4 * sequences + 1e-8 * attended
        )
    for tokens, sequences, attended in ((1, 1, 10), (400, 30, 30_000)):
        want = 0.004 + 2e-5 * tokens + 1e-4 * sequences + 1e-8 * attended
        assert abs(model.predict(Features(tokens, sequences, attended, attended)) - want) < 0.05 * want


def test_explain_tells_why_and_is_bounded() -> None:
    core = builders.scheduler(order="priority", max_num_seqs=1, max_in_flight=1)
    core.explain = Explain(size=50)
    core.add([builders.sequence("low", 4, 30, 0)])
    tick(core)
    core.add([builders.sequence("later", 4, 4, 1)])
    tick(core)
    core.add([replace(builders.sequence("high", 4, 4, 2), priority=1)])
    tick(core)
    reasons = {decision.reason for decision in core.explain.of("low")}
    assert {Reason.PLACED, Reason.ADMITTED, Reason.SCHEDULED, Reason.PREEMPTED} <= reasons
    (gave_way,) = [d for d in core.explain.of("low") if d.reason is Reason.PREEMPTED]
    assert "high comes first" in gave_way.detail
    assert any(d.reason is Reason.NO_WORKER for d in core.explain.of("later"))
    drain(core)
    assert len(core.explain.decisions) <= 50


def test_moves_under_way_are_counted_so_that_they_do_not_overshoot() -> None:
    """Redis is slow: nobody arrives for a while, and no more leave than should."""
    core = builders.scheduler(workers=1, num_blocks=400, max_num_seqs=16, token_budget=64)
    for index in range(12):
        core.add([builders.sequence(f"r{index}", 4, 120, index)])
    for _ in range(4):
        tick(core)
    core.add_worker("w1", builders.limits(num_blocks=400, max_num_seqs=16, token_budget=64))
    moving = []
    for _ in range(12):
        while core.schedule("w0") is not None:
            pass
        moving += core.take_moving()
        core.apply("w0", builders.outcome(core.workers["w0"].in_flight[0]))
    assert 2 <= len(moving) <= 6
    for sequence in moving:
        core.resume(sequence, sequence.output)
    drain(core)
    assert max(sequence.num_moves for sequence in moving) == 1


def test_what_fits_nowhere_is_in_nobody_s_way() -> None:
    core = builders.scheduler(num_blocks=8, block_size=4)
    core.add([builders.sequence("huge", 40, 40, 0)])
    core.add([builders.sequence("small", 4, 2, 1)])
    tick(core)
    assert [s.request_id for s in core.workers["w0"].running.values()] == ["small"]
    core.abort("huge")
    drain(core)


def test_explain_tells_of_a_spent_budget() -> None:
    """One decodes and one prompt takes what is left of the step's eight tokens: the third could start, but for them."""
    core = builders.scheduler(token_budget=8, max_in_flight=1)
    core.explain = Explain()
    core.add([builders.sequence("decodes", 7, 5, 0)])
    tick(core)
    core.add([builders.sequence("fills", 7, 2, 1)])
    core.add([builders.sequence("waits", 3, 2, 2)])
    tick(core)
    assert Reason.NO_BUDGET in {decision.reason for decision in core.explain.of("waits")}
    drain(core)
