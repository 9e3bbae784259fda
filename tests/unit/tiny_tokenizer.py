"""A tokenizer of the 256 bytes: token id = byte."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.common.text.detokenizer import _byte_alphabet


def _make() -> str:
    vocab = dict(_byte_alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


BYTES_JSON = _make()
