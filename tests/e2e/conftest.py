"""Running systems: one with the fake executor, one with the real weights, each started once a session."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from openai import AsyncOpenAI

from loadtest.up import Up

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def fake_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    flags = ("--executor", "fake", "--fake-step-ms", "5", "--kv-blocks", "600", "--max-num-seqs", "32")
    with Up(tmp_path_factory.mktemp("fake"), *flags) as up:
        yield up


@pytest.fixture(scope="session")
def real_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("real"), "--dtype", "float32") as up:
        yield up


async def eventually(holds: Callable[[], bool | Awaitable[bool]], within_s: float = 10.0) -> None:
    """Poll until a condition of other processes holds; fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        result = holds()
        if await result if isinstance(result, Awaitable) else result:
            return
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.02)


@pytest.fixture
async def client(fake_up: Up) -> AsyncIterator[AsyncOpenAI]:
    """The official client, on the fake system; afterwards the system must be idle."""
    async with AsyncOpenAI(base_url=f"{fake_up.url}/v1", api_key="none", max_retries=0) as made:
        yield made
    await eventually(fake_up.is_idle)


@pytest.fixture
async def real_client(real_up: Up) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{real_up.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made
    await eventually(real_up.is_idle)
