"""What a router says of a request when it puts it into the system, and what the system answers."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The most that may be in the system, in total and of one tenant. tokens: prompt and output that requests may come
    to hold, all choices. 0 is no limit."""

    requests: int = 0
    tokens: int = 0
    tenant_requests: int = 0
    tenant_tokens: int = 0

    def of_tenant(self, requests: int, tokens: int) -> "AdmissionLimits":
        """With a tenant's own limits, where they are not 0."""
        if not requests and not tokens:
            return self
        return replace(
            self, tenant_requests=requests or self.tenant_requests, tenant_tokens=tokens or self.tenant_tokens
        )


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """key: digest of tenant and key; body: digest of what was asked. Hexadecimal."""

    key: str
    body: str


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request enters.

    document: what another router needs to go on with its stream (JSON).
    window_s: how long it can be read after its end.
    resumable: it runs on for a grace period when its last reader leaves.
    outlives: it runs to its end whether or not anybody reads it.
    turned_away: how many the router has refused by itself since it last asked.
    rates: requests and tokens a minute that its tenant is allowed; 0 is no limit.
    """

    router: str
    choices: int
    prompt_tokens: int
    tokens: int
    limits: AdmissionLimits
    window_s: int
    tenant: str = ""
    document: str = "{}"
    idempotency: IdempotencyKey | None = None
    resumable: bool = False
    outlives: bool = False
    turned_away: int = 0
    rates: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left to a tenant of this minute, and the seconds until that is all again."""

    requests: int
    requests_reset_s: int
    tokens: int
    tokens_reset_s: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """It is in the system. allowance: None where the tenant has no limit by the minute, or on a retry."""

    allowance: Allowance | None = None


@dataclass(frozen=True, slots=True)
class Full:
    """One more would break this limit (one of LIMIT_NAMES); it makes sense to try again in so many seconds."""

    limit: str
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The idempotency key names this request, running or finished."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The idempotency key was used with another body."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Its router had taken it back before it came."""


Admission = Admitted | Full | Joined | Mismatch | Withdrawn
LIMIT_NAMES = ("requests", "tokens", "tenant_requests", "tenant_tokens", "requests_per_minute", "tokens_per_minute")
