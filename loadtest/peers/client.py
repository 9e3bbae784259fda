"""A streaming client that costs little, and what it saw. The same for every server."""

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from loadtest.peers.traces import Request

COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
READ_BYTES = 1 << 16


@dataclass(slots=True)
class Seen:
    """One request. Times in seconds of the monotonic clock; due: when it should have been sent."""

    due: float
    wanted: int
    events: list[float] = field(default_factory=list)
    end: float = 0.0
    tokens: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.tokens == self.wanted

    @property
    def normalised(self) -> float:
        """End to end per output token (Orca's metric)."""
        return (self.end - self.due) / max(1, self.tokens)


class Client:
    """extra: fields of the body by which this server gives exactly so many tokens, greedily. shown: what a prompt is to
    it; token ids, where nothing else is said."""

    def __init__(
        self, url: str, model: str, extra: dict[str, Any], shown: Callable[[list[int]], Any] = lambda ids: ids
    ) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._model, self._extra, self._shown = model, extra, shown

    def _message(self, request: Request) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": self._shown(request.prompt),
                "max_tokens": request.num_output,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._extra,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def send(self, request: Request, due: float) -> Seen:
        """One request, to its end. Whatever goes wrong is in the result."""
        seen = Seen(due, request.num_output)
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write(self._message(request))
                await self._read(reader, seen)
            finally:
                writer.close()
        except OSError as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.end = time.monotonic()
        return seen

    async def _read(self, reader: asyncio.StreamReader, seen: Seen) -> None:
        """Each event that carries a choice is a token event; chunk borders may cut anything but the count of events."""
        tail = b""
        whole = bytearray()
        while chunk := await reader.read(READ_BYTES):
            now = time.monotonic()
            data = tail + chunk
            found = data.count(b'"choices":[{') + data.count(b'"choices": [{')
            seen.events.extend([now] * found)
            tail = data[-(len(b'"choices": [{') - 1) :]
            if not whole or b"usage" in data or len(whole) < 400:
                whole += chunk
        if not whole.startswith(b"HTTP/1.1 200"):
            seen.error = bytes(whole[:200]).decode(errors="replace") or "no answer"
        matches = COMPLETION_TOKENS.findall(bytes(whole))
        seen.tokens = int(matches[-1]) if matches else 0
        if not matches and not seen.error:
            seen.error = "no usage in the stream"


async def closed(client: Client, requests: Sequence[Request], in_flight: int) -> list[Seen]:
    """So many at once until all are done."""
    waiting = iter(requests)
    done: list[Seen] = []

    async def worker() -> None:
        for request in waiting:
            done.append(await client.send(request, time.monotonic()))

    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return done


async def opened(client: Client, requests: Sequence[Request], rate: float, seed: int) -> list[Seen]:
    """Poisson arrivals."""
    rng = random.Random(f"{seed} {rate}")
    due = time.monotonic()
    tasks = []
    for request in requests:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(client.send(request, due)))
    return list(await asyncio.gather(*tasks))
