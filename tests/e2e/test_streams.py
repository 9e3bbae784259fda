"""Streams go on: on another router, under another leader, with an idempotency key, through drains and moves."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from loadtest.up import Up
from tests.e2e.conftest import MODEL, eventually

BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "stream",
    "max_tokens": 60,
    "temperature": 0,
    "n": 2,
    "logprobs": 1,
    "stop": ["zzzz"],
    "stream": True,
    "stream_options": {"include_usage": True},
}
LONG = BODY | {"max_tokens": 150}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    flags = ("--executor", "fake", "--fake-step-ms", "10", "--kv-blocks", "600")
    parts = ("--routers", "2", "--schedulers", "2", "--workers", "2", "--idempotency-window", "60")
    with Up(tmp_path_factory.mktemp("streams"), *flags, *parts) as made:
        yield made


@pytest.fixture
async def http(up: Up) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=up.url, timeout=60) as made:
        yield made
    await eventually(up.is_idle, within_s=40)


def events(text: str) -> list[tuple[str, str]]:
    """(id, data) of each event."""
    return re.findall(r"(?:id: (\S+)\n)?data: (.*)\n\n", text)


def answer(data: list[str]) -> dict[str, Any]:
    """What a client has in the end, in whichever order the choices came."""
    out: dict[str, Any] = {}
    for text in data:
        if text == "[DONE]":
            out["done"] = out.get("done", 0) + 1
            continue
        chunk = json.loads(text)
        if chunk.get("usage"):
            out["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            mine = out.setdefault(choice["index"], {"text": "", "tokens": [], "finish": []})
            mine["text"] += choice["text"]
            mine["tokens"] += (choice["logprobs"] or {"tokens": []})["tokens"]
            mine["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return out


async def post(http: httpx.AsyncClient, body: dict[str, Any] = BODY, **headers: str) -> httpx.Response:
    return await http.post("/v1/completions", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


async def until(lines: AsyncIterator[str], count: int) -> tuple[str, list[str]]:
    """Read on until so many events with an id have come; returns the last id, and the data."""
    seen, data = "", []
    async for line in lines:
        if line.startswith("id: "):
            seen = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        if len(data) == count:
            return seen, data
    raise AssertionError("the stream ended early")


async def test_a_stream_can_be_resumed_after_every_event(http: httpx.AsyncClient) -> None:
    whole = await post(http)
    request_id = whole.headers["x-orca-request-id"]
    all_events = events(whole.text)
    assert len(all_events) > 60
    assert all_events[-1] == ("", "[DONE]")
    for index, (event_id, _) in enumerate(all_events[:-1]):
        resumed = await http.get(f"/v1/streams/{request_id}", headers={"Last-Event-ID": event_id})
        if index == len(all_events) - 2:
            assert resumed.status_code == 204, "nothing is left: EventSource must not come again"
        else:
            assert events(resumed.text) == all_events[index + 1 :], f"after event {index}"
    again = await http.get(f"/v1/streams/{request_id}")
    assert again.text == whole.text
    posted = await post(http, Last_Event_ID=all_events[9][0])
    assert events(posted.text) == all_events[10:]


async def test_a_stream_cut_in_the_middle_goes_on_live(up: Up, http: httpx.AsyncClient) -> None:
    want = answer([data for _, data in events((await post(http, LONG)).text)])
    async with http.stream("POST", "/v1/completions", json=LONG, headers={"X-Orca-Resumable": "true"}) as response:
        request_id = response.headers["x-orca-request-id"]
        last, data = await until(response.aiter_lines(), 40)
    resumed = await http.get(f"/v1/streams/{request_id}", headers={"Last-Event-ID": last})
    assert answer([*data, *(more for _, more in events(resumed.text))]) == want


async def test_what_is_not_resumable_is_aborted_and_what_is_not_there_is_404(up: Up, http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/completions", json=LONG) as response:
        request_id = response.headers["x-orca-request-id"]
        last, _ = await until(response.aiter_lines(), 10)
    await eventually(up.is_idle)
    resumed = await http.get(f"/v1/streams/{request_id}", headers={"Last-Event-ID": last})
    assert '"code":"generation_failed"' in resumed.text
    missing = await http.get("/v1/streams/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "stream_not_found")
    stranger = await http.get(f"/v1/streams/{request_id}", headers={"X-Orca-Tenant": "other"})
    assert stranger.status_code == 404
    for bad in ("nonsense", "1-2:other", "1-2", "-", "9" * 200):
        response = await http.get(f"/v1/streams/{request_id}", headers={"Last-Event-ID": bad})
        assert response.status_code == (200 if bad == "1-2" else 400), bad
    assert (await post(http, Last_Event_ID="1-2")).status_code == 400


async def test_d20_an_idempotency_key_runs_once(up: Up, http: httpx.AsyncClient) -> None:
    """D20: retries join the running generation or replay the finished one; another body is refused."""
    body = LONG | {"temperature": 1.0}  # no seed: two generations would differ
    both = await asyncio.gather(*(post(http, body, Idempotency_Key="k1") for _ in range(4)))
    assert len({response.text for response in both}) == 1
    assert len({response.headers["x-orca-request-id"] for response in both}) == 1
    replayed = await post(http, body, Idempotency_Key="k1")
    assert replayed.text == both[0].text
    other = await post(http, body | {"max_tokens": 149}, Idempotency_Key="k1")
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    stranger = await post(http, body, Idempotency_Key="k1", X_Orca_Tenant="other")
    assert stranger.status_code == 200
    assert stranger.headers["x-orca-request-id"] != both[0].headers["x-orca-request-id"]
    whole = BODY | {"stream": False, "temperature": 1.0}
    del whole["stream_options"]
    first, second = await asyncio.gather(*(post(http, whole, Idempotency_Key="k2") for _ in range(2)))
    assert first.json() == second.json()
    for bad in ("", "a b", "x" * 256, "\x7f"):
        assert (await post(http, Idempotency_Key=bad)).status_code == 400, repr(bad)


async def test_a_key_whose_client_left_is_joined_by_its_retry(http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/completions", json=LONG, headers={"Idempotency-Key": "k3"}) as response:
        request_id = response.headers["x-orca-request-id"]
        await until(response.aiter_lines(), 5)
    retried = await post(http, LONG, Idempotency_Key="k3")
    assert retried.headers["x-orca-request-id"] == request_id
    assert events(retried.text)[-1][1] == "[DONE]"


async def test_d20_the_same_request_id_twice_is_two_requests(http: httpx.AsyncClient) -> None:
    """D20: the caller's id is bounded, cleaned, echoed, and names nothing of ours."""
    first, second = await asyncio.gather(*(post(http, X_Request_Id="mine") for _ in range(2)))
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine"
    assert first.headers["x-orca-request-id"] != second.headers["x-orca-request-id"]
    odd = await post(http, X_Request_Id='*:{}"' + "a" * 1000)
    assert odd.headers["x-request-id"] == "a" * 128


async def test_a_deadline_ends_a_request_with_an_error(http: httpx.AsyncClient) -> None:
    streamed = await post(http, LONG | {"ignore_eos": True, "max_tokens": 2000}, X_Orca_Timeout="0.5")
    assert '"code":"deadline_exceeded"' in streamed.text
    assert events(streamed.text)[-1][1] == "[DONE]"
    whole = {"model": MODEL, "prompt": "a", "max_tokens": 2000, "ignore_eos": True}
    answered = await post(http, whole, X_Orca_Timeout="0.5")
    assert (answered.status_code, answered.json()["error"]["code"]) == (504, "deadline_exceeded")
    for bad in ("0", "-1", "nan", "inf", "1e9", "x"):
        assert (await post(http, whole, X_Orca_Timeout=bad)).status_code == 400, bad


def orca(up: Up, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", *arguments, "--redis-url", up.redis_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_drain_and_move_by_hand(up: Up, http: httpx.AsyncClient) -> None:
    body = LONG | {"max_tokens": 600, "ignore_eos": True, "stop": None}  # on its way for longer than a command takes
    want = answer([data for _, data in events((await post(http, body)).text)])
    running = [asyncio.create_task(post(http, body)) for _ in range(4)]

    def is_spread() -> bool:
        return up.metrics()["orca_requests_running"] == 8

    await eventually(is_spread)
    done = await asyncio.to_thread(orca, up, "drain", "worker-1")
    assert (done.returncode, done.stdout.strip()) == (0, "worker-1 is empty"), done.stderr
    assert up.metrics()["orca_moves_total"] >= 2, "something was really moved"
    undone = await asyncio.to_thread(orca, up, "drain", "worker-1", "--undo")
    assert undone.returncode == 0, undone.stderr
    for task in running:
        assert answer([data for _, data in events((await task).text)]) == want
    assert (await asyncio.to_thread(orca, up, "drain", "worker-9")).returncode == 2
    assert (await asyncio.to_thread(orca, up, "move", "nothing")).returncode == 2


async def test_usage_is_metered_once_whatever_happens(up: Up, http: httpx.AsyncClient) -> None:
    async def usage() -> dict[str, int]:
        answer = (await http.get("/v1/usage", headers={"X-Orca-Tenant": "metered"})).json()
        return {name: answer[name] for name in ("requests", "prompt", "completion")}

    body = BODY | {"ignore_eos": True, "stop": None, "n": 1}
    first = await post(http, body, X_Orca_Tenant="metered", Idempotency_Key="m")
    await post(http, body, X_Orca_Tenant="metered", Idempotency_Key="m")
    await http.get(f"/v1/streams/{first.headers['x-orca-request-id']}", headers={"X-Orca-Tenant": "metered"})
    alone = await usage()
    assert alone["requests"] == 1
    assert alone["completion"] == 60
    headers = {"X-Orca-Tenant": "metered"}
    async with http.stream("POST", "/v1/completions", json=body | {"max_tokens": 2000}, headers=headers) as response:
        await until(response.aiter_lines(), 20)
    await eventually(up.is_idle)
    after = await usage()
    assert after["requests"] == 2
    assert 20 <= after["completion"] - 60 < 2000, "what was generated, and no more"
