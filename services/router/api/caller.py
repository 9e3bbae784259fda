"""Who asks, and how urgent it is: the tenant and priority headers, believed from this machine only."""

import ipaddress
import re
from dataclasses import dataclass

from fastapi import Request

from services.common.errors import InvalidRequest

TENANT_HEADER = "X-Orca-Tenant"
PRIORITY_HEADER = "X-Orca-Priority"
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Caller:
    """tenant: whose service it counts as, and whose cached prefixes it may share. priority: higher goes first."""

    tenant: str = ""
    priority: int = 0


def caller(request: Request) -> Caller:
    """From the headers, where the peer is on loopback; anybody else is the default tenant at priority 0, until there
    are keys. Raises InvalidRequest on a value that is none."""
    if not _is_loopback(request.client.host if request.client else ""):
        return Caller()
    tenant = request.headers.get(TENANT_HEADER, "")
    if tenant and not TENANT.fullmatch(tenant):
        raise InvalidRequest(f"{TENANT_HEADER}: up to 64 letters, digits, '.', '_' and '-'", TENANT_HEADER)
    return Caller(tenant, _priority(request.headers.get(PRIORITY_HEADER, "0")))


def _priority(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,3}", text) or abs(int(text)) > MAX_PRIORITY:
        raise InvalidRequest(
            f"{PRIORITY_HEADER}: a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}", PRIORITY_HEADER
        )
    return int(text)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
