"""A scheduler process: takes the lead, then wires core, engine, journal and workers together."""

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import closing, suppress

from prometheus_client import CollectorRegistry

from services.common import log as logs
from services.common import metrics, process
from services.common.errors import ConfigurationError
from services.common.failpoints import failpoint
from services.common.redis.store import CONNECTION_ERRORS, Store, connect, until_answered
from services.common.settings import parse
from services.scheduler.adapters.recorder import TraceRecorder
from services.scheduler.adapters.redis_journal import RedisJournal
from services.scheduler.adapters.workers import Workers
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES
from services.scheduler.core.request import Slo
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine import Engine
from services.scheduler.settings import SchedulerSettings

log = logging.getLogger(__name__)

# A lead is renewed every RENEW_S and lapses after its time to live; a standby that sees it lapsed waits CLAIM_S more,
# in which a leader that was only cut off from Redis renews it.
LEAD_TTL_MS = 900
RENEW_S = 0.2
CLAIM_S = 0.3
STANDBY_S = 0.1
HAND_OVER_S = 5.0


class LeadLost(process.ProcessEnded):
    """Another scheduler leads: this process ends, and its supervisor starts it as a standby."""


async def take_lead(store: Store, identity: str) -> int:
    """Wait until the lead is ours; returns the epoch."""
    vacant_since: float | None = None
    said = False
    while True:
        claim = vacant_since is not None and time.monotonic() - vacant_since >= CLAIM_S
        try:
            lead = await store.lead(identity, LEAD_TTL_MS, claim=claim)
        except CONNECTION_ERRORS as error:
            log.log(logging.DEBUG if said else logging.WARNING, "Redis does not answer (%s); trying again", error)
            lead = None
        else:
            if lead is None and not said:
                log.info("another scheduler leads; standing by")
        if isinstance(lead, tuple):
            failpoint("lead.taken")
            await until_answered(store.load_functions)
            return lead[0]
        if lead != "vacant":
            vacant_since = None
        elif vacant_since is None:
            vacant_since = time.monotonic()
        said = True
        await asyncio.sleep(STANDBY_S)


async def keep_lead(store: Store, identity: str, epoch: int) -> None:
    """Renew the lead. Cut off from Redis, go on under the epoch. Raises LeadLost when another has it."""
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            lead = await store.lead(identity, LEAD_TTL_MS, epoch)
        except CONNECTION_ERRORS:
            log.debug("Redis does not answer; going on under epoch %d", epoch)
            continue
        if not isinstance(lead, tuple) or lead[0] != epoch:
            raise LeadLost(f"epoch {epoch} is over")


def expose(engine: Engine, registry: CollectorRegistry) -> None:
    """Gauges that read the core when they are scraped."""
    gauges = metrics.SchedulerMetrics(registry)
    core = engine.core
    gauges.running.set_function(lambda: core.num_running)
    gauges.waiting.set_function(lambda: core.num_waiting)
    gauges.workers.set_function(lambda: len(core.workers))
    gauges.blocks.labels("free").set_function(lambda: sum(w.pool.num_free for w in list(core.workers.values())))
    gauges.blocks.labels("used").set_function(lambda: sum(w.pool.num_used for w in list(core.workers.values())))
    gauges.blocks.labels("cached").set_function(lambda: sum(w.pool.num_cached for w in list(core.workers.values())))
    counters = core.counters
    gauges.count(
        preemptions=lambda: counters.preemptions,
        swaps=lambda: counters.swaps,
        moves=lambda: counters.moves,
        hit_tokens=lambda: counters.hit_tokens,
        recomputed_tokens=lambda: counters.recomputed_tokens,
        trials=lambda: counters.trials,
        recoveries=lambda: engine.num_recovered,
        plans=lambda: engine.num_plans,
    )


def make_core(settings: SchedulerSettings, epoch: int) -> Scheduler:
    """The core that the settings name. Assignment ids begin where no other leader's end."""
    config = SchedulerConfig(prefix_cache=settings.prefix_cache, first_id=epoch << 32)
    return Scheduler(BATCHING_POLICIES[settings.policy](), ORDER_POLICIES[settings.order](), config)


async def serve(settings: SchedulerSettings) -> None:
    """Lead until a signal, or until the lead is lost. Raises ConfigurationError."""
    with closing(TraceRecorder(settings.record, settings.record_steps)) as recorder:
        await lead(settings, recorder)


async def lead(settings: SchedulerSettings, recorder: TraceRecorder) -> None:
    store = Store(connect(settings.redis_url.get_secret_value()), settings.partition)
    identity = f"{settings.name}-{uuid.uuid4().hex[:12]}"
    stop = process.Stop()
    process.on_signals(stop)
    beat = asyncio.create_task(process.heartbeat(store, "schedulers", identity, lambda: "{}"))
    taking = asyncio.create_task(take_lead(store, identity))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([taking, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not taking.done():
        await process.end(taking, beat)
        await store.aclose()
        return
    epoch = taking.result()
    log.info("leading with epoch %d: %s, %s", epoch, settings.policy, settings.order)
    core = make_core(settings, epoch)
    journal = RedisJournal(store, epoch)
    slo = Slo(settings.ttft_target_ms / 1000, settings.tpot_target_ms / 1000)
    engine = Engine(core, journal, settings.depth, slo, recorder)
    workers = Workers(store, engine, epoch, settings.max_num_seqs, settings.token_budget, settings.silence)
    registry = CollectorRegistry()
    expose(engine, registry)
    metrics.serve(registry, settings.metrics_port)

    async def hand_over() -> None:
        """The steps under way end and their tokens are applied; then another may lead."""
        engine.handing_over = True
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                while not engine.is_quiet:  # noqa: ASYNC110 - many things make it so
                    await asyncio.sleep(0.01)

    try:
        await process.run_until(
            stop,
            workers.run(),
            journal.read(engine),
            journal.work(engine),
            journal.watch(engine),
            journal.reap(engine),
            keep_lead(store, identity, epoch),
            drain=hand_over,
        )
        await store.lead(identity, 0)
    except CONNECTION_ERRORS as error:
        log.warning("could not resign: %s", error)
    finally:
        stopping.cancel()
        await process.end(beat)
        await store.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `orca scheduler`."""
    try:
        settings = parse(SchedulerSettings, sys.argv[1:] if argv is None else argv, "orca scheduler")
    except ConfigurationError as error:
        sys.stderr.write(f"orca scheduler: {error.message}\n")
        return 2
    logs.configure(settings.name, settings.log_level)
    return process.run(serve(settings), "orca scheduler")


if __name__ == "__main__":
    sys.exit(main())
