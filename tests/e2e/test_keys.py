"""API keys on a running system: refused without, counted by tenant, reloaded, limited."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError

from loadtest.up import Up
from services.router.core.tenants import digest
from tests.e2e.conftest import MODEL, eventually

BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write(path: Path, **tenants: dict[str, Any]) -> None:
    """A file in which each tenant's key is key-NAME. Replaced whole, as a mounted Secret's is."""
    entries = [{"name": name, "keys": [digest(f"key-{name}")], **more} for name, more in tenants.items()]
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"tenants": entries}))
    new.replace(path)


async def test_keys_decide_who_is_served(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, a={}, b={"requests": 1})
    with Up(tmp_path / "up", "--executor", "fake", "--fake-step-ms", "10", "--api-keys", str(path)) as up:
        assert any("Authorization: Bearer KEY" in line for line in up.lines)
        async with httpx.AsyncClient(base_url=up.url, timeout=60) as http:

            async def status(key: str, **more: Any) -> int:
                return (await http.post("/v1/completions", json=BODY | more, headers=bearer(key))).status_code

            refused = await http.post("/v1/completions", json=BODY)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
            for path_of in ("/v1/models", f"/v1/models/{MODEL}", "/v1/usage", "/v1/streams/x"):
                assert (await http.get(path_of)).status_code == 401, path_of
            assert (await http.get("/health/ready")).status_code == 200
            assert await status("key-a") == 200
            assert await status("key-c") == 401
            usage = (await http.get("/v1/usage", headers=bearer("key-a"))).json()
            assert (usage["tenant"], usage["completion"]) == ("a", 5)

            answers = await asyncio.gather(*(status("key-b", max_tokens=50) for _ in range(3)))
            assert sorted(answers) == [200, 429, 429], "one at a time of this tenant"

            write(path, m={"requests_per_minute": 2, "tokens_per_minute": 1000})
            await eventually(lambda: "1 API keys are known" in (up.folder / "logs" / "router-0.log").read_text())
            first = await http.post("/v1/completions", json=BODY, headers=bearer("key-m"))
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            assert int(first.headers["x-ratelimit-remaining-tokens"]) == 1000 - sum(
                first.json()["usage"][kind] for kind in ("prompt_tokens", "completion_tokens")
            )
            assert await status("key-m") == 200
            third = await http.post("/v1/completions", json=BODY, headers=bearer("key-m"))
            assert third.status_code == 429
            assert 25 <= int(third.headers["retry-after"]) <= 30
            assert "in a minute" in third.json()["error"]["message"]

            write(path, c={}, d={})
            await eventually(lambda: "2 API keys are known" in (up.folder / "logs" / "router-0.log").read_text())
            assert await status("key-a") == 401
            assert await status("key-c") == 200
            path.write_text("{")
            await eventually(lambda: "known before stay" in (up.folder / "logs" / "router-0.log").read_text())
            assert await status("key-c") == 200
        async with AsyncOpenAI(base_url=f"{up.url}/v1", api_key="key-c", max_retries=0) as client:
            answer = await client.completions.create(model=MODEL, prompt="Hello", max_tokens=5)
            assert answer.choices
        async with AsyncOpenAI(base_url=f"{up.url}/v1", api_key="key-e", max_retries=0) as client:
            with pytest.raises(AuthenticationError):
                await client.models.list()
        for log in (up.folder / "logs").glob("*.log"):
            assert "key-c" not in log.read_text(), "a key is in a log"
        await eventually(up.is_idle)
