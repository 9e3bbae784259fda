"""`make test-gpu`: the CUDA back end on a real GPU, in minutes: golden checks, then a short benchmark.

Random weights, made in place. Every check prints what it found; the exit code is 1 if one failed. Needs FlashInfer
(`pip install -e '.[cuda]'`) and nvcc, or its prebuilt kernels.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from services.common.models.resolve import ModelFiles, resolve_model
from services.common.request import SamplingParams
from services.worker.core.plan import BlockCopy, Copy
from services.worker.executor.torch_executor import TorchExecutor
from services.worker.model.backend import Draw, FlatStep, SequenceSpan
from services.worker.model.cuda.backend import CudaBackend
from services.worker.model.cuda.tables import build_tables
from services.worker.model.sampler import draw_tokens
from tests.golden.test_families import make_folder
from tests.harness import LocalSystem

BLOCK, BLOCKS, VOCABULARY = 16, 8192, 32000
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
}
TOLERANCE = 0.03  # of the largest logit, in bfloat16
DECODES, CONTEXT, PREFILLS = (1, 8, 32, 128, 256), 512, (512, 2048)


def steps(counts: list[int], context: int, seed: int) -> list[FlatStep]:
    """First each sequence's prompt, in one step; then one decode of all."""
    generator = torch.Generator().manual_seed(seed)

    def step(lengths: list[int], ends: list[int]) -> FlatStep:
        spans, tokens, used = [], 0, 0
        for length, end in zip(lengths, ends, strict=True):
            blocks = -(-(context + 1) // BLOCK)
            spans.append(SequenceSpan(tokens, length, end, list(range(used, used + blocks))))
            tokens, used = tokens + length, used + blocks
        ids = torch.randint(2, VOCABULARY, (tokens,), generator=generator).tolist()
        return FlatStep(ids, spans, [s.start + s.length - 1 for s in spans], [None] * len(spans))

    return [step(counts, counts), step([1] * len(counts), [count + 1 for count in counts])]


class Checks:
    def __init__(self) -> None:
        self.failed: list[str] = []

    def tell(self, name: str, holds: bool, found: str) -> None:
        print(f"{'ok    ' if holds else 'FAILED'}  {name}: {found}", flush=True)
        if not holds:
            self.failed.append(name)


def make(files: ModelFiles, kernels: str, blocks: int = BLOCKS, **more: Any) -> TorchExecutor:
    return TorchExecutor(files, torch.bfloat16, torch.device("cuda"), blocks, BLOCK, kernels=kernels, **more)


def check_logits(checks: Checks, fast: CudaBackend, reference: TorchExecutor) -> None:
    """Mixed prompts, then their decodes by a graph, against the reference back end on the same device."""
    for seed, counts in enumerate(([5, 1, 17, 640, 33], [16], [100] * 30, [2, 300, 15, 16, 17, 31, 32, 33])):
        for kind, step in zip(("prompts", "decodes"), steps(list(counts), 700, seed), strict=True):
            got, want = fast.forward(step).values, reference.backend.forward(step).values
            assert got is not None
            assert want is not None
            error = float((got - want).abs().max() / want.abs().max())
            same = float((got.argmax(-1) == want.argmax(-1)).float().mean())
            checks.tell(f"logits, {len(counts)} {kind}", error < TOLERANCE, f"error {error:.4f}, same token {same:.0%}")


def check_graphs(checks: Checks, fast: CudaBackend) -> None:
    """A graph gives what the same step gives without one, at every padding."""
    worst = 0.0
    for count in (1, 2, 3, 5, 9, 33, 65, 200):
        prompts, decodes = steps([20] * count, 40, count)
        fast.forward(prompts)
        with torch.inference_mode():
            eager = fast._start(build_tables(decodes, BLOCK)).clone()
        graph = fast.forward(decodes).values
        assert graph is not None
        worst = max(worst, float((graph - eager).abs().max() / eager.abs().max()))
    checks.tell("graphs against eager steps", worst < TOLERANCE, f"error {worst:.4f}")


def check_draws(checks: Checks) -> None:
    logits = 4 * torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(1))
    draws = [
        Draw(0.5 + i / 64, i / 64, *((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (9, 0.8, 0.02))[i % 4])
        for i in range(64)
    ]
    same = (draw_tokens(logits.cuda(), draws).cpu() == draw_tokens(logits, draws)).float().mean()
    checks.tell("draws against those on the CPU", bool(same > 0.98), f"{same:.0%} the same (sums differ in order)")


def check_waits(checks: Checks, fast: CudaBackend) -> None:
    """torch tells of every wait for the device: there must be one a step, for its tokens."""
    prompts, decodes = steps([50] * 8, 100, 3)
    drawn = [Draw(0.8, 0.4), Draw(1.0, 0.3, 20), Draw(0.9, 0.2, 0, 0.9), Draw(0.0)] * 2
    for name, step in (("prompts", prompts), ("decodes", decodes)):
        step = FlatStep(step.tokens, step.spans, step.wanted, drawn)
        fast.forward(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            fast.forward(step)
            torch.cuda.set_sync_debug_mode("default")
        waits = [str(w.message).splitlines()[0] for w in caught if "synchroniz" in str(w.message)]
        checks.tell(f"waits in a step of {name}", len(waits) == 1, f"{len(waits)}")


def check_served(checks: Checks, fast: TorchExecutor, reference: TorchExecutor) -> None:
    """Whole requests through the scheduler, with preemption: the same greedy tokens until a near tie parts them."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in range(3, 99, 4)]
    texts = []
    for executor in (fast, reference):
        system = LocalSystem([executor], token_budget=128, max_model_len=512)
        for index, prompt in enumerate(prompts):
            system.submit(f"r{index}", prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
        made = system.run()
        texts.append([made[f"r{index}"].tokens for index in range(len(prompts))])
    firsts = [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), 24) for pair in zip(*texts, strict=True)
    ]
    checks.tell(
        "24 served requests",
        sum(firsts) / len(firsts) > 6,
        f"first difference after {sum(firsts) / len(firsts):.1f} of 24 tokens on average",
    )


def check_swap(checks: Checks, executor: TorchExecutor) -> None:
    layer = executor.backend.caches[3][0]
    before = layer[5].clone()
    executor.copy([BlockCopy(Copy.TO_HOST, (5,), (0,)), BlockCopy(Copy.TO_DEVICE, (0,), (6,))])
    checks.tell(
        "a block to the host and back",
        bool(torch.equal(layer[6], before)),
        "bit-equal" if torch.equal(layer[6], before) else "changed",
    )


def median_ms(call: Callable[[], object], rounds: int = 30) -> float:
    times = []
    for _ in range(rounds + 5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[5:])


def benchmark(fast: CudaBackend, reference: TorchExecutor) -> list[dict[str, float]]:
    """Whole steps, with their wait, in ms; greedy tokens chosen on the device."""
    results = []
    print("\nsequences  tokens   step ms   without graph   reference   tokens/s")
    for count in DECODES:
        _, step = steps([CONTEXT] * count, CONTEXT, 0)
        step = FlatStep(step.tokens, step.spans, step.wanted, [Draw(0.0)] * count)
        graph = median_ms(lambda step=step: fast.forward(step))  # type: ignore[misc]
        sizes, fast._sizes = fast._sizes, ()
        eager = median_ms(lambda step=step: fast.forward(step))  # type: ignore[misc]
        fast._sizes = sizes
        plain = median_ms(lambda step=step: reference.backend.forward(step), 5)  # type: ignore[misc]
        results.append(
            {"sequences": count, "tokens": count, "step_ms": graph, "eager_ms": eager, "reference_ms": plain}
        )
        print(f"{count:9} {count:7} {graph:9.2f} {eager:15.2f} {plain:11.2f} {1e3 * count / graph:10.0f}", flush=True)
    for length in PREFILLS:
        step, _ = steps([length], length, 0)
        step = FlatStep(step.tokens, step.spans, step.wanted, [Draw(0.0)])
        eager = median_ms(lambda step=step: fast.forward(step), 10)  # type: ignore[misc]
        results.append({"sequences": 1, "tokens": length, "eager_ms": eager})
        print(f"{1:9} {length:7} {'':9} {eager:15.2f} {'':11} {1e3 * length / eager:10.0f}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench-results/gpu.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("test-gpu: torch sees no CUDA device\n")
        return 2
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        make_folder(Path(folder) / "m", "llama", **MODEL)
        files = resolve_model(str(Path(folder) / "m"))
        sized = make(files, "fast", blocks=0, gpu_memory_utilization=0.5)
        total = torch.cuda.mem_get_info()[1]
        pool = sized.num_blocks * sized.backend.block_bytes
        checks.tell(
            "half of the memory",
            0.3 * total < pool < 0.5 * total,
            f"{sized.num_blocks} blocks, {pool >> 20} of {total >> 20} MiB",
        )
        del sized
        torch.cuda.empty_cache()
        started = time.monotonic()
        executor, reference = make(files, "fast", num_host_blocks=16), make(files, "reference")
        fast = executor.backend
        assert isinstance(fast, CudaBackend)
        print(f"graphs of {len(fast._graphs)} sizes, ready in {time.monotonic() - started:.1f} s")
        check_logits(checks, fast, reference)
        check_graphs(checks, fast)
        check_draws(checks)
        check_waits(checks, fast)
        check_swap(checks, executor)
        check_served(checks, executor, reference)
        results = benchmark(fast, reference)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"device": torch.cuda.get_device_name(), "failed": checks.failed, "steps": results}, indent=1)
    )
    print(
        f"\n{torch.cuda.get_device_name()}: "
        + (f"FAILED: {', '.join(checks.failed)}" if checks.failed else "all checks hold")
    )
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
