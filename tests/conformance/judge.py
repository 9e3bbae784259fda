"""Whether a text conforms to a schema: by two validators that share no code, neither of them with the server."""

import json
import random
import sys
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from services.common.models.resolve import resolve_model
from tests.conformance.builders import Schema

CLOSING = b'"]},'
LARGEST = sys.float_info.max


def faults(text: str, schema: Schema) -> list[str]:
    """What is wrong with a whole text: it is no JSON, or not valid. Formats are checked. 1e999 is a number, but none
    of Python."""
    try:
        value = json.loads(text, parse_float=lambda digits: max(-LARGEST, min(LARGEST, float(digits))))
    except json.JSONDecodeError as error:
        return [f"no JSON: {error}"]
    first = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    second = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    return [error.message for error in (*first.iter_errors(value), *second.iter_errors(value))]


class Judge:
    """What needs the model's tokens: whether a text that was cut is a beginning, and texts drawn without a model."""

    def __init__(self, model: str = "builtin:smollm2-135m") -> None:
        files = resolve_model(model)
        self._eos = files.eos_token_ids[0]
        self._vocab = files.vocab_size
        self._tokens = LLTokenizer(files.tokenizer_json, n_vocab=files.vocab_size, eos_token=list(files.eos_token_ids))
        self._closing = [self._tokens.tokenize_str(chr(byte))[0] for byte in CLOSING]

    def _matcher(self, schema: Schema, **options: Any) -> LLMatcher:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options or None)
        return LLMatcher(self._tokens, grammar, log_level=0)

    def refusal(self, schema: Schema) -> str:
        """Why llguidance does not take it; "" if it does."""
        return str(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)), self._tokens))

    def begins(self, text: str, schema: Schema) -> bool:
        """Whether something valid begins with this text. A character cut in two is left aside."""
        matcher = self._matcher(schema)
        tokens = self._tokens.tokenize_str(text.rstrip("\ufffd"))
        return bool(matcher.try_consume_tokens(tokens) == len(tokens))

    def draw(self, schema: Schema, seed: str, most: int = 600) -> str | None:
        """A text of the schema by chance: short words, and it ends where it may. None if it has no end in time."""
        rng = random.Random(seed)
        matcher = self._matcher(schema, whitespace_pattern=" ?")
        mask = allocate_token_bitmask(1, self._vocab)
        out: list[int] = []
        while len(out) < most:
            fill_next_token_bitmask(matcher, mask)
            assert not matcher.is_error(), matcher.get_error()
            token = self._pick(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")), rng)
            matcher.consume_token(token)
            out += [token] if token != self._eos else []
            if matcher.is_stopped():
                return bytes(self._tokens.decode_bytes(out)).decode()
        return None

    def _pick(self, allowed: np.ndarray, rng: random.Random) -> int:
        if self._eos in allowed and rng.random() < 0.5:
            return self._eos
        closing = np.intersect1d(allowed, self._closing)
        if len(closing) and rng.random() < 0.3:
            return int(rng.choice(closing))
        short = allowed[allowed < 256]  # the first tokens are single bytes
        return int(rng.choice(short if len(short) and rng.random() < 0.6 else allowed))
