"""Writes what was served as a trace that `orca simulate` reads: lengths and times, never text."""

import json
import logging
from contextlib import ExitStack
from typing import Any, TextIO

from services.common.errors import ConfigurationError
from services.scheduler.core.step import Features, StepResult
from services.scheduler.engine import Record

log = logging.getLogger(__name__)


class TraceRecorder:
    """Implements the engine's `Recorder`. An empty path records nothing of that kind. Raises ConfigurationError."""

    def __init__(self, requests: str, steps: str) -> None:
        self._files = ExitStack()
        self._requests = self._open(requests, "record")
        self._steps = self._open(steps, "record-steps")

    def _open(self, path: str, flag: str) -> TextIO | None:
        if not path:
            return None
        try:
            # Line by line, so that nothing served is lost with the process.
            return self._files.enter_context(open(path, "a", buffering=1, encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"--{flag} {path}: {error.strerror}") from None

    def request(self, record: Record) -> None:
        """A line per choice. Arrivals are absolute, so that a trace goes on after a restart."""
        for sequence in record.sequences:
            line = {
                "arrival": round(sequence.arrived_s, 3),
                "prompt_tokens": sequence.num_prompt_tokens,
                "output_tokens": len(sequence.output),
                "tenant": sequence.tenant,
                "priority": sequence.priority,
            }
            self._requests = self._write(self._requests, line)

    def step(self, worker: str, features: Features, result: StepResult) -> None:
        """`step` is what the journal's entries name; `ended_s` is on the worker's clock."""
        line = {"worker": worker, "step": result.number, **features._asdict(), "seconds": result.seconds}
        self._steps = self._write(self._steps, line | {"ended_s": result.ended_s})

    @staticmethod
    def _write(file: TextIO | None, line: dict[str, Any]) -> TextIO | None:
        """Returns where to write the next line; None when the disk is full: serving matters more than recording."""
        try:
            if file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.error("recording ends: %s", error)
            return None
        return file

    def close(self) -> None:
        self._files.close()
