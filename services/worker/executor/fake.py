"""An executor without a model: its tokens depend on all that it reads through the block table.

It writes token ids into the slots of a fake KV and samples a hash of what it finds there, so that a wrong
prefix, a lost token or a block reused too early changes the text.
"""

import time
import zlib

import numpy as np

from services.worker.core.plan import BatchRow, BlockCopy, Copy, Sampled, TokenLogprobs


class FakeExecutor:
    """step_time_s: how long a step takes. salt: other tokens, as another GPU would give (e.g. per incarnation)."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        step_time_s: float = 0.0,
        salt: int = 0,
        first_token: int = 256,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_model_calls = 0
        self.num_rows = 0
        self._vocab = vocab_size
        self._first_token = min(first_token, vocab_size - 1)  # below are special tokens and bare bytes
        self._step_time_s = step_time_s
        self._salt = salt
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
        end = time.monotonic() + self._step_time_s
        for row in rows:
            self._write(row)
        samples = [self._sample(row, set(ban)) for row, ban in zip(rows, banned, strict=True) if row.samples]
        self.num_model_calls += 1
        self.num_rows += sum(row.num_tokens for row in rows)
        time.sleep(max(0.0, end - time.monotonic()))  # the device is busy; not a synchronisation
        return samples

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
        params = sequence.params
        seed = 0 if params.temperature == 0 else params.seed * 31 + sequence.choice + 1
        state = zlib.crc32(read.tobytes(), (seed + self._salt) & 0xFFFFFFFF)
        token = self._first_token + state % (self._vocab - self._first_token)
        while token in banned:
            token = self._first_token + (token - self._first_token + 1) % (self._vocab - self._first_token)
        logprob = -((state >> 8) % 1000) / 100 - 0.001
        if params.logprobs is None:
            return Sampled(token)
        top = tuple((token + i, logprob - i) for i in range(params.logprobs))
        return Sampled(token, TokenLogprobs(logprob, top))
