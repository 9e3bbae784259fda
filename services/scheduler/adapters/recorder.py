"""Writes what was served as a trace that `orca simulate` reads: lengths and times, never text."""

import json
from contextlib import ExitStack
from typing import Any, TextIO

from services.common.errors import ConfigurationError
from services.scheduler.core.step import Features
from services.scheduler.engine import Record


class TraceRecorder:
    """Implements the engine's `Recorder`. An empty path records nothing of that kind. Raises ConfigurationError."""

    def __init__(self, requests: str, steps: str) -> None:
        self._files = ExitStack()
        self._requests = self._open(requests, "record")
        self._steps = self._open(steps, "record-steps")
        self._started: float | None = None

    def _open(self, path: str, flag: str) -> TextIO | None:
        if not path:
            return None
        try:
            # Line by line, so that nothing served is lost with the process.
            return self._files.enter_context(open(path, "a", buffering=1, encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"--{flag} {path}: {error.strerror}") from None

    def request(self, record: Record) -> None:
        """A line per choice; arrivals count from the first that is written."""
        for sequence in record.sequences:
            if self._started is None:
                self._started = sequence.arrived_s
            line = {
                "arrival": round(sequence.arrived_s - self._started, 3),
                "prompt_tokens": sequence.num_prompt_tokens,
                "output_tokens": len(sequence.output),
                "tenant": sequence.tenant,
                "priority": sequence.priority,
            }
            self._write(self._requests, line)

    def step(self, worker: str, features: Features, seconds: float) -> None:
        self._write(self._steps, {"worker": worker, **features._asdict(), "seconds": seconds})

    @staticmethod
    def _write(file: TextIO | None, line: dict[str, Any]) -> None:
        if file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._files.close()
