"""Who may ask, and for how much: API keys, known by their digests alone."""

import hashlib
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.errors import ConfigurationError

MAX_PRIORITY = 100
MAX_KEY_CHARS = 256
KEY_PREFIX = "orca-"
TENANT_NAME = r"^[A-Za-z0-9._-]{1,64}$"


@dataclass(frozen=True, slots=True)
class Quota:
    """Of one tenant. requests, tokens: the most in the system at once, and the most that they may come to hold; 0
    leaves it to the router's settings. The others: in a minute; 0 is no limit."""

    requests: int = 0
    tokens: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Tenant:
    """priority: that of its requests, and the highest that they may ask for. weight: its share of service beside
    others', where the order of the queue is fair."""

    name: str
    priority: int = 0
    quota: Quota = NO_QUOTA
    weight: float = 1.0


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(pattern=TENANT_NAME)
    keys: list[Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]] = Field(min_length=1, max_length=1000)
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    weight: float = Field(1.0, gt=0, le=1000, allow_inf_nan=False)
    requests: int = Field(0, ge=0)
    tokens: int = Field(0, ge=0)
    requests_per_minute: int = Field(0, ge=0, le=1_000_000)
    tokens_per_minute: int = Field(0, ge=0, le=1_000_000_000)

    def quota(self) -> Quota:
        return Quota(self.requests, self.tokens, self.requests_per_minute, self.tokens_per_minute)


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    tenants: list[_Entry] = Field(min_length=1, max_length=100_000)


class KeyRing:
    """Tenants by the digests of their keys."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = tenants
        self._by_name = {tenant.name: tenant for tenant in tenants.values()}

    @classmethod
    def parse(cls, text: str) -> "KeyRing":
        """Raises ConfigurationError with the place of what is wrong."""
        try:
            entries = _File.model_validate_json(text).tenants
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(f"{place}: {first['msg'].lower()}" if place else first["msg"].lower()) from None
        tenants: dict[str, Tenant] = {}
        for entry in entries:
            tenant = Tenant(entry.name, entry.priority, entry.quota(), entry.weight)
            for key in entry.keys:
                if key in tenants:
                    raise ConfigurationError(f"a key is given twice, the second time to {entry.name}")
                tenants[key] = tenant
        return cls(tenants)

    def find(self, key: str) -> Tenant | None:
        """Whose key it is. What is compared is digests, so the time it takes tells nothing of the keys."""
        return self._tenants.get(digest(key)) if 0 < len(key) <= MAX_KEY_CHARS else None

    def named(self, name: str) -> Tenant | None:
        """The tenant of this name."""
        return self._by_name.get(name)

    def __len__(self) -> int:
        return len(self._tenants)


def digest(key: str) -> str:
    """As the file has it. A key is random and long: it needs no salt and no slow hash."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own; a name is none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
