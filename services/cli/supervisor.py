"""Runs child processes: restarts one that dies, with backoff, saying so; ends them in order."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0
SETTLED_S = 5.0
READY_POLL_S = 0.05
READY_S = 120.0
PR_SET_PDEATHSIG = 1
CONFIGURATION_EXIT = 2


class ChildFailed(Exception):
    """A child cannot start as configured; the message is its own last line."""


def _die_with_parent() -> None:
    """In the child: get SIGTERM when the supervisor is killed. Linux only; elsewhere children may stay."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Child:
    """One supervised process. Its output goes to a log file."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    listen_fd: int | None = None  # an open socket that it inherits
    on_start: Callable[[], None] = lambda: None
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    stopping: bool = False
    proven: bool = False  # it has served: what ends it now is worth trying again
    _successor: asyncio.subprocess.Process | None = None
    _rolling: bool = False
    _delay: float = field(default=FIRST_DELAY_S)

    async def start(self) -> None:
        self.process = await self._spawn()
        self.on_start()

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self.log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *self.command,
                env={**os.environ, **self.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is ours to hand down
                pass_fds=() if self.listen_fd is None else (self.listen_fd,),
                preexec_fn=_die_with_parent,
            )

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    async def supervise(self, say: Callable[[str], None]) -> None:
        """Start and restart until `stop`. Raises ChildFailed when it is not configured right."""
        started = time.monotonic()
        while True:
            if self._successor is not None:
                self.process, self._successor = self._successor, None
                self.on_start()
            else:
                started = time.monotonic()
                await self.start()
            assert self.process is not None
            if self.stopping:
                self.process.terminate()
            code = await self.process.wait()
            if self.stopping:
                return
            if self._successor is not None or self._rolling:
                self._rolling = False
                continue
            if code == CONFIGURATION_EXIT and not self.proven:
                raise ChildFailed(self.last_line())
            if time.monotonic() - started > SETTLED_S:
                self._delay = FIRST_DELAY_S
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            say(f"{self.name} died ({how}); restarting in {self._delay:g} s; its log is {self.log}")
            await asyncio.sleep(self._delay)
            if self.stopping:
                return
            self._delay = min(self._delay * 2, MAX_DELAY_S)
            self.restarts += 1

    async def replace(self, is_ready: Callable[[], Awaitable[bool]], overlap: bool) -> None:
        """End the process by a drain and run another, which is there first where both can be (`overlap`). Returns when
        the new one is ready and the old one gone."""
        old = self.process
        if old is None:
            return
        if overlap:
            self._successor = await self._spawn()
            await self._until(is_ready, self._successor)
        self._rolling = True
        with suppress(ProcessLookupError):
            old.terminate()
        await old.wait()
        await self._until(is_ready)

    async def _until(self, is_ready: Callable[[], Awaitable[bool]], process: Any = None) -> None:
        """Raises ChildFailed if the process ends before it is ready, or nothing is ready in time."""
        deadline = time.monotonic() + READY_S
        while not await is_ready():
            if time.monotonic() > deadline or (process is not None and process.returncode is not None):
                self._successor = None
                raise ChildFailed(f"{self.name}: {self.last_line()}")
            await asyncio.sleep(READY_POLL_S)

    async def stop(self, timeout_s: float) -> int:
        """SIGINT (everything ends), then SIGKILL after the timeout; returns the exit code."""
        self.stopping = True
        if self._successor is not None and self._successor.returncode is None:
            self._successor.kill()  # it has just come, and nobody is told of it
        if self.process is None or self.process.returncode is not None:
            return 0
        if not self._rolling:  # else it drains already, and a second signal would end it at once
            self.process.send_signal(signal.SIGINT)
        try:
            return await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self.process.wait()

    def kill(self) -> None:
        self.stopping = True
        if self._successor is not None and self._successor.returncode is None:
            self._successor.kill()
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
