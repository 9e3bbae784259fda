"""Files and batches in Redis: routers hold none of it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar, cast

import orjson
from redis.asyncio import Redis

from services.common.errors import Conflict, InvalidRequest, NotFound, Overloaded, Unavailable
from services.common.redis.store import Store, until_answered
from services.router.api.shelf import Claim, LeaseLost, ShelfLimits
from services.router.core.batches import TIMES, Batch, Order
from services.router.core.files import File

T = TypeVar("T")

# How long a call waits for a Redis that does not answer: a restart is shorter.
PATIENCE_S = 15.0
# A file that is being written, and whose writer dies, is forgotten after so long.
UNFINISHED_S = 900
# An input file is kept for so long after its batch must have ended.
INPUT_MARGIN_S = 3600
RETRY_S = 5
FULL = {
    "files": "this tenant has as many files as it may have ({files}); delete some of them",
    "bytes": "this tenant's files would be larger than {bytes} bytes together; delete some of them",
}


async def _answered(call: Callable[[], Awaitable[T]]) -> T:
    """Raises Unavailable."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await until_answered(call)
    except TimeoutError:
        raise Unavailable("the store of files and batches does not answer") from None


class RedisShelf(Store):
    """The shelf of one partition."""

    def __init__(self, redis: Redis, partition: str, owner: str, limits: ShelfLimits) -> None:
        super().__init__(redis, partition)
        self._owner = owner
        self._limits = limits

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"

    async def _ask(self, function: str, *args: Any) -> list[Any]:
        """Raises Unavailable."""
        return await _answered(lambda: self._call(function, *args))

    async def _raw(self, command: str, *args: Any) -> Any:
        """Raises Unavailable."""
        return await _answered(lambda: cast(Any, self._redis).execute_command(command, *args))

    # -- files

    async def put_chunk(self, file: str, index: int, data: bytes) -> None:
        key = self._key("file", file)

        async def put() -> None:
            pipeline: Any = self._redis.pipeline(transaction=True)
            pipeline.hset(key, index, data)
            # Longer from chunk to chunk, and never shorter: of a result, somebody else may have made a file by now.
            pipeline.expire(key, UNFINISHED_S, nx=True)
            pipeline.expire(key, UNFINISHED_S, gt=True)
            await pipeline.execute()

        await _answered(put)

    async def put_file(self, tenant: str, file: File, claim: Claim | None = None) -> None:
        limits = self._limits
        most = (limits.tenant_files, limits.tenant_bytes) if claim is None else (0, 0)
        owner = (claim.batch, claim.fence) if claim is not None else ("", "")
        (answer,) = await self._ask("file_put", tenant, file.name, file.to_json(), *most, *owner)
        if answer == b"stale":
            raise LeaseLost
        if answer != b"ok":
            message = FULL[answer.decode()].format(files=limits.tenant_files, bytes=limits.tenant_bytes)
            raise InvalidRequest(message, "file")

    async def file(self, tenant: str, name: str) -> File:
        text = await self._raw("HGET", self._key("files", tenant), name)
        file = File.from_json(text) if text else None
        if file is None or file.expires_at <= time.time():
            raise NotFound(f"there is no file {name[:64]!r}", "file_id")
        return file

    async def files(self, tenant: str) -> list[File]:
        now = time.time()
        found = map(File.from_json, await self._raw("HVALS", self._key("files", tenant)))
        alive = [file for file in found if file.expires_at > now]
        return sorted(alive, key=lambda file: (file.created_at, file.name), reverse=True)

    async def chunk(self, file: str, index: int) -> bytes | None:
        return cast("bytes | None", await self._raw("HGET", self._key("file", file), index))

    async def delete_file(self, tenant: str, name: str) -> None:
        await self.file(tenant, name)
        await self._raw("HDEL", self._key("files", tenant), name)
        await self.drop_chunks(name)

    async def drop_chunks(self, file: str) -> None:
        await self._raw("UNLINK", self._key("file", file))

    # -- batches

    async def create_batch(self, order: Order) -> Batch:
        limits = self._limits
        terms = (order.created_at, limits.tenant_batches, order.input_file, limits.ttl_s)
        needed_until = order.expires_at + INPUT_MARGIN_S
        document = orjson.dumps(asdict(order))
        (answer,) = await self._ask("batch_create", order.tenant, order.name, document, *terms, needed_until)
        if answer != b"ok":
            raise Overloaded(f"this tenant has as many batches as it may have ({limits.tenant_batches})", RETRY_S)
        return await self.batch(order.tenant, order.name)

    async def batch(self, tenant: str | None, name: str) -> Batch:
        batch = _batch(await self._raw("HGETALL", self._key("batch", name)))
        if batch is None or tenant not in (None, batch.order.tenant):
            raise NotFound(f"there is no batch {name[:64]!r}", "batch_id")
        return batch

    async def batches(self, tenant: str, after: str, most: int) -> list[Batch]:
        rows = await self._raw("ZRANGE", self._key("batches", tenant), 0, -1, "REV")
        names = [row.decode() for row in rows]
        if after:
            names = names[names.index(after) + 1 :] if after in names else []
        found: list[Batch] = []
        while names and len(found) < most:  # some may be past their time
            found += [batch for batch in await self._read_batches(names[:most]) if batch is not None]
            del names[:most]
        return found[:most]

    async def _read_batches(self, names: Sequence[str]) -> list[Batch | None]:
        async def read() -> list[Any]:
            pipeline: Any = self._redis.pipeline(transaction=False)
            for name in names:
                pipeline.hgetall(self._key("batch", name))
            return cast(list[Any], await pipeline.execute())

        return list(map(_batch, await _answered(read)))

    async def cancel_batch(self, tenant: str, name: str) -> None:
        answer, *status = await self._ask("batch_cancel", tenant, name, int(time.time()))
        if answer == b"gone":
            raise NotFound(f"there is no batch {name[:64]!r}", "batch_id")
        if answer == b"over":
            raise Conflict(f"a batch with status {status[0].decode()!r} cannot be cancelled", "batch_id")

    # -- working on them

    async def claim(self, lease_ms: int) -> Claim | None:
        found = await self._ask("batch_claim", self._owner, lease_ms)
        return Claim(found[0].decode(), found[1].decode()) if found else None

    async def renew(self, claim: Claim, lease_ms: int) -> tuple[str, int]:
        answer, *known = await self._ask("batch_renew", claim.batch, claim.fence, lease_ms)
        if answer != b"ok":
            raise LeaseLost
        return known[0].decode(), int(known[1])

    async def advance(self, claim: Claim, before: str, status: str, over: bool = False, **fields: Any) -> bool:
        flat: list[Any] = [f"{status}_at", int(time.time())] if status != before else []
        for name, value in fields.items():
            flat += [name, orjson.dumps(value) if isinstance(value, list) else value]
        kept: Any = self._limits.ttl_s if over else ""
        answer = await self._ask("batch_move", claim.batch, claim.fence, before, status, kept, *flat)
        if answer[0] == b"stale":
            raise LeaseLost
        return bool(answer[0] == b"ok")

    async def done(self, batch: str) -> set[int]:
        return set(map(int, await self._raw("HKEYS", self._key("results", batch))))

    async def put_result(self, claim: Claim, number: int, well: bool, line: bytes) -> None:
        kind = "completed" if well else "failed"
        text = (b"+" if well else b"-") + line
        (answer,) = await self._ask("batch_result", claim.batch, claim.fence, number, kind, text)
        if answer != b"ok":
            raise LeaseLost

    async def results(self, batch: str, numbers: Sequence[int]) -> list[tuple[bool, bytes] | None]:
        rows = await self._raw("HMGET", self._key("results", batch), *numbers) if numbers else []
        return [(row[:1] == b"+", row[1:]) if row else None for row in rows]

    async def abort_request(self, request_id: str) -> None:
        await _answered(lambda: self.abort(request_id))


def _batch(fields: Any) -> Batch | None:
    """From its hash; None if there is none."""
    if not fields:
        return None
    pairs = fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)
    text = {name.decode(): value.decode() for name, value in pairs}
    return Batch(
        order=Order(**orjson.loads(text["document"])),
        status=text["status"],
        total=int(text.get("total", 0)),
        completed=int(text.get("completed", 0)),
        failed=int(text.get("failed", 0)),
        closed=text.get("closed"),
        output_file=text.get("output_file"),
        error_file=text.get("error_file"),
        errors=orjson.loads(text["errors"]) if "errors" in text else None,
        times={name: int(text[name]) for name in TIMES if name in text},
    )
