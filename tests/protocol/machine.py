"""The rules by which hypothesis drives a world."""

import os
import random
import sys

from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.protocol import oracle
from tests.protocol.lab import Lab
from tests.protocol.world import WORKERS, Event, Loss

NIGHTLY = os.environ.get("ORCA_PROPERTY") == "nightly"
PICK = st.integers(0, 11)
SEED = st.integers(0, 1 << 16)
Request = tuple[tuple[int, ...], int, int, tuple[str, ...]]
# A prompt of few different tokens, so that prefixes are shared; choices; most tokens; stop strings.
REQUEST: st.SearchStrategy[Request] = st.tuples(
    st.lists(st.integers(1000, 1001), min_size=1, max_size=9).map(tuple),
    st.integers(1, 2),
    st.integers(1, 8),
    st.sampled_from([(), oracle.STOP]),
)
ALL_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)


def profile(max_examples: int, shrinks: bool = True) -> settings:
    """shrinks: look for the shortest sequence of rules that fails; without, the first one will do."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=60 if NIGHTLY else 40,
        derandomize=True,
        database=None,
        deadline=None,
        phases=ALL_PHASES if shrinks else (Phase.generate,),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


class ProtocolMachine(RuleBasedStateMachine):
    """Two leaders, two workers, a client; every Redis call, message and step is an event of its own.

    The world checks what must hold after every publish that Redis executes, and so after every event.
    """

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab
        self.world = lab.open_world()

    @initialize(first=REQUEST, second=REQUEST, seed=SEED, times=st.integers(0, 60))
    def begin(self, first: Request, second: Request, seed: int, times: int) -> None:
        """No fault hits before there is something to hit."""
        self.world.request(*first)
        self.world.request(*second)
        self.go_far(seed, times)

    @rule(request=REQUEST)
    def request(self, request: Request) -> None:
        self.world.request(*request)

    @rule(picks=st.lists(PICK, min_size=1, max_size=8))
    def go(self, picks: list[int]) -> None:
        """Whatever can happen by itself, one event after the other, in any order."""
        self._go(picks)

    @rule(seed=SEED, times=st.integers(1, 80))
    def go_far(self, seed: int, times: int) -> None:
        """The same for longer, so that faults meet requests at every stage. Few draws: examples have a size limit."""
        rng = random.Random(seed)
        self._go([rng.randrange(1 << 16) for _ in range(times)])

    @rule(seed=SEED, times=st.integers(1, 60), slow=st.sampled_from(["w0", "w1", "L"]))
    def go_without(self, seed: int, times: int, slow: str) -> None:
        """The same while the Redis calls of one worker, or of the leaders, stand still: its steps pile up."""
        rng = random.Random(seed)
        self._go([rng.randrange(1 << 16) for _ in range(times)], f"execute {slow}")

    @rule(slow=st.sampled_from(WORKERS), elects=st.booleans(), seed=SEED, times=st.integers(1, 40))
    def isolate(self, slow: str, elects: bool, seed: int, times: int) -> None:
        """A worker's steps pile up behind a slow call, which is answered; all of them are in its next call when its
        sequences are given to another: that call will come late.
        """
        self.go_without(seed, times, slow)
        for stage in (f"execute {slow}", f"answer {slow}"):
            event = next((event for event in self.world.enabled() if event.label.startswith(stage)), None)
            if event is not None:
                self._happen(event)
        if elects:
            self.world.elect()
        elif slow in self.world.linked():
            self.world.break_link(self.world.linked().index(slow), loses_plans=False)
        self.go_without(seed + 1, times, slow)

    @rule(seed=SEED, times=st.integers(1, 40))
    def go_losing(self, seed: int, times: int) -> None:
        """The same over bad connections to Redis: every fourth event loses a call, before or after its execution."""
        rng = random.Random(seed)
        for _ in range(times):
            if rng.random() < 0.25 and self.world.lossy_calls():
                self.world.lose_call(rng.randrange(1 << 16), rng.choice(list(Loss)))
            else:
                self._go([rng.randrange(1 << 16)])

    def _go(self, picks: list[int], but: str = "none") -> None:
        for pick in picks:
            events = [event for event in self.world.enabled() if not event.label.startswith(but)]
            if events:
                self._happen(events[pick % len(events)])

    def _happen(self, event: Event) -> None:
        note(f"    {event.label}")
        self.world.happen(event)

    @rule(name=st.sampled_from(["L", "w0", "w1", "client"]), times=st.integers(1, 15))
    def rush(self, name: str, times: int) -> None:
        """One actor's affairs proceed, while the others' stand still."""
        for _ in range(times):
            event = next((event for event in self.world.enabled() if name in event.label), None)
            if event is not None:
                self._happen(event)

    @precondition(lambda self: self.world.observer.seen)
    @rule(index=PICK)
    def abort(self, index: int) -> None:
        self.world.abort(index)

    @rule()
    def client_reads(self) -> None:
        self.world.read()

    @precondition(lambda self: self.world.lossy_calls())
    @rule(index=PICK, loss=st.sampled_from(Loss))
    def lose_call(self, index: int, loss: Loss) -> None:
        self.world.lose_call(index, loss)

    @precondition(lambda self: self.world.open_wires())
    @rule(index=PICK, loses_plans=st.booleans())
    def break_link(self, index: int, loses_plans: bool) -> None:
        self.world.break_link(index, loses_plans)

    @rule(index=st.integers(0, 1), leader=st.booleans())
    def kill(self, index: int, leader: bool) -> None:
        if not leader:
            self.world.kill_worker(index)
        elif self.world.leaders:
            self.world.kill_leader(index)

    @rule()
    def elect(self) -> None:
        self.world.elect()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # not after a failure: it would be told of instead
                self.world.finish()
        finally:
            self.lab.close_world(self.world)
