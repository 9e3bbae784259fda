"""What a text must match: JSON schemas, regular expressions and grammars, as llguidance has them.

The router makes a grammar and refuses what cannot work; the worker follows it token by token.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask

from services.common.text.detokenizer import TokenBytes
from services.common.text.tokenizer import TextEncoder

# Between the parts of JSON a space, or a new line and some: any amount would let a model write nothing else.
WHITESPACE = r"( |\n {0,16})?"
MAX_GRAMMAR_BYTES = 1 << 17
# What a small grammar may cost, to be made and at each token.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=200_000,
    max_grammar_size=500_000,
    max_items_in_row=1_000,
    step_max_items=5_000,
)
MAX_COMPILED = 128
# What all masks of a text may take: so much, and so much more for each.
MASK_BUDGET_S, MASK_S = 0.5, 0.005
EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
PROBED_TOKENS = 32
GUIDANCE = "x-guidance"  # where a schema says how strictly it is meant


# Formats that llguidance knows less exactly: the 29th of February in any year, a second 60, a mailbox of any length.
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9_+-]"
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": f"^{_ATOM}{{1,32}}(?:\\.{_ATOM}{{1,15}})?@{_LABEL}(?:\\.{_LABEL}){{1,3}}$",
}
# Keywords whose value is data, and no schema.
DATA = ("const", "enum", "default", "examples")


def exact(schema: Any) -> Any:
    """A schema with the formats that we know better as patterns."""
    if isinstance(schema, list):
        return [exact(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: value if key in DATA else exact(value) for key, value in schema.items()}
    form = out.get("format")
    if isinstance(form, str) and form in FORMATS and "pattern" not in out:
        del out["format"]
        out["pattern"] = FORMATS[form]
    return out


def of_schema(schema: Any) -> str:
    """Text that is JSON and valid under a JSON schema. Raises ValueError if it uses what is not implemented."""
    if isinstance(schema, dict) and GUIDANCE in schema:
        raise ValueError(f"{GUIDANCE} is not for clients")
    text = json.dumps(exact(schema))
    return str(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE}))


def of_regex(pattern: str) -> str:
    """Text that matches a regular expression as a whole."""
    return str(LLMatcher.grammar_from_regex(pattern))


def of_choices(choices: Sequence[str]) -> str:
    """Text that is one of these."""
    return "start: " + " | ".join(map(json.dumps, choices))


def of_grammar(text: str) -> str:
    """Text of a context-free language: in Lark's notation, or in EBNF as llama.cpp writes it (`root ::= ...`). Raises
    ValueError."""
    if not EBNF_RULE.search(text):
        return text
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # noqa: BLE001 - its parser raises whatever it stumbles over
        raise ValueError(str(error)) from None


BUILDERS: dict[str, Callable[[Any], str]] = {
    "schema": of_schema,
    "regex": of_regex,
    "choice": of_choices,
    "grammar": of_grammar,
    "lark": str,
}


def _reason(error: object) -> str:
    """What is wrong, of a message that may have pictures of the place."""
    lines = [line.strip() for line in str(error).split("<state>")[0].splitlines() if line.strip()]
    if not lines or lines[0] == "NoExtensionBias":
        return "it allows no text"
    wrong = next((line for line in lines if line.startswith("error: ")), "")
    return (wrong.replace("error: ", "regex parse error: ", 1) or lines[0])[:300]


class _Tokens:
    """A tokenizer as llguidance asks for one. Text that spells a control token is text: what is forced must be made of
    tokens that are seen."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        table, encoder = TokenBytes(tokenizer_json), TextEncoder(tokenizer_json)
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else 0
        self.bos_token_id = None
        self.special_token_ids = sorted(encoder.special_ids.values())
        names = {token: name.encode() for name, token in encoder.special_ids.items()}
        self.tokens = [names.get(token) or table.of(token) for token in range(vocab_size)]
        self._encode = encoder.encode_plain

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class Grammars:
    """Grammars over one model's tokens. Thread-safe."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._arguments = tokenizer_json, vocab_size, list(eos_token_ids)
        self._threads = ThreadPoolExecutor(1, "grammar")
        self._compiled: dict[str, Future[LLMatcher]] = {}  # the last used last

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Made when first needed: most systems never do."""
        tokens = _Tokens(*self._arguments)
        return LLTokenizer(TokenizerWrapper(tokens), eos_token=self._arguments[2] or None)

    def build(self, kind: str, value: Any) -> str:
        """A grammar that can be followed, of one of BUILDERS' kinds. Whoever asked may have meant harm: it can take any
        time, and overflow the stack. Raises ValueError with what is wrong."""
        try:
            grammar = BUILDERS[kind](value)
        except ValueError as error:
            raise ValueError(_reason(error)) from None
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"larger than {MAX_GRAMMAR_BYTES} bytes")
        wrong = LLMatcher.validate_grammar(grammar, self.tokenizer, limits=LIMITS) or self._probe(grammar)
        if wrong:
            raise ValueError(_reason(wrong))
        return grammar

    def _probe(self, grammar: str) -> str:
        """What goes wrong within the first tokens of a text: some that can be read are too much to be followed."""
        matcher = self._compile(grammar)
        mask = np.zeros(-(-self.tokenizer.vocab_size // 32), dtype=np.int32)
        for _ in range(PROBED_TOKENS):
            if matcher.is_error() or matcher.is_stopped():
                break
            fill_next_token_bitmask(matcher, mask.reshape(1, -1))
            allowed = np.flatnonzero(mask)
            if not matcher.is_error() and len(allowed):
                word = int(mask[allowed[-1]]) & 0xFFFFFFFF
                matcher.consume_token(32 * int(allowed[-1]) + word.bit_length() - 1)
        return str(matcher.get_error()) if matcher.is_error() else ""

    def constrain(self, grammar: str, output: Sequence[int]) -> "Matcher":
        """What may follow an output. Compiled once for all sequences that have it, beside the steps, which do not wait
        before they need it."""
        compiled = self._compiled.pop(grammar, None) or self._threads.submit(self._compile, grammar)
        self._compiled[grammar] = compiled
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.pop(next(iter(self._compiled)))
        return Matcher(compiled, list(output))

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=LIMITS)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Matcher:
    """One sequence's way through its grammar. It fails when a token breaks it, when it becomes too complex, or when its
    masks take far more time than they should: others wait for them."""

    def __init__(self, compiled: "Future[LLMatcher]", output: list[int]) -> None:
        self._compiled = compiled
        self._output = output
        self._spent_s = 0.0
        self._allowed_s = MASK_BUDGET_S

    @cached_property
    def _matcher(self) -> LLMatcher:
        matcher = self._compiled.result().deep_copy()
        matcher.consume_tokens(self._output)
        return matcher

    def fill(self, mask: np.ndarray) -> bool:
        """Set the bits of the tokens that may come next; mask: int32 [words of 32 tokens]. False if it has failed."""
        matcher = self._matcher
        if matcher.is_error() or self._spent_s > self._allowed_s:
            return False
        began = time.thread_time()
        fill_next_token_bitmask(matcher, mask.reshape(1, -1))
        self._spent_s += time.thread_time() - began
        self._allowed_s += MASK_S
        return not matcher.is_error()

    def accept(self, token: int) -> bool:
        """Go on by one token. True if nothing can follow: the text is complete."""
        matcher = self._matcher
        return bool(matcher.consume_token(token) and matcher.is_stopped())
