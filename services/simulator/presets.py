"""Settings of published evaluations, and of the machines people have. Explicit flags win over a preset's."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Preset:
    """requests: of a run, or fewer if they do not arrive within duration_s. seeds: runs of which the median stands.
    batch_sizes: of each policy, the values of max_num_seqs that are tried; the best counts (as in the papers).
    target_ms: of the median normalised latency. workloads: (trace, rate) pairs, for presets at fixed rates."""

    text: str
    model: str
    device: str
    shards: int = 1
    stages: int = 1
    policies: tuple[str, ...] = ("request-level", "orca")
    batch_sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    trace: str = "orca"
    requests: int = 1000
    seeds: int = 1
    target_ms: float = 0.0
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    workloads: tuple[tuple[str, float], ...] = ()
    duration_s: float = 0.0
    kv_blocks: int = 0
    prefix_cache: bool = True


ORCA_BATCH_SIZES: dict[str, tuple[int, ...]] = {
    "request-level": (1, 8),
    "request-level-packed": (1, 8),
    "orca": (8, 32),
}
ORCA_RATES: dict[str, tuple[float, ...]] = {
    "request-level": (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
    "request-level-packed": (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6),
    "orca": (0.5, 1, 2, 3, 4, 5, 6, 7, 8),
}


def _orca(text: str, model: str, shards: int, stages: int, target_ms: float) -> Preset:
    return Preset(
        text,
        model,
        "a100-40gb",
        shards,
        stages,
        batch_sizes=ORCA_BATCH_SIZES,
        target_ms=target_ms,
        rates=ORCA_RATES,
        # The paper does not say how long its traces are. Ten minutes give FasterTransformer's own curve its knee.
        duration_s=600.0,
        seeds=5,
        prefix_cache=False,
    )


PRESETS = {
    "orca-13b": _orca("Orca, OSDI'22: GPT-3 13B on one A100", "gpt3-13b", 1, 1, 100),
    "orca-101b": _orca("Orca, OSDI'22, figure 10a: GPT-3 101B on 8 A100", "gpt3-101b", 8, 1, 120),
    "orca-175b": _orca("Orca, OSDI'22, figure 10b: GPT-3 175B on 16 A100, TP 8 x PP 2", "gpt3-175b", 8, 2, 190),
    "orca-341b": _orca("Orca, OSDI'22, figure 10c: GPT-3 341B on 32 A100, TP 8 x PP 4", "gpt3-341b", 8, 4, 250),
    "vllm-opt13b": Preset(
        "vLLM, SOSP'23, figure 13: OPT-13B on one A100, requests running at once",
        "opt-13b",
        "a100-40gb",
        policies=("orca-max", "orca-pow2", "orca-oracle", "chunked"),
        # Not limited by the batch but by memory, as there: 256 for their Orca, more than ever fit for vLLM.
        batch_sizes=dict.fromkeys(("orca-max", "orca-pow2", "orca-oracle", "chunked"), (256,)),
        workloads=(("sharegpt", 2.0), ("alpaca", 30.0)),
        duration_s=3600.0,
        requests=1_000_000,
        kv_blocks=983,  # 12 GiB (table 1 there: 15.7K slots)
        prefix_cache=False,
    ),
    "laptop": Preset(
        "the built-in model on two CPU cores",
        "smollm2-135m",
        "cpu-2-cores",
        policies=("request-level", "orca", "chunked"),
        trace="chat",
        requests=500,
    ),
    "llama3-8b-h100": Preset(
        "Llama 3 8B on one H100 a worker", "llama3-8b", "h100", policies=("chunked",), trace="chat"
    ),
}
