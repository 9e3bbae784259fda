"""Settings of a worker."""

from pydantic import Field

from services.common.settings import DEFAULT_MODEL, OrcaSettings


class WorkerSettings(OrcaSettings):
    """One model replica: executes step plans."""

    name: str = Field("worker-0", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="name of this worker")
    model: str = Field(DEFAULT_MODEL, description="builtin:NAME, a folder of safetensors, or a .gguf file")
    dtype: str = Field(
        "auto", pattern="^(float32|bfloat16|float16|auto)$", description="float32, bfloat16, float16 (GPUs) or auto"
    )
    kernels: str = Field("auto", pattern="^(auto|fast|reference)$", description="auto, fast or reference")
    quantize: str = Field("none", pattern="^(none|int8)$", description="of the weights: none or int8")
    executor: str = Field("torch", pattern="^(torch|fake)$", description="torch, or fake (no model)")
    device: str = Field("auto", pattern="^(auto|cpu|cuda)$", description="auto, cpu or cuda")
    host: str = Field("127.0.0.1", description="address to listen on for the scheduler")
    advertise_host: str = Field("", description="address the scheduler dials, where that is another")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    kv_blocks: int = Field(0, ge=0, le=10_000_000, description="KV blocks; 0 chooses by free memory")
    host_blocks: int = Field(0, ge=0, le=10_000_000, description="blocks of host memory for swapped KV")
    block_size: int = Field(16, ge=1, le=256, description="token positions in a block")
    max_in_flight: int = Field(2, ge=1, le=8, description="plans on the worker at once")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory for weights, steps and KV, where kv-blocks is 0"
    )
    drain: float = Field(15.0, ge=1, le=600, description="seconds to give sequences away and publish, on SIGTERM")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the model; 0 takes all cores")
    fake_salted: bool = Field(False, description="the fake executor gives other tokens with every start, as GPUs may")
    fake_step_ms: float = Field(0.0, ge=0, le=60_000, description="step time of the fake executor")
