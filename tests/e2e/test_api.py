"""The HTTP interface with the official client, over real processes (fake executor: the model is not the point)."""

import asyncio
import json
import re
import select
import socket
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI

from loadtest.up import Up
from tests.e2e.conftest import MODEL, eventually

USER: list[Any] = [{"role": "user", "content": "Hi"}]


def post(up: Up, path: str, body: Any, **more: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{up.url}{path}", content=content, timeout=30, **more)


async def test_chat_whole_and_streamed_are_the_same(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 20, "temperature": 0}
    whole = await client.chat.completions.create(**options)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    stream = await client.chat.completions.create(**options, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)


async def test_completion_lists_and_n_are_prompt_major(client: AsyncOpenAI) -> None:
    result = await client.completions.create(
        model=MODEL, prompt=["a b", "c d e"], n=2, max_tokens=6, seed=5, temperature=0.9
    )
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    again = await client.completions.create(
        model=MODEL, prompt=["a b", "c d e"], n=2, max_tokens=6, seed=5, temperature=0.9
    )
    texts = [choice.text for choice in result.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 4
    assert result.usage is not None
    assert result.usage.completion_tokens == 24


async def test_prompt_as_ids_equals_prompt_as_text(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    text = await client.completions.create(prompt="2024", **options)
    ids = await client.completions.create(prompt=[34, 32, 34, 36], **options)
    lists = await client.completions.create(prompt=[[34, 32, 34, 36], [34]], **options)
    assert text.choices[0].text == ids.choices[0].text == lists.choices[0].text


async def test_streamed_n_has_one_role_and_one_finish_each(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=USER, n=3, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for index in range(3):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
        assert mine[-1].finish_reason == "length"
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [21]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_tokens(client: AsyncOpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 30, "temperature": 0}
    text = (await client.completions.create(**options)).choices[0].text
    stop = text[len(text) // 3 : len(text) // 3 + 9]
    want = text[: text.index(stop)]
    if stream:
        chunks = [c async for c in await client.completions.create(**options, stop=[stop], stream=True)]
        got, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = (await client.completions.create(**options, stop=[stop])).choices[0]
        got, reason = choice.text, choice.finish_reason
    assert (got, reason) == (want, "stop")


async def test_logprobs(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content is not None
    assert [len(entry.top_logprobs) for entry in content] == [2] * 4
    result = await client.completions.create(model=MODEL, prompt="é", max_tokens=4, logprobs=1, temperature=0)
    logprobs = result.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == 4


async def test_sse_ids_are_journal_entries_and_the_last_line_is_done(fake_up: Up, client: AsyncOpenAI) -> None:
    body = {"model": MODEL, "messages": USER, "max_tokens": 5, "stream": True, "temperature": 0}
    response = post(fake_up, "/v1/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    ids = [line.split("\n")[0].removeprefix("id: ") for line in lines if line.startswith("id: ")]
    assert len({re.split("[.:]", event_id)[0] for event_id in ids}) == 5, "an entry for each step"
    assert ids == sorted(set(ids)), "and an id for each event"
    assert {event_id.split(":")[1] for event_id in ids} == {response.headers["x-orca-request-id"]}


BAD: list[tuple[str, Any, int, str]] = [
    ("/v1/chat/completions", b"{", 400, "invalid_request"),
    ("/v1/chat/completions", b"[]", 400, "invalid_request"),
    ("/v1/chat/completions", b'\xff\xfe{"model"', 400, "invalid_request"),
    ("/v1/chat/completions", b"\xef\xbb\xbf{}", 400, "invalid_request"),
    ("/v1/chat/completions", b'{"model":"smollm2-135m","messages":NaN}', 400, "invalid_request"),
    (
        "/v1/chat/completions",
        b'{"model":"smollm2-135m","messages":[{"role":"user","content":"\\ud800"}]}',
        400,
        "invalid_request",
    ),
    ("/v1/chat/completions", b"[" * 100_000, 400, "invalid_request"),
    ("/v1/chat/completions", {"messages": USER}, 400, "invalid_request"),
    ("/v1/chat/completions", {"model": "gpt-4", "messages": USER}, 404, "model_not_found"),
    ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400, "invalid_request"),
    ("/v1/chat/completions", {"model": MODEL, "messages": "hi"}, 400, "invalid_request"),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user"}]}, 400, "invalid_request"),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "x", "content": "y"}]}, 400, "invalid_request"),
    ("/v1/chat/completions", {"model": MODEL, "messages": USER * 3000}, 400, "invalid_request"),
    *[
        ("/v1/chat/completions", {"model": MODEL, "messages": USER, name: value}, 400, "invalid_request")
        for name, value in [
            ("max_tokens", -1),
            ("max_tokens", 0),
            ("max_tokens", 1.5),
            ("max_tokens", "5"),
            ("max_tokens", True),
            ("max_completion_tokens", -3),
            ("n", 0),
            ("n", 5_000_000),
            ("n", 1.5),
            ("temperature", -0.1),
            ("temperature", 2.01),
            ("temperature", "hot"),
            ("top_p", -0.1),
            ("top_p", 1.1),
            ("top_k", -2),
            ("min_p", 2),
            ("presence_penalty", 3),
            ("repetition_penalty", 0),
            ("seed", 1.5),
            ("seed", 1 << 63),
            ("seed", 1 << 64),
            ("stop", ["a"] * 5),
            ("stop", ""),
            ("stop", "x" * 1001),
            ("stop", 5),
            ("logit_bias", {"99999999": 1}),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"abc": 1}),
            ("logit_bias", {"5": 101}),
            ("logit_bias", {str(i): 1 for i in range(2000)}),
            ("top_logprobs", 5),
            ("min_tokens", -1),
            ("stream_options", {"include_usage": True}),
            ("stream", "yes"),
            ("tools", [{}]),
            ("tool_choice", "required"),
            ("stop_token_ids", [49152]),
            ("response_format", {"type": "json_schema"}),
            ("response_format", {"type": "xml"}),
            ("nonsense", 1),
            ("stream_options", {"nonsense": 1}),
            ("functions", []),
            ("audio", {}),
            ("store", True),
            ("metadata", {"a": 1}),
            ("service_tier", "gold"),
            ("reasoning_effort", "high"),
            ("chat_template_kwargs", {"enable_thinking": True}),
            ("structured_outputs", {}),
            ("structured_outputs", {"regex": "a", "choice": ["b"]}),
            ("structured_outputs", {"regex": "foo**("}),
            ("structured_outputs", {"grammar": "start: nothing"}),
        ]
    ],
    ("/v1/chat/completions", {"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 21}, 400, ""),
    ("/v1/chat/completions", {"model": MODEL, "messages": USER, "max_tokens": 5, "min_tokens": 6}, 400, ""),
    ("/v1/chat/completions", {"model": MODEL, "messages": USER, "max_tokens": 8192}, 400, "context_length_exceeded"),
    ("/v1/completions", {"model": MODEL, "prompt": ""}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": []}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": [""]}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", ""]}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": [[]]}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": [-1]}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": [49152]}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": [1 << 63]}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": [1.5]}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": ["a"] * 100_000}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": [5] * 8192}, 400, "context_length_exceeded"),
    ("/v1/completions", {"model": MODEL, "prompt": "a", "logprobs": 10**9}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 0}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": "a", "suffix": "b"}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": "a", "n": 3, "best_of": 2}, 400, "invalid_request"),
    ("/v1/completions", b'{"model":"smollm2-135m","prompt":"a","temperature":1e999}', 400, "invalid_request"),
    ("/v1/completions", b"x" * 50_000_000, 413, "body_too_large"),
    # Small for the sender, large for a validator that reports every element of every alternative.
    ("/v1/completions", {"model": MODEL, "prompt": [1.5] * 700_000}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": [[]] * 900_000}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": [1] * 1_200_000}, 400, "invalid_request"),
    ("/v1/completions", {"model": MODEL, "prompt": ["ab " * 9000] * 128}, 400, "context_length_exceeded"),
    ("/v1/completions", {"model": MODEL, "prompt": "a", "logit_bias": {str(i): "" for i in range(300_000)}}, 400, ""),
]


@pytest.mark.parametrize(("path", "body", "status", "code"), BAD, ids=[f"{i}" for i in range(len(BAD))])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_gets_one_clear_answer(
    fake_up: Up, path: str, body: Any, status: int, code: str, stream: bool
) -> None:
    if isinstance(body, dict):
        body = {"stream": stream, **body} if "stream_options" not in body else body
    elif stream:
        return
    response = post(fake_up, path, body)
    assert response.status_code == status, response.text[:300]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not code or error["code"] == code
    assert error["message"]
    assert len(response.content) < 1000


def test_unknown_paths_and_methods_are_openai_shaped(fake_up: Up) -> None:
    assert httpx.get(f"{fake_up.url}/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{fake_up.url}/v1/completions").status_code == 405
    assert httpx.get(f"{fake_up.url}/v1/models").json()["data"][0]["id"] == MODEL
    assert httpx.get(f"{fake_up.url}/v1/models/{MODEL}").status_code == 200
    assert httpx.get(f"{fake_up.url}/v1/models/none").status_code == 404
    assert httpx.get(f"{fake_up.url}/health/live").status_code == 200
    assert httpx.get(f"{fake_up.url}/health/ready").status_code == 200


def test_headers_are_bounded(fake_up: Up) -> None:
    response = httpx.post(f"{fake_up.url}/v1/completions", content=b"{}", headers={"X-Large": "a" * 200_000})
    assert response.status_code == 431
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nX-Large: " + b"a" * 70_000, 431),
        (b"CONNECT example:443 HTTP/1.1\r\nHost: example:443\r\n\r\n", 405),
        (b"this is no HTTP\r\n\r\n", 400),
    ],
)
def test_a_refused_client_that_goes_on_sending_hears_the_answer(fake_up: Up, start: bytes, status: int) -> None:
    """The answer is there before the rest is sent: a server that closed then would have it thrown away."""
    url = httpx.URL(fake_up.url)
    with socket.create_connection((url.host, url.port), timeout=20) as client:
        client.sendall(start)
        assert select.select([client], [], [], 20)[0]
        for _ in range(20):
            client.sendall(b"a" * 10_000)
        client.shutdown(socket.SHUT_WR)
        head, _, body = b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_what_comes_before_rubbish_is_answered_and_a_malformed_body_is_refused(fake_up: Up) -> None:
    url = httpx.URL(fake_up.url)
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 50}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"
    for sent, expected in (
        (whole + b"rubbish\r\n\r\n", [b"200", b"400"]),
        (whole + whole + b"rubbish\r\n\r\n", [b"200", b"200", b"400"]),
        (chunked + b'"a":no chunk\r\n', [b"400"]),
        (whole + b"GET / HTTP/1.1\r\nX-Large: " + b"a" * 200_000, [b"200", b"431"]),
    ):
        with socket.create_connection((url.host, url.port), timeout=20) as client:
            client.sendall(sent)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == expected


def test_a_message_of_all_private_use_characters(fake_up: Up) -> None:
    content = "".join(map(chr, range(0xE000, 0xF900)))
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    assert post(fake_up, "/v1/chat/completions", body).status_code in (200, 400)


def test_a_client_s_request_id_is_cleaned_and_echoed_but_never_used(fake_up: Up) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    ours = set()
    for given, echoed in (
        ("abc-123", "abc-123"),
        ("a*b:c{d}", "abcd"),
        ("x" * 1000, "x" * 128),
        ("abc-123", "abc-123"),
    ):
        response = post(fake_up, "/v1/completions", body, headers={"X-Request-Id": given})
        assert response.headers["x-request-id"] == echoed
        ours.add(response.headers["x-orca-request-id"])
    assert len(ours) == 4


async def test_context_edges(client: AsyncOpenAI) -> None:
    """Prompt + max_tokens may fill the context exactly; one more is refused with the true counts."""
    full = await client.completions.create(model=MODEL, prompt=[5] * 8185, max_tokens=7, temperature=0)
    assert full.choices[0].finish_reason == "length"
    rest = await client.completions.create(model=MODEL, prompt=[5] * 8185, temperature=0)
    assert rest.usage is not None
    assert rest.usage.completion_tokens == 7
    with pytest.raises(APIStatusError, match=r"8185 tokens and max_tokens is 8, 8193 together"):
        await client.completions.create(model=MODEL, prompt=[5] * 8185, max_tokens=8)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait", [0.0, 0.05, 0.3])
async def test_disconnect_frees_everything(fake_up: Up, stream: bool, wait: float) -> None:
    """Queued, prefilling or decoding, n = 1 or 3: the blocks are free again."""
    bodies = [
        {"model": MODEL, "prompt": [5] * 600, "max_tokens": 5000, "n": n, "stream": stream, "ignore_eos": True}
        for n in (1, 3, 1)
    ]
    async with httpx.AsyncClient() as http:
        tasks = [asyncio.create_task(http.post(f"{fake_up.url}/v1/completions", json=b, timeout=60)) for b in bodies]
        await asyncio.sleep(wait)  # the phase in which the client goes
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(fake_up.is_idle)


async def test_metrics_names_are_there(fake_up: Up, client: AsyncOpenAI) -> None:
    await client.completions.create(model=MODEL, prompt="a", max_tokens=3)
    metrics = fake_up.metrics()
    for name in (
        'orca_requests_total{outcome="ok"}',
        "orca_requests_running",
        "orca_requests_waiting",
        'orca_kv_blocks{state="free"}',
        'orca_kv_blocks{state="used"}',
        'orca_kv_blocks{state="cached"}',
        "orca_preemptions_total",
        "orca_time_to_first_token_seconds_count",
        "orca_inter_token_latency_seconds_count",
        'orca_step_duration_seconds_count{worker="worker-0"}',
        "orca_prompt_tokens_total",
        "orca_generated_tokens_total",
    ):
        assert name in metrics, name
    assert metrics['orca_steps_total{worker="worker-0"}'] == metrics['orca_model_calls_total{worker="worker-0"}']


async def test_tokenize_sees_what_a_generation_would_and_detokenize_undoes_it(fake_up: Up, client: AsyncOpenAI) -> None:
    text = "Hello <|im_end|> wörld 🐋"
    raw = post(fake_up, "/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    usage = (await client.completions.create(model=MODEL, prompt=text, max_tokens=1)).usage
    assert usage is not None
    assert raw["count"] == len(raw["tokens"]) == usage.prompt_tokens
    assert "<|im_end|>" in raw["token_strs"], "a raw prompt may spell a special token"
    chat = post(fake_up, "/tokenize", {"messages": [{"role": "user", "content": text}]}).json()
    usage = (
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1)
    ).usage
    assert usage is not None
    assert chat["count"] == usage.prompt_tokens
    assert chat["token_strs"] is None
    plain = post(fake_up, "/tokenize", {"prompt": "wörld 🐋"}).json()["tokens"]
    assert post(fake_up, "/detokenize", {"tokens": plain}).json() == {"prompt": "wörld 🐋"}
    assert post(fake_up, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": USER}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/tokenize", {"prompt": "a" * 2_000_000}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/detokenize", {"tokens": [1 << 30]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", b"[", 400),
    ],
)
def test_bad_token_requests_get_one_clear_answer(fake_up: Up, path: str, body: Any, status: int) -> None:
    answer = post(fake_up, path, body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert len(answer.content) < 500


def test_the_docs_page_needs_no_network(fake_up: Up) -> None:
    page = httpx.get(f"{fake_up.url}/docs")
    assert page.status_code == 200
    sources = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
    assert len(sources) >= 2
    for source in sources:
        assert source.startswith("/"), source
        assert httpx.get(fake_up.url + source).status_code == 200
    assert "/openapi.json" in page.text
    assert httpx.get(f"{fake_up.url}/openapi.json").json()["openapi"].startswith("3.1")
