"""Public bug reports that must not happen here, about what comes out: D01 to D08, and seeds and ids: D20, D22.

Each for chat and completions, streamed and whole; after each the house rules hold (the `house` fixture).
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from loadtest.up import Up
from services.worker.executor.fake import NAN
from tests.e2e.asking import APIS, PATHS, Answer, ask, body_of, read
from tests.e2e.conftest import MODEL, eventually

BAD_WORD, BAD_TOKEN = "lighthouse", 33059
PROMPTS = ["한국어로 인사해 주세요", "👩‍👩‍👧‍👦 🇩🇪 e\u0301\u0323 नमस्ते", "plain words"]
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
each_api = pytest.mark.parametrize("api", APIS)


@pytest.fixture
async def house(fake_up: Up) -> AsyncIterator[httpx.AsyncClient]:
    """A client; afterwards health, gauges and blocks are as before, and a plain request gives the same text."""
    async with httpx.AsyncClient(base_url=fake_up.url, timeout=60) as http:
        before = (await ask(http, "completion", "house rules")).text
        yield http
        assert (await ask(http, "completion", "house rules")).text == before
        assert (await http.get("/health")).status_code == 200
    await eventually(fake_up.is_idle)


async def both_ways(http: httpx.AsyncClient, api: str, prompt: object, **fields: object) -> Answer:
    """The whole answer, after the streamed one was found to say the same."""
    whole = await ask(http, api, prompt, **fields)
    streamed = await ask(http, api, prompt, stream=True, **fields)
    assert whole.status == streamed.status == 200, whole.raw[:500]
    assert streamed.num_done == 1
    assert whole.shown() == streamed.shown()
    return whole


def split_token(entries: list[tuple[str, float, object]], at: int) -> tuple[int, int]:
    """Where a text's token number `at` begins, in characters, and its length."""
    return len("".join(entry[0] for entry in entries[:at])), len(entries[at][0])


@each_api
async def test_d01_stop_strings_across_tokens(house: httpx.AsyncClient, api: str) -> None:
    text = (await both_ways(house, api, "stop here", max_tokens=30)).text
    for start in range(5, 40, 7):
        stop = text[start : start + 9]
        first = text.index(stop)
        answer = await both_ways(house, api, "stop here", max_tokens=30, stop=[stop])
        assert (answer.text, answer.choices[0].finishes) == (text[:first], ["stop"])
    # One is a prefix of the other: the one that is complete first ends it.
    answer = await both_ways(house, api, "stop here", max_tokens=30, stop=[text[10:20], text[10:15]])
    assert answer.text == text[: text.index(text[10:15])]
    # What begins like one and is none comes out; so does what is held back at the end.
    answer = await both_ways(house, api, "stop here", max_tokens=30, stop=[text[10:18] + "\0", text[-6:] + "\0"])
    assert (answer.text, answer.choices[0].finishes) == (text, ["length"])
    # At the very end of the budget.
    answer = await both_ways(house, api, "stop here", max_tokens=30, stop=text[-4:])
    assert answer.text == text[: text.index(text[-4:])]


@each_api
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_d02_no_character_is_cut(house: httpx.AsyncClient, api: str, prompt: str) -> None:
    """The fake executor's tokens are as good as random: many characters come in several of them."""
    whole = await ask(house, api, prompt, max_tokens=300)
    streamed = await ask(house, api, prompt, stream=True, max_tokens=300)
    assert streamed.text == whole.text
    # The decoding of all ids at once, by the server's own other way.
    if api == "completion":
        ids = (await house.post("/tokenize", json={"prompt": whole.text})).json()["tokens"]
        assert (await house.post("/detokenize", json={"tokens": ids})).json()["prompt"] == whole.text
    tail = whole.text.rstrip("\ufffd")
    assert all("\ufffd" not in piece or piece in whole.text for piece in streamed.choices[0].pieces)
    assert len(tail) > 100


@each_api
async def test_d03_every_choice_ends_once(house: httpx.AsyncClient, api: str) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 6}
    answer = await both_ways(house, api, "three", **fields)
    assert sorted(answer.choices) == [0, 1, 2]
    assert all(len(choice.finishes) == 1 for choice in answer.choices.values())
    assert len({choice.text for choice in answer.choices.values()}) == 3, "they differ"
    assert (await ask(house, api, "three", **fields)).shown() == answer.shown(), "and repeat"
    streamed = await ask(house, api, "three", stream=True, **fields)
    assert all(choice.roles == (api == "chat") for choice in streamed.choices.values())
    if api == "completion":
        pair = await both_ways(house, api, ["one", "two"], n=2, temperature=1.0, seed=5, max_tokens=6)
        assert sorted(pair.choices) == [0, 1, 2, 3]
        alone = await ask(house, api, "one", n=2, temperature=1.0, seed=5, max_tokens=6)
        assert [pair.choices[i].text for i in (0, 1)] == [alone.choices[i].text for i in (0, 1)], "prompt-major"


@each_api
async def test_d04_the_usage_chunk(house: httpx.AsyncClient, api: str) -> None:
    def chunks(answer: Answer) -> list[dict[str, object]]:
        lines = answer.raw.split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    for options in (None, {"include_usage": False}):
        fields = {"stream_options": options} if options else {}
        plain = chunks(await ask(house, api, "usage", stream=True, **fields))
        assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)
    asked = await ask(house, api, "usage", stream=True, n=2, stream_options={"include_usage": True})
    *others, last = chunks(asked)
    assert last["choices"] == []
    whole = await ask(house, api, "usage", n=2)
    assert last["usage"] == whole.usage
    assert whole.usage["completion_tokens"] == 40, "of both choices"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    assert (await ask(house, api, "usage", stream_options={"include_usage": True})).status == 400


async def test_d07_offsets_of_echo(house: httpx.AsyncClient) -> None:
    for prompt in ["plain ASCII words", "é 한국어 👩‍👧 mixed"]:
        answer = await both_ways(house, "completion", prompt, echo=True, logprobs=2, max_tokens=5)
        assert answer.text.startswith(prompt)
        choice = answer.choices[0]
        tokens, values, tops = zip(*choice.entries, strict=True)
        assert len(tokens) == len(choice.offsets)
        assert values[0] is None
        assert tops[0] is None
        assert all(value is not None for value in values[1:])
        for token, offset in zip(tokens, choice.offsets, strict=True):
            if "\ufffd" not in token:
                assert answer.text[offset:].startswith(token)
        streamed = await ask(house, "completion", prompt, stream=True, echo=True, logprobs=2, max_tokens=5)
        assert streamed.choices[0].offsets == choice.offsets
    plain = await both_ways(house, "completion", ["one two", "three"], echo=True, n=2, max_tokens=3)
    assert [plain.choices[i].text.startswith(p) for i, p in enumerate(["one two"] * 2 + ["three"] * 2)] == [True] * 4
    fields = {"echo": True, "logprobs": 1, "n": 2, "temperature": 1.0, "seed": 1}
    scored = await both_ways(house, "completion", ["one two", "three"], max_tokens=3, **fields)
    first, second, third, _ = (scored.choices[index].entries for index in range(4))
    assert first[:-3] == second[:-3], "the same prompt, the same scores"
    assert first != second
    assert third[:-3] != first[:-3]


@both
@each_api
@pytest.mark.parametrize(
    "fields",
    [{"top_k": 1, "temperature": 1.0}, {"logit_bias": {str(i): -100 for i in range(1000)}}, {"temperature": 0.01}],
)
async def test_d08_log_probabilities_are_json(
    house: httpx.AsyncClient, api: str, stream: bool, fields: dict[str, object]
) -> None:
    answer = await ask(house, api, "spiky", stream=stream, logprobs=5, max_tokens=5, **fields)
    assert answer.status == 200
    assert "Infinity" not in answer.raw
    assert "NaN" not in answer.raw
    entries = answer.choices[0].entries
    assert len(entries) == 5
    for entry in entries:
        token, logprob = (entry["token"], entry["logprob"]) if api == "chat" else entry[:2]
        top = {t["token"]: t["logprob"] for t in entry["top_logprobs"]} if api == "chat" else entry[2]
        assert logprob >= -9999.0
        assert token in top
        assert len(top) >= 5


async def test_best_of_shows_the_best(house: httpx.AsyncClient) -> None:
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
    every = await ask(house, "completion", "best", n=6, logprobs=0, **fields)
    means = {choice.text: sum(entry[1] for entry in choice.entries) for choice in every.choices.values()}
    best = await ask(house, "completion", "best", n=2, best_of=6, **fields)
    assert [choice.text for choice in best.choices.values()] == sorted(means, key=lambda text: -means[text])[:2]
    assert best.usage["completion_tokens"] == 48, "all that were made"
    assert best.body["choices"][0]["logprobs"] is None
    assert (await ask(house, "completion", "best", stream=True, n=2, best_of=6)).status == 400


@both
@each_api
async def test_d20_request_ids_are_ours(house: httpx.AsyncClient, api: str, stream: bool) -> None:
    body = body_of(api, "whose id", stream=stream)
    alone = read(await house.post(PATHS[api], json=body))
    for theirs in ["same", "a" * 8000, "star*colon:quote\"'", "new%0Aline", "tab\tbed"]:
        response = await house.post(PATHS[api], json=body, headers={"X-Request-Id": theirs})
        assert read(response).shown() == alone.shown()
        assert len(response.headers["x-request-id"]) <= 128
        assert set(response.headers["x-request-id"]) <= set(
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
        )
    names = {
        (await house.post(PATHS[api], json=body, headers={"X-Request-Id": "same"})).headers["x-orca-request-id"]
        for _ in range(2)
    }
    assert len(names) == 2


@both
@each_api
async def test_d22_the_same_seed_the_same_text(house: httpx.AsyncClient, api: str, stream: bool) -> None:
    fields = {"temperature": 0.8, "max_tokens": 8}
    for seed in (0, -1, 42, (1 << 63) - 1):
        first = await ask(house, api, "seeded", stream=stream, seed=seed, **fields)
        assert (await ask(house, api, "seeded", stream=stream, seed=seed, **fields)).shown() == first.shown()
    for seed in (1 << 63, 1 << 64, 1.5, "7", True):
        assert (await ask(house, api, "seeded", stream=stream, seed=seed, **fields)).status == 400
    unseeded = {(await ask(house, api, "seeded", seed=None, **fields)).text for _ in range(3)}
    assert len(unseeded) == 3
    assert MODEL


@both
@pytest.mark.parametrize("outputs", [0, 5])
async def test_d06_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, outputs: int
) -> None:
    """Before the first token and after: one error, then [DONE]; whole, a 5xx with the same object. A neighbour in the
    same steps goes on, and what was made is in the tenant's usage."""
    monkeypatch.setenv(NAN, f"{BAD_TOKEN}:{outputs}")
    with Up(tmp_path, "--executor", "fake", "--fake-step-ms", "1") as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=60) as http:
            for api in APIS:
                plain = await ask(http, api, "a neighbour")
                used = (await http.get("/v1/usage")).json()["completion"]
                neighbour = asyncio.create_task(ask(http, api, "a neighbour"))
                answer = await ask(http, api, f"a {BAD_WORD}", stream=stream, max_tokens=40)
                assert answer.error["code"] == "generation_failed"
                assert set(answer.error) == {"message", "type", "param", "code"}
                assert not any(word in answer.raw for word in ("Traceback", "Error(", ".py", "/services"))
                assert (answer.status, answer.num_done) == ((200, 1) if stream else (500, 0))
                assert (await neighbour).shown() == plain.shown()
                told = (await http.get("/v1/usage")).json()["completion"] - used
                assert told == 20 + outputs
        await eventually(up.is_idle)
