"""Flags of `orca simulate`."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common.settings import OrcaSettings
from services.simulator.costs import DEVICES, MODELS
from services.simulator.presets import PRESETS
from services.simulator.trace import LENGTHS


class SimulateSettings(BaseSettings):
    """Runs the production scheduler against a virtual clock: how many workers does this load need, and which policy?"""

    model_config = SettingsConfigDict(**{**OrcaSettings.model_config, "env_prefix": "ORCA_SIMULATE_"})

    preset: str = Field("", description=f"a published evaluation or a usual machine: {', '.join(PRESETS)}")
    policy: str = Field("", description="batching policies to compare, with commas; default: the preset's, or chunked")
    order: str = Field("fcfs", description="order policies to compare, with commas")
    trace: str = Field("", description=f"a JSONL file (see --record), or {', '.join(LENGTHS)}, or e.g. 32x32")
    rate: float = Field(0.0, ge=0, le=1e6, description="requests per second; 0: as recorded, or 1")
    requests: int = Field(0, ge=0, le=10_000_000, description="length of a synthetic trace; 0: the preset's, or 1000")
    burstiness: float = Field(1.0, gt=0, le=100, description="variation of the gaps: 1 is Poisson, more is bursts")
    tenants: str = Field("", description="NAME=SHARE[:PRIORITY[:TTFT_MS]],...: whose requests they are")
    seed: int = Field(0, ge=0, description="of everything that is drawn")
    workers: int = Field(1, ge=1, le=4096, description="model replicas")
    model: str = Field("", description=f"a config.json, or {', '.join(MODELS)}")
    device: str = Field("", description=f"{', '.join(DEVICES)}")
    shards: int = Field(0, ge=0, le=1024, description="tensor-parallel devices of a stage; 0: the preset's, or 1")
    stages: int = Field(0, ge=0, le=64, description="pipeline stages of a worker; 0: the preset's, or 1")
    cost: str = Field("roofline", pattern="^(roofline|measured)$", description="roofline, or measured (see --steps)")
    steps: str = Field("", description="JSONL of steps that `orca up --record-steps` wrote, for --cost measured")
    max_num_seqs: str = Field("", description="most sequences in a step; several with commas: the best counts")
    token_budget: int = Field(512, ge=1, le=1_000_000, description="most tokens in a step (chunked)")
    kv_blocks: int = Field(0, ge=0, le=100_000_000, description="KV blocks of a worker; 0: what fits into memory")
    host_blocks: int = Field(0, ge=0, le=100_000_000, description="host blocks of a worker, for swapped KV")
    block_size: int = Field(16, ge=1, le=256, description="token positions in a block")
    memory_share: float = Field(0.9, gt=0, le=1, description="of the device's memory, the part that is used")
    prefix_cache: bool | None = Field(None, description="share common prefixes; default: the preset's, or yes")
    control_ms: float = Field(
        0.2, ge=0, le=1000, description="from a result to the next plan, where none waits already"
    )
    target_ms: float = Field(0.0, ge=0, description="find the rate at which the median normalised latency is this")
    ttft_slo_ms: float = Field(0.0, ge=0, description="SLO for the first token; 0 is none")
    tpot_slo_ms: float = Field(0.0, ge=0, description="SLO per token; 0 is none; the chunked policy's budget holds it")
    attainment: float = Field(0.99, gt=0, le=1, description="share of requests that must hold the SLO in a search")
    find_rate: bool = Field(False, description="find the highest rate within the SLO, or within --target-ms")
    find_workers: bool = Field(False, description="find the fewest workers that serve --rate within it")
    short_tokens: int = Field(0, ge=0, description="tell apart the requests that generate at most so many tokens")
    sweep: bool = Field(False, description="also run a range of rates (for the plots of --html)")
    explain: str = Field(
        "", description="print why each decision about this request was taken (its number in the trace)"
    )
    html: str = Field("", description="write a report with plots to this file")
    json_output: bool = Field(False, alias="json", description="print one JSON object instead of tables")
