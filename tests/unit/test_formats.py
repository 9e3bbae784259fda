"""Formatters: deltas to the events of each API, as its own client reads them."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.common.errors import DeadlineExceeded, GenerationFailed, Overloaded, StreamInterrupted
from services.common.journal import TokenDetail
from services.common.text.detokenizer import TokenBytes
from services.router.api.format import Formatter, Whole, formatter_for
from services.router.api.responses.translate import shown
from services.router.api.responses.wire import ResponsesRequest
from services.router.core.calls import CallDelta
from services.router.core.document import Document, View
from services.router.core.emission import Delta, Usage
from tests.unit.tiny_tokenizer import BYTES_JSON

TABLE = TokenBytes(BYTES_JSON)
USAGE = Usage(7, 5, 3)
MESSAGE_EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def formatter(api: str, logprobs: bool = False, **asked: Any) -> Formatter:
    detail: dict[str, Any] = {"input_tokens": 7}
    if api == "responses":
        detail = {"shown": shown(ResponsesRequest.model_validate({"model": "m", "input": "x", **asked}))}
    return formatter_for(
        Document("0" * 32, api, "m", 1_700_000_000, 1, logprobs=logprobs, view=View(detail=detail)), TABLE
    )


def deltas(*news: dict[str, Any], finish: str = "stop") -> list[Delta]:
    """News of one choice: text, reasoning or calls each; the last of them ends it."""
    out = []
    for index, item in enumerate(news):
        last = finish if index + 1 == len(news) else None
        values: dict[str, Any] = {"text": "", "token_ids": (65,), "details": ()} | item
        out.append(Delta(choice=0, first=index == 0, finish=last, **values))
    return out


def call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    return {"calls": (CallDelta(index, f"call-{index}", name, arguments),)}


def streamed(made: Formatter, news: Sequence[Delta]) -> list[dict[str, Any]]:
    return [event for delta in news for event in made.chunks(delta)] + made.end(USAGE)


def whole(made: Formatter, news: Sequence[Delta]) -> dict[str, Any]:
    choice = Whole(0)
    for delta in news:
        choice.add(delta)
    return made.whole([choice], USAGE)


def message_of(events: Sequence[dict[str, Any]]) -> Message:
    """What Anthropic's client makes of a stream."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        parsed = MESSAGE_EVENTS.validate_python(event)
        message = accumulate_event(event=parsed, current_snapshot=message, json_bufs=buffers)
    return Message.model_validate(message.to_dict())


def response_of(events: Sequence[dict[str, Any]]) -> Response:
    """What OpenAI's client makes of a stream that ends."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(RESPONSE_EVENTS.validate_python(event))
    last = RESPONSE_EVENTS.validate_python(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response: Response = last.response
    return response


TEXT = deltas({"text": "Hel"}, {"text": "lo"})
THOUGHT = deltas({"reasoning": "Hm"}, {"reasoning": "m."}, {"text": "\n\n"}, {"text": "So."})
CALLS = deltas(
    {"text": "I look."},
    call(0, "weather", '{"place":'),
    call(0, None, ' "Oslo"}'),
    call(1, "time", "{}"),
    {"text": ""},
    finish="tool_calls",
)
THOUGHT_CALL = deltas({"reasoning": "Hm."}, {"text": "\n\n"}, call(0, "time", "{}"), finish="tool_calls")
ALL = {
    "text": TEXT,
    "thought": THOUGHT,
    "calls": CALLS,
    "both": THOUGHT_CALL,
    "nothing": deltas({}),
    "space": deltas({"text": "\n"}),
}


@pytest.mark.parametrize("name", ALL)
def test_a_streamed_message_is_the_whole_one(name: str) -> None:
    told = message_of(streamed(formatter("messages"), ALL[name]))
    assert told.to_dict() == whole(formatter("messages"), ALL[name]) | {"stop_details": None}


@pytest.mark.parametrize("name", ALL)
def test_a_streamed_response_is_the_whole_one(name: str) -> None:
    told = response_of(streamed(formatter("responses"), ALL[name]))
    assert told == Response.model_validate(whole(formatter("responses"), ALL[name]))
    assert told.status == "completed"


def test_blocks_of_a_message() -> None:
    thought = message_of(streamed(formatter("messages"), THOUGHT))
    assert [block.type for block in thought.content] == ["thinking", "text"]
    assert thought.content[0].thinking == "Hmm."  # type: ignore[union-attr]
    assert thought.content[1].text == "\n\nSo."  # type: ignore[union-attr]
    calls = message_of(streamed(formatter("messages"), CALLS))
    assert [block.type for block in calls.content] == ["text", "tool_use", "tool_use"]
    assert calls.content[1].input == {"place": "Oslo"}  # type: ignore[union-attr]
    assert calls.stop_reason == "tool_use"
    assert (calls.usage.input_tokens, calls.usage.cache_read_input_tokens, calls.usage.output_tokens) == (4, 3, 5)


def test_items_of_a_response() -> None:
    thought = response_of(streamed(formatter("responses"), THOUGHT))
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert thought.output[0].content[0].text == "Hmm."  # type: ignore[union-attr,index]
    assert thought.output_text == "\n\nSo."
    calls = response_of(streamed(formatter("responses"), CALLS))
    assert [item.type for item in calls.output] == ["message", "function_call", "function_call"]
    assert calls.output[1].arguments == '{"place": "Oslo"}'  # type: ignore[union-attr]
    assert len({item.id for item in calls.output}) == 3
    assert all(item.status == "completed" for item in calls.output)  # type: ignore[union-attr]


def test_a_call_that_was_cut_off() -> None:
    news = deltas(call(0, "weather", '{"place": "Os'), finish="length")
    message = whole(formatter("messages"), news)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {}
    response = response_of(streamed(formatter("responses"), news))
    assert response.status == "incomplete"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert response.output[0].arguments == '{"place": "Os'  # type: ignore[union-attr]


def test_text_after_a_call_is_another_block() -> None:
    news = deltas(call(0, "time", "{}"), {"text": "Done."}, finish="tool_calls")
    assert [block.type for block in message_of(streamed(formatter("messages"), news)).content] == ["tool_use", "text"]
    assert [i.type for i in response_of(streamed(formatter("responses"), news)).output] == ["function_call", "message"]


def test_logprobs_go_with_the_text_that_their_tokens_made() -> None:
    detail = (TokenDetail(-0.5, ((66, -0.5), (67, -1.0))),)
    news = deltas(
        {"reasoning": "x", "details": detail}, {"text": "", "details": detail}, {"text": "AB", "details": detail}
    )
    events = streamed(formatter("responses", logprobs=True), news)
    told = [len(event["logprobs"]) for event in events if event["type"] == "response.output_text.delta"]
    assert told == [2]
    part = response_of(events).output[1].content[0]  # type: ignore[union-attr,index]
    assert [entry.logprob for entry in part.logprobs] == [-0.5, -0.5]  # type: ignore[union-attr]


def test_a_response_shows_what_was_asked() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    asked: dict[str, Any] = {
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "metadata": {"k": "v"},
        "background": True,
    }
    events = streamed(formatter("responses", **asked), TEXT)
    assert events[0]["response"]["status"] == "queued"
    response = response_of(events)
    assert response.model_dump(exclude_none=True)["tool_choice"] == asked["tool_choice"]
    assert response.text is not None
    assert response.text.model_dump(by_alias=True, exclude_none=True) == asked["text"]
    assert (response.metadata, response.background) == ({"k": "v"}, True)


def test_a_failure_is_an_event_of_its_api() -> None:
    name, data = formatter("messages").failed(Overloaded("full", 3)).decode().strip().split("\n")
    assert name == "event: error"
    body = json.loads(data.removeprefix("data: "))
    assert body["error"] == {"type": "rate_limit_error", "message": "full"}

    for begun in (False, True):
        made = formatter("responses")
        before = made.chunks(TEXT[0]) if begun else []
        frames = made.failed(GenerationFailed("lost")).decode().strip().split("\n\n")
        events = before + [json.loads(frame.partition("data: ")[2]) for frame in frames]
        failed = response_of(events)
        assert failed.status == "failed"
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == ("server_error", "lost")
    interrupted = formatter("responses").failed(StreamInterrupted("elsewhere")).decode()
    assert interrupted.startswith("event: error\n"), "the response itself goes on"


def test_a_reader_gets_what_comes_after_a_sequence_number() -> None:
    every = formatter("responses")
    document = every.document
    detail = document.view.detail | {"after": 4}
    later = formatter_for(
        Document(document.request_id, "responses", "m", document.created, 1, view=View(detail=detail)), TABLE
    )
    frames = [every.frame(event, "1-0") for event in streamed(every, TEXT)]
    assert [later.frame(event, "1-0") for event in streamed(later, TEXT)] == [b""] * 5 + frames[5:]


@pytest.mark.parametrize(("finish", "status"), [("abort", "cancelled"), ("error", "failed"), ("deadline", "failed")])
def test_a_response_that_did_not_end_well_says_so(finish: str, status: str) -> None:
    made = formatter("responses", background=True)
    assert made.stands()["status"] == "queued"  # type: ignore[attr-defined]
    for delta in deltas({"text": "a"}, {"text": "b"}, finish=finish)[:1]:
        made.chunks(delta)
    assert made.stands()["status"] == "in_progress"  # type: ignore[attr-defined]
    made.chunks(Delta(0, "", (), (), False, finish))
    response = Response.model_validate(made.stands(USAGE))  # type: ignore[attr-defined]
    assert (response.status, response.output_text) == (status, "a")
    assert (response.error is not None) == (status == "failed")
    if finish == "deadline":
        assert response.error is not None
        assert "in time" in response.error.message
        assert DeadlineExceeded.status == 504
