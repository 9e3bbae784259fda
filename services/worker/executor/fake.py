"""An executor without a model: its tokens depend on all that it reads through the block table.

It writes token ids into the slots of a fake KV and samples a hash of what it finds there, so that a wrong
prefix, a lost token or a block reused too early changes the text.
"""

import os
import signal
import time
import zlib
from collections.abc import Collection

import numpy as np

from services.common.request import SamplingParams
from services.worker.core.plan import BatchRow, BlockCopy, Copy, Sampled, TokenLogprobs

FIRST_TOKEN = 256  # below are special tokens and bare bytes
NUM_SALTS = 64  # as many different devices there are, for a test
POISON = "ORCA_FAKE_POISON_TOKEN"  # a token id: whoever runs a prompt that has it dies at once


def sample(
    read: np.ndarray,
    params: SamplingParams,
    choice: int,
    salt: int,
    banned: Collection[int],
    vocab_size: int,
    first_token: int = FIRST_TOKEN,
) -> Sampled:
    """The token that follows the int32 token ids `read`: a pure function, so that others can check what was made."""
    first_token = min(first_token, vocab_size - 1)
    seed = 0 if params.temperature == 0 else params.seed * 31 + choice + 1
    # Salts are spread out, so that no choice under one salt is another choice under the next.
    state = zlib.crc32(read.tobytes(), (seed + salt * 0x9E3779B1) & 0xFFFFFFFF)
    token = first_token + state % (vocab_size - first_token)
    while token in banned:
        token = first_token + (token - first_token + 1) % (vocab_size - first_token)
    logprob = -((state >> 8) % 1000) / 100 - 0.001
    if params.logprobs is None:
        return Sampled(token)
    top = tuple((token + i, logprob - i) for i in range(params.logprobs))
    return Sampled(token, TokenLogprobs(logprob, top))


class FakeExecutor:
    """step_time_s: how long a step takes. salt: other tokens, as another GPU would give (e.g. per incarnation)."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        step_time_s: float = 0.0,
        salt: int = 0,
        first_token: int = FIRST_TOKEN,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_model_calls = 0
        self.num_rows = 0
        self._vocab = vocab_size
        self._first_token = first_token
        self._step_time_s = step_time_s
        self._host_s = 0.0
        self._salt = salt
        self._poison = int(os.environ.get(POISON) or -1)
        self.num_host_blocks = num_host_blocks
        self.swap_s = 0.0
        self._kv = np.full(num_blocks * block_size, -1, dtype=np.int32)
        self._host = np.full(num_host_blocks * block_size, -1, dtype=np.int32)

    def copy(self, copies: list[BlockCopy]) -> None:
        kv, host = (pool.reshape(-1, self.block_size) for pool in (self._kv, self._host))
        pools = {Copy.TO_HOST: (kv, host), Copy.WITHIN: (kv, kv), Copy.TO_DEVICE: (host, kv)}
        for copy in copies:
            source, target = pools[copy.kind]
            target[list(copy.targets)] = source[list(copy.sources)]

    def execute(self, rows: list[BatchRow], banned: list[list[int]]) -> list[Sampled]:
        began = time.monotonic()
        for row in rows:
            if self._poison >= 0 and self._poison in row.sequence.tokens[: row.sequence.num_prompt]:
                signal.raise_signal(signal.SIGKILL)
        # A device is busy first, and leaves the interpreter to others; the host has the tokens when it is done. What
        # making them takes here is known from the step before.
        self._busy(began + self._step_time_s - self._host_s)
        woken = time.monotonic()
        for row in rows:
            self._write(row)
        samples = [self._sample(row, set(ban)) for row, ban in zip(rows, banned, strict=True) if row.samples]
        self.num_model_calls += 1
        self.num_rows += sum(row.num_tokens for row in rows)
        self._host_s = time.monotonic() - woken
        self._busy(began + self._step_time_s)
        return samples

    @staticmethod
    def _busy(until: float) -> None:
        if (rest := until - time.monotonic()) > 0:
            time.sleep(rest)

    def _slots(self, table: list[int], stop: int) -> np.ndarray:
        positions = np.arange(stop)
        return np.asarray(table, dtype=np.int64)[positions // self.block_size] * self.block_size + (
            positions % self.block_size
        )

    def _write(self, row: BatchRow) -> None:
        sequence = row.sequence
        stop = row.start + row.num_tokens
        slots = self._slots(sequence.block_table, stop)[row.start :]
        self._kv[slots] = sequence.tokens[row.start : stop]

    def _sample(self, row: BatchRow, banned: set[int]) -> Sampled:
        sequence = row.sequence
        read = self._kv[self._slots(sequence.block_table, row.start + row.num_tokens)]
        return sample(read, sequence.params, sequence.choice, self._salt, banned, self._vocab, self._first_token)
