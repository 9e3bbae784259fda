"""How long a step takes: from a device's data sheet (roofline), or fitted from a worker's recorded steps (measured)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.common.errors import ConfigurationError
from services.scheduler.core.step import Features


class CostModel(Protocol):
    @property
    def stages(self) -> int:
        """Pipeline stages of one worker."""
        ...

    def stage_s(self, features: Features) -> float:
        """Seconds that one stage is busy with a step."""
        ...

    def swap_s(self, block_size: int) -> float:
        """Seconds to copy one block to host memory."""
        ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder's cost depends on. parameters: all of them; heads x head_dim: width of attention;
    bytes: of a weight and of a KV element."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    max_model_len: int
    bytes: int = 2

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes

    @property
    def kv_bytes(self) -> int:
        """Of one token: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes


def gpt(
    name: str, layers: int, hidden: int, head_dim: int = 128, vocabulary: int = 50257, length: int = 2048
) -> ModelShape:
    """A GPT-3-like decoder: 12 h^2 weights a layer, and the embedding."""
    heads = hidden // head_dim
    return ModelShape(
        name, layers, hidden, heads, heads, head_dim, 12.0 * layers * hidden**2 + vocabulary * hidden, length
    )


def llama(
    name: str,
    layers: int,
    hidden: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    length: int,
    head_dim: int = 0,
    tied: bool = False,
) -> ModelShape:
    """A Llama-like decoder: gated feed-forward, grouped queries."""
    head_dim = head_dim or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    parameters = layers * (attention + 3.0 * hidden * feed_forward) + vocabulary * hidden * (1 if tied else 2)
    return ModelShape(name, layers, hidden, heads, kv_heads, head_dim, parameters, length)


MODELS = {
    shape.name: shape
    for shape in (
        gpt("gpt3-13b", 40, 5120),
        gpt("gpt3-101b", 80, 10240),
        gpt("gpt3-175b", 96, 12288),
        gpt("gpt3-341b", 120, 15360),
        gpt("opt-13b", 40, 5120, vocabulary=50272),
        llama("smollm2-135m", 30, 576, 1536, 9, 3, 49152, 8192, tied=True),
        llama("llama3-8b", 32, 4096, 14336, 32, 8, 128256, 8192),
        llama("llama3-70b", 80, 8192, 28672, 64, 8, 128256, 8192),
        llama("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064, 32768),
    )
}


def model_of(name: str) -> ModelShape:
    """A preset, or the config.json of a model on disk. Raises ConfigurationError."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigurationError(f"--model: no file and no preset {name!r}; there are {', '.join(MODELS)}")
    try:
        return shape_from_config(path.parent.name or str(path), json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--model {name}: no config.json of a decoder that is understood: {error!r}") from None


def shape_from_config(name: str, config: dict[str, Any]) -> ModelShape:
    """From a Hugging Face config. Raises KeyError, TypeError or ValueError on what is none."""
    hidden, layers, heads = (int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    vocabulary, length = int(config["vocab_size"]), int(config["max_position_embeddings"])
    if min(hidden, layers, heads, vocabulary, length) < 1:
        raise ValueError("sizes must be positive")
    if "intermediate_size" not in config or config.get("model_type") in ("gpt2", "opt", "gpt_neox"):
        return gpt(name, layers, hidden, hidden // heads, vocabulary, length)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    tied = bool(config.get("tie_word_embeddings", False))
    feed_forward = int(config["intermediate_size"])
    return llama(name, layers, hidden, feed_forward, heads, kv_heads, vocabulary, length, head_dim, tied)


@dataclass(frozen=True, slots=True)
class Device:
    """A data sheet. flops: dense, 16 bit, per second; bandwidth: of memory, bytes per second; link: all-reduce within
    a node, bytes per second of bus; network: between nodes; host: to host memory."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    host: float


DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 312e12, 1555e9, 40e9, 230e9, 25e9, 25e9),
        Device("a100-80gb", 312e12, 2039e9, 80e9, 230e9, 25e9, 25e9),
        Device("h100", 989e12, 3350e9, 80e9, 370e9, 50e9, 50e9),
        Device("h200", 989e12, 4800e9, 141e9, 370e9, 50e9, 50e9),
        Device("l4", 121e12, 300e9, 24e9, 25e9, 12e9, 12e9),
        # Two cores: what a laptop or the smallest cloud machine has (see docs/simulator.md for the measurement).
        Device("cpu-2-cores", 0.35e12, 30e9, 16e9, 1e12, 1e9, 10e9),
    )
}


def device_of(name: str) -> Device:
    """Raises ConfigurationError."""
    if name not in DEVICES:
        raise ConfigurationError(f"--device: no device {name!r}; there are {', '.join(DEVICES)}")
    return DEVICES[name]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What part of the data sheet an engine reaches. Stated once, for all presets; see docs/simulator.md.

    flops, layer_s (launches and element-wise kernels of a layer): fitted to the 40 latencies that FasterTransformer
    publishes for its 20B model on one A100; they agree with both to 2 %.
    reduce_s: NCCL's own model of a small all-reduce over 8 GPUs.
    bandwidth: fixed by one point, Orca's figure 9c: GPT-3 175B, 128 input tokens, 95 ms per generated token.
    """

    bandwidth: float = 0.337
    flops: float = 0.66
    layer_s: float = 75e-6
    reduce_s: float = 15e-6


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a stage = weights read + arithmetic + KV read + what each layer costs whatever its size.

    The terms are added, not overlapped: that is how the step times that can be read from Orca's figure 10 grow with the
    batch. shards: tensor-parallel devices of a stage (Megatron: two all-reduces a layer).
    """

    model: ModelShape
    device: Device
    shards: int = 1
    stages: int = 1
    efficiency: Efficiency = Efficiency()

    def stage_s(self, features: Features) -> float:
        model, device, part = self.model, self.device, self.shards * self.stages
        bandwidth = device.bandwidth * self.efficiency.bandwidth
        width = model.heads * model.head_dim
        operations = 2 * model.parameters * features.tokens + 4 * model.layers * width * features.attended
        read = model.weight_bytes + model.kv_bytes * features.context
        layers = model.layers / self.stages
        fixed = layers * self.efficiency.layer_s
        return (
            read / part / bandwidth
            + operations / part / (device.flops * self.efficiency.flops)
            + fixed
            + layers * 2 * self._all_reduce_s(features.tokens)
            + self._handover_s(features.tokens)
        )

    def _all_reduce_s(self, tokens: int) -> float:
        """A ring moves 2 (n-1)/n of the activations."""
        if self.shards == 1:
            return 0.0
        activations = tokens * self.model.hidden * self.model.bytes
        return self.efficiency.reduce_s + 2 * (self.shards - 1) / self.shards * activations / self.device.link

    def _handover_s(self, tokens: int) -> float:
        """Activations go to the next stage, a part from each shard."""
        if self.stages == 1:
            return 0.0
        return tokens * self.model.hidden * self.model.bytes / self.shards / self.device.network

    def swap_s(self, block_size: int) -> float:
        return self.model.kv_bytes * block_size / (self.shards * self.stages) / self.device.host

    def num_blocks(self, block_size: int, share: float) -> int:
        """KV blocks that fit beside the weights into `share` of the memory. Raises ConfigurationError if none does."""
        memory = self.device.memory * self.shards * self.stages * share - self.model.weight_bytes
        blocks = int(memory // (self.model.kv_bytes * block_size))
        if blocks < 1:
            count = self.shards * self.stages
            raise ConfigurationError(f"{self.model.name} does not fit into {count} x {self.device.name}")
        return blocks


@dataclass(frozen=True, slots=True)
class Measured:
    """seconds = a + b tokens + c sequences + d attended, fitted to steps that a worker has run."""

    coefficients: tuple[float, float, float, float]
    swap_block_s: float = 0.0
    stages: int = 1

    def stage_s(self, features: Features) -> float:
        a, b, c, d = self.coefficients
        return a + b * features.tokens + c * features.sequences + d * features.attended

    def swap_s(self, block_size: int) -> float:
        return self.swap_block_s


FIT_ROUNDS = 4  # of weights by the last prediction; the second changes a percent, the third nothing


def fit(steps: Sequence[tuple[Features, float]]) -> Measured:
    """Least squares with coefficients that are not negative: what comes out negative is left out, and the rest fitted
    again. Relative errors count, so that the many short steps are not drowned by the few long ones; relative to what
    is predicted, or what took long by chance would count for less, and the whole come out too short."""
    rows = np.array([(1.0, f.tokens, f.sequences, f.attended) for f, _ in steps])
    seconds = np.array([duration for _, duration in steps])
    predicted = seconds
    for _ in range(FIT_ROUNDS):
        values = _least_squares(rows / predicted[:, None], seconds / predicted)
        predicted = np.maximum(rows @ values, seconds.min() / 2)
    a, b, c, d = map(float, values)
    return Measured((a, b, c, d))


def _least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Coefficients of all columns, none negative."""
    values, keep = np.zeros(rows.shape[1]), list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, keep], wanted, rcond=None)
        if len(keep) == 1 or found.min() >= 0:
            break
        keep.pop(int(found.argmin()))
    values[keep] = np.maximum(found, 0.0)
    return values


def read_steps(path: Path) -> list[tuple[Features, float]]:
    """Steps that `orca up --record-steps` wrote. Raises ConfigurationError naming the line."""
    out = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {getattr(error, 'strerror', None) or 'no text file'}") from None
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(line)
            features = Features(*(int(step[name]) for name in Features._fields))
            seconds = float(step["seconds"])
            if not 0 < seconds < float("inf") or min(features) < 0:
                raise ValueError("out of range")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"{path} line {number}: no recorded step: {error}") from None
        out.append((features, seconds))
    if len(out) < 4:
        raise ConfigurationError(f"{path}: {len(out)} steps are too few for a fit")
    return out
