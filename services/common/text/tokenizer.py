"""Encoding: raw prompts, where special tokens count, and message content, where they never do."""

from tokenizers import Tokenizer

from services.common.errors import ConfigurationError


def _load(tokenizer_json: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ConfigurationError(f"the tokenizer cannot be loaded: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TextEncoder:
    """Text to token ids. Thread-safe; releases the GIL while it encodes."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = _load(tokenizer_json)
        self._plain = _load(tokenizer_json)
        self._plain.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: index for index, token in added.items() if token.special}
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode_raw(self, text: str) -> list[int]:
        """Ids of a raw completion prompt: special tokens are parsed, BOS added where the model wants it."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a special token."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)
