"""A running system whose requests are bounded by itself: its pool holds 256 tokens, so none can ask for more."""

import os
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from loadtest.up import Up
from tests.e2e.conftest import MODEL, eventually

# 16 blocks of 16: what a generated request without max_tokens, or with a huge one, can take at most.
FLAGS = ("--executor", "fake", "--fake-step-ms", "0", "--kv-blocks", "16", "--resume-window", "5")
FLAGS += ("--idempotency-window", "5")


def cases(few: int) -> int:
    """How many to run: ORCA_FUZZ_CASES, or the few that a change can wait for."""
    return int(os.environ.get("ORCA_FUZZ_CASES") or few)


def run_seed() -> int:
    """ORCA_FUZZ_SEED: another run."""
    return int(os.environ.get("ORCA_FUZZ_SEED") or 1)


async def greedy(up: Up) -> str:
    """What a plain request says."""
    async with httpx.AsyncClient(base_url=up.url, timeout=30) as http:
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def fuzz_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("fuzz"), *FLAGS) as up:
        yield up


@pytest.fixture
async def unharmed(fuzz_up: Up) -> AsyncIterator[Up]:
    """The system; afterwards it is idle and says what it said before."""
    want = await greedy(fuzz_up)
    yield fuzz_up
    await eventually(fuzz_up.is_idle, within_s=30)
    assert await greedy(fuzz_up) == want
    await eventually(fuzz_up.is_idle)
