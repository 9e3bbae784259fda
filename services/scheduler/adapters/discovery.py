"""Where workers are found."""

import json
from typing import Any, Protocol

from services.common.redis.store import Store


class Discovery(Protocol):
    """Knows the workers that can be dialled: by name, each with its `address`, and its `incarnation` where that is
    known."""

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Those of now. Raises one of CONNECTION_ERRORS; then those known before stay."""
        ...

    def close(self) -> None:
        """Look no more."""
        ...


class RedisDiscovery:
    """Workers register themselves in Redis, and renew that every second."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def workers(self) -> dict[str, dict[str, Any]]:
        documents = await self._store.registered("workers")
        return {name: json.loads(document) for name, document in documents.items()}

    def close(self) -> None:
        pass
