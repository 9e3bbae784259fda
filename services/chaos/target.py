"""The system under test, on this machine: who runs, hitting them, and whether everything is as before."""

import asyncio
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import orjson

from services.chaos import proc
from services.chaos.faults import KILL, RESTART, STOP, Fault
from services.common.errors import ConfigurationError
from services.common.redis.store import CONNECTION_ERRORS, MAX_CONNECTIONS, Store, connect

SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP, RESTART: signal.SIGTERM}
IDLE_METRICS = ("orca_requests_running", "orca_requests_waiting", 'orca_kv_blocks{state="used"}')
# How much more a process may hold than the most that one of its kind held before the first fault.
SLACK_FILES, SLACK_THREADS = 12, 8
FAILPOINTS = "ORCA_FAILPOINTS"


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is held when nothing is under way: the most per kind of process, and the keys that never expire."""

    held: dict[str, proc.Held]
    keys: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Hit:
    """A signal that was sent, or a failpoint that was passed. at: on the monotonic clock."""

    name: str
    pid: int
    at: float


def service_of(name: str) -> str:
    """worker-3 -> worker."""
    return name.rsplit("-", 1)[0]


class LocalTarget:
    """An `orca up` of this user. Raises ConfigurationError if the folder is not one of a running system."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._children = folder / "children.json"
        variables = self._variables()
        redis_url = variables.get("ORCA_REDIS_URL", "")
        if not redis_url:
            raise ConfigurationError(f"--data-dir {folder}: no `orca up` of this user runs there")
        self._redis_port = urlsplit(redis_url).port or 6379
        self._redis = connect(redis_url)
        self.store = Store(self._redis, variables.get("ORCA_PARTITION", "default"))
        self.is_fake = variables.get("ORCA_EXECUTOR") == "fake"
        self.model_spec = variables.get("ORCA_MODEL", "")
        self.poison = int(variables.get("ORCA_FAKE_POISON_TOKEN") or -1)
        self.failpoints = Path(variables[FAILPOINTS]) if variables.get(FAILPOINTS) else None
        self._http = httpx.AsyncClient(base_url=url, timeout=5, limits=httpx.Limits(max_keepalive_connections=0))
        self._leader = ""
        self._leaders: dict[str, int] = {}  # process ids of those that have led, by identity

    async def aclose(self) -> None:
        await self._http.aclose()
        await self.store.aclose()

    def _variables(self) -> dict[str, str]:
        """Settings of the children, as they were told by environment: nothing has to be given twice."""
        merged: dict[str, str] = {}
        for name, pid in sorted(self.pids().items()):
            if service_of(name) in ("worker", "scheduler"):
                merged |= proc.environment(pid)
        return merged

    # -- who runs

    def pids(self) -> dict[str, int]:
        """Process ids by name, as `orca up` last wrote them."""
        try:
            return cast(dict[str, int], orjson.loads(self._children.read_bytes()))
        except (OSError, orjson.JSONDecodeError):
            return {}

    async def model(self) -> str:
        """The name under which the model is served."""
        response = await self._http.get("/v1/models")
        return cast(str, response.json()["data"][0]["id"])

    async def leader(self) -> tuple[str, int] | None:
        """Name and process of the leading scheduler; while Redis is away, the last that we know of.

        A dead leader holds its lease for some seconds, and its name is soon that of another process, which does not
        lead: None then.
        """
        with suppress(*CONNECTION_ERRORS):
            self._leader = await self.store.leader() or self._leader
        name = self._leader.rsplit("-", 1)[0]
        pid = self.pids().get(name)
        if pid is None or self._leaders.setdefault(self._leader, pid) != pid:
            return None
        return name, pid

    async def pick(self, fault: Fault, rng: random.Random) -> tuple[str, int] | None:
        """The process to hit: the leader, or any of the kind that is alive."""
        if fault.target == "leader":
            leader = await self.leader()
            found = [leader] if leader else []
        else:
            found = [(name, pid) for name, pid in sorted(self.pids().items()) if name.startswith(fault.process)]
        alive = [(name, pid) for name, pid in found if proc.state(pid) not in ("", "Z")]
        return rng.choice(alive) if alive else None

    # -- hitting

    async def hit(self, fault: Fault, rng: random.Random) -> Hit | None:
        """Send a fault's signal now; None if there was nobody to send it to."""
        picked = await self.pick(fault, rng)
        if picked is None:
            return None
        name, pid = picked
        return Hit(name, pid, time.monotonic()) if self.signal(pid, SIGNALS[fault.kind]) else None

    @staticmethod
    def signal(pid: int, number: int) -> bool:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def arm(self, fault: Fault) -> None:
        """Set a failpoint for whichever process of its kind passes it first. The file appears whole."""
        assert self.failpoints is not None
        self.failpoints.mkdir(parents=True, exist_ok=True)
        for old in self.failpoints.glob(f"{fault.where}.hit-*"):
            old.unlink()
        draft = self.failpoints / f".{fault.where}"
        draft.write_text(f"{fault.process} {fault.kind} {fault.skip}\n")
        draft.rename(self.failpoints / fault.where)

    def disarm(self, fault: Fault) -> None:
        if self.failpoints is not None:
            (self.failpoints / fault.where).unlink(missing_ok=True)

    def hit_at(self, fault: Fault) -> Hit | None:
        """Who passed an armed failpoint, if somebody has."""
        assert self.failpoints is not None
        for path in self.failpoints.glob(f"{fault.where}.hit-*"):
            pid = int(path.name.rsplit("-", 1)[1])
            names = {number: name for name, number in self.pids().items()}
            return Hit(names.get(pid, fault.process), pid, time.monotonic())
        return None

    def continue_all(self) -> None:
        """Nobody stays stopped, whatever happened to the run that stopped them."""
        for pid in self.pids().values():
            if proc.state(pid) == "T":
                self.signal(pid, signal.SIGCONT)

    # -- as before

    async def not_ready(self) -> list[str]:
        """What is missing for the system to be whole; nothing if it is."""
        pids = self.pids()
        states = {name: proc.state(pid) or "gone" for name, pid in pids.items()}
        reasons = [f"{name} is {state}" for name, state in states.items() if state in ("gone", "T", "Z")]
        try:
            response = await self._http.get("/health/ready")
            if response.status_code != 200:
                reasons.append(f"not ready: {response.text}")
            if not await self.store.leader():
                reasons.append("nobody leads")
            routers = len(await self.store.registered("routers"))
            want = sum(service_of(name) == "router" for name in pids)
            if routers < want:
                reasons.append(f"{routers} of {want} routers")
            workers = (await self.metrics()).get("orca_workers", [0])
            want = sum(service_of(name) == "worker" for name in pids)
            if max(workers) < want:
                reasons.append(f"{max(workers):g} of {want} workers")
        except (httpx.HTTPError, *CONNECTION_ERRORS) as error:
            reasons.append(f"no answer: {error or type(error).__name__}")
        return reasons

    async def metrics(self) -> dict[str, list[float]]:
        """All samples of /metrics by name with labels: one per process that says it."""
        text = (await self._http.get("/metrics")).raise_for_status().text
        samples: dict[str, list[float]] = defaultdict(list)
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name].append(float(value))
        return dict(samples)

    async def busy(self) -> list[str]:
        """What is still under way by the system's own counts."""
        try:
            metrics = await self.metrics()
            reasons = []
            for name in IDLE_METRICS:
                values = metrics.get(name)
                if values is None:
                    reasons.append(f"{name} is not told")
                elif sum(values):
                    reasons.append(f"{name} {sum(values):g}")
            requests = await self.store.num_requests()
            if requests:
                reasons.append(f"{requests} entries in requests")
        except (httpx.HTTPError, *CONNECTION_ERRORS) as error:
            return [f"no answer: {error or type(error).__name__}"]
        return reasons

    async def baseline(self) -> Baseline:
        """To be taken when idle, after work of the usual size: pools and thread pools have grown then."""
        most: dict[str, proc.Held] = {}
        for name, pid in self.pids().items():
            now = proc.held(pid, self._redis_port)
            if now is not None:
                before = most.get(service_of(name), now)
                files, threads = max(before.files, now.files), max(before.threads, now.threads)
                most[service_of(name)] = proc.Held(files, threads, max(before.to_redis, now.to_redis))
        return Baseline(most, await self._lasting_keys())

    async def leaks(self, baseline: Baseline) -> list[str]:
        """What is held now and was not then."""
        reasons = []
        for name, pid in self.pids().items():
            now, then = proc.held(pid, self._redis_port), baseline.held.get(service_of(name))
            if now is None or then is None:
                continue
            if now.files > then.files + SLACK_FILES:
                what = proc.open_files(pid)
                reasons.append(f"{name} has {now.files} open files besides Redis, not about {then.files}: {what}")
            if now.threads > then.threads + SLACK_THREADS:
                reasons.append(f"{name} has {now.threads} threads, not about {then.threads}")
            if service_of(name) != "valkey" and now.to_redis > MAX_CONNECTIONS + SLACK_FILES:
                reasons.append(f"{name} has {now.to_redis} connections to Redis")
        try:
            more = await self._lasting_keys() - baseline.keys
        except CONNECTION_ERRORS as error:
            return [*reasons, f"Redis: {error}"]
        if more:
            names = ", ".join(sorted(key.decode(errors="replace") for key in list(more)[:5]))
            reasons.append(f"{len(more)} new keys in Redis that never expire: {names}")
        return reasons

    async def _lasting_keys(self) -> frozenset[bytes]:
        redis: Any = self._redis
        keys = [key async for key in redis.scan_iter(count=1000)]
        pipeline = redis.pipeline(transaction=False)
        for key in keys:
            pipeline.ttl(key)
        ttls = await pipeline.execute()
        return frozenset(key for key, ttl in zip(keys, ttls, strict=True) if ttl == -1)


async def nothing_within(reasons: Callable[[], Awaitable[list[str]]], within_s: float, settled: int = 1) -> list[str]:
    """Ask until there are no reasons, `settled` times in a row; the last ones if that does not happen in time."""
    deadline = time.monotonic() + within_s
    clear = 0
    while True:
        found = await reasons()
        clear = 0 if found else clear + 1
        if clear >= settled or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)
