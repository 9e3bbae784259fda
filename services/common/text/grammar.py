"""What a text must match: JSON schemas, regular expressions and grammars, as llguidance has them.

The router makes a grammar and refuses what cannot work; the worker follows it token by token.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask

from services.common.errors import InvalidRequest

# Between the parts of JSON a space, or a new line and some: any amount would let a model write nothing else.
WHITESPACE = r"( |\n {0,16})?"
MAX_GRAMMAR_BYTES = 1 << 17
# What a small grammar may cost, to be made and at each token.
LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=500_000, max_grammar_size=500_000)


def of_schema(schema: Any, param: str) -> str:
    """Text that is JSON and valid under a JSON schema. Raises InvalidRequest if it uses what is not implemented."""
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}))
    except ValueError as error:
        raise InvalidRequest(f"{param}: {_first_line(error)}", param) from None


def of_regex(pattern: str) -> str:
    """Text that matches a regular expression as a whole."""
    return str(LLMatcher.grammar_from_regex(pattern))


def of_choices(choices: Sequence[str]) -> str:
    """Text that is one of these."""
    return "start: " + " | ".join(map(json.dumps, choices))


def of_grammar(text: str, param: str) -> str:
    """Text of a context-free language: in Lark's notation, or in EBNF as llama.cpp writes it (`root ::= ...`). Raises
    InvalidRequest."""
    if "::=" not in text:
        return text
    try:
        return str(gbnf_to_lark(text))
    except GbnfToLarkError as error:
        raise InvalidRequest(f"{param}: {_first_line(error)}", param) from None


def _first_line(error: object) -> str:
    return (str(error).strip() or "not valid").splitlines()[0][:300]


class Grammars:
    """Grammars over one model's tokens. Thread-safe."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._arguments = tokenizer_json, vocab_size, list(eos_token_ids)
        self._threads = ThreadPoolExecutor(1, "grammar")

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made when first needed: most systems never do."""
        tokenizer_json, vocab_size, eos = self._arguments
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos or None)

    def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest with what is wrong."""
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{param}: larger than {MAX_GRAMMAR_BYTES} bytes", param)
        wrong = LLMatcher.validate_grammar(grammar, self._tokenizer, limits=LIMITS)
        if wrong:
            raise InvalidRequest(f"{param}: {_first_line(wrong)}", param)

    def constrain(self, grammar: str, output: Sequence[int]) -> "Matcher":
        """What may follow an output. Compiled beside the steps, which do not wait before they need it."""
        return Matcher(self._threads.submit(self._compile, grammar, list(output)))

    def _compile(self, grammar: str, output: list[int]) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher.consume_tokens(output)
        return matcher

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Matcher:
    """One sequence's way through its grammar."""

    def __init__(self, compiled: "Future[LLMatcher]") -> None:
        self._compiled = compiled

    def fill(self, mask: np.ndarray) -> bool:
        """Set the bits of the tokens that may come next; mask: int32 [words of 32 tokens]. False if it has failed: a
        token broke it, or it became too complex."""
        matcher = self._compiled.result()
        if matcher.is_error():
            return False
        fill_next_token_bitmask(matcher, mask.reshape(1, -1))
        return not matcher.is_error()

    def accept(self, token: int) -> bool:
        """Go on by one token. True if nothing can follow: the text is complete."""
        matcher = self._compiled.result()
        return bool(matcher.consume_token(token) and matcher.is_stopped())
