"""Commands of an operator on a running system: `orca drain` and `orca move`. They speak to the leader through Redis."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from services.common.errors import ConfigurationError
from services.common.redis.store import CONNECTION_ERRORS, Store, connect
from services.common.settings import OrcaSettings, parse

S = TypeVar("S", bound=OrcaSettings)
DRAINED_TTL_MS = 24 * 3_600_000
POLL_S = 0.1
NAME = r"^[A-Za-z0-9._-]{1,64}$"


class DrainSettings(OrcaSettings):
    """Empties a worker: its sequences go on elsewhere, and it gets no new ones, for a day or until --undo."""

    worker: CliPositionalArg[str] = Field(pattern=NAME, description="name of the worker")
    undo: bool = Field(False, description="let it run sequences again")
    wait: float = Field(60.0, ge=0, le=86_400, description="seconds to wait until it is empty")


class MoveSettings(OrcaSettings):
    """Moves a running request to another worker."""

    request: CliPositionalArg[str] = Field(pattern=NAME, description="id of the request, as in X-Orca-Request-Id")
    worker: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,64}$", description="where to; any other worker if not given")


async def _drain(settings: DrainSettings, store: Store) -> str:
    if settings.worker not in await store.registered("workers"):
        raise ConfigurationError(f"there is no worker {settings.worker}")
    await store.register("draining", settings.worker, "", 0)  # what was said of an earlier drain
    await store.register("drains", settings.worker, "", 0 if settings.undo else DRAINED_TTL_MS)
    if settings.undo:
        return f"{settings.worker} may run sequences again"
    until = time.monotonic() + settings.wait
    while time.monotonic() < until:
        state = (await store.registered("draining")).get(settings.worker)
        if state is not None and json.loads(state)["sequences"] == 0:
            return f"{settings.worker} is empty"
        await asyncio.sleep(POLL_S)
    raise ConfigurationError(f"{settings.worker} is not empty after {settings.wait:g} s; it stays closed to new work")


async def _move(settings: MoveSettings, store: Store) -> str:
    if settings.worker and settings.worker not in await store.registered("workers"):
        raise ConfigurationError(f"there is no worker {settings.worker}")
    if not await store.move(settings.request, settings.worker):
        raise ConfigurationError(f"there is no unfinished request {settings.request}")
    return f"{settings.request} is asked to move"


async def _with_store(settings: S, command: Callable[[S, Store], Awaitable[str]]) -> str:
    store = Store(connect(settings.redis_url.get_secret_value()), settings.partition)
    try:
        return await command(settings, store)
    except CONNECTION_ERRORS as error:
        raise ConfigurationError(f"--redis-url: no answer: {error or 'timeout'}") from None
    finally:
        await store.aclose()


def _run(kind: type[S], command: Callable[[S, Store], Awaitable[str]], argv: Sequence[str], prog: str) -> int:
    try:
        print(asyncio.run(_with_store(parse(kind, argv, prog), command)))
    except ConfigurationError as error:
        print(f"{prog}: {error.message}", file=sys.stderr)
        return 2
    return 0


def drain(argv: Sequence[str]) -> int:
    """Entry point of `orca drain`."""
    return _run(DrainSettings, _drain, argv, "orca drain")


def move(argv: Sequence[str]) -> int:
    """Entry point of `orca move`."""
    return _run(MoveSettings, _move, argv, "orca move")
