"""Logging: one line an event, to standard error; as text for people, or as JSON for what collects it."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

TEXT, JSON = "text", "json"


def about(traceparent: str) -> dict[str, str]:
    """What a line about a request is given as `extra`: JSON lines then carry the id of its trace."""
    return {"traceparent": traceparent}


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        parts = getattr(record, "traceparent", "").split("-")
        if len(parts) == 4:
            line |= {"trace_id": parts[1], "span_id": parts[2]}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(process: str, level: str, form: str = TEXT) -> None:
    """Set up the root logger of a process, whose name each line has."""
    handler = logging.StreamHandler()
    if form == JSON:
        handler.setFormatter(_JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
