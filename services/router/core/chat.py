"""Chat: template and messages to token ids. Message content never turns into control tokens."""

import json
import re
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import InvalidRequest
from services.common.models.resolve import ModelFiles
from services.common.text.tokenizer import TextEncoder


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


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

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. Raises InvalidRequest with what is wrong."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        mark = self._unused_character(messages)
        broken = [{**message, "content": self._break(message["content"], mark)} for message in messages]
        try:
            text = self._template.render(messages=broken, add_generation_prompt=True, **self._special_tokens)
        except (TemplateError, SecurityError) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", "messages") from None
        ids: list[int] = []
        position = 0
        for match in self._specials.finditer(text):
            ids += self._plain(text[position : match.start()], mark)
            ids.append(self._encoder.special_ids[match.group()])
            position = match.end()
        return ids + self._plain(text[position:], mark)

    @staticmethod
    def _unused_character(messages: list[dict[str, Any]]) -> str:
        used = set().union(*(message["content"] for message in messages))
        private_use = (chr(code) for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)))
        free = next((character for character in private_use if character not in used), "")
        if not free:
            raise InvalidRequest("the messages use every private-use character", "messages")
        return free

    def _break(self, content: str, mark: str) -> str:
        return self._specials.sub(lambda match: match.group()[0] + mark + match.group()[1:], content)

    def _plain(self, text: str, mark: str) -> list[int]:
        return self._encoder.encode_plain(text.replace(mark, "")) if text else []
