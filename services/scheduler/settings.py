"""Settings of the scheduler."""

from pydantic import Field

from services.common.settings import OrcaSettings
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES

# Names as the flags accept them.
POLICIES = f"^({'|'.join(BATCHING_POLICIES)})$"
ORDERS = f"^({'|'.join(ORDER_POLICIES)})$"
WHERE = "^(redis|kubernetes)$"
DNS_NAME = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"


class SchedulingSettings(OrcaSettings):
    """How a scheduler decides. `orca up` takes the same flags and hands them on."""

    policy: str = Field("chunked", pattern=POLICIES, description=f"batching policy: {', '.join(BATCHING_POLICIES)}")
    order: str = Field("fcfs", pattern=ORDERS, description=f"order policy: {', '.join(ORDER_POLICIES)}")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="most sequences in one step")
    token_budget: int = Field(512, ge=1, le=1_000_000, description="most tokens in one step (chunked)")
    prefix_cache: bool = Field(True, description="share the KV of common prefixes, within a tenant")
    ttft_target_ms: float = Field(0, ge=0, le=3_600_000, description="target for the first token (order deadline)")
    tpot_target_ms: float = Field(
        0, ge=0, le=3_600_000, description="target per token; prefills are cut so that steps hold it. 0 is none"
    )
    silence: float = Field(3.0, gt=0, le=600, description="seconds of silence after which a worker is taken for lost")
    depth: int = Field(0, ge=0, le=8, description="plans in flight per worker; 0 takes what the worker offers")
    record: str = Field("", description="append a trace of the requests served to this file (JSONL, lengths only)")
    record_steps: str = Field("", description="append every step's size and time to this file (JSONL)")


class SchedulerSettings(SchedulingSettings):
    """Decides every iteration of every worker of a partition."""

    name: str = Field("scheduler-0", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="name of this scheduler")
    discovery: str = Field("redis", pattern=WHERE, description="where workers are found: redis or kubernetes")
    leadership: str = Field("redis", pattern=WHERE, description="who elects the leader: redis or kubernetes")
    namespace: str = Field("default", pattern=DNS_NAME, description="Kubernetes namespace of workers and Lease")
    worker_selector: str = Field(
        "app.kubernetes.io/component=worker", description="label selector of the workers' EndpointSlices"
    )
    lease: str = Field("orca-default", pattern=DNS_NAME, description="name of the Lease")
    lease_seconds: int = Field(5, ge=2, le=60, description="seconds after which a Lease that is not renewed is taken")
