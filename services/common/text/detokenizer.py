"""Token ids back to text, one token at a time, without ever cutting a character.

Each token is a run of bytes; an incremental UTF-8 decoder joins them. So the deltas always add up to the
decoding of all ids, and the state can be rebuilt from the ids alone.
"""

import codecs
import json
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from services.common.errors import ConfigurationError


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    """The bytes of every token id. Special tokens have none: output skips them.

    Raises ConfigurationError if the tokenizer decodes neither byte-level nor with byte fall-back.
    """

    def __init__(self, tokenizer_json: str) -> None:
        data = json.loads(tokenizer_json)
        kinds = _decoder_kinds(data.get("decoder"))
        if "ByteLevel" in kinds:
            convert: Callable[[str], bytes] = partial(_from_alphabet, alphabet=_byte_alphabet())
        elif "ByteFallback" in kinds:
            convert = _from_fallback
        else:
            raise ConfigurationError("the tokenizer is neither byte-level nor has it byte fall-back")
        self.strips_first_space = "ByteFallback" in kinds and "Strip" in kinds
        vocab: dict[str, int] = data["model"]["vocab"]
        added = data.get("added_tokens", [])
        size = max([*vocab.values(), *(token["id"] for token in added)], default=-1) + 1
        self._bytes = [b""] * size
        for piece, index in vocab.items():
            self._bytes[index] = convert(piece)
        for token in added:
            self._bytes[token["id"]] = b"" if token["special"] else token["content"].encode()
        self.longest = max(map(len, self._bytes), default=1)
        self._content = {token["id"]: token["content"] for token in added}

    def of(self, token_id: int) -> bytes:
        """Bytes of a token; none for an id beyond the tokenizer (logits can be wider)."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def named(self, contents: Collection[str]) -> dict[int, bytes]:
        """The special tokens among these, with their names as bytes."""
        return {token: text.encode() for token, text in self._content.items() if text in contents}

    def shown(self, token_id: int) -> str:
        """A token's text for log-probabilities: special tokens by name, broken bytes replaced."""
        return self._content.get(token_id) or self.of(token_id).decode("utf-8", errors="replace")


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    return {decoder["type"]}.union(*(_decoder_kinds(part) for part in decoder.get("decoders", [])))


def _from_alphabet(piece: str, alphabet: dict[str, int]) -> bytes:
    # A character outside the alphabet stands for itself (added tokens).
    return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)


def _from_fallback(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


class Detokenizer:
    """One sequence's text, token by token."""

    def __init__(self, table: TokenBytes, shown: Collection[str] = (), begins: bool = True) -> None:
        """shown: special tokens that are text all the same. begins: its first token begins a text."""
        self._table = table
        self._shown = table.named(shown) if shown else {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = table.strips_first_space and begins

    def push(self, token_id: int) -> str:
        """The text that this token completes; never part of a character."""
        data = self._table.of(token_id)
        if not data and self._shown:
            data = self._shown.get(token_id, b"")
        if self._first and data:
            self._first = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def shows(self, token_id: int) -> bool:
        """It is a special token that is text here."""
        return token_id in self._shown

    def flush(self) -> str:
        """What is left at the end: a truly incomplete tail, once, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
