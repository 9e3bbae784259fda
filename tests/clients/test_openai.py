"""The official openai client, unmodified, on the real weights."""

import io
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, pydantic_function_tool

from tests.clients.tasks import CAPITAL, MODEL, OTHER_TOOL, REPORT, TOOL, WEATHER, City, GetWeather
from tests.e2e.conftest import eventually

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


# -- chat and completions


async def test_chat_whole_streamed_and_by_the_helper(openai: AsyncOpenAI) -> None:
    options = {**GREEDY, "messages": CAPITAL, "max_tokens": 30}
    whole = await openai.chat.completions.create(**options)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    chunks = [chunk async for chunk in await openai.chat.completions.create(**options, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    async with openai.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == text
    assert final.usage == whole.usage
    assert "".join(event.delta for event in events if event.type == "content.delta") == text
    assert [event.type for event in events].count("content.done") == 1


async def test_completions(openai: AsyncOpenAI) -> None:
    options = {**GREEDY, "prompt": "The capital of France is", "max_tokens": 5}
    whole = await openai.completions.create(**options)
    assert "Paris" in whole.choices[0].text
    chunks = [chunk async for chunk in await openai.completions.create(**options, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


async def test_echo_with_logprobs_scores_a_text(openai: AsyncOpenAI) -> None:
    """How evaluation harnesses ask how likely a text is."""
    prompt = "The capital of France is Paris"
    echoed = await openai.completions.create(**GREEDY, prompt=prompt, max_tokens=1, echo=True, logprobs=1)
    choice = echoed.choices[0]
    assert choice.text.startswith(prompt)
    assert choice.logprobs is not None
    scores = choice.logprobs.token_logprobs or []
    assert scores[0] is None, "nothing comes before the first token"
    assert all(score is not None and score <= 0 for score in scores[1:])
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[0] == 0


async def test_best_of_gives_the_likeliest(openai: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 8, "temperature": 1, "seed": 3}
    every = await openai.completions.create(**options, n=4, logprobs=0)
    best = await openai.completions.create(**options, n=1, best_of=4)

    def mean(choice: Any) -> float:
        scores = choice.logprobs.token_logprobs
        return float(sum(scores) / len(scores))

    assert best.choices[0].text == max(every.choices, key=mean).text
    assert len(best.choices) == 1


async def test_models(openai: AsyncOpenAI) -> None:
    assert [model.id async for model in openai.models.list()] == [MODEL]
    assert (await openai.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(NotFoundError):
        await openai.models.retrieve("gpt-none")


# -- structured outputs


async def test_parse_into_a_pydantic_model(openai: AsyncOpenAI) -> None:
    parsed = await openai.chat.completions.parse(
        model=MODEL, messages=CAPITAL, response_format=City, max_tokens=200, n=3, temperature=1, seed=1
    )
    assert len(parsed.choices) == 3
    assert all(isinstance(choice.message.parsed, City) for choice in parsed.choices)


async def test_parse_while_it_streams(openai: AsyncOpenAI) -> None:
    async with openai.chat.completions.stream(
        **GREEDY, messages=CAPITAL, response_format=City, max_tokens=200
    ) as stream:
        partial = [event.parsed async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)
    assert any(isinstance(value, dict) for value in partial), "it can be read before it is complete"


async def test_json_object(openai: AsyncOpenAI) -> None:
    """Any object; a tiny model may not come to its end."""
    messages: list[Any] = [{"role": "user", "content": 'Say {"ok": true} as JSON.'}]
    answer = await openai.chat.completions.create(
        **GREEDY, messages=messages, response_format={"type": "json_object"}, max_tokens=200
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        ({"choice": ["yes", "no", "perhaps"]}, {"yes", "no", "perhaps"}),
        ({"regex": "(ab|ba){2}"}, {"abab", "abba", "baab", "baba"}),
        ({"grammar": 'start: "x" ("y" | "z")'}, {"xy", "xz"}),
        ({"json": {"enum": [1, True, None]}}, {"1", "true", "null"}),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
async def test_structured_outputs_as_vllm_takes_them(openai: AsyncOpenAI, wanted: Any, allowed: set[str]) -> None:
    extra = {"structured_outputs": wanted}
    chat = await openai.chat.completions.create(
        model=MODEL, messages=CAPITAL, n=8, temperature=1, seed=1, max_tokens=20, extra_body=extra
    )
    texts = {(choice.message.content or "").strip() for choice in chat.choices}
    assert texts <= allowed
    plain = await openai.completions.create(**GREEDY, prompt="a", max_tokens=20, extra_body=extra)
    assert plain.choices[0].text.strip() in allowed
    assert plain.choices[0].finish_reason == "stop"


# -- tools


async def test_tool_loop(openai: AsyncOpenAI) -> None:
    """A call is required, its result is given, and there is an answer."""
    asked = await openai.chat.completions.create(
        **GREEDY, messages=WEATHER, tools=[TOOL], tool_choice="required", max_tokens=200
    )
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert GetWeather.model_validate_json(call.function.arguments)
    messages: list[Any] = [*WEATHER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": REPORT}]
    answer = await openai.chat.completions.create(**GREEDY, messages=messages, tools=[TOOL], max_tokens=40)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    final = await openai.chat.completions.create(
        **GREEDY, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=40
    )
    assert final.choices[0].message.content
    assert not final.choices[0].message.tool_calls


async def test_a_named_tool_streamed(openai: AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    options = {**GREEDY, "messages": WEATHER, "tools": [TOOL, OTHER_TOOL], "tool_choice": named, "max_tokens": 200}
    whole = await openai.chat.completions.create(**options)
    assert whole.choices[0].message.tool_calls
    want = whole.choices[0].message.tool_calls[0]
    parts = []
    async for chunk in await openai.chat.completions.create(**options, stream=True):
        parts += chunk.choices[0].delta.tool_calls or [] if chunk.choices else []
    assert parts[0].id, "the first part names the call"
    assert [part.function.name for part in parts if part.function and part.function.name] == ["get_weather"]
    arguments = "".join(part.function.arguments or "" for part in parts if part.function)
    assert want.type == "function"
    assert arguments == want.function.arguments
    assert {part.index for part in parts} == {0}


async def test_a_tool_from_a_pydantic_model(openai: AsyncOpenAI) -> None:
    parsed = await openai.chat.completions.parse(
        **GREEDY, messages=WEATHER, tools=[pydantic_function_tool(GetWeather)], tool_choice="required", max_tokens=200
    )
    calls = parsed.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, GetWeather)


async def test_a_tool_that_is_not_there(openai: AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "none"}}
    with pytest.raises(BadRequestError):
        await openai.chat.completions.create(**GREEDY, messages=WEATHER, tools=[TOOL], tool_choice=named)
    with pytest.raises(BadRequestError):
        await openai.chat.completions.create(**GREEDY, messages=WEATHER, tool_choice="required")


# -- responses


async def test_responses_whole_and_streamed(openai: AsyncOpenAI) -> None:
    options = {**GREEDY, "input": "What is the capital of France?", "max_output_tokens": 30}
    whole = await openai.responses.create(**options)
    assert "Paris" in whole.output_text
    assert whole.status in ("completed", "incomplete")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    async with openai.responses.stream(**options) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(set(numbers))


async def test_responses_parse(openai: AsyncOpenAI) -> None:
    parsed = await openai.responses.parse(
        **GREEDY, input="Tell me about Paris.", text_format=City, max_output_tokens=200, instructions="Answer in JSON."
    )
    assert isinstance(parsed.output_parsed, City)


async def test_responses_tool_loop(openai: AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    options: dict[str, Any] = {**GREEDY, "tools": [tool], "max_output_tokens": 200}
    asked = await openai.responses.create(**options, input=WEATHER, tool_choice="required")
    call = next(item for item in asked.output if item.type == "function_call")
    assert GetWeather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": REPORT}
    history: list[Any] = [*WEATHER, *(item.model_dump(exclude_none=True) for item in asked.output), result]
    answer = await openai.responses.create(**options, input=history, tool_choice="none")
    assert answer.output_text


# -- embeddings


async def test_embeddings(openai: AsyncOpenAI) -> None:
    """The client asks for base64 by itself; both forms are the same numbers, and each text has its own."""
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose again."]
    packed = await openai.embeddings.create(model=MODEL, input=texts)
    plain = await openai.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    vectors = [entry.embedding for entry in packed.data]
    assert [entry.index for entry in packed.data] == [0, 1, 2]
    for ours, theirs in zip(vectors, (entry.embedding for entry in plain.data), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    alone = await openai.embeddings.create(model=MODEL, input=texts[2])
    assert alone.data[0].embedding == pytest.approx(vectors[2], abs=1e-4)

    def likeness(a: list[float], b: list[float]) -> float:
        norm = (sum(x * x for x in a) * sum(x * x for x in b)) ** 0.5
        return sum(x * y for x, y in zip(a, b, strict=True)) / norm

    assert likeness(vectors[0], vectors[1]) > likeness(vectors[0], vectors[2])
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 10


# -- files and batches


async def test_a_batch_from_upload_to_results(openai: AsyncOpenAI) -> None:
    bodies = [{**GREEDY, "messages": CAPITAL, "max_tokens": 10 + index} for index in range(5)]
    lines = [
        {"custom_id": f"r{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for index, body in enumerate(bodies)
    ]
    lines.append({"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": {**bodies[0], "n": -1}})
    content = "\n".join(map(json.dumps, lines)).encode()
    upload = await openai.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    assert (await openai.files.content(upload.id)).content == content
    batch = await openai.batches.create(
        input_file_id=upload.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )

    async def over() -> bool:
        return (await openai.batches.retrieve(batch.id)).status in ("completed", "failed", "cancelled", "expired")

    await eventually(over, within_s=120)
    done = await openai.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.metadata == {"a": "b"}
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (6, 5, 1)
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    results = [json.loads(line) for line in (await openai.files.content(done.output_file_id)).text.splitlines()]
    by_id = {result["custom_id"]: result["response"]["body"] for result in results}
    for index, body in enumerate(bodies):
        direct = await openai.chat.completions.create(**body)
        assert by_id[f"r{index}"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    errors = [json.loads(line) for line in (await openai.files.content(done.error_file_id)).text.splitlines()]
    assert [error["custom_id"] for error in errors] == ["bad"]
    assert batch.id in [listed.id async for listed in openai.batches.list()]
    assert (await openai.files.delete(upload.id)).deleted
    with pytest.raises(NotFoundError):
        await openai.files.retrieve(upload.id)


async def test_a_batch_is_cancelled(openai: AsyncOpenAI) -> None:
    body = {**GREEDY, "prompt": "a", "max_tokens": 2000, "ignore_eos": True}
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(20)]
    content = "\n".join(map(json.dumps, lines)).encode()
    upload = await openai.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    batch = await openai.batches.create(input_file_id=upload.id, endpoint="/v1/completions", completion_window="24h")
    assert (await openai.batches.cancel(batch.id)).status in ("cancelling", "cancelled")

    async def cancelled() -> bool:
        return (await openai.batches.retrieve(batch.id)).status == "cancelled"

    await eventually(cancelled, within_s=60)
