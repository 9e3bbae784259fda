"""What every process does alike: signals, heartbeats, one clear line when it cannot start."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from services.common.errors import ConfigurationError
from services.common.health import Health
from services.common.redis.store import CONNECTION_ERRORS, Store, backoff

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
HEARTBEAT_TTL_MS = 3_000
CANCEL_AGAIN_S = 0.2


class ProcessEnded(Exception):
    """This process has no more business, for a reason that is no bug; its supervisor starts another."""


def run(main: Coroutine[Any, Any, None], prog: str) -> int:
    """Run a process's main. Exit code 2 and one line when it is not configured right."""
    import uvloop

    try:
        uvloop.run(main)
    except ConfigurationError as error:
        sys.stderr.write(f"{prog}: {error.message}\n")
        return 2
    except ProcessEnded as error:
        log.warning("%s", error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class Stop(asyncio.Event):
    """Set when the process is asked to end. at_once: nobody takes its place, so it need not be gentle to newcomers."""

    at_once = False


def on_signals(stop: Stop) -> None:
    """SIGTERM and SIGINT ask for a drain, SIGINT for one of the whole system; a second signal exits at once."""

    def handle(number: signal.Signals) -> None:
        if stop.is_set():
            sys.stderr.flush()
            signal.raise_signal(signal.SIGKILL)
        stop.at_once = number == signal.SIGINT
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)


async def heartbeat(store: Store, kind: str, name: str, document: Callable[[], str], health: Health) -> None:
    """Register `name` every second; says when Redis is away and when it is back. Ends by cancellation."""
    away = False
    waits = backoff()
    while True:
        try:
            await store.register(kind, name, document(), HEARTBEAT_TTL_MS)
        except CONNECTION_ERRORS as error:
            if not away:
                log.warning("Redis does not answer (%s); trying again", error)
                away = True
            health.reachable = False
            await anext(waits)
            continue
        if away:
            log.warning("Redis is back")
            away, waits = False, backoff()
        health.reachable = True
        await asyncio.sleep(HEARTBEAT_S)


async def end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks until each has ended. Once is not enough: redis-py 8.1 loses a cancellation now and then."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_until(
    stop: asyncio.Event, *tasks: Awaitable[None], drain: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Run background tasks until `stop`, then drain while they still run. A task's failure is raised."""
    # What is there by now, modules and models, is never garbage; looking through it costs milliseconds each time.
    gc.collect()
    gc.freeze()
    running = [asyncio.ensure_future(task) for task in tasks]
    waiter = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([waiter, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if drain is not None:
            await drain()
    finally:
        await end(waiter, *running)
