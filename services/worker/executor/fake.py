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
from services.worker.core.plan import BatchRow, BlockCopy, Copy, Sampled, SequenceState, TokenLogprobs, allowed_tokens

FIRST_TOKEN = 256  # below are special tokens and bare bytes
EMBEDDING_SIZE = 64
NUM_SALTS = 64  # as many different devices there are, for a test
POISON = "ORCA_FAKE_POISON_TOKEN"  # a token id: whoever runs a prompt that has it dies at once
NAN = "ORCA_FAKE_NAN"  # TOKEN:COUNT: after so many outputs, the logits of a prompt that has this token are no numbers


def sample(
    read: np.ndarray,
    params: SamplingParams,
    choice: int,
    salt: int,
    banned: Collection[int],
    vocab_size: int,
    first_token: int = FIRST_TOKEN,
    allowed: np.ndarray | None = None,
) -> Sampled:
    """The token that follows the int32 token ids `read`: a pure function, so that others can check what was made.
    allowed: bool [vocabulary] of a constraint."""
    first_token = min(first_token, vocab_size - 1)
    seed = 0 if params.temperature == 0 else params.seed * 31 + choice + 1
    # Salts are spread out, so that no choice under one salt is another choice under the next.
    state = zlib.crc32(read.tobytes(), (seed + salt * 0x9E3779B1) & 0xFFFFFFFF)
    if allowed is None:
        token = first_token + state % (vocab_size - first_token)
        while token in banned:
            token = first_token + (token - first_token + 1) % (vocab_size - first_token)
    else:
        tokens = np.flatnonzero(allowed)
        tokens = tokens[~np.isin(tokens, list(banned))] if not set(tokens.tolist()) <= set(banned) else tokens
        token = int(tokens[state % len(tokens)])
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
        nan_token, _, nan_after = (os.environ.get(NAN) or "-1:0").partition(":")
        self._nan_token, self._nan_after = int(nan_token), int(nan_after)
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
        params, choice = sequence.params, sequence.choice
        prompt = sequence.tokens[: sequence.num_prompt] if self._nan_token >= 0 else ()
        if self._nan_token in prompt and sequence.num_output >= self._nan_after:
            return Sampled(None)
        self._answer_about_prompt(sequence)
        if sequence.constraint is None:
            return sample(read, params, choice, self._salt, banned, self._vocab, self._first_token)
        allowed = allowed_tokens(sequence.constraint, self._vocab)
        if allowed is None:
            return Sampled(None)
        return sample(read, params, choice, self._salt, banned, self._vocab, self._first_token, allowed)

    @staticmethod
    def _answer_about_prompt(sequence: SequenceState) -> None:
        """Made up of its tokens, like all that this executor says."""
        params, prompt = sequence.params, sequence.tokens[: sequence.num_prompt]
        if params.prompt_logprobs and not sequence.num_output:
            sequence.scores = [_made_up(token, params.logprobs or 0) for token in prompt[1:]]
        if params.embed:
            state = zlib.crc32(np.asarray(prompt, dtype=np.int32).tobytes())
            vector = np.random.default_rng(state).standard_normal(EMBEDDING_SIZE)
            sequence.embedding = (vector / np.linalg.norm(vector)).tolist()


def _made_up(token: int, alternatives: int) -> TokenLogprobs:
    logprob = -(token % 1000) / 100 - 0.001
    return TokenLogprobs(logprob, tuple((token + i, logprob - i) for i in range(alternatives)))
