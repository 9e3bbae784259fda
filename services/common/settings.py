"""Settings: one definition gives the flags, the ORCA_* environment variables and --help."""

from collections.abc import Sequence
from typing import TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from services.common.errors import ConfigurationError

DEFAULT_MODEL = "builtin:smollm2-135m"


class OrcaSettings(BaseSettings):
    """What every process knows. A flag wins over the environment."""

    model_config = SettingsConfigDict(
        env_prefix="ORCA_",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        extra="ignore",
    )

    redis_url: SecretStr = Field(SecretStr("redis://127.0.0.1:6379/0"), description="Redis or Valkey, 7 or later")
    partition: str = Field("default", pattern=r"^[A-Za-z0-9_-]{1,64}$", description="name of the partition")
    metrics_host: str = Field("127.0.0.1", description="address of /metrics and /health")
    metrics_port: int = Field(0, ge=0, le=65535, description="port of /metrics and /health; 0 picks a free one")
    otlp_endpoint: str = Field(
        "", description="send traces and metrics to this OTLP/gRPC address, e.g. http://host:4317"
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")
    log_format: str = Field("text", pattern="^(text|json)$", description="text or json")


S = TypeVar("S", bound=BaseSettings)


def parse(settings: type[S], argv: Sequence[str], prog: str) -> S:
    """Read flags and environment. Raises ConfigurationError with one line that names the setting."""
    try:
        return settings(_cli_parse_args=list(argv), _cli_prog_name=prog)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = "--" + ".".join(str(part) for part in first["loc"]).replace("_", "-")
        raise ConfigurationError(f"{name}: {first['msg'].lower()}") from None
    except SettingsError as error:
        raise ConfigurationError(str(error).splitlines()[-1].removeprefix("error parsing CLI: ")) from None
