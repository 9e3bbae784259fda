"""A grammar's state survives what takes a sequence off its worker: preemption, and a worker that dies."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from loadtest.up import Up
from tests.conformance.ask import Answer, request, stream
from tests.conformance.builders import Case
from tests.conformance.judge import Judge, faults
from tests.conformance.schemas import SCHEMAS
from tests.e2e.conftest import eventually

FULL = os.environ.get("ORCA_CONFORMANCE") == "full"
NAMES = ("twenty", "matrix", "invoice", "strict Everything", *(("github issue", "resume") if FULL else ()))
MAX_TOKENS = 300


def asked() -> list[Case]:
    """Long ones, so that they are hit in the middle."""
    by_name = {case.name: case for case in SCHEMAS}
    return [by_name[name] for name in NAMES]


def bodies() -> list[dict[str, Any]]:
    return [request(case.name, case.schema, seed, MAX_TOKENS) for seed, case in enumerate(asked())]


def connect(up: Up) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=300)


async def alone(client: AsyncOpenAI) -> list[Answer]:
    """One after another, so that nothing is preempted."""
    return [await stream(client, Answer(), **body) for body in bodies()]


async def together(client: AsyncOpenAI) -> list[Answer]:
    return await asyncio.gather(*(stream(client, Answer(), **body) for body in bodies()))


def check(judge: Judge, got: list[Answer], want: list[Answer]) -> None:
    """Valid, and the same as without the fault."""
    for case, answer in zip(asked(), got, strict=True):
        for index, text in answer.texts.items():
            if answer.reasons[index] == "stop":
                assert not faults(text, case.schema), case.name
            else:
                assert judge.begins(text, case.schema), case.name
    assert got == want
    assert sum(reason == "stop" for answer in got for reason in answer.reasons.values()) >= len(NAMES)


async def test_answers_conform_under_preemption(tmp_path: Path, judge: Judge) -> None:
    """Eight sequences or more where two or three fit."""
    with Up(tmp_path, "--dtype", "float32", "--kv-blocks", "40", "--no-prefix-cache") as up:
        async with connect(up) as client:
            want = await alone(client)
            before = up.metrics()["orca_preemptions_total"]
            got = await together(client)
            assert up.metrics()["orca_preemptions_total"] > before, "they did not fit together"
        check(judge, got, want)
        await eventually(up.is_idle)


async def test_answers_conform_when_a_worker_dies(tmp_path: Path, judge: Judge) -> None:
    """The other one goes on in the middle of a grammar."""
    with Up(tmp_path, "--dtype", "float32", "--workers", "2") as up:
        async with connect(up) as client:
            want = await together(client)
            before = up.metrics()["orca_recoveries_total"]
            got = [Answer() for _ in want]
            running = [asyncio.create_task(stream(client, a, **body)) for a, body in zip(got, bodies(), strict=True)]
            await eventually(lambda: min(answer.num_chunks for answer in got) >= 10, within_s=120)
            os.kill(up.pid("worker-0"), signal.SIGKILL)
            await asyncio.gather(*running)
            assert up.metrics()["orca_recoveries_total"] > before, "the fault hit somebody"
        check(judge, got, want)
        await eventually(up.is_idle, within_s=60)
