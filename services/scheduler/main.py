"""A scheduler process: takes the lead, then wires core, engine, journal and workers together."""

import asyncio
import logging
import sys
import uuid
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from services.common import log as logs
from services.common import metrics, process, telemetry
from services.common.errors import ConfigurationError
from services.common.health import Health
from services.common.redis.store import CONNECTION_ERRORS, Store, connect
from services.common.settings import parse
from services.scheduler.adapters.discovery import Discovery, RedisDiscovery
from services.scheduler.adapters.leadership import Leadership, RedisLeadership
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

if TYPE_CHECKING:
    from services.common.telemetry.tracing import Tracing
    from services.scheduler.adapters.spans import QueueSpans

log = logging.getLogger(__name__)

HAND_OVER_S = 5.0


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


def make_cluster(settings: SchedulerSettings, store: Store, identity: str) -> tuple[Discovery, Leadership]:
    """Where workers are found and who elects. Raises ConfigurationError."""
    discovery: Discovery = RedisDiscovery(store)
    leadership: Leadership = RedisLeadership(store, identity)
    if "kubernetes" in (settings.discovery, settings.leadership):
        try:
            from services.scheduler.adapters import kubernetes
        except ImportError as error:
            raise ConfigurationError(f"--discovery kubernetes needs the 'kubernetes' extra: {error}") from None
        api = kubernetes.api_client()
        if settings.discovery == "kubernetes":
            discovery = kubernetes.EndpointSlices(api, settings.namespace, settings.worker_selector)
        if settings.leadership == "kubernetes":
            lease = kubernetes.Lease(api, settings.namespace, settings.lease, identity, settings.lease_seconds)
            leadership = kubernetes.LeaseLeadership(lease, store, identity)
    return discovery, leadership


def make_spans(tracing: "Tracing") -> "QueueSpans":
    from services.scheduler.adapters.spans import QueueSpans  # imports OpenTelemetry

    return QueueSpans(tracing)


async def serve(settings: SchedulerSettings) -> None:
    """Stand by, then lead until a signal, or until the lead is lost. Raises ConfigurationError."""
    stop = process.Stop()
    process.on_signals(stop)
    registry = CollectorRegistry()
    health = Health()
    metrics.serve(registry, health, settings.metrics_host, settings.metrics_port)
    tracing = telemetry.configure(settings, "scheduler", settings.name, registry)
    store = Store(connect(settings.redis_url.get_secret_value()), settings.partition)
    identity = f"{settings.name}-{uuid.uuid4().hex[:12]}"
    discovery, leadership = make_cluster(settings, store, identity)
    beat = process.heartbeat(store, "schedulers", identity, lambda: "{}", health)
    background = [asyncio.create_task(beat), asyncio.create_task(health.run())]
    health.started = True
    try:
        with closing(TraceRecorder(settings.record, settings.record_steps)) as recorder:
            epoch = await unless_stopped(stop, leadership)
            if epoch is None:
                return
            log.info("leading with epoch %d: %s, %s", epoch, settings.policy, settings.order)
            core = make_core(settings, epoch)
            journal = RedisJournal(store, epoch)
            slo = Slo(settings.ttft_target_ms / 1000, settings.tpot_target_ms / 1000)
            waits = make_spans(tracing) if tracing else None
            engine = Engine(core, journal, settings.depth, slo, recorder, waits)
            workers = Workers(
                store, discovery, engine, epoch, settings.max_num_seqs, settings.token_budget, settings.silence
            )
            expose(engine, registry)
            await lead(stop, engine, journal, workers, leadership, epoch)
    finally:
        await process.end(*background)
        await asyncio.to_thread(discovery.close)
        await store.aclose()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


async def unless_stopped(stop: process.Stop, leadership: Leadership) -> int | None:
    """The epoch, once the lead is ours; None if this process was asked to end before."""
    taking, stopping = asyncio.ensure_future(leadership.take()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([taking, stopping], return_when=asyncio.FIRST_COMPLETED)
        return taking.result() if taking.done() else None
    finally:
        await process.end(taking, stopping)


async def lead(
    stop: process.Stop, engine: Engine, journal: RedisJournal, workers: Workers, leadership: Leadership, epoch: int
) -> None:
    """Until a signal, which hands the lead over. Raises LeadLost."""

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
            leadership.keep(epoch),
            drain=hand_over,
        )
        await leadership.resign()
    except CONNECTION_ERRORS as error:
        log.warning("could not resign: %s", error)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `orca scheduler`."""
    try:
        settings = parse(SchedulerSettings, sys.argv[1:] if argv is None else argv, "orca scheduler")
    except ConfigurationError as error:
        sys.stderr.write(f"orca scheduler: {error.message}\n")
        return 2
    logs.configure(settings.name, settings.log_level, settings.log_format)
    return process.run(serve(settings), "orca scheduler")


if __name__ == "__main__":
    sys.exit(main())
