"""The typed client of the function library. The only place, with the router's shelf of files and batches, that names a
Redis key."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, cast
from urllib.parse import unquote

import orjson
from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialWithJitterBackoff

from services.common.admission import (
    LIMIT_NAMES,
    Admission,
    Admitted,
    Allowance,
    Full,
    Joined,
    Mismatch,
    Terms,
    Withdrawn,
)
from services.common.codec import details_from_bytes
from services.common.errors import ConfigurationError
from services.common.journal import (
    Attached,
    Crash,
    FenceAnswer,
    FencedChoice,
    JournalEntry,
    JournalItem,
    Leave,
    PublishItem,
)
from services.common.redis import library

log = logging.getLogger(__name__)

T = TypeVar("T")
LIBRARY = "orca_v1"
SENTINEL = "redis+sentinel://"
MAX_CONNECTIONS = 64
PASSING = ("BUSY", "MISCONF", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "READONLY", "OOM", "LOADING", "TRYAGAIN")
CONNECTION_ERRORS = (redis_errors.ConnectionError, redis_errors.TimeoutError, redis_errors.BusyLoadingError, OSError)


def connect(url: str) -> Redis:
    """A client that retries briefly by itself; the functions are idempotent, so that is safe.

    redis://, rediss:// or unix://, or redis+sentinel://[user:password@]host:port[,host:port...]/service[/database] for
    whoever is the master according to these sentinels. Raises ConfigurationError if the URL is none of them.
    """
    options: dict[str, Any] = {
        "socket_timeout": 10,
        "socket_connect_timeout": 3,
        "health_check_interval": 15,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 2),
        "protocol": 3,
    }
    try:
        if url.startswith(SENTINEL):
            return _master(url, options)
        return Redis.from_pool(
            BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=None, **options)
        )
    except ValueError as error:
        raise ConfigurationError(f"--redis-url: {str(error).splitlines()[0]}") from None


def _master(url: str, options: dict[str, Any]) -> Redis:
    """Raises ValueError."""
    credentials, _, hosts = url.removeprefix(SENTINEL).rpartition("@")
    hosts, _, path = hosts.partition("/")
    service, _, database = path.partition("/")
    addresses = [address.rpartition(":")[::2] for address in hosts.split(",")]
    if not service or not all(host and port.isdigit() for host, port in addresses) or not (database or "0").isdigit():
        raise ValueError(f"expected {SENTINEL}host:port[,host:port]/service[/database]")
    user, _, password = credentials.rpartition(":")
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [(host, int(port)) for host, port in addresses],
        sentinel_kwargs={"socket_timeout": 1, "socket_connect_timeout": 1},
        db=int(database or "0"),
        username=unquote(user) or None,
        password=unquote(password) or None,
        **options,
    )
    return cast(Redis, sentinel.master_for(service, max_connections=MAX_CONNECTIONS * 16))


def _ids(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def parse_entry(request_id: str, entry_id: str, fields: Sequence[tuple[bytes, bytes]]) -> JournalEntry:
    """From the field-value pairs that `publish` wrote."""
    worker, step, items, usage = "", 0, [], None
    for name, value in fields:
        if name == b"@":
            worker, _, number = value.decode().rpartition(":")
            step = int(number)
        elif name == b"$":
            prompt, _, completion = value.partition(b":")
            usage = (int(prompt), int(completion))
        else:
            choice, index, ids, finish = name.decode().split(":")
            items.append(JournalItem(int(choice), int(index), _ids(ids), finish or None, *details_from_bytes(value)))
    return JournalEntry(request_id, entry_id, worker, step, tuple(items), usage)


@contextmanager
def _passing_states() -> Iterator[None]:
    """A server that cannot serve just now (read-only, full, busy) is treated like one that does not answer."""
    try:
        yield
    except redis_errors.ResponseError as error:
        if str(error).startswith(PASSING):
            raise redis_errors.ConnectionError(str(error)) from error
        if isinstance(error, (redis_errors.ReadOnlyError, redis_errors.OutOfMemoryError)):
            raise redis_errors.ConnectionError(str(error)) from error
        raise


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


class Store:
    """One partition's state in Redis. Connection errors pass through as redis exceptions."""

    def __init__(self, redis: Redis, partition: str) -> None:
        self._redis = redis
        self._prefix = f"orca:{{{partition}}}:"
        self.requests_key = self._prefix + "requests"
        self.control_key = self._prefix + "control"

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> bool:
        return bool(await cast(Any, self._redis.ping()))

    async def _call(self, function: str, *args: Any) -> list[Any]:
        name = f"{LIBRARY}_{function}"
        try:
            return await self._fcall(name, args)
        except redis_errors.ResponseError as error:
            if "Function not found" not in str(error):
                raise
        await self.load_functions()
        return await self._fcall(name, args)

    async def _fcall(self, name: str, args: Sequence[Any]) -> list[Any]:
        with _passing_states():
            return cast(list[Any], await cast(Any, self._redis.fcall(name, 1, self.requests_key, *args)))

    async def load_functions(self) -> None:
        """Put this version of the library into Redis, over any other; a leader does when it takes over."""
        with _passing_states():
            await cast(Any, self._redis.function_load(library.source(), replace=True))

    # -- requests

    async def enqueue(self, request_id: str, payload: bytes, terms: Terms) -> Admission:
        """Put a request into the system, within its limits. Again for the same id is no second request."""
        answer = await self._call("enqueue", request_id, payload, terms.document, _terms_to_json(terms))
        match answer[0]:
            case b"ok":
                return Admitted(Allowance(*map(int, answer[1:])) if len(answer) > 1 else None)
            case b"full":
                return Full(LIMIT_NAMES[int(answer[1]) - 1], int(answer[2]))
            case b"joined":
                return Joined(answer[1].decode())
            case b"mismatch":
                return Mismatch()
        return Withdrawn()

    async def fence(
        self, request_id: str, epoch: int, choices: Sequence[int] = (), crash: Crash = Crash.NONE
    ) -> FenceAnswer | str:
        """Raise the fence and read the journal's end in one call; "gone" or "stale" if that cannot be.

        A higher epoch takes every choice; within an epoch the attempts of the named choices are raised.
        crash: the worker that ran it has crashed.
        """
        answer = await self._call("fence", request_id, epoch, ",".join(map(str, choices)), crash.value)
        if answer[0] != b"ok":
            return cast(bytes, answer[0]).decode()
        rows = zip(answer[3::3], answer[4::3], answer[5::3], strict=True)
        found = (
            FencedChoice(int(attempt), _ids(ids.decode()), finish.decode() or None) for attempt, ids, finish in rows
        )
        return FenceAnswer(bool(answer[1]), tuple(found), int(answer[2]) if answer[2] else None)

    async def publish(self, worker: str, items: Sequence[PublishItem]) -> list[str]:
        """One round trip for a whole step. An answer per item: ok, same, differs, gap:N, stale, finished, gone."""
        args: list[Any] = [worker]
        for item in items:
            ids = ",".join(map(str, item.token_ids))
            # Few arguments: each costs the client more than its characters.
            head = f"{item.epoch}:{item.attempt}:{item.choice}:{item.index}:{ids}:{item.finish}:{item.step}"
            args += (item.request_id, head, item.payload)
        return [answer.decode() for answer in await self._call("publish", *args)]

    async def attach(self, request_id: str, router: str) -> Attached | None:
        """Join the readers of a request, before reading its journal. None if it is gone."""
        answer = await self._call("attach", request_id, router)
        return Attached(answer[1].decode(), answer[2].decode() or None) if answer[0] == b"ok" else None

    async def abort(self, request_id: str, router: str = "", how: Leave = Leave.ABORT) -> str:
        """A reader leaves (or, with no router, everybody): ok, kept, finished or gone."""
        return cast(bytes, (await self._call("abort", request_id, router, how.value))[0]).decode()

    async def move(self, request_id: str, worker: str = "") -> bool:
        """Ask the leader to move a request to a worker, or to any other. False if it is gone."""
        return bool((await self._call("move", request_id, worker))[0] == b"ok")

    async def journal(self, request_id: str, after: str = "-", count: int | None = None) -> list[JournalEntry]:
        """Entries after an entry id, in order, at most `count`."""
        start = after if after == "-" else f"({after}"
        with _passing_states():
            rows: Any = await self._redis.xrange(f"{self._prefix}journal:{request_id}", min=start, count=count)
        return [parse_entry(request_id, row[0].decode(), _entry_pairs(row[1])) for row in rows]

    async def last_entries(self, request_ids: Sequence[str]) -> list[str | None]:
        """The id of each request's last journal entry, in one pipelined call; None for a request that is gone."""
        pipeline: Any = self._redis.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hget(f"{self._prefix}state:{request_id}", "last")
        with _passing_states():
            return [last.decode() if last else None for last in await pipeline.execute()]

    async def readers(self, request_ids: Sequence[str]) -> list[set[str] | None]:
        """The routers that read each request, in one pipelined call; None for a request that needs no reader."""
        pipeline: Any = self._redis.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hmget(f"{self._prefix}state:{request_id}", "readers", "outlives")
        with _passing_states():
            rows = await pipeline.execute()
        return [None if outlives == b"1" else set((names or b"").decode().split()) for names, outlives in rows]

    async def document(self, request_id: str) -> str | None:
        """What a request was enqueued with for its readers, without becoming one. None if it is gone."""
        with _passing_states():
            text = await cast(Any, self._redis.hget(f"{self._prefix}state:{request_id}", "document"))
        return text.decode() if text else None

    async def forget(self, request_id: str) -> str:
        """Take away what is left of a request that is over: ok, running or gone."""
        return cast(bytes, (await self._call("forget", request_id))[0]).decode()

    async def is_aborted(self, request_id: str) -> bool:
        return bool(await cast(Any, self._redis.hget(f"{self._prefix}state:{request_id}", "abort")))

    async def num_requests(self) -> int:
        with _passing_states():
            return int(await self._redis.xlen(self.requests_key))

    async def requests(self) -> list[tuple[str, list[tuple[bytes, bytes]]]]:
        """Every request in the system, oldest first: (entry id, fields)."""
        with _passing_states():
            rows: Any = await self._redis.xrange(self.requests_key)
        return [(entry_id.decode(), _entry_pairs(fields)) for entry_id, fields in rows]

    async def usage(self) -> dict[str, dict[str, int]]:
        """Requests, prompt and completion tokens metered so far, by tenant."""
        out: dict[str, dict[str, int]] = {}
        for name, value in (await cast(Any, self._redis.hgetall(self._prefix + "usage"))).items():
            what, _, tenant = name.decode().partition(":")
            out.setdefault(tenant, {})[what] = int(value)
        return out

    async def time_s(self) -> float:
        """Seconds since the epoch by Redis' clock, which stamps the requests."""
        with _passing_states():
            seconds, microseconds = await cast(Any, self._redis.time())
        return int(seconds) + int(microseconds) / 1e6

    # -- reading streams

    async def read(self, positions: dict[str, str], block_ms: int) -> list[tuple[str, str, list[tuple[bytes, bytes]]]]:
        """New entries of some streams: (stream, entry id, fields). Moves `positions` on. Waits up to block_ms."""
        with _passing_states():
            rows: Any = await self._redis.xread(cast(Any, positions), count=500, block=block_ms)
        out = []
        streams = rows.items() if isinstance(rows, dict) else rows
        for stream, batches in streams or []:
            key = stream.decode()
            entries = batches[0] if batches and isinstance(batches[0], list) else batches
            for entry_id, fields in entries:
                positions[key] = entry_id.decode()
                out.append((key, entry_id.decode(), _entry_pairs(fields)))
        return out

    def inbox_key(self, router: str) -> str:
        return f"{self._prefix}inbox:{router}"

    # -- registration and leadership

    async def register(self, kind: str, name: str, document: str, ttl_ms: int) -> None:
        """Heartbeat of a worker or router; a time to live of 0 takes it away."""
        await self._call("register", kind, name, document, ttl_ms)

    async def registered(self, kind: str) -> dict[str, str]:
        """Documents of the workers or routers that are alive, by name."""
        return {name.decode(): document.decode() for name, document in _pairs(await self._call("registered", kind))}

    async def lead(
        self, leader: str, ttl_ms: int, epoch: int = 0, claim: Literal["", "vacant", "elected"] = ""
    ) -> tuple[int, str] | Literal["vacant"] | None:
        """Take the lead, or keep it under `epoch`: (epoch, generation), or None while another leads.

        "vacant": the last leader's time ran out; claim it as vacant after a moment. Who was elected elsewhere claims it
        from anybody. A time to live of 0 resigns.
        """
        answer = await self._call("lead", leader, ttl_ms, epoch, claim)
        if answer[0] == b"vacant":
            return "vacant"
        return (int(answer[1]), answer[2].decode()) if answer[0] == b"leader" else None

    async def epoch(self) -> int:
        """The highest that anybody has led under; 0 before the first."""
        return int(await cast(Any, self._redis.get(self._prefix + "epoch")) or 0)

    async def leader(self) -> str | None:
        """Who leads."""
        name = await cast(Any, self._redis.get(self._prefix + "leader"))
        return name.decode() if name else None


def _terms_to_json(terms: Terms) -> bytes:
    limits, key = terms.limits, terms.idempotency
    return orjson.dumps(
        {
            "router": terms.router,
            "choices": terms.choices,
            "prompt_tokens": terms.prompt_tokens,
            "tokens": terms.tokens,
            "tenant": terms.tenant,
            "limits": [limits.requests, limits.tokens, limits.tenant_requests, limits.tenant_tokens],
            "window": terms.window_s,
            "resumable": terms.resumable,
            "outlives": terms.outlives,
            "turned_away": terms.turned_away,
            "rates": terms.rates,
            "key": key.key if key else "",
            "body": key.body if key else "",
        }
    )


def _entry_pairs(fields: Any) -> list[tuple[bytes, bytes]]:
    return list(fields.items()) if isinstance(fields, dict) else _pairs(fields)


async def backoff(cap_s: float = 2.0) -> AsyncIterator[float]:
    """Waits between tries: 50 ms, doubling up to the cap, for ever."""
    delay = 0.05
    while True:
        await asyncio.sleep(delay)
        yield delay
        delay = min(delay * 2, cap_s)


async def until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Try an idempotent call until Redis answers; says so once when it is away and once when it is back."""
    waits = backoff()
    failures = 0
    while True:
        try:
            result = await call()
        except CONNECTION_ERRORS as error:
            failures += 1
            if failures == 1:
                log.warning("Redis does not answer (%s); trying again", error)
            await anext(waits)
            continue
        if failures:
            log.warning("Redis is back after %d tries", failures)
        return result
