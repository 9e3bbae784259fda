"""Chat: template and messages to token ids. Message content never turns into control tokens."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import ContextLengthError, InvalidRequest
from services.common.models.resolve import ModelFiles
from services.common.text.tokenizer import TextEncoder
from services.router.core.calls import ThoughtSplitter, format_of
from services.router.core.tools import as_text

# What a template is given anyway, and nobody else may give.
RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as templates have them, tools as JSON schemas, and what else a template may look at. most_tokens: it is
    refused if it surely has more; 0 is any."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    most_tokens: int = 0


class Encoded(NamedTuple):
    """Token ids, and where the answer has thoughts: as in View."""

    ids: list[int]
    reasoning: str


class ChatEncoder:
    """Renders a model's chat template (sandboxed) and encodes the result. Thread-safe.

    A special token spelt out in a message is broken up before rendering, with a character that no message of the
    request contains, and mended after the rendered text has been split at the template's own special tokens.
    """

    def __init__(self, files: ModelFiles, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self._special_tokens = files.special_tokens
        specials = sorted(encoder.special_ids, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        self._template = environment.from_string(files.chat_template) if files.chat_template else None

        source = files.chat_template or ""
        self._native = format_of(source)
        self.call_format = self._native or "hermes"  # what is told to a model without tools of its own
        self._thinks = ThoughtSplitter.CLOSING in source
        given = {*RESERVED, *files.special_tokens, *environment.globals}
        self._variables = frozenset(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", source)) - given

    def special_id(self, name: str) -> int | None:
        """Of a control token."""
        return self._encoder.special_ids.get(name)

    def check_variables(self, names: Collection[str], param: str) -> None:
        """Raises InvalidRequest on what the template does not look at."""
        unknown = sorted(set(names) - self._variables)
        if unknown:
            raise InvalidRequest(f"{param}: this model's chat template has no {unknown[0][:64]!r}", param)

    def encode(self, chat: Conversation) -> Encoded:
        """A conversation, ready for the assistant's turn. Raises InvalidRequest with what is wrong."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        messages, tools = chat.messages, chat.tools
        if not self._native and (tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)):
            messages, tools = as_text(messages, tools), []
        mark = _unused_character([messages, tools, chat.variables])
        given: dict[str, Any] = {"tools": self._broken(tools, mark)} if tools else {}
        try:
            text = self._template.render(
                messages=self._broken(messages, mark),
                add_generation_prompt=True,
                **given,
                **self._special_tokens,
                **self._broken(chat.variables, mark),
            )
        except (
            TemplateError,
            SecurityError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            RecursionError,
        ) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", "messages") from None
        if chat.most_tokens and self._encoder.surely_longer(text, chat.most_tokens):
            raise ContextLengthError(f"the messages have far more than {chat.most_tokens} tokens", "messages")
        ids: list[int] = []
        position = 0
        for match in self._specials.finditer(text):
            ids += self._plain(text[position : match.start()], mark)
            ids.append(self._encoder.special_ids[match.group()])
            position = match.end()
        return Encoded(ids + self._plain(text[position:], mark), self._reasoning(text))

    def _reasoning(self, text: str) -> str:
        """Where the answer to this prompt has the model's thoughts; see View."""
        if not self._thinks:
            return ""
        return "inside" if text.rstrip().endswith(ThoughtSplitter.OPENING) else "marked"

    def _broken(self, value: Any, mark: str) -> Any:
        """With every special token that is spelt out in it broken up."""
        if isinstance(value, str):
            return self._specials.sub(lambda match: match.group()[0] + mark + match.group()[1:], value)
        if isinstance(value, list):
            return [self._broken(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._broken(key, mark): self._broken(item, mark) for key, item in value.items()}
        return value

    def _plain(self, text: str, mark: str) -> list[int]:
        return self._encoder.encode_plain(text.replace(mark, "")) if text else []


def _unused_character(value: Any) -> str:
    used: set[str] = set()
    _collect(value, used)
    private_use = (chr(code) for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)))
    free = next((character for character in private_use if character not in used), "")
    if not free:
        raise InvalidRequest("the messages use every private-use character", "messages")
    return free


def text_bytes(value: Any) -> int:
    """The bytes of all strings in a value, names of fields apart."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(text_bytes, value)) if isinstance(value, list) else 0


def _collect(value: Any, used: set[str]) -> None:
    """Add the characters of all strings in a value."""
    if isinstance(value, str):
        used.update(value)
    elif isinstance(value, list):
        for item in value:
            _collect(item, used)
    elif isinstance(value, dict):
        for key, item in value.items():
            used.update(key)
            _collect(item, used)
