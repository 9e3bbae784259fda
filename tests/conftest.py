"""Real servers for tests: one Valkey a session, one partition (key space) a test."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from services.common.redis.store import Store, connect
from tests.servers import valkey


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
def partition() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def store(redis_url: str, partition: str) -> AsyncIterator[Store]:
    made = Store(connect(redis_url), partition)
    yield made
    await made.aclose()
