"""Grammars of clients, tried out before they are queued, in a child process that they may bring down."""

import asyncio
import hashlib
import json
import signal
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from services.common.errors import InvalidRequest, Overloaded, Unavailable

START_S, ANSWER_S = 60.0, 10.0
MAX_PENDING = 64
MAX_LINE = 4 << 20
# Verdicts that are remembered: nearly always the same few schemas come again.
MAX_KNOWN, MAX_KNOWN_CHARS = 512, 32_768
KILLED_BY = {-signal.SIGVTALRM: "it takes too long to prepare", -signal.SIGSEGV: "it is nested too deeply"}


class GrammarChecker:
    """One child at a time, started when first needed."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        first = {"tokenizer_json": tokenizer_json, "vocab_size": vocab_size, "eos_token_ids": eos_token_ids}
        self._first = json.dumps(first)
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._pending = 0
        self._known: OrderedDict[bytes, dict[str, str]] = OrderedDict()

    async def build(self, kind: str, value: Any, param: str) -> str:
        """A grammar that a worker can follow. Raises InvalidRequest naming the parameter, Overloaded or Unavailable."""
        line = json.dumps({"kind": kind, "value": value})
        key = hashlib.sha256(line.encode()).digest()
        said = self._known.get(key) or await self._ask(line)
        self._remember(key, said)
        if "error" in said:
            raise InvalidRequest(f"{param}: {said['error']}", param)
        return said["grammar"]

    def _remember(self, key: bytes, said: dict[str, str]) -> None:
        if sum(map(len, said.values())) <= MAX_KNOWN_CHARS:
            self._known[key] = said
            self._known.move_to_end(key)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    async def _ask(self, line: str) -> dict[str, str]:
        if self._pending >= MAX_PENDING:
            raise Overloaded("too many grammars are being looked at; try again later")
        self._pending += 1
        try:
            async with self._turn:
                return await self._ask_child(line)
        finally:
            self._pending -= 1

    async def _ask_child(self, line: str) -> dict[str, str]:
        child = self._child or await self._start()
        try:
            answer = await self._exchange(child, line, ANSWER_S)
        except BaseException:
            await self._end()  # or its answer would be taken for the next one's
            raise
        if answer is None:
            return {"error": KILLED_BY.get(await self._end(), "it cannot be prepared")}
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.router.adapters.grammar_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
        )
        try:
            ready = await self._exchange(self._child, self._first, START_S)
        except BaseException:
            await self._end()
            raise
        if ready is None:
            await self._end()
            raise Unavailable("grammars cannot be looked at now")
        return self._child

    @staticmethod
    async def _exchange(child: asyncio.subprocess.Process, line: str, patience_s: float) -> dict[str, str] | None:
        """None if the child ended, or did not answer."""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            async with asyncio.timeout(patience_s):
                child.stdin.write(line.encode() + b"\n")
                await child.stdin.drain()
                said = await child.stdout.readline()
        except (TimeoutError, OSError):
            return None
        answer: dict[str, str] | None = json.loads(said) if said else None
        return answer

    async def _end(self) -> int:
        """Returns the child's exit status: negative is the signal that ended it."""
        child, self._child = self._child, None
        if child is None:
            return 0
        assert child.stdin is not None
        child.stdin.close()
        with suppress(TimeoutError):
            return await asyncio.wait_for(child.wait(), 1.0)
        child.kill()
        return await child.wait()

    async def close(self) -> None:
        async with self._turn:
            await self._end()
