"""Flags of `orca chaos`."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common.settings import OrcaSettings


class ChaosSettings(BaseSettings):
    """Hurts a running system, by seed, and checks that no client notices more than a pause. Not for production."""

    model_config = SettingsConfigDict(**{**OrcaSettings.model_config, "env_prefix": "ORCA_CHAOS_"})

    url: str = Field("", description="a running `orca up` on this machine; without it, one of its own is started")
    data_dir: str = Field("", description="the --data-dir of that `orca up`")
    runs: int = Field(10, ge=0, le=1_000_000, description="runs, each under the faults of its seed")
    seed: int = Field(0, ge=0, description="of the first run; the next have the next seeds")
    streams: int = Field(64, ge=8, le=1024, description="concurrent requests of a run")
    mixes: int = Field(4, ge=1, le=1000, description="different mixes of requests; each is first run undisturbed")
    tokens: int = Field(120, ge=16, le=2000, description="most output tokens of a request")
    only: str = Field("", pattern="^(|router|leader|worker|redis)$", description="router, leader, worker or redis")
    salted: bool = Field(False, description="workers that sample otherwise after each start (see --fake-salted)")
    poison: bool = Field(False, description="also a run in which one request kills each worker that runs it")
    up: str = Field("", description="other flags for its own `orca up`, as one string")
    json_file: str = Field("", alias="json", description="write the report to this file as JSON")
