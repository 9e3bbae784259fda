"""The publish / fence / recover protocol under interleavings drawn at random, and proof that the check can fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test

from services.common.journal import Crash, FenceAnswer, FencedChoice
from services.scheduler.adapters.redis_journal import RedisJournal
from services.scheduler.engine import Engine
from tests.protocol.lab import LIBRARY, Lab
from tests.protocol.machine import NIGHTLY, ProtocolMachine, profile
from tests.protocol.observer import Violation
from tests.protocol.world import Config
from tests.servers import valkey

EXAMPLES = 5_000 if NIGHTLY else 80
DEFAULT, JOURNALS_ONLY = Config(), Config(drains=False)
# A mutant must be found well within these.
MUTANT_EXAMPLES = 600

FENCE = "if known.epoch ~= item.epoch or known.attempt[c] ~= item.attempt then"
INDEX = "if known.fin[c] or (item.index < next_index and #ids > 0) then"
GAP = "if item.index > next_index then return 'gap:' .. next_index end"
RAISED = "redis.call('HINCRBY', state, 'attempt:' .. c, 1)"
FINISH = {INDEX: "if item.index < next_index and #ids > 0 then"}
MUTANTS = {
    "no fence": {FENCE: "if false then"},
    "attempts are not compared": {FENCE: "if known.epoch ~= item.epoch then"},
    "attempts are not raised": {RAISED: ""},
    "any index will do": {INDEX: "if known.fin[c] then", GAP: ""},
}
if NIGHTLY:  # takes some hundreds of examples
    MUTANTS["epochs are not compared"] = {FENCE: "if known.attempt[c] ~= item.attempt then"}


@contextmanager
def opened(url: str, library: str = LIBRARY, config: Config = DEFAULT) -> Iterator[Lab]:
    lab = Lab(url, library, config)
    try:
        yield lab
    finally:
        lab.close()
        print(lab.tally)


def mutated(changes: dict[str, str]) -> str:
    library = LIBRARY
    for shipped, mutant in changes.items():
        assert library.count(shipped) == 1, f"the library has changed: {shipped}"
        library = library.replace(shipped, mutant)
    return library


def expect_failure(lab: Lab, kind: type[AssertionError]) -> None:
    with pytest.raises(kind) as caught:
        run_state_machine_as_test(lambda: ProtocolMachine(lab), settings=profile(MUTANT_EXAMPLES, shrinks=False))
    print(f"found in example {lab.tally.examples - 1}: {caught.value}")


def test_protocol(redis_url: str) -> None:
    with opened(redis_url) as lab:
        run_state_machine_as_test(lambda: ProtocolMachine(lab), settings=profile(EXAMPLES))


def test_session_of_an_older_leader_that_dials_last(redis_url: str) -> None:
    """The newer leader, with as many plans in flight as it may have, must not lose its session."""
    with opened(redis_url) as lab:
        world = lab.open_world()
        try:
            world.elect()
            world.request((1000,), choices=1, max_tokens=8, stop=())
            world.happen_all_but("L1 dials", "step")
            for event in [event for event in world.enabled() if event.label.startswith("L1 dials")]:
                world.happen(event)
            world.happen_all_but("L1 dials", "L2", "step")
            world.drain()
            world.check_end()
        finally:
            lab.close_world(world)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_finds_mutated_library(mutant: str, tmp_path: Path) -> None:
    with valkey(tmp_path) as url, opened(url, mutated(MUTANTS[mutant]), JOURNALS_ONLY) as lab:
        expect_failure(lab, Violation)


def test_finds_finishes_taken_twice(tmp_path: Path) -> None:
    """Seen mostly when the lost finish of an aborted request is sent again, which most worlds do at their end."""
    with valkey(tmp_path) as url, opened(url, mutated(FINISH)) as lab:
        expect_failure(lab, Violation)


def test_finds_recovery_from_memory(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that goes on from what it believes to be there, and raises no fence."""

    async def from_memory(self: RedisJournal, engine: Engine, request_id: str, choices: list[int], _: Crash) -> None:
        record = engine.records.get(request_id)
        if record is not None:
            remembered = zip(record.attempts, record.sequences, strict=True)
            fenced = tuple(FencedChoice(attempt, tuple(s.output), None) for attempt, s in remembered)
            engine.on_recovered(request_id, choices, FenceAnswer(False, fenced))

    monkeypatch.setattr(RedisJournal, "_recover", from_memory)
    with opened(redis_url) as lab:
        expect_failure(lab, AssertionError)
