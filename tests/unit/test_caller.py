"""Tenant and priority headers: believed from loopback alone, refused when they make no sense."""

import pytest
from fastapi import Request

from services.common.errors import InvalidRequest
from services.router.api.caller import Caller, caller


def request(host: str, **headers: str) -> Request:
    raw = [(f"x-orca-{name}".encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw, "client": (host, 5)})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_believed(host: str) -> None:
    assert caller(request(host, tenant="team-a", priority="-7")) == Caller("team-a", -7)
    assert caller(request(host)) == Caller("", 0)


@pytest.mark.parametrize("host", ["10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "localhost", ""])
def test_nobody_else_is(host: str) -> None:
    assert caller(
        request(
            host,
            tenant="team-a",
            priority="9",
        )
    ) == Caller("", 0, highest=0)
    assert caller(request(host, tenant="a b", priority="x")) == Caller("", 0, highest=0)


@pytest.mark.parametrize(
    ("header", "value"),
    [("tenant", "a b"), ("tenant", "x" * 65), ("tenant", "é"), ("priority", "101"), ("priority", "1.5"),
     ("priority", "high"), ("priority", ""), ("priority", "٣")],
)  # fmt: skip
def test_nonsense_is_refused(header: str, value: str) -> None:
    with pytest.raises(InvalidRequest):
        caller(request("127.0.0.1", **{header: value}))
