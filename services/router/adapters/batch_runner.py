"""Works on batches: every router claims some, one router at a time works on each. All that it has come to lies on the
shelf, so that another can go on at any moment: a line's request is joined, and its first result stays."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from services.common import process
from services.common.errors import NotFound, Unavailable
from services.router.api.files import chunks
from services.router.api.lines import Line, LineRunner
from services.router.api.service import Service
from services.router.api.shelf import Claim, LeaseLost, Shelf, ShelfLimits
from services.router.core.batches import (
    CANCELLED,
    END,
    Batch,
    Lines,
    Order,
    Validation,
    reason_to_stop,
    unrun_line,
)
from services.router.core.files import BATCH_OUTPUT, File, Pieces, derived_name
from services.router.core.tenants import Tenant

log = logging.getLogger(__name__)

T = TypeVar("T")

# Batches that one router works on at a time.
MAX_BATCHES = 8
# How long a router may be silent until another goes on with its batches, and how often it is heard.
LEASE_MS = 4_000
RENEW_S = 1.0
CLAIM_S = 0.5
RETRY_S = 1.0
# Giving batches back must not hold up a router's end: a lease lapses by itself.
GIVE_BACK_S = 2.0
RESULTS_AT_ONCE = 256


async def _persist(call: Callable[[], Awaitable[T]]) -> T:
    """Try a call of the shelf until it is answered."""
    while True:
        try:
            return await call()
        except Unavailable as error:
            log.warning("%s; trying again", error.message)
            await asyncio.sleep(RETRY_S)


async def _some_end(tasks: "set[asyncio.Task[None]]") -> "set[asyncio.Task[None]]":
    """Wait for one of them; returns the others. Raises what one failed with."""
    ended, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return others


class BatchRunner:
    """The batches that this router works on. in_flight: the most lines of one that are under way."""

    def __init__(self, service: Service, shelf: Shelf, limits: ShelfLimits, in_flight: int) -> None:
        self._service = service
        self._shelf = shelf
        self._limits = limits
        self._in_flight = in_flight
        self._working: dict[Claim, asyncio.Task[None]] = {}
        self._stopped = False

    async def run(self) -> None:
        """Claim batches and work on them. Ends by cancellation."""
        try:
            while True:
                claim = await _persist(lambda: self._shelf.claim(LEASE_MS)) if self._has_room() else None
                if claim is None:
                    await asyncio.sleep(CLAIM_S)
                elif self._stopped:
                    await self._give_back(claim)
                else:
                    self._begin(claim)
        finally:
            await process.end(*self._working.values())

    def _begin(self, claim: Claim) -> None:
        work = _Work(self._service, self._shelf, self._limits, self._in_flight, claim)
        task = asyncio.create_task(work.run())
        self._working[claim] = task
        task.add_done_callback(lambda done: self._ended(claim, done))

    def _has_room(self) -> bool:
        return not self._stopped and len(self._working) < MAX_BATCHES

    def _ended(self, claim: Claim, task: "asyncio.Task[None]") -> None:
        self._working.pop(claim, None)
        if not task.cancelled() and (error := task.exception()):
            # Not this process's end: it would be that of each router, one after another. Its lease lapses.
            log.error("batch %s could not be worked on", claim.batch, exc_info=error)

    async def stop(self) -> None:
        """Work on nothing more, and let others go on at once."""
        self._stopped = True
        working = dict(self._working)
        await process.end(*working.values())
        await asyncio.gather(*map(self._give_back, working))

    async def _give_back(self, claim: Claim) -> None:
        with suppress(LeaseLost, Unavailable, TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                await self._shelf.renew(claim, 0)


class _Work:
    """One batch, from wherever it stands to its end."""

    def __init__(self, service: Service, shelf: Shelf, limits: ShelfLimits, in_flight: int, claim: Claim) -> None:
        self._service = service
        self._shelf = shelf
        self._limits = limits
        self._in_flight = in_flight
        self._claim = claim
        self._stop = asyncio.Event()  # it is to run no more lines
        self._why = ""

    async def run(self) -> None:
        """Until it is over, or another router works on it."""
        name = self._claim.batch
        try:
            batch = await self._now()
            watching = asyncio.ensure_future(self._watch(batch.order))
            working = asyncio.ensure_future(self._work(batch))
            try:
                await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
                for task in (watching, working):
                    if task.done():
                        task.result()
            finally:
                await process.end(watching, working)
        except LeaseLost:
            log.info("batch %s: another router works on it", name)
        except NotFound:
            log.warning("batch %s is gone", name)

    # -- whose it is

    async def _watch(self, order: Order) -> None:
        """Keep the batch, and see whether it is to stop. Ends by LeaseLost or cancellation."""
        while True:
            status, size = await _persist(lambda: self._shelf.renew(self._claim, LEASE_MS))
            why = reason_to_stop(status, order.expires_at, time.time(), size, self._limits.tenant_bytes)
            if why is None and self._tenant(order) is None:
                why = CANCELLED
            if why is not None and not self._stop.is_set():
                self._why = why
                self._stop.set()
            await asyncio.sleep(RENEW_S)

    def _tenant(self, order: Order) -> Tenant | None:
        """Whose it is, as the keys have it now; None if they do not know it any more."""
        ring = self._service.ring()
        return Tenant(order.tenant) if ring is None else ring.named(order.tenant)

    def _known(self, order: Order) -> Tenant:
        return self._tenant(order) or Tenant(order.tenant)

    # -- what is to be done

    async def _work(self, batch: Batch) -> None:
        """Raises LeaseLost."""
        order = batch.order
        try:
            file = await _persist(lambda: self._shelf.file(order.tenant, order.input_file))
            if batch.status == "validating":
                await self._validate(batch, file)
            batch = await self._now()
            if batch.status == "in_progress":
                batch = await self._close(batch, await self._run_lines(order, file))
            elif batch.status == "cancelling":
                batch = await self._close(batch, CANCELLED)
            if batch.closed is not None and batch.status in ("finalizing", "cancelling"):
                await self._finish(batch, file)
        except NotFound:
            await self._fail(order)

    async def _now(self) -> Batch:
        return await _persist(lambda: self._shelf.batch(None, self._claim.batch))

    async def _move(self, before: str, status: str, over: bool = False, **fields: object) -> bool:
        return await _persist(lambda: self._shelf.advance(self._claim, before, status, over, **fields))

    async def _fail(self, order: Order) -> None:
        """Its input has gone."""
        message = f"there is no file {order.input_file!r} any more"
        errors = [{"code": "input_file_not_found", "message": message, "param": "input_file_id", "line": None}]
        while (batch := await self._now()).status in ("validating", "in_progress", "finalizing", "cancelling"):
            await self._move(batch.status, "failed", over=True, errors=errors)

    async def _chunk(self, file: str, index: int) -> bytes | None:
        return await _persist(lambda: self._shelf.chunk(file, index))

    async def _lines(self, file: File) -> AsyncIterator[list[tuple[int, bytes]]]:
        """The lines of a file, as many at a time as came together. Raises NotFound if it goes meanwhile."""
        lines, size = Lines(), 0
        async for chunk in chunks(self._chunk, file):
            size += len(chunk)
            yield await asyncio.to_thread(lines.push, chunk)
        if size != file.size:
            raise NotFound("the file has gone")
        yield lines.end()

    async def _validate(self, batch: Batch, file: File) -> None:
        validation = Validation(batch.order.endpoint, self._service.max_body_bytes)
        async for some in self._lines(file):
            await asyncio.to_thread(validation.look, iter(some))
            if validation.hopeless:
                break
        validation.end()
        if validation.errors:
            await self._move("validating", "failed", over=True, errors=validation.errors)
        else:
            await self._move("validating", "in_progress", total=validation.total)

    async def _close(self, batch: Batch, why: str) -> Batch:
        """No more results are taken from here on, so that whoever writes the files writes the same."""
        while batch.status in ("in_progress", "cancelling") and batch.closed is None:
            if batch.status == "cancelling":
                await self._move("cancelling", "cancelling", closed=CANCELLED)
            else:
                await self._move("in_progress", "finalizing", closed=why)
            batch = await self._now()
        return batch

    # -- running the lines

    async def _run_lines(self, order: Order, file: File) -> str:
        """Until each has a result, or it is to stop; returns why. What is under way then is aborted."""
        if self._stop.is_set():
            return self._why
        runner = LineRunner(self._service, order, lambda: self._known(order))
        running = asyncio.ensure_future(self._run_each(runner, file))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                return ""
        except NotFound:
            await self._abort(runner)
            raise
        finally:
            await process.end(running, stopping)
        await self._abort(runner)
        return self._why

    async def _abort(self, runner: LineRunner) -> None:
        """What was under way when its lines were given up; or it would run on until it is seen that nobody reads it."""
        for request_id in runner.running.values():
            await _persist(lambda request_id=request_id: self._shelf.abort_request(request_id))  # type: ignore[misc]

    async def _run_each(self, runner: LineRunner, file: File) -> None:
        done = await _persist(lambda: self._shelf.done(self._claim.batch))
        tasks: set[asyncio.Task[None]] = set()
        try:
            async for some in self._lines(file):
                for number, text in some:
                    if number not in done:
                        tasks.add(asyncio.create_task(self._run_line(runner, Line.parse(number, text))))
                    if len(tasks) >= self._in_flight:
                        tasks = await _some_end(tasks)
            while tasks:
                tasks = await _some_end(tasks)
        finally:
            await process.end(*tasks)

    async def _run_line(self, runner: LineRunner, line: Line) -> None:
        well, text = await runner.run(line)
        await _persist(lambda: self._shelf.put_result(self._claim, line.number, well, text))

    # -- its files

    async def _finish(self, batch: Batch, file: File) -> None:
        """Write the files of results and end. Again, by whomever, it makes the same files."""
        name = batch.name
        answers, errors = _Output(self._shelf, name, "output"), _Output(self._shelf, name, "error")
        # One that was cancelled before its lines were looked at has none that could be named.
        async for some in self._lines(file) if batch.total else _nothing():
            lines = iter(some)
            while page := list(islice(lines, RESULTS_AT_ONCE)):
                numbers = [number for number, _ in page]
                results = await _persist(lambda numbers=numbers: self._shelf.results(name, numbers))  # type: ignore[misc]
                for (number, text), result in zip(page, results, strict=True):
                    if result is None:
                        custom_id = Line.parse(number, text).custom_id
                        result = False, unrun_line(name, number, custom_id, batch.closed or CANCELLED)
                    await (answers if result[0] else errors).write(result[1])
        fields: dict[str, object] = {}
        for kind, output in (("output_file", answers), ("error_file", errors)):
            if made := await output.end(self._limits.ttl_s):
                await _persist(lambda made=made: self._shelf.put_file(batch.order.tenant, made, self._claim))  # type: ignore[misc]
                fields[kind] = made.name
        await self._move(batch.status, END.get(batch.closed or "", "completed"), over=True, **fields)


async def _nothing() -> AsyncIterator[list[tuple[int, bytes]]]:
    for _ in ():
        yield []


class _Output:
    """A file of results on its way."""

    def __init__(self, shelf: Shelf, batch: str, kind: str) -> None:
        self._shelf = shelf
        self._name = derived_name("file-", batch, kind)
        self._filename = f"{batch}_{kind}.jsonl"
        self._pieces = Pieces()
        self._count = 0

    async def write(self, data: bytes) -> None:
        await self._put(self._pieces.push(data))

    async def end(self, ttl_s: int) -> File | None:
        """None if nothing was written."""
        await self._put(self._pieces.rest())
        now = int(time.time())
        size = self._pieces.size
        return File(self._name, self._filename, BATCH_OUTPUT, size, now, now + ttl_s) if size else None

    async def _put(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            await _persist(lambda chunk=chunk: self._shelf.put_chunk(self._name, self._count, chunk))  # type: ignore[misc]
            self._count += 1
