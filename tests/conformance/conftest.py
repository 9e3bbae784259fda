"""The real weights, and what judges their answers."""

from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from loadtest.up import Up
from tests.conformance.judge import Judge
from tests.e2e.conftest import eventually


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A system of its own: its worker is full for minutes."""
    with Up(tmp_path_factory.mktemp("conformance"), "--dtype", "float32") as made:
        yield made


@pytest.fixture
async def client(up: Up) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=600) as made:
        yield made
    await eventually(up.is_idle)
