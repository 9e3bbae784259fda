"""API keys: what the file may hold, whose key is whose, and what a caller may ask for."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from services.cli.key import main as key_command
from services.common.admission import AdmissionLimits, Allowance
from services.common.errors import ConfigurationError, InvalidRequest, Unauthenticated
from services.router.adapters.keys import KeyFile, key_file
from services.router.api.caller import Caller, allowance_headers, caller
from services.router.core.tenants import KeyRing, Quota, digest

KEY = "orca-kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk"


def file_of(**more: Any) -> str:
    return json.dumps({"tenants": [{"name": "team-a", "keys": [digest(KEY)]} | more]})


def request(host: str = "10.0.0.1", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw, "client": (host, 5)})


def test_a_key_is_its_tenants_wherever_it_comes_from() -> None:
    ring = KeyRing.parse(file_of(priority=5, requests=3, tokens=1000))
    expected = Caller("team-a", 5, Quota(3, 1000), highest=5)
    assert caller(request(authorization=f"Bearer {KEY}"), ring) == expected
    assert caller(request(authorization=f"bearer  {KEY}"), ring) == expected
    assert caller(request(x_api_key=KEY), ring) == expected
    assert caller(request(authorization=f"Bearer {KEY}", x_orca_priority="-2"), ring).priority == -2
    assert caller(request(authorization=f"Bearer {KEY}", x_orca_priority="90"), ring).priority == 5, (
        "no more than its own"
    )
    assert caller(request(authorization=f"Bearer {KEY}", x_orca_tenant="team-b"), ring).tenant == "team-a"
    with pytest.raises(InvalidRequest):
        caller(request(authorization=f"Bearer {KEY}", x_orca_priority="high"), ring)


def test_what_is_left_of_a_minute_is_told_under_openais_names() -> None:
    quota, left = Quota(requests_per_minute=60, tokens_per_minute=1000), Allowance(59, 1, 700, 18)
    assert allowance_headers(quota, left) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "700",
        "x-ratelimit-reset-tokens": "18s",
    }
    assert set(allowance_headers(Quota(requests_per_minute=60), left)) == {
        f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")
    }
    assert allowance_headers(quota, None) == {}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {digest(KEY)}"},
        {"x_api_key": "é"},
        {"x_api_key": "x" * 100_000},
        {"x_orca_tenant": "team-a"},
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_anybody_else_is_refused_also_on_loopback(host: str, headers: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated) as refused:
        caller(request(host, **headers), KeyRing.parse(file_of()))
    assert KEY not in refused.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "invalid json"),
        ("[]", "object"),
        ("{}", "tenants: field required"),
        ('{"tenants": []}', "tenants: list should have at least 1 item"),
        (file_of(name="a b"), "tenants.0.name"),
        (file_of(keys=[]), "tenants.0.keys"),
        (file_of(keys=[KEY]), "tenants.0.keys.0"),
        (file_of(priority=101), "tenants.0.priority"),
        (file_of(requests="3"), "tenants.0.requests"),
        (file_of(limit=3), "tenants.0.limit: extra inputs are not permitted"),
        (file_of(keys=[digest(KEY)] * 2), "a key is given twice"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_the_place(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        KeyFile(str(path))
    assert says in refused.value.message
    assert str(path) in refused.value.message
    assert "\n" not in refused.value.message
    assert KEY not in refused.value.message


def test_other_addresses_than_loopback_need_keys_or_a_word(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert key_file("", False, host) is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com"):
        with pytest.raises(ConfigurationError, match="--api-keys or --allow-anonymous"):
            key_file("", False, host)
        assert key_file("", True, host) is None
    (tmp_path / "keys").write_text(file_of())
    found = key_file(str(tmp_path / "keys"), False, "0.0.0.0")
    assert found is not None
    assert len(found.ring) == 1
    with pytest.raises(ConfigurationError, match="No such file"):
        key_file(str(tmp_path / "absent"), True, "127.0.0.1")


def test_a_tenants_own_limits_come_before_the_routers() -> None:
    limits = AdmissionLimits(100, 1000, 10, 500)
    assert limits.of_tenant(0, 0) is limits
    assert limits.of_tenant(3, 0) == AdmissionLimits(100, 1000, 3, 500)
    assert limits.of_tenant(0, 9) == AdmissionLimits(100, 1000, 10, 9)


def test_orca_key_makes_a_key_that_its_entry_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert key_command(["team-a", "--priority", "7", "--requests", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    key, entry = first.split()[1], second.removeprefix("entry").strip()
    tenant = KeyRing.parse(f'{{"tenants": [{entry}]}}').find(key)
    assert tenant is not None
    assert (tenant.name, tenant.priority, tenant.quota) == ("team-a", 7, Quota(2, 0))
    assert key not in entry
    assert key_command(["a b"]) == 2
    assert capsys.readouterr().err.startswith("orca key: --tenant")
