"""Tool calls in the text of a model, in the format of its family, found while the text comes. A pure fold."""

import hashlib
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

# So much is looked at for a call's name, again with each piece.
MAX_HEAD = 1024
_FIELD = r'\s{0,64},\s{0,64}"%s"\s{0,64}:\s{0,64}(?=\{)'


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes tool calls.

    opening, closing: what stands around them; without an opening, text that begins with a brace is calls. arguments:
    the name of that field. alphanumeric_ids: call ids are nine letters and digits.
    """

    opening: str = ""
    closing: str = ""
    arguments: str = "arguments"
    alphanumeric_ids: bool = False


FORMATS = {
    "hermes": CallFormat("<tool_call>", "</tool_call>"),
    "mistral": CallFormat("[TOOL_CALLS]", alphanumeric_ids=True),
    "llama3": CallFormat(arguments="parameters"),
}


def format_of(template: str) -> str:
    """The format that a chat template is written for, "" if it has no tools."""
    if "tools" not in template:
        return ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "hermes" if "<tool_call>" in template else "llama3"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """News of one tool call. index: which of its choice's. name: on its first. arguments: the next piece of JSON."""

    index: int
    call_id: str
    name: str | None
    arguments: str


class JsonEnd:
    """Finds the end of a JSON object or array in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Where in this piece it is complete: the index after its last character."""
        for index, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


class _OpenCall:
    """One call's object, from its brace on. Its name and what there is of its arguments are told as they come, if they
    stand in this order; else at its end. names: what may be called; any if empty."""

    def __init__(self, arguments: str, names: Collection[str]) -> None:
        # Up to the value of the arguments, which is an object.
        name = r'("(?:[^"\\]|\\.){0,256}")'
        self._head = re.compile(r'\s{0,64}\{\s{0,64}"name"\s{0,64}:\s{0,64}' + name + _FIELD % arguments)
        self._arguments, self._names = arguments, names
        self._end, self._arguments_end = JsonEnd(), JsonEnd()
        self.text = ""
        self.name: str | None = None
        self._headless = False  # it does not begin like a call whose arguments can be told as they come
        self._told = 0  # up to where in the text
        self._complete_at: int | None = None

    def push(self, text: str) -> tuple[int | None, str]:
        """Where in this piece the object ends, and the arguments that it adds."""
        end = self._end.find(text)
        self.text += text if end is None else text[:end]
        if self.name is None and not self._headless:
            self._look_for_name()
        if self.name is None or self._complete_at is not None:
            return end, ""
        piece = self.text[self._told :]
        stop = self._arguments_end.find(piece)
        if stop is not None:
            piece = piece[:stop]
            self._complete_at = self._told + stop
        self._told += len(piece)
        return end, piece

    def _look_for_name(self) -> None:
        match = self._head.match(self.text)
        if match is None:
            self._headless = len(self.text) > MAX_HEAD
        elif self._may(name := str(json.loads(match[1]))):
            self.name, self._told = name, match.end()
        else:
            self._headless = True

    def _may(self, name: object) -> bool:
        return isinstance(name, str) and (not self._names or name in self._names)

    def parsed(self) -> tuple[str, str] | None:
        """Name and arguments of an object that has ended without its name told; None if it is no call."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not self._may(value.get("name")):
            return None
        given: Any = value.get(self._arguments, value.get("arguments", {}))
        return value["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


class CallParser:
    """Splits one choice's text into content and calls of functions with these names; without names, of any."""

    def __init__(self, name: str, new_id: Callable[[int], str], names: Collection[str] = ()) -> None:
        self._format = FORMATS[name]
        self._new_id = new_id
        self._names = frozenset(names)
        self._held = ""  # what may be the beginning of a mark, or white space before one
        self._passed = ""  # what has come since the last content and is none, unless no call follows
        self._inside = False
        self._called = False  # there was a call since it went inside
        self._call: _OpenCall | None = None
        self._started = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Content that is certain to be none of a call, and news of calls."""
        self._held += text
        content, calls = "", []
        while True:
            before = (self._held, self._inside, self._call)
            piece, news = self._advance()
            content += piece
            calls += news
            if (self._held, self._inside, self._call) == before:
                return content, calls

    def flush(self) -> tuple[str, list[CallDelta]]:
        """The end of the text: what was held back. Of a call that is not complete what was told stays."""
        content = self._content("")
        if self._call is None:
            content += self._held
        elif self._call.name is None:
            content += self._call.text
        self._held, self._call = "", None
        return content.rstrip() if self.num_calls else content, []

    def _content(self, text: str) -> str:
        """Content, and before it what was passed over for a call that did not come."""
        passed, self._passed = self._passed, ""
        return passed + text

    def _pass_over(self, text: str) -> None:
        """What stands around calls; without one it is content after all."""
        if not self._called:
            self._passed += text

    def _advance(self) -> tuple[str, list[CallDelta]]:
        if self._call is not None:
            return self._in_call(self._call)
        return self._between_calls() if self._inside else (self._outside(), [])

    def _outside(self) -> str:
        """Content up to a mark that opens calls."""
        opening = self._format.opening
        if not opening:
            return self._at_beginning()
        at = self._held.find(opening)
        if at < 0:
            return self._release(_kept(self._held, opening))
        content = self._held[:at].rstrip()
        out = self._content(content) if content else ""
        self._passed += self._held[len(content) : at] + opening
        self._held, self._inside, self._called = self._held[at + len(opening) :], True, False
        return out

    def _at_beginning(self) -> str:
        """Without marks: a brace at the very beginning is what makes a call."""
        stripped = self._held.lstrip()
        if stripped and not self._started:
            self._started = True
            if stripped.startswith("{"):
                self._inside = True
                return ""
        return self._release(0) if self._started else ""

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        cut = len(self._held[:cut].rstrip())  # white space before a call is none of the content
        content, self._held = self._held[:cut], self._held[cut:]
        return self._content(content) if content else ""

    def _between_calls(self) -> tuple[str, list[CallDelta]]:
        held = self._held.lstrip(" \t\r\n[],;")
        self._pass_over(self._held[: len(self._held) - len(held)])
        self._held = held
        closing = self._format.closing
        if closing and held.startswith(closing):
            self._pass_over(closing)
            self._held, self._inside = held[len(closing) :], False
        elif held.startswith("{"):
            self._call = _OpenCall(self._format.arguments, self._names)
        elif held and not closing.startswith(held):
            self._inside = False  # neither a call nor the end: content again
        return "", []

    def _in_call(self, call: _OpenCall) -> tuple[str, list[CallDelta]]:
        known = call.name is not None
        text, self._held = self._held, ""
        end, piece = call.push(text)
        calls: list[CallDelta] = []
        if call.name is not None:
            index = self.num_calls - known
            if not known:
                self._passed, self._called = "", True
                self.num_calls += 1
                calls.append(CallDelta(index, self._new_id(index), call.name, piece))
            elif piece:
                calls.append(CallDelta(index, self._new_id(index), None, piece))
        if end is None:
            return "", calls
        self._held, self._call = text[end:], None
        if call.name is not None:
            return "", calls
        parsed = call.parsed()
        if parsed is None:
            self._inside = False
            return self._content(call.text), calls
        self._passed, self._called = "", True
        index, self.num_calls = self.num_calls, self.num_calls + 1
        return "", [CallDelta(index, self._new_id(index), *parsed)]


def _kept(text: str, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of a mark."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)


class ThoughtSplitter:
    """Splits one choice's text into the model's thoughts and its answer."""

    OPENING, CLOSING = "<think>", "</think>"

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._undecided = not inside
        self._after = False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that this piece adds."""
        self._held += text
        if self._undecided:
            stripped = self._held.lstrip()
            if len(stripped) < len(self.OPENING) and self.OPENING.startswith(stripped):
                return "", ""
            self._undecided = False
            if stripped.startswith(self.OPENING):
                self._held, self._inside = stripped[len(self.OPENING) :], True
        if not self._inside:
            return "", self._answer()
        at = self._held.find(self.CLOSING)
        if at < 0:
            cut = len(self._held) - _kept(self._held, self.CLOSING)
            thoughts, self._held = self._held[:cut], self._held[cut:]
            return thoughts, ""
        thoughts, self._held = self._held[:at], self._held[at + len(self.CLOSING) :]
        self._inside, self._after = False, True
        return thoughts, self._answer()

    def _answer(self) -> str:
        text, self._held = self._held, ""
        if self._after:  # blank lines between thoughts and answer belong to neither
            text = text.lstrip()
            self._after = not text
        return text

    def flush(self) -> tuple[str, str]:
        rest, self._held = self._held, ""
        return (rest, "") if self._inside else ("", rest)


def call_ids(request_id: str, choice: int, alphanumeric: bool) -> Callable[[int], str]:
    """Ids that any router makes alike."""

    def new_id(index: int) -> str:
        digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
        return digest[:9] if alphanumeric else f"call_{digest[:24]}"

    return new_id
