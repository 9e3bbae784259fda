"""Encoding: raw prompts, where special tokens count, and message content, where they never do."""

from tokenizers import Tokenizer

from services.common.errors import ConfigurationError

# A text of so many characters for each token that it may have is looked at in pieces first.
LONG = 4
PIECE_CHARS = 16_384


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
        return self._ids(self._tokenizer, text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a special token."""
        return self._ids(self._plain, text, add_special_tokens=False)

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        # In the way of batches: without offsets into the text it takes a third of the time.
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def surely_longer(self, text: str, limit: int) -> bool:
        """Whether a long text has far more tokens than `limit`: by a quarter, for where a text is cut its tokens are
        others. Looks no further than it must, so that a text of any length is refused in the same time."""
        if len(text) < LONG * limit:
            return False
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            count += len(self._plain.encode_batch_fast([piece], add_special_tokens=False)[0])
            if count > limit + limit // 4 + PIECE_CHARS // 256:
                return True
        return False
