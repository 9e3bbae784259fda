"""Who asks, and how urgent it is: by API key; or, where there are none, by headers that are believed from this machine
only."""

import re
from dataclasses import dataclass

from fastapi import Request

from services.common.admission import Allowance
from services.common.errors import InvalidRequest, Unauthenticated
from services.router.core.tenants import MAX_PRIORITY, NO_QUOTA, KeyRing, Quota, is_loopback

TENANT_HEADER = "X-Orca-Tenant"
PRIORITY_HEADER = "X-Orca-Priority"
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Caller:
    """tenant: whose service it counts as, and whose cached prefixes it may share. priority: higher goes first.
    highest: the highest that it may ask for. weight: its share of service beside other tenants'."""

    tenant: str = ""
    priority: int = 0
    quota: Quota = NO_QUOTA
    highest: int = MAX_PRIORITY
    weight: float = 1.0

    def tier(self, step: int) -> int:
        """The priority of a request that asks for so much more or less than its caller's."""
        return max(-MAX_PRIORITY, min(self.highest, self.priority + step))


def caller(request: Request, ring: KeyRing | None = None) -> Caller:
    """With keys, whoever has one of them. Without, the headers of a peer on loopback; anybody else is the default
    tenant at priority 0. Raises Unauthenticated, or InvalidRequest on a header that makes no sense."""
    if ring is not None:
        return _by_key(request, ring)
    if not is_loopback(request.client.host if request.client else ""):
        return Caller(highest=0)
    tenant = request.headers.get(TENANT_HEADER, "")
    if tenant and not TENANT.fullmatch(tenant):
        raise InvalidRequest(f"{TENANT_HEADER}: up to 64 letters, digits, '.', '_' and '-'", TENANT_HEADER)
    return Caller(tenant, _priority(request.headers.get(PRIORITY_HEADER, "0")))


def _by_key(request: Request, ring: KeyRing) -> Caller:
    found = BEARER.fullmatch(request.headers.get("authorization", ""))
    key = found[1] if found else request.headers.get("x-api-key", "")
    tenant = ring.find(key)
    if tenant is None:
        raise Unauthenticated("this API key is not known" if key else "an API key is needed: Authorization: Bearer KEY")
    priority = _priority(request.headers.get(PRIORITY_HEADER, str(tenant.priority)))
    return Caller(tenant.name, min(priority, tenant.priority), tenant.quota, tenant.priority, tenant.weight)


def allowance_headers(quota: Quota, left: Allowance | None) -> dict[str, str]:
    """As OpenAI names them: what the caller has left of this minute, and when that is all again."""
    if left is None:
        return {}
    rows = (
        ("requests", quota.requests_per_minute, left.requests, left.requests_reset_s),
        ("tokens", quota.tokens_per_minute, left.tokens, left.tokens_reset_s),
    )
    headers: dict[str, str] = {}
    for what, limit, remaining, reset_s in rows:
        if limit:
            headers |= {
                f"x-ratelimit-limit-{what}": str(limit),
                f"x-ratelimit-remaining-{what}": str(remaining),
                f"x-ratelimit-reset-{what}": f"{reset_s}s",
            }
    return headers


def _priority(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,3}", text) or abs(int(text)) > MAX_PRIORITY:
        raise InvalidRequest(
            f"{PRIORITY_HEADER}: a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}", PRIORITY_HEADER
        )
    return int(text)
