"""Services as a cluster runs them: each a process of its own with its settings in the environment."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from services.cli.ports import free_port


class Process:
    """One service. Leaving it asserts that SIGTERM ends it with 0, unless it was killed."""

    def __init__(self, service: str, name: str, folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.metrics_port = free_port()
        self.log = folder / f"{name}.log"
        own = {"ORCA_NAME": name, "ORCA_METRICS_PORT": str(self.metrics_port)}
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"services.{service}.main"],
                env=os.environ | environment | own,
                stdout=log,
                stderr=log,
            )
        self.killed = False

    def health(self, what: str) -> tuple[int, str]:
        """Status and text of /health/WHAT; (0, "") if nobody answers."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.metrics_port}/health/{what}", timeout=2)
        except httpx.HTTPError:
            return 0, ""
        return answer.status_code, answer.text

    def metric(self, name: str) -> float:
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5).text
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name} "))

    @property
    def ended(self) -> int | None:
        """Exit code, or None."""
        return self._process.poll()

    def kill(self) -> None:
        self.killed = True
        self._process.kill()
        self._process.wait(10)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        """As a kubelet does. Fails if it does not end, or not well."""
        if self._process.poll() is None:
            self._process.terminate()
        code = self._process.wait(40)
        assert self.killed or code == 0, f"{self.name} ended with {code}\n{self.log.read_text()[-3000:]}"
