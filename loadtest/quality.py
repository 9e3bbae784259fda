"""`make bench-quality`: what fewer bits cost: perplexity on prose that ships with Python, agreement with float32.

Agreement: the share of positions at which the most likely next token is that of float32.
"""

import argparse
import math

import torch

from loadtest.peers.traces import Prompts
from services.common.models.resolve import resolve_model
from services.common.settings import DEFAULT_MODEL
from services.worker.executor.torch_executor import TorchExecutor
from services.worker.model.backend import FlatStep, SequenceSpan

LENGTH, BLOCK = 512, 16
FORMATS = {"float32": ("float32", "none"), "bfloat16": ("bfloat16", "none"), "int8": ("bfloat16", "int8")}


def measure(name: str, texts: list[list[int]]) -> tuple[float, list[int]]:
    """Perplexity, and the most likely token at every position."""
    dtype, quantize = FORMATS[name]
    executor = TorchExecutor(
        resolve_model(DEFAULT_MODEL),
        getattr(torch, dtype),
        torch.device("cpu"),
        LENGTH // BLOCK,
        BLOCK,
        kernels="fast",
        quantize=quantize,
    )
    loss, best = 0.0, []
    for text in texts:
        span = SequenceSpan(0, LENGTH, LENGTH, list(range(LENGTH // BLOCK)))
        logits = executor.backend.forward(FlatStep(text, [span], list(range(LENGTH)), [None] * LENGTH))
        assert logits.values is not None
        log_probabilities = torch.log_softmax(logits.values[:-1], dim=-1)
        loss -= float(log_probabilities.gather(1, torch.tensor(text[1:]).unsqueeze(1)).mean())
        best += logits.chosen
    return math.exp(loss / len(texts)), best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=40, help=f"pieces of {LENGTH} tokens")
    args = parser.parse_args()
    prompts = Prompts(7)
    texts = [prompts.cut(LENGTH) for _ in range(args.texts)]
    print("          perplexity   change   agreement")
    reference: tuple[float, list[int]] | None = None
    for name in FORMATS:
        perplexity, best = measure(name, texts)
        reference = reference or (perplexity, best)
        same = sum(a == b for a, b in zip(best, reference[1], strict=True)) / len(best)
        print(f"{name:9} {perplexity:10.3f} {perplexity / reference[0] - 1:+8.2%} {same:11.2%}")


if __name__ == "__main__":
    main()
