"""`orca key`: a new API key. It is shown once; the file has its digest."""

import json
import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

from services.common.errors import ConfigurationError
from services.common.settings import parse
from services.router.core.tenants import MAX_PRIORITY, TENANT_NAME, digest, new_key


class KeySettings(BaseSettings):
    """Makes an API key for a tenant. The entry goes into the list `tenants` of the file that --api-keys names."""

    model_config = SettingsConfigDict(cli_kebab_case=True, cli_exit_on_error=False)

    tenant: CliPositionalArg[str] = Field(pattern=TENANT_NAME, description="name of the tenant")
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="of its requests; they may ask for less")
    weight: float = Field(1.0, gt=0, le=1000, description="its share of service beside others', under --order fair")
    requests: int = Field(0, ge=0, description="most of its requests in the system; 0 leaves it to the router")
    tokens: int = Field(0, ge=0, description="most tokens of its requests in the system; 0 leaves it to the router")
    requests_per_minute: int = Field(0, ge=0, le=1_000_000, description="0 is no limit")
    tokens_per_minute: int = Field(0, ge=0, le=1_000_000_000, description="of prompts and answers; 0 is no limit")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `orca key`."""
    try:
        settings = parse(KeySettings, sys.argv[1:] if argv is None else argv, "orca key")
    except ConfigurationError as error:
        sys.stderr.write(f"orca key: {error.message}\n")
        return 2
    key = new_key()
    entry = {
        "name": settings.tenant,
        "keys": [digest(key)],
        "priority": settings.priority,
        "weight": settings.weight,
        "requests": settings.requests,
        "tokens": settings.tokens,
        "requests_per_minute": settings.requests_per_minute,
        "tokens_per_minute": settings.tokens_per_minute,
    }
    print(f"key    {key}")
    print(f"entry  {json.dumps(entry)}")
    return 0
