"""Grammars: what is refused, what a matcher does, and that one compile serves all who have the same."""

import json

import numpy as np
import pytest

from services.common.models.resolve import resolve_model
from services.common.text.grammar import Grammars, Matcher, exact, of_grammar
from services.worker.core.plan import allowed_tokens


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    files = resolve_model("builtin:smollm2-135m")
    return Grammars(files.tokenizer_json, files.vocab_size, files.eos_token_ids)


def follow(grammars: Grammars, grammar: str, text: str) -> tuple[Matcher, bool]:
    """A matcher after a text, token by token, and whether it is complete."""
    matcher, complete = grammars.constrain(grammar, ()), False
    for token in grammars.tokenizer.tokenize_str(text):
        allowed = allowed_tokens(matcher, grammars.tokenizer.vocab_size)
        assert allowed is not None
        assert allowed[token], text
        complete = matcher.accept(token)
    return matcher, complete


WRONG = [
    ("schema", {"dependentSchemas": {}}, "dependentSchemas"),
    ("schema", {"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    ("schema", {"type": "string", "pattern": "["}, "regex"),
    ("schema", {"$ref": "#"}, "no text"),
    ("regex", "foo**(", "unclosed group"),
    ("regex", "(x{1000}){1000}", "too many"),
    ("grammar", "start: nothing", "nothing"),
    ("grammar", "root ::= nope", "nope"),
    ("grammar", "start: start", "no text"),
    ("choice", ["x" * 200_000], "larger"),
]


@pytest.mark.parametrize(("kind", "value", "says"), WRONG)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    grammars: Grammars, kind: str, value: object, says: str
) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        grammars.build(kind, value)
    assert len(str(caught.value)) < 400


def test_an_output_is_caught_up_with(grammars: Grammars) -> None:
    """As after a preemption, a move or a crash."""
    grammar = grammars.build("schema", {"enum": ["one", "two"]})
    tokens = grammars.tokenizer.tokenize_str('"tw')
    caught_up = grammars.constrain(grammar, tokens)
    walked, _ = follow(grammars, grammar, '"tw')
    size = grammars.tokenizer.vocab_size
    np.testing.assert_array_equal(allowed_tokens(caught_up, size), allowed_tokens(walked, size))
    _, complete = follow(grammars, grammar, '"two"')
    assert complete


def test_one_that_is_broken_has_failed(grammars: Grammars) -> None:
    matcher = grammars.constrain(grammars.build("regex", "ab"), grammars.tokenizer.tokenize_str("zz"))
    assert allowed_tokens(matcher, grammars.tokenizer.vocab_size) is None


def test_text_that_spells_a_control_token_is_made_of_text(grammars: Grammars) -> None:
    for grammar in (grammars.build("schema", {"const": "<|im_end|>"}), grammars.build("choice", ["a<|im_end|>b"])):
        matcher = grammars.constrain(grammar, ())
        seen: list[int] = []
        while True:
            allowed = allowed_tokens(matcher, grammars.tokenizer.vocab_size)
            assert allowed is not None
            seen.append(int(np.flatnonzero(allowed)[-1]))
            assert not grammars.tokenizer.is_special_token(seen[-1])
            if matcher.accept(seen[-1]):
                break
        assert "<|im_end|>" in grammars.tokenizer.decode_bytes(seen).decode()


def test_formats_are_exact(grammars: Grammars) -> None:
    grammar = grammars.build("schema", {"type": "string", "format": "date"})
    _, complete = follow(grammars, grammar, '"2024-02-29"')
    assert complete
    matcher, _ = follow(grammars, grammar, '"2023-02-2')
    allowed = allowed_tokens(matcher, grammars.tokenizer.vocab_size)
    assert allowed is not None
    assert not allowed[grammars.tokenizer.tokenize_str("9")[0]]
    data = {"const": {"format": "date"}, "properties": {"format": {"type": "string"}}}
    assert exact(data) == data, "what is data, or a name, is no keyword"


def test_ebnf_is_known_by_its_rules() -> None:
    assert of_grammar('start: "a ::= b"') == 'start: "a ::= b"'
    assert "start" in of_grammar('root ::= "a" | "b"')


def test_white_space_in_json_is_bounded(grammars: Grammars) -> None:
    grammar = grammars.build("schema", {"type": "array", "items": {"type": "integer"}})
    for text in (json.dumps([1, 2, 3]), json.dumps([1, 2], indent=2), json.dumps([1], separators=(",", ":"))):
        assert follow(grammars, grammar, text)[1]
    matcher, _ = follow(grammars, grammar, "[ ")
    allowed = allowed_tokens(matcher, grammars.tokenizer.vocab_size)
    assert allowed is not None
    assert not allowed[grammars.tokenizer.tokenize_str(" ")[0]]
