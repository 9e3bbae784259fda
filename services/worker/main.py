"""A worker process: wires executor, step loop, publisher and session together."""

import asyncio
import json
import logging
import os
import sys
import time
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from services.common import log as logs
from services.common import metrics, process, rpc, telemetry
from services.common.errors import ConfigurationError
from services.common.health import Health
from services.common.models.resolve import ModelFiles, resolve_model
from services.common.redis.store import CONNECTION_ERRORS, Store, connect
from services.common.settings import parse
from services.common.text.detokenizer import Detokenizer, TokenBytes
from services.common.text.grammar import Grammars
from services.worker.adapters.publisher import Publisher
from services.worker.adapters.session import Identity, SessionServer
from services.worker.core.input_batch import InputBatch
from services.worker.core.plan import StepOutput
from services.worker.core.publishing import PublishBook
from services.worker.engine import StepLoop
from services.worker.executor.base import Executor
from services.worker.executor.fake import NUM_SALTS, FakeExecutor
from services.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from services.common.telemetry.tracing import Tracing
    from services.worker.adapters.spans import PhaseSpans

log = logging.getLogger(__name__)

# The step loop's thread, between two steps, must not wait long for what the event loop's is at.
SWITCH_S = 0.0002
FAKE_BLOCKS = 4096


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
    return executor


def make_spans(tracing: "Tracing", worker: str) -> "PhaseSpans":
    from services.worker.adapters.spans import PhaseSpans  # imports OpenTelemetry

    return PhaseSpans(tracing, worker)


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


class Worker:
    """Step loop, publisher and session, wired. Made on the event loop that it works on."""

    def __init__(
        self,
        settings: WorkerSettings,
        files: ModelFiles,
        executor: Executor,
        store: Store,
        gauges: metrics.WorkerMetrics,
        spans: "PhaseSpans | None",
        incarnation: str,
    ) -> None:
        self._settings, self._executor, self._gauges, self._spans = settings, executor, gauges, spans
        self._loop = asyncio.get_running_loop()
        self._identity = Identity(
            name=settings.name,
            incarnation=incarnation,
            model=files.name,
            max_in_flight=settings.max_in_flight,
            max_model_len=files.max_model_len,
            vocab_size=files.vocab_size,
        )
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._grammars = Grammars(files.tokenizer_json, files.vocab_size, files.eos_token_ids)
        self._batch = InputBatch(
            executor.num_blocks,
            executor.block_size,
            files.eos_token_ids,
            executor.num_host_blocks,
            self._grammars.constrain,
        )
        self._steps = StepLoop(executor, self._batch, self._emit, self._on_failure, keep_results=settings.max_in_flight)
        self._session = SessionServer(self._identity, self._steps)
        table = TokenBytes(files.tokenizer_json)
        book = PublishBook(new_decoder=lambda: Detokenizer(table).push)
        self._publisher = Publisher(store, settings.name, book, self._session.send_outcomes, self._on_published)
        gauges.count(lambda: executor.num_model_calls, lambda: self._publisher.num_round_trips)

    # -- from the step loop's thread

    def _emit(self, step: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._on_step, step)

    def _on_failure(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self.failed.set_exception, error)

    # -- on the event loop

    def _on_step(self, step: StepOutput) -> None:
        if not step.repeated:
            self._publisher.put(step)
        self._loop.call_soon(self._tell, step)  # clients wait for what is published, the next step has its plan already

    def _tell(self, step: StepOutput) -> None:
        self._session.send_step(step)
        if not step.repeated:
            observe(self._gauges, step)
            if self._spans is not None:
                self._spans.on_step(step)

    def _on_published(self, published: list[StepOutput]) -> None:
        self._steps.published(published)
        now = time.monotonic_ns()
        for step in published:
            self._gauges.publish.observe((now - step.finished_ns) / 1e9)

    async def start(self) -> None:
        """Listen for the scheduler, and be ready for plans."""
        settings = self._settings
        self._server, port = await rpc.serve(self._session.session, settings.host, settings.port)
        self._address = f"{settings.advertise_host or settings.host}:{port}"
        self._steps.start()
        blocks = self._executor.num_blocks
        log.info("%s is listening on port %d with %d blocks of KV", settings.name, port, blocks)

    def document(self) -> str:
        """What it registers."""
        identity = self._identity
        return json.dumps(
            {
                "address": self._address,
                "incarnation": identity.incarnation,
                "model": identity.model,
                "num_blocks": self._executor.num_blocks,
                "block_size": self._executor.block_size,
                "max_model_len": identity.max_model_len,
                "vocab_size": identity.vocab_size,
            }
        )

    async def publish(self) -> None:
        """Publish what the steps give. Ends by cancellation."""
        await self._publisher.run()

    async def drain(self, at_once: bool) -> None:
        """Give away what runs here, then take no more plans; what was computed is published. Raises TimeoutError."""
        async with asyncio.timeout(self._settings.drain):
            if not at_once:
                self._session.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._given_away(), self._settings.drain / 2)
            await self._server.stop(grace=0.5)
            self._steps.stop()
            await asyncio.to_thread(self._steps.join, self._settings.drain)
            await self._publisher.drained()
            self._grammars.close()

    async def _given_away(self) -> None:
        """Return once no sequence is left here, or nobody to give one to."""
        while self._batch.sequences and self._session.connected:  # noqa: ASYNC110 - the step loop's thread changes it
            await asyncio.sleep(0.01)


async def serve(settings: WorkerSettings) -> None:
    """Run the worker until a signal; what was computed is published before it ends."""
    sys.setswitchinterval(SWITCH_S)
    stop = process.Stop()
    process.on_signals(stop)
    registry = CollectorRegistry()
    health = Health()
    metrics.serve(registry, health, settings.metrics_host, settings.metrics_port)
    turning = asyncio.create_task(health.run())
    tracing = telemetry.configure(settings, "worker", settings.name, registry)
    store = Store(connect(settings.redis_url.get_secret_value()), settings.partition)
    files = await asyncio.to_thread(resolve_model, settings.model)
    log.info("loading %s", files.name)
    incarnation = uuid.uuid4().hex
    executor = await asyncio.to_thread(make_executor, settings, files, incarnation)
    gauges = metrics.WorkerMetrics(registry, settings.name)
    spans = make_spans(tracing, settings.name) if tracing else None
    worker = Worker(settings, files, executor, store, gauges, spans, incarnation)
    await worker.start()
    health.started = True

    async def drain() -> None:
        health.draining = True
        await worker.drain(stop.at_once)

    beat = process.heartbeat(store, "workers", settings.name, worker.document, health)
    try:
        await process.run_until(stop, worker.publish(), beat, worker.failed, drain=drain)
        await store.register("workers", settings.name, "", 0)
    except (*CONNECTION_ERRORS, TimeoutError) as error:
        log.warning("drain is not complete: %s", error or "Redis did not answer in time")
    finally:
        await process.end(turning)
        await store.aclose()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `orca worker`."""
    try:
        settings = parse(WorkerSettings, sys.argv[1:] if argv is None else argv, "orca worker")
    except ConfigurationError as error:
        sys.stderr.write(f"orca worker: {error.message}\n")
        return 2
    logs.configure(settings.name, settings.log_level, settings.log_format)
    return process.run(serve(settings), "orca worker")


if __name__ == "__main__":
    sys.exit(main())
