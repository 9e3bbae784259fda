"""A worker process: wires executor, step loop, publisher and session together."""

import asyncio
import gc
import json
import logging
import os
import sys
import time
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry

from services.common import log as logs
from services.common import metrics, process, rpc
from services.common.errors import ConfigurationError
from services.common.models.resolve import ModelFiles, resolve_model
from services.common.redis.store import CONNECTION_ERRORS, Store, connect
from services.common.settings import parse
from services.common.text.detokenizer import Detokenizer, TokenBytes
from services.worker.adapters.publisher import Publisher
from services.worker.adapters.session import Identity, SessionServer
from services.worker.core.input_batch import InputBatch
from services.worker.core.plan import StepOutput
from services.worker.core.publishing import PublishBook
from services.worker.engine import StepLoop
from services.worker.executor.base import Executor
from services.worker.executor.fake import NUM_SALTS, FakeExecutor
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# The step loop's thread, between two steps, must not wait long for what the event loop's is at.
SWITCH_S = 0.0002
FAKE_BLOCKS = 4096
DRAIN_S = 15.0
GIVE_AWAY_S = 8.0


def make_executor(settings: WorkerSettings, files: ModelFiles, incarnation: str) -> Executor:
    """The executor that the settings name. Raises ConfigurationError."""
    if settings.executor == "fake":
        blocks = settings.kv_blocks or FAKE_BLOCKS
        return FakeExecutor(
            blocks,
            settings.block_size,
            files.vocab_size,
            settings.fake_step_ms / 1000,
            salt=zlib.crc32(incarnation.encode()) % NUM_SALTS if settings.fake_salted else 0,
            num_host_blocks=settings.host_blocks,
        )
    try:
        import torch

        from services.worker.executor.torch_executor import TorchExecutor
        from services.worker.model.loader import pick_dtype
    except ImportError as error:
        raise ConfigurationError(f"the torch executor needs the 'worker' extra: {error}") from None
    threads = settings.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    name = settings.device if settings.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: torch sees no CUDA device")
    device = torch.device(name)
    executor = TorchExecutor(
        files,
        pick_dtype(settings.dtype, device),
        device,
        settings.kv_blocks,
        settings.block_size,
        settings.host_blocks,
        kernels=settings.kernels,
        quantize=settings.quantize,
        threads=threads,
        gpu_memory_utilization=settings.gpu_memory_utilization,
    )
    if executor.has_own_threads:
        torch.set_num_threads(1)  # torch's would spin on the cores that the kernels want
    # What a model's modules consist of is never garbage; looking through it in a step costs milliseconds.
    gc.collect()
    gc.freeze()
    return executor


async def given_away(batch: InputBatch, session: SessionServer) -> None:
    """Return once no sequence is left here, or nobody to give one to."""
    while batch.sequences and session.connected:  # noqa: ASYNC110 - the step loop's thread changes it
        await asyncio.sleep(0.01)


def observe(gauges: metrics.WorkerMetrics, step: StepOutput) -> None:
    """Count one step."""
    if not step.num_rows:
        return
    gauges.steps.inc()
    gauges.step_duration.observe((step.finished_ns - step.started_ns) / 1e9)
    gauges.step_sequences.observe(len(step.outputs))
    gauges.step_tokens.observe(step.num_rows)
    if step.idle_ns:
        gauges.step_idle.observe(step.idle_ns / 1e9)


async def serve(settings: WorkerSettings) -> None:
    """Run the worker until a signal; what was computed is published before it ends."""
    sys.setswitchinterval(SWITCH_S)
    stop = process.Stop()
    process.on_signals(stop)
    store = Store(connect(settings.redis_url.get_secret_value()), settings.partition)
    files = resolve_model(settings.model)
    log.info("loading %s", files.name)
    incarnation = uuid.uuid4().hex
    executor = await asyncio.to_thread(make_executor, settings, files, incarnation)
    identity = Identity(
        name=settings.name,
        incarnation=incarnation,
        model=files.name,
        max_in_flight=settings.max_in_flight,
        max_model_len=files.max_model_len,
        vocab_size=files.vocab_size,
    )
    registry = CollectorRegistry()
    gauges = metrics.WorkerMetrics(registry, settings.name)
    loop = asyncio.get_running_loop()
    table = TokenBytes(files.tokenizer_json)

    def on_step(step: StepOutput) -> None:
        if not step.repeated:
            publisher.put(step)
        loop.call_soon(told, step)  # clients wait for what is published, the next step has its plan already

    def told(step: StepOutput) -> None:
        session.send_step(step)
        if not step.repeated:
            observe(gauges, step)

    def emit(step: StepOutput) -> None:
        loop.call_soon_threadsafe(on_step, step)

    failed: asyncio.Future[None] = loop.create_future()

    def on_failure(error: Exception) -> None:
        loop.call_soon_threadsafe(failed.set_exception, error)

    batch = InputBatch(executor.num_blocks, executor.block_size, files.eos_token_ids, executor.num_host_blocks)
    steps = StepLoop(executor, batch, emit, on_failure, keep_results=settings.max_in_flight)
    session = SessionServer(identity, steps)
    book = PublishBook(new_decoder=lambda: Detokenizer(table).push)

    def on_published(published: list[StepOutput]) -> None:
        steps.published(published)
        now = time.monotonic_ns()
        for step in published:
            gauges.publish.observe((now - step.finished_ns) / 1e9)

    publisher = Publisher(store, settings.name, book, session.send_outcomes, on_published)
    server, port = await rpc.serve(session.session, settings.host, settings.port)
    document = json.dumps(
        {
            "address": f"{settings.advertise_host or settings.host}:{port}",
            "incarnation": identity.incarnation,
            "model": identity.model,
            "num_blocks": executor.num_blocks,
            "block_size": executor.block_size,
            "max_model_len": identity.max_model_len,
            "vocab_size": identity.vocab_size,
        }
    )
    gauges.count(lambda: executor.num_model_calls, lambda: publisher.num_round_trips)
    metrics.serve(registry, settings.metrics_port)
    steps.start()
    log.info("%s is listening on port %d with %d blocks of KV", settings.name, port, executor.num_blocks)

    async def drain() -> None:
        """Give away what runs here, then take no more plans; what was computed is published."""
        if not stop.at_once:
            session.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(given_away(batch, session), GIVE_AWAY_S)
        await server.stop(grace=0.5)
        steps.stop()
        await asyncio.to_thread(steps.join, DRAIN_S)
        await publisher.drained()

    beat = process.heartbeat(store, "workers", settings.name, lambda: document)
    try:
        await process.run_until(stop, publisher.run(), beat, failed, drain=lambda: asyncio.wait_for(drain(), DRAIN_S))
        await store.register("workers", settings.name, "", 0)
    except (*CONNECTION_ERRORS, TimeoutError) as error:
        log.warning("drain is not complete: %s", error or "Redis did not answer in time")
    finally:
        await store.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `orca worker`."""
    try:
        settings = parse(WorkerSettings, sys.argv[1:] if argv is None else argv, "orca worker")
    except ConfigurationError as error:
        sys.stderr.write(f"orca worker: {error.message}\n")
        return 2
    logs.configure(settings.name, settings.log_level)
    return process.run(serve(settings), "orca worker")


if __name__ == "__main__":
    sys.exit(main())
