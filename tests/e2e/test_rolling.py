"""D24: SIGTERM to each part, and a restart of all of them, under a steady load that retries and resumes nothing."""

import asyncio
import os
import runpy
import signal
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from openai import AsyncOpenAI

from loadtest.up import Up
from tests.e2e.conftest import MODEL, eventually

CLIENTS = 12


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    flags = ("--executor", "fake", "--fake-step-ms", "10", "--kv-blocks", "600")
    parts = ("--routers", "2", "--schedulers", "2", "--workers", "2")
    with Up(tmp_path_factory.mktemp("rolling"), *flags, *parts) as made:
        yield made


@pytest.fixture
async def client(up: Up) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
    await eventually(up.is_idle, within_s=20)


class Load:
    """Clients that ask again and again, streaming and not. A failure of any is raised by `end`."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self.answers: dict[int, set[str]] = {}
        self.num_answers = 0

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._ask(index)) for index in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)
        assert all(len(texts) == 1 for texts in self.answers.values()), "a text changed"

    async def _ask(self, index: int) -> None:
        create = self._client.completions.create
        while not self._ending:
            text = ""
            if index % 2:
                stream = await create(model=MODEL, prompt=f"p{index}", max_tokens=40, temperature=0, stream=True)
                async for chunk in stream:
                    text += chunk.choices[0].text
            else:
                text = (await create(model=MODEL, prompt=f"p{index}", max_tokens=40, temperature=0)).choices[0].text
            self.answers.setdefault(index, set()).add(text)
            self.num_answers += 1

    async def until_more(self, count: int = 3 * CLIENTS) -> None:
        """So many answers more."""
        wanted = self.num_answers + count
        await eventually(lambda: self.num_answers >= wanted or any(task.done() for task in self._tasks), within_s=60)


@pytest.mark.parametrize("name", ["router-0", "worker-1", "scheduler-0", "scheduler-1"])
async def test_d24_sigterm_to_one_part(up: Up, client: AsyncOpenAI, name: str) -> None:
    async with Load(client) as load:
        await load.until_more()
        before = up.pid(name)
        os.kill(before, signal.SIGTERM)
        await eventually(lambda: up.pid(name) != before, within_s=30)
        await load.until_more()
    (line,) = [line for line in up.lines if line.startswith(f"orca: {name} died")]
    assert "exit code 0" in line, "it drained, and nobody had to kill it"


async def test_d24_every_process_is_restarted_and_nothing_fails(up: Up, client: AsyncOpenAI) -> None:
    names = ["valkey", *(f"{part}-{index}" for part in ("scheduler", "worker", "router") for index in (0, 1))]
    before = {name: up.pid(name) for name in names}
    async with Load(client) as load:
        await load.until_more()
        await asyncio.to_thread(up.roll)
        await load.until_more()
    assert {name for name in names if up.pid(name) == before[name]} == set(), "each was really restarted"
    assert sum(map(len, load.answers.values())) == CLIENTS


async def test_d24_a_stream_longer_than_the_grace_is_handed_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = ("--executor", "fake", "--fake-step-ms", "20", "--routers", "2", "--drain", "0.5")
    body = {"model": MODEL, "prompt": "a", "max_tokens": 200, "temperature": 0, "stream": True, "ignore_eos": True}
    with Up(tmp_path_factory.mktemp("grace"), *flags) as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=60) as http:
            whole = (await http.post("/v1/completions", json=body)).text
            lines: list[str] = []
            async with http.stream("POST", "/v1/completions", json=body) as response:
                request_id = response.headers["x-orca-request-id"]
                async for line in response.aiter_lines():
                    lines.append(line)
                    if len(lines) == 60:
                        for index in (0, 1):
                            os.kill(up.pid(f"router-{index}"), signal.SIGTERM)
            assert "stream_interrupted" in lines[-2], lines[-3:]
            last = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")][-1]
        # On a new connection: the old one is closed just now by a router that had sent its headers before it knew.
        async with httpx.AsyncClient(base_url=up.url, timeout=60) as http:
            rest = await http.get(f"/v1/streams/{request_id}", headers={"Last-Event-ID": last})
        texts = [line for line in lines if line.startswith("data: {") and "error" not in line]
        num_events = len(texts) + rest.text.count("data: {")
        assert num_events == whole.count("data: {")
        assert rest.text.endswith("data: [DONE]\n\n")


async def test_the_documented_client_loses_nothing_to_killed_routers(up: Up, client: AsyncOpenAI) -> None:
    prompt = "what is documented works"
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=200, seed=5)
    want = answer.choices[0].text
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 200, "seed": 5, "stream": True}
    texts: list[str] = []

    def read() -> None:
        for event in runpy.run_path("docs/resume.py")["stream"](up.url, body):
            texts.append(event["choices"][0]["text"])

    reading = asyncio.create_task(asyncio.to_thread(read))
    for count in (20, 80):
        await eventually(lambda count=count: len(texts) >= count)  # type: ignore[misc]
        killed = [up.pid(f"router-{index}") for index in (0, 1)]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda killed=killed: not set(killed) & set(up.children().values()), within_s=20)  # type: ignore[misc]
    await reading
    assert "".join(texts) == want
