"""Runs steps with torch: one model call per step on the flat [1, sum of lengths] input."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.common.errors import ConfigurationError
from services.common.models.resolve import ModelFiles
from services.worker.core.plan import BatchRow, BlockCopy, Copy, Sampled
from services.worker.model.backend import Draw, FlatStep, Logits, SequenceSpan
from services.worker.model.choose import make_backend
from services.worker.model.cuda.memory import measure_blocks
from services.worker.model.masks import Masks, Words
from services.worker.model.sampler import SampleRow, sample, score

DEFAULT_POOL_BYTES = 2 << 30


class TorchExecutor:
    """A model, its paged KV cache and the sampler.

    batch_invariant: a row's bits do not depend on what else is in the step.
    kernels, quantize, threads: as of `make_backend`. gpu_memory_utilization: share of a GPU's memory for weights, steps
    and KV together, where num_blocks is 0.
    Raises ConfigurationError when the KV pool does not fit into memory.
    """

    def __init__(
        self,
        files: ModelFiles,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        kernels: str = "auto",
        quantize: str = "none",
        threads: int = 0,
        gpu_memory_utilization: float = 0.9,
    ) -> None:
        self.num_model_calls = 0
        self.num_rows = 0
        self._masks = Masks(files.vocab_size)
        self.block_size = block_size
        self._device = device
        self.backend = make_backend(
            files, dtype, device, block_size, kernels, quantize, threads or torch.get_num_threads()
        )
        block_bytes = self.backend.block_bytes
        least = -(-files.max_model_len // block_size)
        if num_blocks == 0 and device.type == "cuda":
            num_blocks = measure_blocks(self.backend, device, gpu_memory_utilization, block_size, least)
        self.num_blocks = num_blocks or self._default_blocks(block_bytes, least)
        self.num_host_blocks = num_host_blocks
        self._check_memory(block_bytes)
        self.backend.allocate(self.num_blocks)
        self.backend.prepare()
        self._host = [
            (self._host_like(keys), self._host_like(values)) for keys, values in self.backend.caches if num_host_blocks
        ]
        self.swap_s = self._measure_swap() if num_host_blocks else 0.0

    @property
    def batch_invariant(self) -> bool:
        return self.backend.batch_invariant

    @property
    def has_own_threads(self) -> bool:
        return self.backend.has_own_threads

    def _host_like(self, cache: torch.Tensor) -> torch.Tensor:
        shape = (self.num_host_blocks, *cache.shape[1:])
        return torch.zeros(shape, dtype=cache.dtype, pin_memory=self._device.type == "cuda")

    def _default_blocks(self, block_bytes: int, least: int) -> int:
        """Room for one sequence of full length at least, 2 GiB or a quarter of free memory at most."""
        wanted = min(DEFAULT_POOL_BYTES, _available_bytes() // 4) // block_bytes
        return max(int(wanted), least)

    def _check_memory(self, block_bytes: int) -> None:
        needed = ((self.num_blocks if self._device.type == "cpu" else 0) + self.num_host_blocks) * block_bytes
        if needed > _available_bytes():
            free = _available_bytes()
            blocks = f"{self.num_blocks} KV blocks" + f" and {self.num_host_blocks} of host memory" * bool(
                self.num_host_blocks
            )
            raise ConfigurationError(f"no memory for {blocks}: {needed >> 20} MiB needed, {free >> 20} MiB free")

    @torch.inference_mode()
    def copy(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            sources, targets = torch.tensor(copy.sources), torch.tensor(copy.targets)
            for layer, device_kv in enumerate(self.backend.caches):
                host_kv = self._host[layer] if self._host else device_kv
                source_kv = host_kv if copy.kind is Copy.TO_DEVICE else device_kv
                target_kv = host_kv if copy.kind is Copy.TO_HOST else device_kv
                for source, target in zip(source_kv, target_kv, strict=True):
                    target[targets.to(target.device)] = source[sources.to(source.device)].to(target.device)

    def _measure_swap(self, rounds: int = 5) -> float:
        """Seconds to copy one block to host memory: the median of a few, the first left out."""
        times = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            self.copy([BlockCopy(Copy.TO_HOST, (0,), (0,))])
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return sorted(times[1:])[rounds // 2]

    @torch.inference_mode()
    def execute(self, rows: list[BatchRow], banned: list[list[int]]) -> list[Sampled]:
        sampling = [row for row in rows if row.samples]
        wishes = [_sample_row(row, ban) for row, ban in zip(rows, banned, strict=True) if row.samples]
        draws = [self._draw(wish) for wish in wishes]
        more = [index for index, draw in enumerate(draws) if draw is None]
        constraints = {i: row.sequence.constraint for i, row in enumerate(sampling) if row.sequence.constraint}
        masks = self._masks.begin(constraints) if constraints else None
        logits = self._forward(rows, draws, masks.words if masks and self.backend.masks else None)
        sampled = [Sampled(token if token >= 0 else None) for token in logits.chosen[: len(wishes)]]
        if more:
            assert logits.values is not None
            allowed = masks.of(more, self._device) if masks else {}
            chosen = sample(logits.values[more], [wishes[index] for index in more], allowed)
            for index, one in zip(more, chosen, strict=True):
                sampled[index] = one
        self._answer_about_prompts(rows, sampling, logits)
        return sampled

    def _draw(self, wish: SampleRow) -> Draw | None:
        """What the back end does of the sampling, if it can do all of it."""
        if wish.constrained and not self.backend.masks:
            return None
        return wish.draw if self.backend.draws or wish.greedy else None

    def _forward(
        self, rows: list[BatchRow], draws: list[Draw | None], masks: Callable[[], Words] | None = None
    ) -> Logits:
        """Of the rows that sample, then of the positions that are scored."""
        tokens: list[int] = []
        spans: list[SequenceSpan] = []
        wanted: list[int] = []
        scored: list[int] = []
        for row in rows:
            sequence, end = row.sequence, row.start + row.num_tokens
            scored += (len(tokens) + position - row.start for position in row.scored)
            spans.append(SequenceSpan(len(tokens), row.num_tokens, end, sequence.block_table))
            tokens += sequence.tokens[row.start : end]
            if row.samples:
                wanted.append(len(tokens) - 1)
        states = any(row.sequence.params.embed for row in rows)
        step = FlatStep(tokens, spans, wanted + scored, draws + [None] * len(scored), states, masks)
        logits = self.backend.forward(step)
        self.num_model_calls += 1
        self.num_rows += len(tokens)
        return logits

    @staticmethod
    def _answer_about_prompts(rows: list[BatchRow], sampling: list[BatchRow], logits: Logits) -> None:
        """Log-probabilities of the prompts' own tokens, and embeddings: kept with their sequences."""
        at = len(sampling)
        for row in rows:
            positions, sequence = row.scored, row.sequence
            if positions:
                assert logits.values is not None
                following = sequence.tokens[positions.start + 1 : positions.stop + 1]
                values = logits.values[at : at + len(positions)]
                sequence.scores += score(values, following, sequence.params.logprobs or 0)
                at += len(positions)
        for index, row in enumerate(sampling):
            if row.sequence.params.embed:
                assert logits.states is not None
                row.sequence.embedding = torch.nn.functional.normalize(logits.states[index], dim=0).tolist()


def _sample_row(row: BatchRow, banned: list[int]) -> SampleRow:
    sequence = row.sequence
    return SampleRow(
        sequence.params,
        sequence.prompt_index,
        sequence.choice,
        sequence.tokens,
        sequence.num_prompt,
        banned,
        sequence.constraint is not None,
    )


def _available_bytes() -> int:
    """Free memory of the machine, or of the container if that is less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(0, available)
