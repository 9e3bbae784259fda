"""Batching policies: what may share a step. One small class each, chosen by name."""

from services.scheduler.core.policies.base import BatchingPolicy
from services.scheduler.core.policies.chunked import Chunked
from services.scheduler.core.policies.orca import Orca
from services.scheduler.core.policies.phase_separated import PhaseSeparated
from services.scheduler.core.policies.request_level import RequestLevel

BATCHING_POLICIES: dict[str, type[BatchingPolicy]] = {
    policy.name: policy for policy in (RequestLevel, Orca, PhaseSeparated, Chunked)
}

__all__ = ["BATCHING_POLICIES", "BatchingPolicy", "Chunked", "Orca", "PhaseSeparated", "RequestLevel"]
