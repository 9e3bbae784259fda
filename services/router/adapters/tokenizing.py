"""Tokenizing on threads, bounded."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.common.errors import Overloaded

A = TypeVar("A")
R = TypeVar("R")

# One core is left for the event loop.
THREADS = max(1, (os.cpu_count() or 1) - 1)
MAX_PENDING = 256


class TokenizingPool:
    """Runs encoders, which release the GIL, beside the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._pending = 0

    async def run(self, function: Callable[[A], R], argument: A, /) -> R:
        """function(argument), on a thread. Raises Overloaded when too many wait for that."""
        if self._pending >= MAX_PENDING:
            raise Overloaded("too many prompts are being tokenized; try again later")
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, argument)
        finally:
            self._pending -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
