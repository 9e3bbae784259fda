"""Runs steps with torch: one model call per step on the flat [1, sum of lengths] input."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from services.common.errors import ConfigurationError
from services.common.models.resolve import ModelFiles
from services.worker.core.plan import BatchRow, BlockCopy, Copy, Sampled, SequenceState
from services.worker.model import paged
from services.worker.model.attention import SequenceSpan, build_tile_groups
from services.worker.model.linear import pack_linears
from services.worker.model.loader import load_model
from services.worker.model.sampler import SampleRow, sample

log = logging.getLogger(__name__)

# Below this number of rows some float32 products change with it; checked at start, doubled if need be.
MIN_ROWS = 16
DEFAULT_POOL_BYTES = 2 << 30


class TorchExecutor:
    """A model, its paged KV cache and the sampler.

    batch_invariant: a row's bits do not depend on what else is in the step (always tried in float32).
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
    ) -> None:
        paged.register()
        self.num_model_calls = 0
        self.num_rows = 0
        self.block_size = block_size
        self.min_rows = MIN_ROWS
        self._device = device
        self._model = load_model(files, dtype, device)
        config: Any = self._model.config
        self._vocab_size = int(config.vocab_size)
        has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        if device.type == "cpu" and dtype == torch.float32 and has_onednn:
            pack_linears(self._model)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._group_size = int(config.num_attention_heads) // kv_heads
        layers = int(config.num_hidden_layers)
        block_bytes = 2 * layers * kv_heads * block_size * head_dim * dtype.itemsize
        self.num_blocks = num_blocks or self._default_blocks(block_bytes, files.max_model_len)
        self.num_host_blocks = num_host_blocks
        self._check_memory(block_bytes)
        shape = (kv_heads, block_size, head_dim)
        self._caches = [
            (
                torch.zeros((self.num_blocks, *shape), dtype=dtype, device=device),
                torch.zeros((self.num_blocks, *shape), dtype=dtype, device=device),
            )
            for _ in range(layers)
        ]
        pinned = device.type == "cuda"
        self._host = [
            (
                torch.zeros((num_host_blocks, *shape), dtype=dtype, pin_memory=pinned),
                torch.zeros((num_host_blocks, *shape), dtype=dtype, pin_memory=pinned),
            )
            for _ in range(layers if num_host_blocks else 0)
        ]
        self.swap_s = self._measure_swap() if num_host_blocks else 0.0
        self.batch_invariant = dtype == torch.float32 and self._make_invariant()

    def _default_blocks(self, block_bytes: int, max_model_len: int) -> int:
        """Room for one sequence of full length at least, 2 GiB or a quarter of free memory at most."""
        wanted = min(DEFAULT_POOL_BYTES, _available_bytes() // 4) // block_bytes
        return max(int(wanted), -(-max_model_len // self.block_size))

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
            for layer, device_kv in enumerate(self._caches):
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
        logits = self._forward(rows)
        sampling = [
            SampleRow(
                params=row.sequence.params,
                prompt_index=row.sequence.prompt_index,
                choice=row.sequence.choice,
                prompt=row.sequence.tokens[: row.sequence.num_prompt],
                output=row.sequence.tokens[row.sequence.num_prompt :],
                banned=ban,
            )
            for row, ban in zip(rows, banned, strict=True)
            if row.samples
        ]
        return sample(logits, sampling) if sampling else []

    @torch.inference_mode()
    def _forward(self, rows: list[BatchRow]) -> torch.Tensor:
        """Logits, [rows that sample, vocabulary] float32."""
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        spans: list[SequenceSpan] = []
        last: list[int] = []
        for row in rows:
            sequence, end = row.sequence, row.start + row.num_tokens
            spans.append(SequenceSpan(len(tokens), row.num_tokens, end, sequence.block_table))
            tokens += sequence.tokens[row.start : end]
            positions += range(row.start, end)
            blocks += (sequence.block_table[position // self.block_size] for position in range(row.start, end))
            if row.samples:
                last.append(len(tokens) - 1)
        count = len(tokens)
        padding = [0] * (self.min_rows - count)
        keep = last + [0] * (self.min_rows - len(last))
        offsets = torch.tensor(positions) % self.block_size
        step = paged.PagedStep(
            caches=self._caches,
            slot_blocks=torch.tensor(blocks, device=self._device),
            slot_offsets=offsets.to(self._device),
            num_tokens=count,
            groups=build_tile_groups(spans, self.block_size, self._group_size, self._device),
        )
        result = self._model(
            input_ids=torch.tensor([tokens + padding], device=self._device),
            position_ids=torch.tensor([positions + padding], device=self._device),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, device=self._device),
            orca_step=step,
        )
        self.num_model_calls += 1
        self.num_rows += count
        logits: torch.Tensor = result.logits[0, : len(last)].float()
        return logits

    def _make_invariant(self) -> bool:
        """Find the padding under which a row alone equals the row in company. False if none does."""
        while self.min_rows <= 128:
            if self._is_invariant():
                self._reset_counters()
                return True
            self.min_rows *= 2
        self.min_rows = MIN_ROWS
        self._reset_counters()
        log.warning("batch invariance does not hold on this machine: texts may depend on the batch")
        return False

    def _reset_counters(self) -> None:
        self.num_model_calls = self.num_rows = 0

    def _is_invariant(self) -> bool:
        """One prompt alone, token by token, and as one chunk beside others, must give the same bits."""
        length = min(6, self.block_size)
        if self.num_blocks < 2:
            return False
        tables = [[0], [1]]
        tokens = [(i * 7919) % self._vocab_size for i in range(length)]
        alone = None
        for position in range(length):
            row = BatchRow(_probe(tokens[: position + 1], tables[0]), position, 1)
            alone = self._forward([row])
        company = [
            BatchRow(_probe(list(reversed(tokens)), tables[1]), 0, length),
            BatchRow(_probe(tokens, tables[0]), 0, length),
        ]
        together = self._forward(company)
        return alone is not None and torch.equal(alone[0], together[1])


def _probe(tokens: list[int], table: list[int]) -> SequenceState:
    from services.common.request import SamplingParams

    return SequenceState(0, "probe", 0, 0, 0, 0, SamplingParams(max_tokens=1), len(tokens), tokens, 0, table)


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
