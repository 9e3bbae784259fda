"""The real weights, and the official clients as anybody installs them."""

from collections.abc import AsyncIterator, Iterator

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from loadtest.up import Up
from tests.e2e.conftest import eventually


@pytest.fixture(scope="session")
def clients_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One system for all clients."""
    with Up(tmp_path_factory.mktemp("clients"), "--dtype", "float32") as up:
        yield up


@pytest.fixture
async def openai(clients_up: Up) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{clients_up.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made
    await eventually(clients_up.is_idle)


@pytest.fixture
async def anthropic(clients_up: Up) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=clients_up.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made
    await eventually(clients_up.is_idle)
