"""Batching policies: what may share a step. One small class each, chosen by name."""

from services.scheduler.core.policies.base import BatchingPolicy
from services.scheduler.core.policies.chunked import Chunked
from services.scheduler.core.policies.orca import Orca, OrcaMax, OrcaOracle, OrcaPow2
from services.scheduler.core.policies.phase_separated import PhaseSeparated
from services.scheduler.core.policies.request_level import RequestLevel, RequestLevelPacked

BATCHING_POLICIES: dict[str, type[BatchingPolicy]] = {
    policy.name: policy
    for policy in (
        RequestLevel,
        RequestLevelPacked,
        Orca,
        OrcaMax,
        OrcaPow2,
        OrcaOracle,
        PhaseSeparated,
        Chunked,
    )
}

__all__ = ["BATCHING_POLICIES", "BatchingPolicy"]
