"""Tool calls and thoughts in text: each format, and the same however the text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from services.router.core.calls import FORMATS, CallParser, ThoughtSplitter, call_ids, format_of
from services.router.core.tools import as_text, call_grammar

WEATHER = '{"city": "Pa\\"ris}", "days": [1, {"a": "{"}]}'
TEXTS = {
    "hermes": [
        ("", []),
        ("no call at all", []),
        ("a < b and <tool", []),
        (f'Let me see.\n<tool_call>\n{{"name": "w", "arguments": {WEATHER}}}\n</tool_call>', [("w", WEATHER)]),
        (
            '<tool_call>{"name":"a","arguments":{}}</tool_call>\n'
            f'<tool_call>{{"name": "b", "arguments": {WEATHER}}}</tool_call>',
            [("a", "{}"), ("b", WEATHER)],
        ),
        ('<tool_call>[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]</tool_call>', None),
        ('<tool_call>\n{"arguments": {"x": 1}, "name": "late"}\n</tool_call>', [("late", '{"x": 1}')]),
        ('<tool_call>{"name": "s", "arguments": "{\\"x\\": 1}"}</tool_call>', [("s", '{"x": 1}')]),
    ],
    "mistral": [
        ("plain", []),
        (f'[TOOL_CALLS] [{{"name": "w", "arguments": {WEATHER}}}, {{"name": "v", "arguments": {{}}}}]', None),
    ],
    "llama3": [
        ("plain {", []),
        (f'{{"name": "w", "parameters": {WEATHER}}}', [("w", WEATHER)]),
        ('{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}', [("a", "{}"), ("b", '{"x": 1}')]),
        ('{"name": "c", "arguments": {"x": 2}}', [("c", '{"x": 2}')]),
    ],
}
CASES = [(name, text, calls) for name, cases in TEXTS.items() for text, calls in cases]


def parse(name: str, pieces: list[str], functions: tuple[str, ...] = ()) -> tuple[str, list[tuple[str, str]]]:
    parser = CallParser(name, call_ids("request", 0, False), functions)
    content, calls = "", []
    news = [parser.push(piece) for piece in pieces] + [parser.flush()]
    for text, deltas in news:
        content += text
        for delta in deltas:
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            assert delta.call_id == call_ids("request", 0, False)(delta.index)
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return content, calls


@pytest.mark.parametrize(("name", "text", "calls"), CASES)
def test_formats(name: str, text: str, calls: Any) -> None:
    content, found = parse(name, [text])
    if calls is not None:
        assert found == calls
    else:
        assert len(found) == 2
    assert content == ("Let me see." if "Let me" in text else "" if found else text)


@given(st.sampled_from(CASES), st.data())
def test_the_cutting_changes_nothing(case: tuple[str, str, Any], data: st.DataObject) -> None:
    name, text, _ = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(name, pieces) == parse(name, [text])


@given(st.sampled_from(sorted(FORMATS)), st.text(alphabet='<>/tool_call{}[]",:name arguments\\TOL_CAS\n', max_size=80))
def test_without_a_call_nothing_is_lost(name: str, text: str) -> None:
    content, calls = parse(name, [text])
    alone = parse(name, list(text))
    assert (content, calls) == alone
    if not calls:
        assert content == text


def test_bad_json_is_content() -> None:
    content, calls = parse("hermes", ["<tool_call>{not json}</tool_call>"])
    assert calls == []
    assert "{not json}" in content
    assert parse("llama3", ['{"an": "ordinary answer"}']) == ('{"an": "ordinary answer"}', [])


def test_only_what_is_offered_can_be_called() -> None:
    answer = '{"name": "Bob", "age": 3, "parameters": {}}'
    assert parse("llama3", [answer], ("weather",)) == (answer, [])
    assert parse("llama3", list(answer), ("weather",)) == (answer, [])
    offered = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse("hermes", [offered], ("f",)) == ("", [("f", "{}")])
    assert parse("hermes", [offered], ("g",))[1] == []


def test_a_name_without_end_costs_no_more_than_its_length() -> None:
    """Looked at again with each piece, it would cost its square."""
    parser = CallParser("hermes", call_ids("request", 0, False))
    parser.push('<tool_call>{"name": "')
    for _ in range(20_000):
        parser.push("a")
    assert parser.num_calls == 0
    assert len(parser.flush()[0]) == 20_000 + len('<tool_call>{"name": "')


def test_arguments_come_as_they_are_made() -> None:
    parser = CallParser("hermes", call_ids("r", 0, False))
    parser.push('<tool_call>\n{"name": "f", "arguments": {"te')
    _, calls = parser.push("xt")
    assert [call.arguments for call in calls] == ["xt"]


@pytest.mark.parametrize("cut", range(1, 40))
def test_thoughts(cut: int) -> None:
    text = "<think>a thought</think>\n\nan answer"
    splitter = ThoughtSplitter(inside=False)
    parts = [splitter.push(text[:cut]), splitter.push(text[cut:]), splitter.flush()]
    assert "".join(part[0] for part in parts) == "a thought"
    assert "".join(part[1] for part in parts) == "an answer"
    inside = ThoughtSplitter(inside=True)
    parts = [inside.push("thinking</thi"), inside.push("nk>done"), inside.flush()]
    assert ("".join(p[0] for p in parts), "".join(p[1] for p in parts)) == ("thinking", "done")
    never = ThoughtSplitter(inside=False)
    assert [never.push("<thin"), never.flush()] == [("", ""), ("", "<thin")]


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("several", [False, True])
def test_a_required_call_is_what_the_parser_reads(name: str, several: bool) -> None:
    """The grammar allows what the format says, and the parser takes it apart again."""
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    grammar = call_grammar(name, [("f", schema), ("g", {})], several, lambda _: None)
    assert LLMatcher.validate_grammar(grammar) == ""
    field = FORMATS[name].arguments
    call = json.dumps({"name": "f", field: {"x": 5}})
    text = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "mistral": f"[TOOL_CALLS][{call}]",
        "llama3": call,
    }[name]
    assert parse(name, [text]) == ("", [("f", '{"x": 5}')])


def test_formats_are_known_by_their_templates() -> None:
    assert format_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert format_of("{% if tools %}[TOOL_CALLS]{% endif %}") == "mistral"
    assert format_of("{% if tools %}<|python_tag|>{% endif %}") == "llama3"
    assert format_of("{{ messages }}") == ""


def test_a_template_without_tools_is_told_in_words() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    system, user, assistant, result = as_text(messages, tools)
    assert system["role"] == "system"
    assert '"name": "f"' in system["content"]
    assert user == messages[0]
    assert parse("hermes", [assistant["content"]]) == ("", [("f", '{"x": 1}')])
    assert result == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
    merged = as_text([{"role": "system", "content": "Be brief."}], tools)
    assert merged[0]["content"].startswith("Be brief.\n\n")
