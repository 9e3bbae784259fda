"""A scheduler with workers that really keep KV: every token depends on all that is read through the block tables, so
a block reused too early, a wrong prefix or a bad copy changes the text."""

import random
from functools import cache

from services.common.request import SamplingParams
from services.scheduler.adapters.codec import result_from_proto
from services.scheduler.core import invariants
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import FinishReason, Sequence, Slo, Status
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepResult
from services.worker.adapters.codec import result_to_proto
from services.worker.core.plan import BatchRow, SequenceState
from services.worker.executor.fake import FakeExecutor
from tests import builders
from tests.harness import LocalWorker

VOCABULARY = 64
EOS = (1, 2, 3)
BLOCK_SIZE = 4
TENANTS = ("", "a", "b")
SLOS = (Slo(), Slo(1.0, 0.1), Slo(5.0, 0.0))


def executor(num_blocks: int, num_host_blocks: int = 0) -> FakeExecutor:
    return FakeExecutor(num_blocks, BLOCK_SIZE, VOCABULARY, first_token=0, num_host_blocks=num_host_blocks)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, seed=5)


@cache
def expected(prompt: tuple[int, ...], choice: int, max_tokens: int) -> tuple[int, ...]:
    """What this sequence gives alone, token by token, on a device of its own."""
    alone = executor(-(-(len(prompt) + max_tokens) // BLOCK_SIZE))
    tokens = list(prompt)
    state = SequenceState(1, "r", choice, 0, 1, 1, params(max_tokens), len(prompt), tokens)
    state.block_table = list(range(alone.num_blocks))
    while True:
        row = BatchRow(state, state.num_computed, len(tokens) - state.num_computed)
        token = alone.execute([row], [[]])[0].token_id
        assert token is not None
        state.num_computed = len(tokens)
        tokens.append(token)
        if token in EOS or len(tokens) == len(prompt) + max_tokens:
            return tuple(tokens[len(prompt) :])


class Fleet:
    """Drives a scheduler as engine and workers would."""

    def __init__(
        self,
        policy: str,
        order: str = "fcfs",
        workers: int = 1,
        num_blocks: int = 14,
        stages: int = 1,
        num_host_blocks: int = 0,
        prefix_cache: bool = True,
        max_moves: int = 2,
    ) -> None:
        self.limits = {
            "num_blocks": num_blocks,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 4,
            "token_budget": 8,
            "stages": stages,
            "num_host_blocks": num_host_blocks,
        }
        config = SchedulerConfig(prefix_cache=prefix_cache, max_moves=max_moves)
        self.scheduler: Scheduler = builders.scheduler(policy, 0, order, config)
        self.workers: dict[str, LocalWorker] = {}
        for index in range(workers):
            self._connect(f"w{index}")
        self.arrivals = 0
        self.live: dict[tuple[str, int], Sequence] = {}
        self.params: dict[str, SamplingParams] = {}
        self.finished: list[Sequence] = []
        self.recovering: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.num_copied = 0

    def _connect(self, name: str) -> None:
        device = executor(self.limits["num_blocks"], self.limits["num_host_blocks"])
        self.workers[name] = LocalWorker(device, EOS)
        self.scheduler.add_worker(name, builders.limits(**self.limits))

    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        n: int = 1,
        tenant: str = "",
        priority: int = 0,
        slo: Slo = SLOS[0],
    ) -> None:
        self.arrivals += 1
        name = f"r{self.arrivals}"
        sequences = []
        for choice in range(n):
            sequence = Sequence(name, choice, prompt, max_tokens, self.arrivals, tenant, priority, self.arrivals, slo)
            sequence.expected_output = len(expected(prompt, choice, max_tokens))
            sequences.append(sequence)
        if all(self.scheduler.can_ever_fit(sequence) for sequence in sequences):
            self.params[name] = params(max_tokens)
            self.scheduler.add(sequences)
            self.live |= {(name, sequence.choice): sequence for sequence in sequences}

    def add_random(self, rng: random.Random) -> None:
        prefix = tuple((i * 7 + rng.randrange(2)) % VOCABULARY for i in range(rng.choice((0, 0, 8, 12))))
        prompt = prefix + tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 14)))
        self.add(
            prompt,
            rng.randrange(1, 20),
            n=rng.choice((1, 1, 1, 3)),
            tenant=rng.choice(TENANTS),
            priority=rng.randrange(3),
            slo=rng.choice(SLOS),
        )

    def plan(self, name: str) -> bool:
        plan = self.scheduler.schedule(name)
        self.recovering += self.scheduler.take_moving()
        if plan is None:
            return False
        invariants.check_plan(self.scheduler, plan)
        self.workers[name].receive(plan, self.params)
        return True

    def pump(self) -> None:
        """Plans for whoever can take some, as the engine does it. Must come to an end."""
        core = self.scheduler
        core.place()
        for _ in range(1000):
            if not core.awake:
                return
            name, _ = core.awake.popitem()
            while self.plan(name):
                self.check()
        raise AssertionError("the pump does not end")

    def result(self, name: str, rng: random.Random) -> bool:
        worker = self.workers[name]
        output = worker.run_next()
        if output is None:
            return False
        assert not output.error
        proto = result_to_proto(output).result
        result = result_from_proto(proto)
        planned = self.scheduler.workers[name].in_flight[0]
        scheduled = {item.sequence_id: item.num_tokens for item in planned.scheduled}
        ran = {item.sequence_id: item.num_computed for item in proto.sequences}
        assert ran.items() <= scheduled.items(), "the worker ran what was not decided"
        for sequence_id in scheduled.keys() - ran.keys():  # ended meanwhile, by its own rules
            assert sequence_id not in worker.batch.sequences
        seconds = 0.01 * sum(ran.values()) * rng.random()
        self.ended += self.scheduler.apply(name, StepResult(result.number, result.tokens, result.finished, seconds))
        if rng.random() < 0.7:  # the finish is acknowledged at once, or later, or after the worker is lost
            self.acknowledge()
        return True

    def acknowledge(self) -> None:
        """The finishes are in the journal."""
        for sequence in self.ended:
            if sequence.status is Status.ENDED:
                self._finish(sequence)
        self.ended = []

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, FinishReason.STOP, tell_worker=True)
        if self.live.pop((sequence.request_id, sequence.choice), None):
            self.finished.append(sequence)
            right = expected(tuple(sequence.prompt), sequence.choice, sequence.max_tokens)
            assert tuple(sequence.output) == right[: len(sequence.output)], "the text is not what it is alone"
        self._forget(sequence.request_id)

    def _forget(self, request_id: str) -> None:
        if all(s.status is Status.FINISHED for s in self.scheduler.sequences(request_id)):
            self.scheduler.forget(request_id)

    def stop_string(self, rng: random.Random) -> None:
        """A worker finds a stop string where text is made: it drops the sequence, and says so later."""
        for worker in self.workers.values():
            states = [state for state in worker.batch.sequences.values() if state.decoding and not state.ended]
            if states:
                state = rng.choice(states)
                state.ended = "stop"
                sequence = self.live.get((state.request_id, state.choice))
                if sequence is not None and sequence.sequence_id == state.sequence_id and rng.random() < 0.5:
                    self._finish(sequence)
                elif sequence is not None and sequence.sequence_id == state.sequence_id:
                    self.suspend(sequence)  # as when a publish was refused
                return

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        assert self.scheduler.abort(request_id) == []
        for key in [key for key in self.live if key[0] == request_id]:
            del self.live[key]
        self._forget(request_id)

    def lose(self, name: str, rng: random.Random) -> None:
        """A worker's process ends, for a reason or without; or only its session breaks, and it offers what it has."""
        self.recovering += self.scheduler.remove_worker(name, crashed=rng.random() < 0.7)
        assert all(sequence.status is not Status.RUNNING for sequence in self.recovering)
        if rng.random() < 0.5:
            self._connect(name)
        else:
            worker = self.workers[name]
            worker.plans.clear()
            worker.batch.sequences.clear()
            self.scheduler.add_worker(name, builders.limits(**self.limits), dict(worker.batch.contents))

    def operate(self, name: str, rng: random.Random) -> None:
        """An operator empties a worker, or lets it go on, or moves something."""
        worker = self.scheduler.workers[name]
        if worker.draining:
            self.scheduler.undrain(name)
        elif rng.random() < 0.5:
            self.scheduler.drain(name)
            assert not worker.running, "a worker that drains runs nothing"
        elif worker.running:
            sequence = rng.choice(list(worker.running.values()))
            self.scheduler.send_away(sequence, rng.choice([None, *self.scheduler.workers]))
        self.recovering += self.scheduler.take_moving()

    def suspend(self, sequence: Sequence) -> None:
        if sequence.status is not Status.RECOVERING:
            self.scheduler.suspend(sequence)
            self.recovering.append(sequence)

    def recover(self, rng: random.Random) -> None:
        """The fences are raised: all that recovers continues, from a journal that may lack the last token."""
        for sequence in self.recovering:
            if sequence.status is Status.RECOVERING:
                over = sequence.output and (sequence.output[-1] in EOS or len(sequence.output) == sequence.max_tokens)
                keep = len(sequence.output) - (over or rng.random() < 0.3)
                self.scheduler.resume(sequence, sequence.output[: max(0, keep)])
        self.recovering = []

    def check(self) -> None:
        invariants.check(self.scheduler)

    def drain(self, rng: random.Random) -> None:
        for name, worker in self.scheduler.workers.items():
            if worker.draining:
                self.scheduler.undrain(name)
        for _ in range(20_000):
            self.recover(rng)
            moved = False
            for name in self.scheduler.workers:
                self.pump()
                self.check()
                moved |= self.result(name, rng)
                self.check()
            self.acknowledge()
            self.pump()
            if not self.live and not any(w.in_flight for w in self.scheduler.workers.values()):
                break
            assert moved or self.recovering, "something waits or runs, but no step was made"
        assert not self.live, "the system did not drain"
        for name in self.scheduler.workers:  # let go of what was aborted last
            while self.plan(name):
                self.result(name, rng)
        invariants.check_idle(self.scheduler)
        assert not any(worker.batch.sequences for worker in self.workers.values()), "a worker holds on to a sequence"
