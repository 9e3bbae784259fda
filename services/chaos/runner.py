"""Runs: the undisturbed one, then the same requests under faults, compared; then everything must be as before."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from services.chaos import requests
from services.chaos.checker import Model, Verdict, check_journal, compare
from services.chaos.client import Client, Outcome, Patience
from services.chaos.faults import schedule
from services.chaos.injector import Injected, Injector
from services.chaos.report import MAX_DETAILS, FaultReport, RunReport
from services.chaos.requests import Request
from services.chaos.target import Baseline, LocalTarget, nothing_within
from services.common.errors import ConfigurationError
from services.common.journal import JournalEntry
from services.common.models.resolve import ModelFiles
from services.common.redis.store import CONNECTION_ERRORS
from services.common.text.detokenizer import TokenBytes
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import TextEncoder
from services.router.core.chat import ChatEncoder, Conversation

READY_S, IDLE_S = 60.0, 90.0
POISON_S = 180.0
JOURNAL_S = 30.0
SETTLED = 3  # looks in a row: the answers come from different routers
EVENTS_IN_FLIGHT_S = 0.5  # what was under way when a process was hit still arrives


@dataclass(frozen=True, slots=True)
class Options:
    """mixes: so many different ones; the undisturbed run of each is made once."""

    streams: int = 64
    only: str = ""
    salted: bool = False
    mixes: int = 4
    most_tokens: int = 120
    patience: Patience = field(default_factory=Patience)


class Prompts:
    """The token ids of a request's prompt, as a router makes them."""

    def __init__(self, files: ModelFiles) -> None:
        encoder = TextEncoder(files.tokenizer_json)
        self._raw = encoder.encode_raw
        self._chat = ChatEncoder(files, encoder).encode
        grammars = Grammars(files.tokenizer_json, files.vocab_size, files.eos_token_ids)
        self.model = Model(TokenBytes(files.tokenizer_json), files.vocab_size, files.eos_token_ids, grammars)

    def encode(self, request: Request) -> list[int]:
        if request.is_chat:
            return self._chat(Conversation(request.body["messages"])).ids
        prompt = request.body["prompt"]
        return self._raw(prompt) if isinstance(prompt, str) else list(prompt)


class Runner:
    """prompts: needed in salted runs only. say: progress, a line each."""

    def __init__(
        self, target: LocalTarget, options: Options, model: str, prompts: Prompts | None, say: Callable[[str], None]
    ) -> None:
        self._target = target
        self._options = options
        self._model = model
        self._prompts = prompts
        self._say = say
        self._undisturbed: dict[int, tuple[list[Request], list[Outcome]]] = {}
        self._before: Baseline | None = None

    # -- undisturbed

    async def prepare(self) -> None:
        """The first undisturbed run; what is held after it is what may be held later. Raises ConfigurationError."""
        missing = await nothing_within(self._target.not_ready, READY_S)
        if missing:
            raise ConfigurationError(f"the system is not whole: {'; '.join(missing)}")
        for seed in range(2):  # with more than one mix twice: all routers and pools have been used then
            await self._requests(seed)
        busy = await nothing_within(self._target.busy, IDLE_S, SETTLED)
        if busy:
            raise ConfigurationError(f"the system has other work: {'; '.join(busy)}")
        self._before = await self._target.baseline()

    async def _requests(self, seed: int) -> tuple[list[Request], list[Outcome]]:
        """A run's requests, and what becomes of them undisturbed."""
        options = self._options
        number = seed % options.mixes
        if number not in self._undisturbed:
            mix = requests.mix(number, options.streams, self._model, options.salted, options.most_tokens)
            outcomes = await self._quiet(mix)
            if not self._options.salted:
                mix, outcomes = await self._with_stops(number, mix, outcomes)
            self._undisturbed[number] = mix, outcomes
        return self._undisturbed[number]

    async def _with_stops(
        self, seed: int, mix: list[Request], outcomes: list[Outcome]
    ) -> tuple[list[Request], list[Outcome]]:
        """Stop strings that really occur can be chosen only when the texts are known."""
        rng = random.Random(f"stops {seed}")
        mix, outcomes = list(mix), list(outcomes)
        changed = []
        for index, request in enumerate(mix):
            stop = requests.choose_stop(outcomes[index].choice(0).pieces, rng) if request.wants_stop else None
            if stop is not None:
                mix[index] = request.with_stop(stop, requests.NEVER)
                changed.append(index)
        again = await self._quiet([mix[index] for index in changed])
        for index, outcome in zip(changed, again, strict=True):
            outcomes[index] = outcome
        return mix, outcomes

    async def _quiet(self, mix: Sequence[Request]) -> list[Outcome]:
        async with self._clients(mix) as clients:
            outcomes = list(await asyncio.gather(*(client.run() for client in clients)))
        for request, outcome in zip(mix, outcomes, strict=True):
            problems = [*outcome.anomalies, outcome.hung, outcome.failed]
            if any(problems):
                what = "; ".join(filter(None, problems))
                raise ConfigurationError(f"even undisturbed, request {request.index} does not end well: {what}")
        return outcomes

    @asynccontextmanager
    async def _clients(self, mix: Sequence[Request]) -> AsyncIterator[list[Client]]:
        """New keys each time: a known one would be answered from what is kept of the run before."""
        run = uuid.uuid4().hex
        # A kept connection would mostly be one to a router that has gone since.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._target.url, limits=limits) as http:
            yield [
                Client(
                    http,
                    request,
                    f"chaos-{run}-{request.index}" if request.leave_after is None else "",
                    self._options.patience,
                )
                for request in mix
            ]

    # -- disturbed

    async def run(self, seed: int) -> RunReport:
        """One run under the faults of its seed."""
        mix, expected = await self._requests(seed)
        gone = requests.leavers(seed, max(1, len(mix) // 16), self._model, len(mix))
        faults = schedule(seed, self._options.only, self._target.failpoints is not None)
        report = RunReport(seed, len(mix))
        started = time.monotonic()
        async with self._clients([*mix, *gone]) as clients:
            injector = Injector(self._target, faults, clients[: len(mix)], seed)
            await injector.arm()
            running = asyncio.create_task(injector.run())
            try:
                verdicts = await self._all(clients, mix, expected)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                injected = injector.finish()
        report.took_s = time.monotonic() - started
        outcomes = [client.outcome for client in clients[: len(mix)]]
        report.faults = [_fault_report(one, outcomes, started) for one in injected]
        _count(report, mix, outcomes, verdicts)
        await self._settle(report)
        self._say(report.line())
        return report

    async def poison(self, seed: int) -> RunReport:
        """One request kills each worker that runs it. It must fail in bounded time; nobody else may notice."""
        mix, expected = await self._requests(seed)
        mix, expected = mix[:-1], expected[:-1]
        bad = requests.poisoned(len(mix), self._model, self._target.poison)
        report = RunReport(seed, len(mix) + 1, "poison")
        started = time.monotonic()
        async with self._clients([*mix, bad]) as clients:
            verdicts = await self._all(clients, mix, expected)
        outcomes = [client.outcome for client in clients]
        report.took_s = time.monotonic() - started
        verdicts.append(_poison_verdict(outcomes[-1]))
        _count(report, [*mix, bad], outcomes, verdicts)
        await self._settle(report)
        self._say(report.line())
        return report

    async def _all(
        self, clients: Sequence[Client], mix: Sequence[Request], expected: Sequence[Outcome]
    ) -> list[Verdict]:
        """Verdicts of the streams of `mix`; clients beyond those only run."""
        checks = [
            self._checked(client, request, outcome)
            for client, request, outcome in zip(clients, mix, expected, strict=False)
        ]
        others = asyncio.gather(*(client.run() for client in clients[len(mix) :]))
        verdicts = list(await asyncio.gather(*checks))
        await others
        return verdicts

    async def _checked(self, client: Client, request: Request, expected: Outcome) -> Verdict:
        outcome = await client.run()
        if not self._options.salted:
            return compare(outcome, expected, request)
        assert self._prompts is not None
        # At once: the journal is kept only for a while, and a run may take longer.
        entries = await self._journal(outcome.request_id)
        return check_journal(outcome, request, self._prompts.encode(request), entries, self._prompts.model)

    async def _journal(self, request_id: str) -> list[JournalEntry]:
        """Nothing if Redis does not come back."""
        deadline = time.monotonic() + JOURNAL_S
        while request_id and time.monotonic() < deadline:
            try:
                return await self._target.store.journal(request_id)
            except CONNECTION_ERRORS:
                await asyncio.sleep(0.2)
        return []

    # -- as before

    async def _settle(self, report: RunReport) -> None:
        """Everybody is back, nothing is under way, nobody holds more than before."""
        started = time.monotonic()
        self._target.continue_all()
        missing = await nothing_within(self._target.not_ready, READY_S, SETTLED)
        report.violations += [f"not whole after {READY_S:g} s: {what}" for what in missing]
        busy = await nothing_within(self._target.busy, IDLE_S, SETTLED)
        report.violations += [f"not idle after {IDLE_S:g} s: {what}" for what in busy]
        if self._before is not None:
            before = self._before
            leaks = await nothing_within(lambda: self._target.leaks(before), READY_S)
            report.violations += [f"leak: {what}" for what in leaks]
        report.settle_s = time.monotonic() - started


def _poison_verdict(outcome: Outcome) -> Verdict:
    verdict = Verdict()
    if outcome.hung or outcome.took_s > POISON_S:
        verdict.add("hung", f"the poisoned request: {outcome.hung or f'ended after {outcome.took_s:.0f} s'}")
    elif not outcome.failed:
        verdict.add("changed", "the poisoned request ended well: it was not poisoned")
    return verdict


def _fault_report(injected: Injected, outcomes: Sequence[Outcome], started: float) -> FaultReport:
    fault, hit = injected.fault, injected.hit
    if hit is None:
        return FaultReport(fault.kind, fault.target, fault.where)
    around = [
        end - start
        for outcome in outcomes
        for start, end in outcome.gaps
        if start <= hit.at + EVENTS_IN_FLIGHT_S and end >= hit.at
    ]
    recovery = round(max(around, default=0.0), 3)
    return FaultReport(fault.kind, fault.target, fault.where, hit.name, round(hit.at - started, 3), recovery)


def _count(report: RunReport, mix: Sequence[Request], outcomes: Sequence[Outcome], verdicts: Sequence[Verdict]) -> None:
    for request, outcome, verdict in zip(mix, outcomes, verdicts, strict=True):
        report.reconnects += outcome.num_reconnects
        report.refused += outcome.num_refused
        if verdict.kind is not None:
            report.verdicts[verdict.kind] += 1
            kind, what = next(fault for fault in verdict.faults if fault[0] == verdict.kind)
            more = f" and {len(verdict.faults) - 1} more" if len(verdict.faults) > 1 else ""
            report.violations.append(f"{kind}: request {request.index} ({outcome.request_id}): {what}{more}")
    if len(report.violations) > MAX_DETAILS:
        rest = len(report.violations) - MAX_DETAILS
        report.violations[MAX_DETAILS:] = [f"and {rest} streams more"]
