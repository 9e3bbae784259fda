"""Processes die and come back under a running stream; Redis stops for a while. The texts are those of a quiet run."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from openai import AsyncOpenAI

from loadtest.up import Up
from tests.e2e.conftest import MODEL, eventually


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("recovery"), "--executor", "fake", "--fake-step-ms", "10") as made:
        yield made


@pytest.fixture
async def client(up: Up) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
    await eventually(up.is_idle, within_s=20)


async def _texts(client: AsyncOpenAI, progress: asyncio.Event) -> list[str]:
    """Four streams, one with a stop string and one of two choices; sets `progress` when tokens have come."""

    async def one(index: int, **options: object) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=f"stream {index}", max_tokens=150, temperature=0, stream=True, **options
        )  # type: ignore[call-overload]
        parts: dict[int, str] = {}
        count = 0
        async for chunk in stream:
            choice = chunk.choices[0]
            parts[choice.index] = parts.get(choice.index, "") + choice.text
            count += 1
            if count == 20:
                progress.set()
        return repr(sorted(parts.items()))

    return await asyncio.gather(one(0), one(1), one(2, stop=["zzzz"]), one(3, n=2))


@pytest.mark.parametrize("module", ["services.worker.main", "services.scheduler.main"])
async def test_a_killed_process_loses_and_doubles_nothing(up: Up, client: AsyncOpenAI, module: str) -> None:
    want = await _texts(client, asyncio.Event())
    progress = asyncio.Event()
    running = asyncio.create_task(_texts(client, progress))
    await progress.wait()
    (before,) = up.pids(module)
    up.kill(module)
    assert await running == want
    await eventually(lambda: bool(up.pids(module)), within_s=20)
    assert up.pids(module) != [before], "the process was really killed"
    assert any("died (killed by SIGKILL)" in line for line in up.lines)


async def test_redis_stopped_for_a_while(up: Up, client: AsyncOpenAI) -> None:
    want = await _texts(client, asyncio.Event())
    progress = asyncio.Event()
    running = asyncio.create_task(_texts(client, progress))
    await progress.wait()
    up.kill("valkey-server", signal.SIGSTOP)
    await asyncio.sleep(2)  # how long Redis is away
    up.kill("valkey-server", signal.SIGCONT)
    assert await running == want


async def test_redis_killed_comes_back_from_its_log(up: Up, client: AsyncOpenAI) -> None:
    want = await _texts(client, asyncio.Event())
    progress = asyncio.Event()
    running = asyncio.create_task(_texts(client, progress))
    await progress.wait()
    up.kill("valkey-server")
    assert await running == want


async def test_a_killed_router_is_restarted_and_serves(up: Up, client: AsyncOpenAI) -> None:
    progress = asyncio.Event()
    running = asyncio.create_task(_texts(client, progress))
    await progress.wait()
    up.kill("services.router.main")
    results = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(results[0], Exception), "the router was really killed under its streams"

    async def ready() -> bool:
        async with httpx.AsyncClient() as http:
            try:
                return (await http.get(f"{up.url}/health/ready")).status_code == 200
            except httpx.HTTPError:
                return False

    await eventually(ready, within_s=20)
    assert len(await _texts(client, asyncio.Event())) == 4
