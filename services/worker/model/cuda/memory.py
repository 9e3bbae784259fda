"""How many KV blocks a GPU has room for: what a large step leaves of the share that may be used."""

import gc

import torch

from services.common.errors import ConfigurationError
from services.worker.model.backend import Backend, FlatStep, SequenceSpan

PROFILE_TOKENS, PROFILE_SEQUENCES = 4096, 128


def profile_step(tokens: int, sequences: int, block_size: int) -> FlatStep:
    """As many rows and logits as a step may come to have; every sequence has blocks of its own."""
    length = max(1, tokens // sequences)
    blocks = -(-length // block_size)
    spans = [
        SequenceSpan(i * length, length, length, list(range(i * blocks, (i + 1) * blocks))) for i in range(sequences)
    ]
    rows = sequences * length
    return FlatStep([1] * rows, spans, [span.start + length - 1 for span in spans], [None] * sequences)


def blocks_that_fit(total: int, utilization: float, in_use: int, headroom: int, block_bytes: int, least: int) -> int:
    """All in bytes. in_use: of the device, by whomever, once weights are loaded. headroom: what a step takes beyond.
    Raises ConfigurationError if `least` blocks do not fit."""
    room = int(total * utilization) - in_use - headroom
    blocks = max(0, room) // block_bytes
    if blocks < least:
        raise ConfigurationError(
            f"no memory for KV: {utilization:.0%} of {total >> 20} MiB leaves {max(0, room) >> 20} MiB, "
            f"and one sequence of full length takes {least * block_bytes >> 20} MiB"
        )
    return blocks


def measure_blocks(backend: Backend, device: torch.device, utilization: float, block_size: int, least: int) -> int:
    """Run a large step with a cache just large enough for it, and see what it took."""
    step = profile_step(PROFILE_TOKENS, PROFILE_SEQUENCES, block_size)
    backend.allocate(sum(len(span.block_table) for span in step.spans))
    torch.cuda.reset_peak_memory_stats(device)
    backend.forward(step)
    torch.cuda.synchronize(device)
    headroom = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    backend.allocate(0)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return blocks_that_fit(total, utilization, total - free, headroom, backend.block_bytes, least)
