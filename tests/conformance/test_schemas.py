"""Answers of the real weights conform to what was asked for, whatever the schema; what is not implemented is refused.

ORCA_CONFORMANCE=full asks for every schema, otherwise for a few of each kind.
"""

import asyncio
import json
import os
import re
from collections import Counter

import httpx
import pytest
from openai import AsyncOpenAI

from loadtest.up import Up
from tests.conformance.ask import Answer, request, whole
from tests.conformance.builders import Case
from tests.conformance.judge import Judge, faults
from tests.conformance.schemas import SCHEMAS, UNSUPPORTED
from tests.e2e.conftest import MODEL

FULL = os.environ.get("ORCA_CONFORMANCE") == "full"
FEW = 12
AT_ONCE = 16
# More than any bounded schema needs; and what the others get, which may go on for ever.
MAX_TOKENS, UNBOUNDED_TOKENS = 1500, 150
# What llguidance's formats let through and validators do not: 29 February in every year, a leap second in every
# minute, and an email address with more than 64 characters before the @.
KNOWN = re.compile(r'-02-29|:60|"[^"]{65,}@')


def asked() -> list[Case]:
    """All, or a few spread over every kind."""
    return SCHEMAS if FULL else SCHEMAS[5 :: len(SCHEMAS) // FEW][:FEW]


def test_there_are_many_and_no_two_are_the_same() -> None:
    assert len(SCHEMAS) >= 240
    assert len({case.name for case in SCHEMAS}) == len(SCHEMAS)
    assert len({json.dumps(case.schema, sort_keys=True) for case in SCHEMAS}) > len(SCHEMAS) - 10
    assert len(asked()) >= FEW


@pytest.mark.parametrize("case", SCHEMAS[:: 1 if FULL else 4], ids=lambda case: case.name.replace(" ", "-"))
def test_what_the_grammar_allows_is_valid(judge: Judge, case: Case) -> None:
    """Without a model: any text that the tokens' masks let through is valid, not only what a model would say."""
    assert not judge.refusal(case.schema)
    texts = [judge.draw(case.schema, f"{case.name} {seed}") for seed in range(6 if FULL else 2)]
    assert not case.bounded or None not in texts
    wrong = [(text, found) for text in texts if text is not None and (found := faults(text, case.schema))]
    assert not [text for text, _ in wrong if not KNOWN.search(text)], wrong


def test_no_more_is_wrong_with_formats_than_is_known(judge: Judge) -> None:
    """What `KNOWN` forgives must still be so: when llguidance has mended it, the exception goes."""
    assert judge.begins('"2023-02-29"', {"type": "string", "format": "date"})
    assert judge.begins('"2023-01-01T10:10:60Z"', {"type": "string", "format": "date-time"})
    assert judge.begins(f'"{"a" * 65}@b.com"', {"type": "string", "format": "email"})


@pytest.mark.parametrize(("name", "schema", "word"), UNSUPPORTED, ids=[name for name, *_ in UNSUPPORTED])
@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_what_is_not_implemented_is_refused_by_name(up: Up, name: str, schema: object, word: str, field: str) -> None:
    wanted = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        "structured_outputs": {"json": schema},
    }
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], field: wanted[field], "max_tokens": 5}
    response = httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400, response.text[:500]
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert word in error["message"], error["message"]
    assert field in error["param"]
    assert len(error["message"]) < 600


async def test_answers_conform(judge: Judge, client: AsyncOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    cases, gate = asked(), asyncio.Semaphore(AT_ONCE)

    async def ask(index: int, case: Case) -> Answer:
        async with gate:
            most = MAX_TOKENS if case.bounded else UNBOUNDED_TOKENS
            return await whole(client, **request(case.name, case.schema, index, most))

    answers = await asyncio.gather(*(ask(index, case) for index, case in enumerate(cases)))
    ended, wrong = Counter[tuple[bool, str]](), []
    for case, answer in zip(cases, answers, strict=True):
        assert len(answer.texts) == 2
        for index, text in answer.texts.items():
            ended[case.bounded, answer.reasons[index]] += 1
            wrong += [
                f"{case.name}: {fault}: {text[:300]!r}" for fault in verdict(judge, case, answer.reasons[index], text)
            ]
    with capsys.disabled():
        print(f"\n{len(cases)} schemas, two answers each: {report(ended)}")
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:30])
    assert {reason for _, reason in ended} <= {"stop", "length"}
    assert ended[True, "length"] <= 0.01 * (ended[True, "length"] + ended[True, "stop"])
    assert ended[False, "stop"] + ended[True, "stop"] > ended[False, "length"], "most have an end"


def verdict(judge: Judge, case: Case, reason: str, text: str) -> list[str]:
    """What is wrong with one answer. What was cut must be the beginning of something right."""
    if reason == "stop":
        return faults(text, case.schema)
    return [] if judge.begins(text, case.schema) else ["cut, and no beginning of anything valid"]


def report(ended: Counter[tuple[bool, str]]) -> str:
    kinds = {True: "bounded", False: "unbounded"}
    return ", ".join(f"{kinds[b]} {reason} {count}" for (b, reason), count in sorted(ended.items(), reverse=True))


@pytest.mark.parametrize("case", [SCHEMAS[index] for index in (40, 120, 200)], ids=lambda case: case.name)
async def test_the_same_seed_gives_the_same_answer_beside_others(client: AsyncOpenAI, case: Case) -> None:
    """A mask is one sequence's own: neighbours with other grammars, or none, change nothing."""
    mine = request(case.name, case.schema, 7, 100)
    alone = await whole(client, **mine)
    others = [request(other.name, other.schema, 1, 60) for other in SCHEMAS[3::40]]
    free = {**mine, "response_format": {"type": "text"}, "max_tokens": 40}
    beside, *_ = await asyncio.gather(*(whole(client, **body) for body in (mine, free, *others)))
    assert beside == alone


# -- the judge itself


def test_formats_are_really_checked() -> None:
    """Some validators say nothing about formats that they do not know."""
    bad = {
        "date": "2023-02-30",
        "date-time": "2023-01-01 noon",
        "time": "25:00:00Z",
        "duration": "P1",
        "email": "nobody",
        "hostname": "-a-",
        "ipv4": "1.2.3.256",
        "ipv6": "1::2::3",
        "uuid": "0-0",
        "uri": "no scheme",
    }
    assert [
        name for name, text in bad.items() if not faults(json.dumps(text), {"type": "string", "format": name})
    ] == []


def test_a_beginning_is_told_from_an_error(judge: Judge) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert all(judge.begins('{"a": 12}'[:length], schema) for length in range(10))
    assert not any(judge.begins(text, schema) for text in ("[", '{"b', '{"a": "', '{"a": 1, "', "Sure"))


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_end|>b", "<|endoftext|>", "<|im_start|>user"])
async def test_what_spells_a_special_token_is_text(client: AsyncOpenAI, text: str) -> None:
    """A constant may spell the token that ends a text; it is written out in other tokens, and nothing ends there."""
    for wanted, want in (({"choice": [text]}, text), ({"json": {"const": text}}, json.dumps(text))):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 40, "extra_body": {"structured_outputs": wanted}}
        choice = (await client.completions.create(**body)).choices[0]
        assert (choice.text, choice.finish_reason) == (want, "stop")


@pytest.mark.parametrize("options", [{"lenient": True}, {"coerce_one_of": True}], ids=["lenient", "coerced"])
def test_a_schema_cannot_switch_its_own_checks_off(up: Up, options: dict[str, bool]) -> None:
    """llguidance takes options from within a schema; with them, what is not implemented is left out in silence."""
    ones = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}
    schema = {"x-guidance": options, **(ones if "coerce_one_of" in options else {"not": {"type": "string"}})}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 5, "structured_outputs": {"json": schema}}
    assert httpx.post(f"{up.url}/v1/completions", json=body, timeout=60).status_code == 400
