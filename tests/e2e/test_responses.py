"""OpenAI's Responses API with the official client, over real processes (fake executor: the model is not the point)."""

import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from loadtest.up import Up
from tests.e2e.conftest import MODEL, eventually
from tests.e2e.test_keys import write

OPTIONS: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 12, "temperature": 0}
LONG = OPTIONS | {"max_output_tokens": 600, "background": True}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": False,
}


# What is made for it ends soon, whatever the model.
SWITCH: Any = {
    "type": "function",
    "name": "switch",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
    "strict": True,
}


def post(up: Up, body: Any, path: str = "/v1/responses", **more: Any) -> httpx.Response:
    return httpx.post(f"{up.url}{path}", content=json.dumps(body).encode(), timeout=30, **more)


async def reaches(client: AsyncOpenAI, response_id: str, *statuses: str) -> Response:
    """The response as soon as it has one of these statuses."""
    found: list[Response] = []

    async def there() -> bool:
        found[:] = [await client.responses.retrieve(response_id)]
        return found[0].status in statuses

    await eventually(there, within_s=30)
    return found[0]


async def test_whole_and_streamed_are_the_same(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**OPTIONS, instructions="Be brief.", metadata={"a": "b"}, user="somebody")
    assert (whole.object, whole.status, whole.model) == ("response", "incomplete", MODEL)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.instructions, whole.metadata, whole.user) == ("Be brief.", {"a": "b"}, "somebody")
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    events = [e async for e in await client.responses.create(**OPTIONS, instructions="Be brief.", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


async def test_the_clients_own_stream_helper(client: AsyncOpenAI) -> None:
    text = (await client.responses.create(**OPTIONS | {"max_output_tokens": 40})).output_text
    async with client.responses.stream(**OPTIONS) as stream:
        events = [event async for event in stream]
    snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert text.startswith(snapshots[-1])
    assert events[-1].type == "response.incomplete"


async def test_a_stream_has_named_events_that_can_be_resumed(fake_up: Up, client: AsyncOpenAI) -> None:
    body = OPTIONS | {"stream": True, "max_output_tokens": 30}
    response = post(fake_up, body)
    assert "[DONE]" not in response.text
    form = re.compile(r"event: (\S+)\nid: (\S+)\ndata: (.*)\n\n")
    events = form.findall(response.text)
    assert len(events) == response.text.count("data: ")
    assert all(json.loads(data)["type"] == name for name, _, data in events)
    for index in (0, 3, len(events) // 2, len(events) - 2):
        rest = post(fake_up, body, headers={"Last-Event-ID": events[index][1]})
        assert form.findall(rest.text) == events[index + 1 :]
    assert post(fake_up, body, headers={"Last-Event-ID": events[-1][1]}).status_code == 204


async def test_logprobs(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = OPTIONS | {"max_output_tokens": 4, "top_logprobs": 2}
    options["include"] = ["message.output_text.logprobs"]
    whole = await client.responses.create(**options)
    assert whole.output[0].type == "message"
    part = whole.output[0].content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 4
    events = [event async for event in await client.responses.create(**options, stream=True)]
    told = [entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert told == [entry.token for entry in part.logprobs]


async def test_what_was_answered_can_be_retrieved(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**OPTIONS)
    assert await client.responses.retrieve(whole.id) == whole
    stream = await client.responses.retrieve(whole.id, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    rest = [event async for event in await client.responses.retrieve(whole.id, stream=True, starting_after=4)]
    assert [event.sequence_number for event in rest] == list(range(5, len(events)))
    none = await client.responses.retrieve(whole.id, stream=True, starting_after=len(events) - 1)
    assert [event async for event in none] == []


async def test_what_was_not_stored_or_is_no_response_is_not_there(fake_up: Up, client: AsyncOpenAI) -> None:
    unstored = await client.responses.create(**OPTIONS, store=False)
    chat = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=2)
    other = chat.id.replace("chatcmpl-", "resp_")
    for response_id in (unstored.id, other, "resp_" + "0" * 32, "resp_x", "x"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id, stream=True)
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel(response_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**OPTIONS, previous_response_id=response_id)


async def test_a_conversation_goes_on_from_a_response(client: AsyncOpenAI) -> None:
    first = await client.responses.create(**OPTIONS, instructions="Be brief.")
    second = await client.responses.create(**OPTIONS | {"input": "And?"}, previous_response_id=first.id)
    by_hand = await client.responses.create(
        **OPTIONS
        | {
            "input": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": first.output_text},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]},
            ]
        }
    )
    assert second.previous_response_id == first.id
    assert (second.output_text, second.instructions) == (by_hand.output_text, None)
    assert second.usage is not None
    assert by_hand.usage is not None
    assert second.usage.total_tokens == by_hand.usage.total_tokens
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message"] * 3
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr,index]
    assert texts == ["Hi", first.output_text, "And?"]
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert newest.data == items[2:]
    assert newest.has_more


async def test_items_of_tools_and_thoughts_are_taken(client: AsyncOpenAI) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather in Oslo?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"place": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    response = await client.responses.create(
        **OPTIONS | {"input": items},
        tools=[WEATHER],
        tool_choice="auto",
        parallel_tool_calls=False,
        truncation="disabled",
        text={"format": {"type": "text"}},
    )
    assert response.tools[0].type == "function"
    assert response.parallel_tool_calls is False
    listed = [item async for item in client.responses.input_items.list(response.id, order="asc")]
    assert [item.type for item in listed] == [item.get("type", "message") for item in items]


async def test_a_function_is_called_and_its_output_goes_back(client: AsyncOpenAI) -> None:
    options = OPTIONS | {"max_output_tokens": 150, "tools": [SWITCH], "tool_choice": "required"}
    whole = await client.responses.create(**options, parallel_tool_calls=False)
    assert whole.status == "completed"
    (call,) = whole.output
    assert call.type == "function_call"
    assert isinstance(json.loads(call.arguments)["on"], bool)
    async with client.responses.stream(**options, parallel_tool_calls=False) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.arguments for event in events if event.type == "response.function_call_arguments.done"] == [
        call.arguments
    ]
    assert final.output[0].arguments == call.arguments  # type: ignore[union-attr]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    by_id = await client.responses.create(**OPTIONS | {"input": [output]}, previous_response_id=whole.id)
    turns: Any = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_unset=True), output]
    by_hand = await client.responses.create(**OPTIONS | {"input": turns})
    assert by_id.output_text == by_hand.output_text


class Switch(BaseModel):
    on: bool


async def test_output_of_a_schema(client: AsyncOpenAI) -> None:
    options = OPTIONS | {"max_output_tokens": 100}
    parsed = await client.responses.parse(**options, text_format=Switch)
    assert isinstance(parsed.output_parsed, Switch)
    async with client.responses.stream(**options, text_format=Switch) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed
    anything = await client.responses.create(**options, text={"format": {"type": "json_object"}})
    assert anything.output_text.startswith("{")


async def test_in_the_background_it_runs_without_a_reader(client: AsyncOpenAI) -> None:
    made = await client.responses.create(**LONG)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    running = await reaches(client, made.id, "in_progress")
    assert running.usage is None
    partly = await reaches(client, made.id, "in_progress", "incomplete")
    done = await reaches(client, made.id, "incomplete")
    assert done.output_text.startswith(partly.output_text)
    assert done.usage is not None
    assert done.usage.output_tokens == 600
    assert await client.responses.cancel(made.id) == done, "it is over"


async def test_a_background_stream_goes_on_without_its_client(client: AsyncOpenAI) -> None:
    seen: list[int] = []
    async with await client.responses.create(**LONG, stream=True) as stream:
        async for event in stream:
            if event.type == "response.created":
                assert event.response.status == "queued"
                response_id = event.response.id
            seen.append(event.sequence_number)
            if len(seen) == 20:
                break
    rest = [e async for e in await client.responses.retrieve(response_id, stream=True, starting_after=seen[-1])]
    assert [event.sequence_number for event in rest] == list(range(20, 20 + len(rest)))
    assert rest[-1].type == "response.incomplete"


async def test_one_in_the_background_can_be_cancelled(client: AsyncOpenAI) -> None:
    made = await client.responses.create(**LONG)
    await reaches(client, made.id, "in_progress")
    cancelled = await client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert await client.responses.cancel(made.id) == cancelled
    assert await client.responses.retrieve(made.id) == cancelled
    whole = await client.responses.create(**OPTIONS)
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(whole.id)


async def test_what_is_deleted_is_gone(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**OPTIONS)
    running = await client.responses.create(**LONG)
    for response_id in (whole.id, running.id):
        await client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id)


async def test_an_idempotency_key_gives_the_same_response(fake_up: Up, client: AsyncOpenAI) -> None:
    headers = {"Idempotency-Key": "background-once"}
    first, second = post(fake_up, LONG, headers=headers).json(), post(fake_up, LONG, headers=headers).json()
    assert first["id"] == second["id"]
    assert first["status"] == "queued"
    await client.responses.cancel(first["id"])


IMAGE = {"type": "input_image", "image_url": "http://nowhere/x.png"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "", "input is missing"),
    ({"input": 5}, "input", "must be a string or a list of items"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input", "parts of type 'input_image' are not supported"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "items of type 'item_reference' are not supported"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools of type 'web_search' are not run here"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp' is not supported"),
    ({"conversation": "c"}, "conversation", "previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt", "there are no stored prompts"),
    ({"max_tool_calls": 3}, "max_tool_calls", "this one calls none"),
    ({"truncation": "auto"}, "truncation", "disabled"),
    ({"include": ["reasoning.encrypted_content"]}, "include", "logprobs"),
    ({"background": True, "store": False}, "", "background needs store"),
    ({"max_output_tokens": 1_000_000}, "max_output_tokens", "max_output_tokens is 1000000"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "name and schema are needed"),
    ({"temperature": 3}, "temperature", "temperature"),
    ({"speling": 1}, "speling", "speling"),
]


@pytest.mark.parametrize(("change", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
async def test_refused_with_what_is_wrong(fake_up: Up, change: dict[str, Any], param: str, message: str) -> None:
    response = post(fake_up, {name: value for name, value in (OPTIONS | change).items() if value is not None})
    error = response.json()["error"]
    assert response.status_code == 400
    assert message in error["message"]
    assert (error["param"] or "") == param


async def test_a_deadline_is_a_failed_response(client: AsyncOpenAI) -> None:
    options = OPTIONS | {"max_output_tokens": 1500, "extra_headers": {"X-Orca-Timeout": "0.3"}}
    with pytest.raises(openai.APIStatusError) as whole:
        await client.responses.create(**options)
    assert whole.value.status_code == 504
    events = [event async for event in await client.responses.create(**options, stream=True)]
    assert events[-1].type == "response.failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    made = await client.responses.create(**options, background=True)
    failed = await reaches(client, made.id, "failed")
    assert failed.error is not None
    assert failed.error.code == "server_error"


async def test_a_response_is_its_tenants_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, a={}, b={})
    with Up(tmp_path / "up", "--executor", "fake", "--api-keys", str(path)) as up:
        async with (
            AsyncOpenAI(base_url=f"{up.url}/v1", api_key="key-a", max_retries=0) as ours,
            AsyncOpenAI(base_url=f"{up.url}/v1", api_key="key-b", max_retries=0) as theirs,
        ):
            whole = await ours.responses.create(**OPTIONS)
            assert (await ours.responses.retrieve(whole.id)).id == whole.id
            with pytest.raises(openai.NotFoundError):
                await theirs.responses.retrieve(whole.id)
            with pytest.raises(openai.NotFoundError):
                await theirs.responses.retrieve(whole.id, stream=True)
            with pytest.raises(openai.NotFoundError):
                await theirs.responses.cancel(whole.id)
            with pytest.raises(openai.NotFoundError):
                await theirs.responses.delete(whole.id)
            with pytest.raises(openai.NotFoundError):
                await theirs.responses.input_items.list(whole.id)
            with pytest.raises(openai.NotFoundError):
                await theirs.responses.create(**OPTIONS, previous_response_id=whole.id)
        async with AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.responses.retrieve(whole.id)
        await eventually(up.is_idle)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Up]:
    with Up(tmp_path / "up", "--executor", "fake", "--fake-step-ms", "10", "--routers", "2") as up:
        yield up
        await eventually(up.is_idle, within_s=30)


async def test_the_background_survives_every_router(pair: Up) -> None:
    """Those that take their places tell how it went on."""
    async with AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=5) as client:
        made = await client.responses.create(**LONG)
        await reaches(client, made.id, "in_progress")
        for pid in pair.pids("services.router.main"):
            os.kill(pid, signal.SIGKILL)
        done = await reaches(client, made.id, "incomplete")
        assert done.usage is not None
        assert done.usage.output_tokens == 600
