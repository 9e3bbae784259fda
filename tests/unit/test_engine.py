"""The scheduler's engine: what it asks of the journal, and when it forgets."""

from dataclasses import dataclass, field

from services.common.journal import Crash, FenceAnswer, FencedChoice
from services.common.request import GenerateRequest, SamplingParams
from services.scheduler.core import invariants
from services.scheduler.core.request import FinishReason, Status
from services.scheduler.core.step import StepPlan
from services.scheduler.engine import MAX_CRASHES, MAX_STALLS, Assignment, Engine, PublishOutcome
from tests import builders


@dataclass
class Link:
    plans: list[StepPlan] = field(default_factory=list)
    added: list[Assignment] = field(default_factory=list)
    closed: bool = False

    def send(self, plan: StepPlan, added: list[Assignment]) -> None:
        self.plans.append(plan)
        self.added += added

    def close(self) -> None:
        self.closed = True


@dataclass
class Asked:
    finishes: list[tuple[str, list[int], FinishReason]] = field(default_factory=list)
    recoveries: list[tuple[str, list[int]]] = field(default_factory=list)
    crashes: list[Crash] = field(default_factory=list)

    def finish(self, request_id: str, choices: list[int], reason: FinishReason) -> None:
        self.finishes.append((request_id, choices, reason))

    def recover(self, request_id: str, choices: list[int], crash: Crash = Crash.NONE) -> None:
        self.recoveries.append((request_id, choices))
        self.crashes.append(crash)

    @property
    def is_idle(self) -> bool:
        return True


def fence(
    *choices: tuple[int, tuple[int, ...], str | None], aborted: bool = False, crashes: int | None = None
) -> FenceAnswer:
    return FenceAnswer(aborted, tuple(FencedChoice(*choice) for choice in choices), crashes)


class Bench:
    """An engine with one worker."""

    def __init__(self, **limits: int) -> None:
        self.journal = Asked()
        self.engine = Engine(builders.scheduler(workers=0), self.journal)
        self.limits = builders.limits(**limits)
        self.connect()

    def connect(self) -> None:
        self.link = Link()
        self.engine.on_worker("w0", self.link, self.limits)

    def request(self, max_tokens: int = 3, n: int = 1, name: str = "r", **state: bool) -> None:
        request = GenerateRequest(name, "m", ((1, 2, 3),), SamplingParams(max_tokens=max_tokens), n)
        self.engine.on_request(request, fence(*[(1, (), None)] * n, **state))
        self.engine.pump()

    def result(self) -> None:
        plan = self.engine.core.workers["w0"].in_flight[0]
        self.engine.on_result("w0", builders.outcome(plan))
        self.engine.pump()

    def acknowledge(self, assignment: Assignment, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.engine.on_outcome(PublishOutcome(assignment.item.sequence_id, "ok", reason))
        self.engine.pump()

    def assert_idle(self) -> None:
        assert not self.engine.records
        assert not self.engine._assigned
        while self.engine.core.workers["w0"].in_flight:
            self.result()
        invariants.check_idle(self.engine.core)


def test_a_request_is_forgotten_only_when_its_finish_is_in_the_journal() -> None:
    bench = Bench()
    bench.request(n=2)
    for _ in range(3):
        bench.result()
    assert "r" in bench.engine.records
    bench.acknowledge(bench.link.added[0])
    assert "r" in bench.engine.records
    bench.acknowledge(bench.link.added[1])
    bench.assert_idle()


def test_a_finish_that_was_reported_but_not_published_is_not_lost_with_its_worker() -> None:
    bench = Bench()
    bench.request(max_tokens=2)
    bench.result()
    bench.result()
    assert bench.engine.records["r"].sequences[0].status is Status.ENDED
    bench.engine.on_worker_lost("w0")
    assert bench.journal.recoveries == [("r", [0])]
    bench.connect()
    bench.engine.on_recovered("r", [0], fence((2, (7,), None)))
    bench.engine.pump()
    assert bench.link.added[0].attempt == 2
    assert bench.link.added[0].item.sequence.output == [7], "it goes on from the journal's end"
    bench.result()
    bench.acknowledge(bench.link.added[0])
    bench.assert_idle()


def test_the_journal_wins_when_a_publish_differs() -> None:
    bench = Bench()
    bench.request(max_tokens=5)
    bench.result()
    first = bench.link.added[0].item.sequence_id
    bench.engine.on_outcome(PublishOutcome(first, "differs", None))
    assert bench.journal.recoveries == [("r", [0])]
    bench.engine.on_recovered("r", [0], fence((2, (9, 9), None)))
    while len(bench.link.added) < 2:
        bench.result()  # plans that were under way when it was suspended
    assert bench.link.added[1].item.sequence.output == [9, 9]
    bench.engine.on_outcome(PublishOutcome(first, "stale", None))
    assert len(bench.journal.recoveries) == 1, "what the old assignment still says is for nobody"
    bench.engine.on_abort("r")
    bench.engine.on_finished("r", [0])
    bench.assert_idle()


def test_abort_frees_blocks_at_once_and_in_every_state() -> None:
    bench = Bench()
    bench.request(max_tokens=50, n=3)
    bench.engine.on_abort("r")
    assert bench.engine.core.workers["w0"].pool.num_used == 0
    bench.engine.on_abort("r")
    bench.engine.on_finished("r", [0, 1, 2])
    bench.request(name="flagged", aborted=True)
    assert bench.journal.finishes[-1] == ("flagged", [0], FinishReason.ABORT)
    bench.engine.on_finished("flagged", [0])
    bench.request(name="lost", max_tokens=50)
    bench.engine.on_worker_lost("w0")
    bench.engine.on_abort("lost")
    bench.connect()
    bench.engine.on_recovered("lost", [0], fence((2, (), None), aborted=True))
    bench.engine.on_finished("lost", [0])
    bench.assert_idle()


def test_what_fits_nowhere_is_ended_once_the_fleet_is_known() -> None:
    bench = Bench(num_blocks=4, block_size=4)
    bench.request(max_tokens=100)
    assert not bench.journal.finishes, "a larger worker may still connect"
    bench.engine.end_impossible()
    assert bench.journal.finishes == [("r", [0], FinishReason.ERROR)]
    bench.engine.on_finished("r", [0])
    bench.assert_idle()


def test_what_crashes_its_worker_alone_is_ended() -> None:
    bench = Bench()
    bench.request(max_tokens=50)
    for crashes in range(1, MAX_CRASHES + 1):
        bench.engine.on_worker_lost("w0")
        assert bench.journal.crashes[-1] is Crash.ALONE
        bench.connect()
        bench.engine.on_recovered("r", [0], fence((crashes + 1, (), None), crashes=crashes))
        bench.engine.pump()
    assert bench.journal.finishes == [("r", [0], FinishReason.ERROR)]
    bench.engine.on_finished("r", [0])
    bench.assert_idle()


def test_a_crash_in_company_is_tried_in_halves_and_a_lone_bystander_is_not_held_responsible() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.request(name=name, max_tokens=50)
        bench.result()
    bench.engine.on_worker_lost("w0")
    assert bench.journal.crashes == [Crash.SHARED] * 3
    for name in ("a", "b", "c"):
        bench.engine.on_recovered(name, [0], fence((2, (7,), None), crashes=0))
    bench.connect()
    bench.engine.pump()
    together = [{i.sequence.request_id for i in plan.scheduled} for plan in bench.link.plans]
    assert together[0] == {"a", "b"}, "the first half"
    bench.result()
    while len(bench.link.plans) < 5:
        bench.result()
    others = [{i.sequence.request_id for i in plan.scheduled} for plan in bench.link.plans]
    assert {"c"} in others, "the second half, apart"
    assert others[-1] == {"a", "b", "c"}, "all are cleared"
    assert bench.engine.core.counters.trials == 2
    for name in ("a", "b", "c"):
        bench.engine.on_abort(name)
        bench.engine.on_finished(name, [0])
    bench.assert_idle()


def test_an_idle_workers_loss_makes_nobody_a_suspect() -> None:
    bench = Bench()
    bench.request(max_tokens=1)
    bench.result()
    bench.engine.on_worker_lost("w0")
    assert bench.journal.crashes == [Crash.NONE]
    bench.connect()
    bench.engine.on_recovered("r", [0], fence((2, (7,), "length")))
    bench.assert_idle()


def test_tokens_that_never_go_into_the_journal_end_the_request() -> None:
    bench = Bench()
    bench.request(max_tokens=50)
    for attempt in range(2, MAX_STALLS + 3):
        bench.engine.on_outcome(PublishOutcome(bench.link.added[-1].item.sequence_id, "stale", None))
        bench.engine.on_recovered("r", [0], fence((attempt, (), None)))
        while bench.engine.core.workers["w0"].in_flight:
            bench.result()
            if bench.link.added[-1].attempt == attempt:
                break
    assert bench.journal.finishes == [("r", [0], FinishReason.ERROR)]
    bench.engine.on_finished("r", [0])
    bench.assert_idle()


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    bench = Bench()
    request = GenerateRequest("r", "m", ((1, 2, 3),), SamplingParams(max_tokens=50))
    bench.engine.on_request(request, fence((1, (), None)), deadline_s=10.0)
    bench.engine.pump()
    bench.engine.expire(9.0)
    assert not bench.journal.finishes
    bench.engine.expire(11.0)
    bench.engine.expire(12.0)
    assert bench.journal.finishes == [("r", [0], FinishReason.DEADLINE)]
    bench.engine.on_finished("r", [0])
    bench.assert_idle()


def test_a_trial_begins_also_when_its_last_suspect_turns_out_to_have_ended() -> None:
    bench = Bench()
    bench.request(max_tokens=50, n=2)
    bench.result()
    bench.result()
    bench.engine.on_worker_lost("w0")
    bench.connect()
    bench.engine.pump()
    assert not bench.link.plans
    bench.engine.on_recovered("r", [0, 1], fence((2, (7,), None), (2, (7, 8), "stop"), crashes=0))
    bench.engine.pump()
    assert bench.link.plans, "the other choice goes on"
    bench.engine.on_abort("r")
    bench.engine.on_finished("r", [0])
    bench.assert_idle()


def test_a_trial_is_given_to_a_worker_that_can_hold_it() -> None:
    bench = Bench()
    bench.request(max_tokens=50)
    bench.engine.on_worker_lost("w0")
    small, large = Link(), Link()
    bench.engine.on_worker("small", small, builders.limits(num_blocks=2))
    bench.engine.on_recovered("r", [0], fence((2, (), None), crashes=1))
    bench.engine.pump()
    assert not small.plans
    bench.engine.on_worker("w0", large, bench.limits)
    bench.link = large
    bench.engine.pump()
    assert large.plans
    bench.engine.on_abort("r")
    bench.engine.on_finished("r", [0])
    bench.assert_idle()
