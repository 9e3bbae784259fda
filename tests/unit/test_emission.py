"""The fold from journal entries to deltas: worker and router agree on where a text ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.journal import JournalEntry, JournalItem, TokenDetail
from services.common.request import GenerateRequest, SamplingParams
from services.common.text.detokenizer import Detokenizer, TokenBytes
from services.router.core.document import Document, View
from services.router.core.emission import Fold
from services.worker.core.plan import Plan, SequenceOutput, SequenceState, StepOutput
from services.worker.core.publishing import PublishBook
from tests.unit.tiny_tokenizer import BYTES_JSON

TABLE = TokenBytes(BYTES_JSON)


def published(text: bytes, params: SamplingParams) -> list[JournalEntry]:
    """What a worker with a byte tokenizer publishes for this text."""
    book = PublishBook(lambda: Detokenizer(TABLE).push)
    sequence = SequenceState(1, "r", 0, 0, 1, 1, params, 1, [0, *text])
    entries, count = [], 0
    for index, byte in enumerate(text):
        last = "length" if index + 1 == len(text) else None
        output = SequenceOutput(sequence, 1, index, (byte,), (), last)
        for item in book.take(StepOutput(Plan(index + 1, 1), (output,), 0, 0, 0, 1)):
            count += 1
            entry = JournalItem(0, item.index, (byte,), item.finish, ())
            usage = (1, count) if item.finish else None
            entries.append(JournalEntry("r", f"{index + 1}-0", "w", index + 1, (entry,), usage))
    return entries


def text_of(entries: list[JournalEntry], params: SamplingParams) -> tuple[str, str | None]:
    fold = Fold(Document.of(GenerateRequest("r", "m", ((0,),), params), "completion", 0, True, False), TABLE)
    deltas = [delta for entry in entries for delta in fold.push(entry)]
    assert fold.done
    assert [delta.first for delta in deltas].count(True) == 1
    assert [delta.finish for delta in deltas if delta.finish] == [deltas[-1].finish]
    return "".join(delta.text for delta in deltas), deltas[-1].finish


@pytest.mark.parametrize("text", ["plain", "안녕 👩‍👩‍👧‍👦 é", "🇫🇷 flag"])
def test_text_comes_whole(text: str) -> None:
    params = SamplingParams(max_tokens=100)
    assert text_of(published(text.encode(), params), params) == (text, "length")


def test_an_incomplete_tail_is_flushed_once() -> None:
    params = SamplingParams(max_tokens=100)
    data = "ab👩".encode()[:-1]
    assert text_of(published(data, params), params) == (data.decode(errors="replace"), "length")


def test_stop_string_ends_the_text_before_it() -> None:
    params = SamplingParams(max_tokens=100, stop=("DEFG", "zz"))
    entries = published(b"ABCDEFGHI", params)
    assert len(entries) == len("ABCDEFG"), "nothing is published beyond the stop"
    assert text_of(entries, params) == ("ABC", "stop")


def test_stop_at_the_very_end_wins_over_length() -> None:
    params = SamplingParams(max_tokens=5, stop=("DE",))
    assert text_of(published(b"ABCDE", params), params) == ("ABC", "stop")


def test_no_stop_within_min_tokens() -> None:
    params = SamplingParams(max_tokens=100, stop=("b",), min_tokens=3)
    assert text_of(published(b"abcabc", params), params) == ("abca", "stop")


@given(st.binary(min_size=1, max_size=40), st.lists(st.sampled_from(["ab", "b", "é"]), max_size=2), st.integers(0, 5))
def test_worker_and_router_agree(data: bytes, stops: list[str], min_tokens: int) -> None:
    params = SamplingParams(max_tokens=100, stop=tuple(stops), min_tokens=min_tokens)
    entries = published(data, params)
    text, finish = text_of(entries, params)
    whole = data.decode(errors="replace")
    assert whole.startswith(text) or "\ufffd" in whole
    assert (finish == "stop") == (entries[-1].items[0].finish == "stop")
    if finish == "length":
        assert text == whole


def test_what_a_failover_writes_again_counts_once() -> None:
    """The journal lost its end, and the first item with it: what came with the first token comes again."""
    params = SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=True)
    document = Document.of(GenerateRequest("r", "m", ((1, 2),), params), "completion", 0, True, False)
    fold = Fold(document, TABLE)
    score = TokenDetail(-1.0, ())
    first = JournalItem(0, 0, (65,), None, (score,), (score,), (0.5,), 2)
    again = JournalItem(0, 0, (65, 66), "length", (score, score), (score,), (0.5,), 2)
    (delta,) = fold.push(JournalEntry("r", "1-0", "w", 1, (first,), None))
    (rest,) = fold.push(JournalEntry("r", "2-0", "w", 1, (again,), (2, 2)))
    assert (delta.prompt, delta.embedding) == ((score,), (0.5,))
    assert (rest.prompt, rest.embedding, rest.text, rest.details) == ((), (), "B", (score,))
    assert fold.usage == (2, 2, 2)


def test_a_mark_is_no_place_to_stop() -> None:
    """It is text for the parser of calls; the worker, which looks for stop strings, does not see it."""
    table = TokenBytes(
        '{"decoder":{"type":"ByteLevel"},"model":{"vocab":{"a":0,"b":1,"{":2}},'
        '"added_tokens":[{"id":3,"content":"<tool_call>","special":true}]}'
    )
    params = SamplingParams(max_tokens=4, stop=("call>", "zz"))
    request = GenerateRequest("r", "m", ((0,),), params)
    fold = Fold(Document.of(request, "chat", 0, True, False, View(calls="hermes")), table)
    items = [JournalItem(0, index, (token,), None, ()) for index, token in enumerate((0, 3, 1))]
    items.append(JournalItem(0, 3, (2,), "length", ()))
    deltas = [
        delta for i, item in enumerate(items) for delta in fold.push(JournalEntry("r", f"{i}-0", "w", i, (item,), None))
    ]
    assert "".join(delta.text for delta in deltas) == "a<tool_call>b{", "no call came of it"
