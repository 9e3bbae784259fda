"""/v1/files and /v1/batches as OpenAI's client uses them: everything once, whoever dies, and behind everybody else."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, ConflictError, NotFoundError
from openai.types import Batch

from loadtest.up import Up
from services.common.redis.store import Store, connect
from services.router.adapters.redis_shelf import RedisShelf
from services.router.api.shelf import ShelfLimits
from services.router.core.batches import Order
from tests.e2e.conftest import MODEL, eventually
from tests.e2e.test_keys import write

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
VECTORS = "/v1/embeddings"
OVER = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    flags = (
        "--executor",
        "fake",
        "--fake-step-ms",
        "5",
        "--routers",
        "2",
        "--kv-blocks",
        "600",
        "--tenant-files",
        "20",
    )
    with Up(tmp_path_factory.mktemp("batches"), *flags, "--max-file-bytes", "3000000") as made:
        yield made


def connected(up: Up, key: str = "none", **headers: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{up.url}/v1", api_key=key, max_retries=0, timeout=60, default_headers=headers or None)


@pytest.fixture
async def client(up: Up) -> AsyncIterator[AsyncOpenAI]:
    """Afterwards the system is idle, and once its files are deleted nothing is left but what batches have become."""
    async with connected(up) as made:
        yield made
        async for file in made.files.list():
            await made.files.delete(file.id)
    await eventually(up.is_idle, within_s=20)
    assert await keys_left(up) == []


async def keys_left(up: Up) -> list[str]:
    store = Store(connect(up.redis_url), "default")
    try:
        kinds = ("work", "file:*", "files:*", "results:*")
        return [key.decode() for kind in kinds for key in await store._redis.keys(store._prefix + kind)]
    finally:
        await store.aclose()


async def of_batch(up: Up, batch: str, field: str) -> str:
    """What Redis has of a batch."""
    store = Store(connect(up.redis_url), "default")
    try:
        value: Any = await store._redis.hget(f"{store._prefix}batch:{batch}", field)  # type: ignore[misc]
        return value.decode() if value else ""
    finally:
        await store.aclose()


def line(name: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "max_tokens": 10, "temperature": 0, "ignore_eos": True, **body}
    if "prompt" not in fields and "messages" not in fields:
        fields["prompt"] = name
    return {"custom_id": name, "method": "POST", "url": url, "body": fields}


def jsonl(lines: list[Any]) -> bytes:
    return "".join(text if isinstance(text, str) else json.dumps(text) + "\n" for text in lines).encode()


async def begin(client: AsyncOpenAI, lines: list[Any], endpoint: Any = TEXT, **more: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def until(client: AsyncOpenAI, batch: Batch, completed: int = 0, within_s: float = 60) -> Batch:
    """Poll a batch until it is over, or so many of its lines are."""
    now = [batch]

    async def reached() -> bool:
        now[0] = await client.batches.retrieve(batch.id)
        counts = now[0].request_counts
        return now[0].status in OVER or bool(completed and counts and counts.completed >= completed)

    await eventually(reached, within_s)
    return now[0]


async def read(client: AsyncOpenAI, file: str | None) -> dict[str, dict[str, Any]]:
    """A file of results by custom_id; each there once."""
    if file is None:
        return {}
    rows = [json.loads(text) for text in (await client.files.content(file)).text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows), "a custom_id is there twice"
    assert len({row["id"] for row in rows}) == len(rows)
    return found


async def test_a_batch_is_answered_like_its_requests_alone(client: AsyncOpenAI) -> None:
    messages = [[{"role": "user", "content": f"question {index}"}] for index in range(12)]
    lines = [line(f"q{index}", CHAT, messages=said) for index, said in enumerate(messages)]
    batch = await begin(client, lines, CHAT, metadata={"who": "me"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"who": "me"})
    done = await until(client, batch)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 12, "completed": 12, "failed": 0}
    assert done.error_file_id is None
    times = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
    assert times == sorted(time or 0 for time in times)
    found = await read(client, done.output_file_id)
    assert list(found) == [f"q{index}" for index in range(12)], "in the order of the input"
    for index, said in enumerate(messages):
        row = found[f"q{index}"]
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["request_id"]
        alone = await client.chat.completions.create(
            model=MODEL,
            messages=said,
            max_tokens=10,
            temperature=0,
            extra_body={"ignore_eos": True},  # type: ignore[arg-type]
        )
        body = row["response"]["body"]
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
        assert body["usage"]["completion_tokens"] == 10
    output = await client.files.retrieve(str(done.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


async def test_a_batch_of_embeddings(client: AsyncOpenAI) -> None:
    lines = [
        {"custom_id": f"e{i}", "method": "POST", "url": VECTORS, "body": {"model": MODEL, "input": [f"a{i}", f"b{i}"]}}
        for i in range(3)
    ]
    done = await until(client, await begin(client, lines, VECTORS))
    assert done.status == "completed"
    for name, row in (await read(client, done.output_file_id)).items():
        alone = await client.embeddings.create(model=MODEL, input=[name.replace("e", "a"), name.replace("e", "b")])
        vectors = [item["embedding"] for item in row["response"]["body"]["data"]]
        assert [len(vector) for vector in vectors] == [len(item.embedding) for item in alone.data]


async def test_lines_that_a_route_refuses_are_in_the_error_file(client: AsyncOpenAI) -> None:
    lines = [line("good"), line("hot", temperature=9), line("who", model="gpt-0"), line("long", max_tokens=10**6)]
    done = await until(client, await begin(client, lines))
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 4, "completed": 1, "failed": 3}
    assert list(await read(client, done.output_file_id)) == ["good"]
    errors = await read(client, done.error_file_id)
    assert {name: row["response"]["status_code"] for name, row in errors.items()} == {
        "hot": 400,
        "who": 404,
        "long": 400,
    }
    assert errors["who"]["response"]["body"]["error"]["code"] == "model_not_found"


async def test_a_file_that_is_not_right_fails_its_batch(client: AsyncOpenAI) -> None:
    lines = [
        line("a"),
        line("a"),
        "no json\n",
        {**line("b"), "method": "GET"},
        {**line("c"), "url": CHAT},
        {"method": "POST", "url": TEXT, "body": {}},
        line("d", stream=True),
        "\n",
        "[]",
    ]
    done = await until(client, await begin(client, lines))
    assert done.status == "failed"
    assert done.failed_at
    assert done.errors is not None
    assert done.errors.data is not None
    assert [(error.line, error.code, error.param) for error in done.errors.data] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_json_line", None),
        (4, "invalid_method", "method"),
        (5, "invalid_url", "url"),
        (6, "missing_required_parameter", "custom_id"),
        (7, "invalid_request", "body.stream"),
        (9, "invalid_json_line", None),
    ]
    assert all(error.message for error in done.errors.data)
    assert done.output_file_id is None
    empty = await until(client, await begin(client, ["\n"]))
    assert empty.errors is not None
    assert [error.code for error in empty.errors.data or []] == ["empty_file"]


async def test_what_cannot_be_made_is_refused(client: AsyncOpenAI, up: Up) -> None:
    file = await client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
    create = client.batches.create
    for wrong in ({"endpoint": "/v1/moderations"}, {"completion_window": "1h"}, {"metadata": {"k": "v" * 513}}):
        body: Any = {"input_file_id": file.id, "endpoint": TEXT, "completion_window": "24h", **wrong}
        with pytest.raises(BadRequestError):
            await create(**body)
    with pytest.raises(NotFoundError):
        await create(input_file_id="file-none", endpoint=TEXT, completion_window="24h")
    with pytest.raises(BadRequestError):
        await client.files.create(file=("in.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(BadRequestError):
        await client.files.create(file=("in.jsonl", b""), purpose="batch")
    with pytest.raises(APIStatusError) as too_large:
        await client.files.create(file=("in.jsonl", b"x" * 3_000_001), purpose="batch")
    assert too_large.value.status_code == 413
    async with httpx.AsyncClient(base_url=up.url) as http:
        for body, kind in ((b"{}", "application/json"), (b"--x\r\n", "multipart/form-data; boundary=x")):
            answer = await http.post("/v1/files", content=body, headers={"Content-Type": kind})
            assert answer.status_code == 400, answer.text
    store = Store(connect(up.redis_url), "default")
    left = await store._redis.keys(store._prefix + "file:*")
    await store.aclose()
    assert len(left) == 1, "nothing is left of what was refused"


async def test_files_are_listed_read_and_deleted(client: AsyncOpenAI) -> None:
    data = os.urandom(2_500_000)  # of several chunks; what is in it is nobody's business yet
    large = await client.files.create(file=("large.jsonl", data), purpose="batch")
    assert (large.bytes, large.filename, large.purpose) == (2_500_000, "large.jsonl", "batch")
    assert large.expires_at == large.created_at + 7 * 86_400
    assert (await client.files.content(large.id)).content == data
    body: Any = {"expires_after": {"anchor": "created_at", "seconds": 3600}}
    others = [await client.files.create(file=(f"{i}", b"x"), purpose="batch", **body) for i in range(4)]
    assert others[0].expires_at == others[0].created_at + 3600
    names = {large.id, *(file.id for file in others)}
    first = await client.files.list(limit=2)
    assert (len(first.data), first.has_next_page()) == (2, True)
    found = [file.id async for file in client.files.list(limit=2)]
    assert len(found) == 5
    assert set(found) == names
    assert [file.id async for file in client.files.list(order="asc")] == found[::-1]
    assert [file.id async for file in client.files.list(purpose="batch_output")] == []
    assert (await client.files.delete(large.id)).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(NotFoundError):
            await gone(large.id)
    for index in range(16):
        await client.files.create(file=(f"{index}", b"x"), purpose="batch")
    with pytest.raises(BadRequestError, match="as many files"):
        await client.files.create(file=("21", b"x"), purpose="batch")


async def test_a_cancelled_batch_says_what_was_not_run(client: AsyncOpenAI, up: Up) -> None:
    batch = await until(client, await begin(client, [line(f"p{i}", max_tokens=200) for i in range(60)]), completed=3)
    assert batch.status == "in_progress"
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    done = await until(client, batch)
    assert done.status == "cancelled"
    assert done.cancelling_at is not None
    assert done.cancelled_at is not None
    await eventually(up.is_idle)
    answers, errors = await read(client, done.output_file_id), await read(client, done.error_file_id)
    assert len(answers) >= 3
    assert not answers.keys() & errors.keys()
    assert answers.keys() | errors.keys() == {f"p{i}" for i in range(60)}
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    with pytest.raises(ConflictError):
        await client.batches.cancel(batch.id)


async def test_a_batch_that_is_too_late_expires(client: AsyncOpenAI, up: Up) -> None:
    shelf = RedisShelf(connect(up.redis_url), "default", "test", ShelfLimits())
    lines = [line(f"p{i}", max_tokens=200) for i in range(60)]
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    now = int(time.time())
    batch = await shelf.create_batch(Order(f"batch_late{now}", "", TEXT, file.id, now - 60, now - 1))
    await shelf.aclose()
    done = await until(client, await client.batches.retrieve(batch.name))
    assert done.status == "expired"
    assert done.expired_at is not None
    answers, errors = await read(client, done.output_file_id), await read(client, done.error_file_id)
    assert not answers.keys() & errors.keys()
    assert answers.keys() | errors.keys() == {f"p{i}" for i in range(60)}
    assert {row["error"]["code"] for row in errors.values()} == {"batch_expired"}


async def test_batches_are_listed_by_page_the_newest_first(client: AsyncOpenAI, up: Up) -> None:
    async with connected(up, **{"X-Orca-Tenant": "lister"}) as mine:
        made = [await until(mine, await begin(mine, [line("a")])) for _ in range(3)]
        assert [batch.id async for batch in mine.batches.list(limit=1)] == [batch.id for batch in made[::-1]]
        for batch in made:
            for file in (batch.input_file_id, str(batch.output_file_id)):
                await mine.files.delete(file)


async def test_a_deleted_input_fails_its_batch(client: AsyncOpenAI) -> None:
    batch = await begin(client, [line(f"{i}", max_tokens=100, prompt="x" * 40_000 + str(i)) for i in range(60)])
    await client.files.delete(batch.input_file_id)
    done = await until(client, batch)
    assert done.status == "failed"
    assert done.errors is not None
    assert [error.code for error in done.errors.data or []] == ["input_file_not_found"]


async def test_another_tenant_sees_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, a={"requests": 2}, b={})
    with Up(tmp_path / "up", "--executor", "fake", "--fake-step-ms", "5", "--api-keys", str(path)) as up:
        async with connected(up, "key-a") as mine, connected(up, "key-b") as other, connected(up, "key-c") as nobody:
            batch = await begin(mine, [line(f"p{i}") for i in range(10)])
            assert (await until(mine, batch)).status == "completed", "8 in flight, of 2 that it may have: it waited"
            done = await mine.batches.retrieve(batch.id)
            assert done.request_counts is not None
            assert done.request_counts.to_dict() == {"total": 10, "completed": 10, "failed": 0}
            for file in (batch.input_file_id, str(done.output_file_id)):
                for call in (other.files.retrieve, other.files.content, other.files.delete):
                    with pytest.raises(NotFoundError):
                        await call(file)
            for look in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(NotFoundError):
                    await look(batch.id)
            with pytest.raises(NotFoundError):
                await other.batches.create(input_file_id=batch.input_file_id, endpoint=TEXT, completion_window="24h")
            assert [file async for file in other.files.list()] == []
            assert [one async for one in other.batches.list()] == []
            with pytest.raises(APIStatusError) as refused:
                await nobody.files.list()
            assert refused.value.status_code == 401
            running = await until(mine, await begin(mine, [line(f"p{i}", max_tokens=200) for i in range(50)]), 1)
            write(path, b={})
            assert running.status == "in_progress"
            log = up.folder / "logs" / "router-0.log"
            await eventually(lambda: "1 API keys are known" in log.read_text())
            write(path, a={}, b={})

            async def cancelled() -> bool:
                return await of_batch(up, running.id, "status") == "cancelled"

            await eventually(cancelled, within_s=20)
        await eventually(up.is_idle)


async def test_nobody_waits_for_a_batch_where_priorities_count(tmp_path: Path) -> None:
    flags = ("--executor", "fake", "--fake-step-ms", "10", "--order", "priority", "--max-num-seqs", "1")
    with Up(tmp_path, *flags) as up:
        async with connected(up) as client:
            batch = await begin(client, [line(f"p{i}", max_tokens=60) for i in range(6)])
            await until(client, batch, completed=1)
            for index in range(2):
                await eventually(lambda: up.metrics()["orca_requests_waiting"] >= 1)
                before = await until(client, batch, completed=1)
                preemptions = up.metrics()["orca_preemptions_total"]
                # A line takes 60 steps: whoever waited for the one that runs would see it end.
                answer = await client.completions.create(model=MODEL, prompt=f"now {index}", max_tokens=5)
                assert answer.choices
                after = await client.batches.retrieve(batch.id)
                assert after.request_counts is not None
                assert before.request_counts is not None
                assert after.request_counts.completed - before.request_counts.completed <= 1
                assert up.metrics()["orca_preemptions_total"] > preemptions, "a line gave way"
            done = await until(client, batch)
            assert len(await read(client, done.output_file_id)) == 6
        await eventually(up.is_idle)


async def requests_metered(up: Up, tenant: str) -> int:
    async with httpx.AsyncClient(base_url=up.url) as http:
        answer = await http.get("/v1/usage", headers={"X-Orca-Tenant": tenant})
        return int(answer.json()["requests"])


async def expected(client: AsyncOpenAI, count: int, tokens: int) -> dict[str, str]:
    """What the lines are to be answered with."""
    prompts = [f"p{index}" for index in range(count)]
    calls = [
        client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        for prompt in prompts
    ]
    answers = await asyncio.gather(*calls)
    return {prompt: answer.choices[0].text for prompt, answer in zip(prompts, answers, strict=True)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_a_router_that_ends_loses_and_repeats_no_line(
    up: Up, client: AsyncOpenAI, number: signal.Signals
) -> None:
    tenant = f"t{number}"
    want = await expected(client, 60, 120)
    async with connected(up, **{"X-Orca-Tenant": tenant}) as patient:
        mine = patient.with_options(max_retries=5)  # its connections end with the routers
        batch = await begin(mine, [line(name, max_tokens=120) for name in want])
        killed = {}
        for completed in (5, 25):
            await until(mine, batch, completed)
            owner = await of_batch(up, batch.id, "owner")
            name = owner.rpartition("-")[0]
            killed[name] = up.pid(name)
            os.kill(killed[name], number)

            async def taken_over(owner: str = owner) -> bool:
                return await of_batch(up, batch.id, "owner") != owner

            await eventually(taken_over)
            if number == signal.SIGSTOP:
                os.kill(killed.pop(name), signal.SIGCONT)  # it goes on where it was, and is not heard
        done = await until(mine, batch)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 60, "completed": 60, "failed": 0}
        found = await read(mine, done.output_file_id)
        assert {name: row["response"]["body"]["choices"][0]["text"] for name, row in found.items()} == want
        assert await requests_metered(up, tenant) == 60, "no line was run twice"
        assert int(await of_batch(up, batch.id, "fence")) == 3
        for file in (done.input_file_id, str(done.output_file_id)):
            await mine.files.delete(file)
    await eventually(lambda: not set(killed.values()) & set(up.children().values()), within_s=60)


async def test_a_batch_goes_on_when_the_system_is_started_again(tmp_path: Path) -> None:
    flags = ("--executor", "fake", "--fake-step-ms", "5", "--kv-blocks", "600")
    with Up(tmp_path, *flags) as up:
        async with connected(up) as client:
            want = await expected(client, 40, 60)
            batch = await begin(client, [line(name, max_tokens=60) for name in want])
            assert (await until(client, batch, completed=5)).status == "in_progress"
    with Up(tmp_path, *flags) as up:
        async with connected(up) as client:
            done = await until(client, batch)
            found = await read(client, done.output_file_id)
            assert {name: row["response"]["body"]["choices"][0]["text"] for name, row in found.items()} == want
            assert done.request_counts is not None
            assert done.request_counts.to_dict() == {"total": 40, "completed": 40, "failed": 0}
        await eventually(up.is_idle)


async def test_a_restart_of_everything_loses_no_line(up: Up, client: AsyncOpenAI) -> None:
    want = await expected(client, 200, 60)
    patient = client.with_options(max_retries=5)
    batch = await begin(client, [line(name, max_tokens=60) for name in want])
    await until(client, batch, completed=5)
    await asyncio.to_thread(up.roll)
    done = await until(patient, batch)
    assert done.status == "completed"
    found = await read(patient, done.output_file_id)
    assert {name: row["response"]["body"]["choices"][0]["text"] for name, row in found.items()} == want
