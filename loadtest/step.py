"""`make bench-step`: the time of whole steps against that of their matrix products alone, in one process.

The products run through the same kernels on the same weights; what a step takes beyond them is attention, norms, the
sampler and bookkeeping. Each pair is measured in turns, and the medians are compared. Beside them stands what torch's
own bfloat16 products take, with the same fused projections: what a plain implementation cannot go below.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.common.models.resolve import resolve_model
from services.common.request import SamplingParams
from services.common.settings import DEFAULT_MODEL
from services.worker.core.plan import BatchRow, SequenceState
from services.worker.executor.torch_executor import TorchExecutor
from services.worker.model.cpu.decoder import CpuDecoder

BLOCK = 16
COUNTS, CONTEXTS, PREFILL = (1, 8, 32, 64, 128), (50, 200, 500, 2000), 512
# The KV that this reads exceeds the memory of a small machine.
MOST_TOKENS = 64 * 2000
SHAPES = [
    *((n, context, 1) for n in COUNTS for context in CONTEXTS if n * context <= MOST_TOKENS),
    (1, PREFILL, PREFILL),
]


# SmolLM2-135M: [outputs, inputs] of a layer's fused projections, and of the head.
LAYERS, PROJECTIONS, HEAD = 30, ((960, 576), (576, 576), (3072, 576), (576, 1536)), (49152, 576)


class PlainProducts:
    """The matrix products of a step by torch, on weights in their usual order."""

    def __init__(self) -> None:
        def random(shape: tuple[int, int]) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16)

        self._layers = [[random(shape) for shape in PROJECTIONS] for _ in range(LAYERS)]
        self._head = random(HEAD)

    @torch.inference_mode()
    def run(self, rows: int, wanted: int) -> None:
        inputs = {width: torch.randn(rows, width, dtype=torch.bfloat16) for width in (576, 1536)}
        for layer in self._layers:
            for weight in layer:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        torch.nn.functional.linear(inputs[HEAD[1]][:wanted], self._head)

    def measure(self, rows: int, wanted: int, rounds: int) -> float:
        """The median in ms."""
        return statistics.median([timed(lambda: self.run(rows, wanted)) for _ in range(rounds + 2)][2:])


def rows_of(count: int, context: int, length: int, vocabulary: int) -> list[BatchRow]:
    """Sequences at `context` tokens, the last `length` of them in this step."""
    rng = random.Random(0)
    per_sequence = -(-context // BLOCK)
    rows = []
    for index in range(count):
        tokens = [rng.randrange(vocabulary) for _ in range(context)]
        table = list(range(index * per_sequence, (index + 1) * per_sequence))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        state = SequenceState(index, f"r{index}", 0, 0, 0, 0, params, context, tokens, context - length, table)
        rows.append(BatchRow(state, context - length, length))
    return rows


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def measure(executor: TorchExecutor, shape: tuple[int, int, int], rounds: int, vocabulary: int) -> dict[str, float]:
    """Medians of both in ms, and their ratio."""
    count, context, length = shape
    rows = rows_of(count, context, length, vocabulary)
    backend = executor.backend
    assert isinstance(backend, CpuDecoder)
    steps, products = [], []
    for number in range(rounds + 2):
        step = timed(lambda: executor.execute(rows, [[]] * count))
        product = timed(lambda: backend.products(count * length, count))
        if number >= 2:
            steps.append(step)
            products.append(product)
    step, product = statistics.median(steps), statistics.median(products)
    return {"sequences": count, "context": context, "tokens": count * length, "step_ms": step, "products_ms": product}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="bfloat16,int8", help="of float32, bfloat16 and int8, those to measure")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--quick", action="store_true", help="only 1, 8 and 32 sequences at 200 tokens, and the prefill"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    files = resolve_model(DEFAULT_MODEL)
    shapes = [shape for shape in SHAPES if not args.quick or (shape[0] <= 32 and shape[1] in (200, PREFILL))]
    blocks = max(count * -(-context // BLOCK) for count, context, _ in shapes)
    results = []
    plain = PlainProducts()
    plain_ms = {
        count * length: plain.measure(count * length, count, args.rounds) for count, _, length in sorted(set(shapes))
    }
    del plain
    for weights in args.weights.split(","):
        dtype = torch.float32 if weights == "float32" else torch.bfloat16
        quantize = "int8" if weights == "int8" else "none"
        executor = TorchExecutor(
            files,
            dtype,
            torch.device("cpu"),
            blocks,
            BLOCK,
            kernels="fast",
            quantize=quantize,
            threads=os.cpu_count() or 1,
        )
        print(f"\n{weights}\nsequences  context  tokens   step ms  products ms  ratio  torch's products ms  ratio")
        for shape in shapes:
            result = measure(executor, shape, args.rounds, files.vocab_size)
            step, product = result["step_ms"], result["products_ms"]
            tokens = int(result["tokens"])
            result["torch_products_ms"] = theirs = plain_ms[tokens]
            line = f"{shape[0]:9} {shape[1]:8} {tokens:7} {step:9.2f} {product:12.2f} {step / product:6.2f}"
            print(f"{line} {theirs:20.2f} {step / theirs:6.2f}", flush=True)
            results.append({"weights": weights, **result})
        del executor
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
