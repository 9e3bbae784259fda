"""A system of our own to hurt: `orca up` in a folder, with failpoints."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from services.chaos.target import FAILPOINTS
from services.cli.ports import free_port
from services.common.errors import ConfigurationError

START_S = 120.0
STOP_S = 90.0
# Enough of everything that one can fail while others go on; steps slow enough that faults fall among them.
FLAGS = (
    *("--executor", "fake", "--fake-step-ms", "20", "--kv-blocks", "600"),
    *("--workers", "2", "--routers", "2", "--schedulers", "2"),
)


class LocalSystem:
    """`orca up` as a child. Its output goes to `up.log` in the folder."""

    def __init__(self, folder: Path, flags: Sequence[str] = FLAGS, poison_token: int | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "up.log"
        self._command = [sys.executable, "-m", "services.cli.main", "up", "--port", str(self.port)]
        self._command += ["--data-dir", str(folder), *flags]
        self._environment = {**os.environ, FAILPOINTS: str(folder / "failpoints")}
        if poison_token is not None:
            self._environment["ORCA_FAKE_POISON_TOKEN"] = str(poison_token)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it serves. Raises ConfigurationError if it does not come to that."""
        (self.folder / "failpoints").mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        deadline = time.monotonic() + START_S
        async with httpx.AsyncClient(timeout=5) as http:
            while not await self._serves(http):
                if self._process.returncode is not None or time.monotonic() > deadline:
                    await self.stop()
                    raise ConfigurationError(f"orca up did not start; its log is {self.log}:\n{self.last_words()}")
                await asyncio.sleep(0.2)

    async def _serves(self, http: httpx.AsyncClient) -> bool:
        try:
            response = await http.get(f"{self.url}/health/ready")
        except httpx.HTTPError:
            return False
        return response.status_code == 200 and (self.folder / "children.json").exists()

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])

    async def stop(self) -> int:
        """The exit code of a Ctrl-C: 0 if everything drained."""
        process = self._process
        assert process is not None
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode
