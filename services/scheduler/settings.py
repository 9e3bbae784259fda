"""Settings of the scheduler."""

from pydantic import Field

from services.common.settings import OrcaSettings
from services.scheduler.core.order import ORDER_POLICIES
from services.scheduler.core.policies import BATCHING_POLICIES

# Names as the flags accept them.
POLICIES = f"^({'|'.join(BATCHING_POLICIES)})$"
ORDERS = f"^({'|'.join(ORDER_POLICIES)})$"


class SchedulerSettings(OrcaSettings):
    """Decides every iteration of every worker of a partition."""

    name: str = Field("scheduler-0", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="name of this scheduler")
    policy: str = Field("chunked", pattern=POLICIES, description=f"batching policy: {', '.join(BATCHING_POLICIES)}")
    order: str = Field("fcfs", pattern=ORDERS, description=f"order policy: {', '.join(ORDER_POLICIES)}")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="most sequences in one step")
    token_budget: int = Field(512, ge=1, le=1_000_000, description="most tokens in one step (chunked)")
    depth: int = Field(0, ge=0, le=8, description="plans in flight per worker; 0 takes what the worker offers")
