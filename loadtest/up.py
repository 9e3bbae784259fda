"""A real `orca up` for tests and benchmarks: real processes, Valkey, gRPC and HTTP."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from services.cli.ports import free_port

START_TIMEOUT_S = 240


class UpFailed(Exception):
    """`orca up` ended before it was ready."""


class Up:
    """`orca up` as a child of the test. Use as a context manager; leaving it asserts a clean drain."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.lines: list[str] = []
        self.exit_code: int | None = None
        self._signalled = False
        self._ready = threading.Event()
        command = [sys.executable, "-m", "services.cli.main", "up"]
        command += ["--port", str(self.port), "--data-dir", str(folder), *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if "  stop  " in line:
                self._ready.set()
        self._ready.set()

    def __enter__(self) -> "Up":
        if not self._ready.wait(START_TIMEOUT_S) or self._process.poll() is not None:
            self._process.kill()
            raise UpFailed("\n".join(self.lines) + "\n" + self.logs())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert self.exit_code == 0, "\n".join(self.lines)

    def roll(self) -> None:
        """Restart every process, one after another; returns when that is done."""
        done = sum("has been restarted" in line for line in self.lines)
        self._process.send_signal(signal.SIGHUP)
        while sum("has been restarted" in line for line in self.lines) == done:
            if self._process.poll() is not None:
                raise UpFailed("\n".join(self.lines))
            time.sleep(0.05)

    def interrupt(self) -> None:
        """What Ctrl-C does, once."""
        if not self._signalled:
            self._signalled = True
            self._process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        if self.exit_code is None:
            self.interrupt()
            self.exit_code = self._process.wait(60)
            self._reader.join(5)
            assert self._process.stdout is not None
            self._process.stdout.close()

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("logs/*.log")))

    @property
    def redis_url(self) -> str:
        return next(match[0] for line in self.lines if (match := re.search(r"redis://\S+", line)))

    def pids(self, module: str) -> list[int]:
        """Process ids of a service's children, by what they run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if parent == self._process.pid and module in command:
                    found.append(int(entry.name))
        return found

    def children(self) -> dict[str, int]:
        """Process ids by name."""
        found: dict[str, int] = json.loads((self.folder / "children.json").read_text())
        return found

    def pid(self, name: str) -> int:
        """Of a child, by its name."""
        return self.children()[name]

    def kill(self, module: str, number: int = signal.SIGKILL) -> None:
        (pid,) = self.pids(module)
        os.kill(pid, number)

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics: name with labels -> value."""
        text = httpx.get(f"{self.url}/metrics").text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def is_idle(self) -> bool:
        metrics = self.metrics()
        return (
            metrics["orca_requests_running"] == 0
            and metrics["orca_requests_waiting"] == 0
            and metrics['orca_kv_blocks{state="used"}'] == 0
        )
