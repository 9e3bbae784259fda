"""A GGUF file's metadata, and its tokenizer rebuilt exactly.

The usual GGUF-to-HF conversions are lossy: they drop the pre-tokenizer that `tokenizer.ggml.pre` names. SmolLM2's
splits digits one by one before the byte-level step; without it "2024" becomes other ids. Only the
pre-tokenizers in PRE_TOKENIZERS are known to be right (tests hold them against llama.cpp); any other is refused.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from services.common.cache import cache_dir
from services.common.errors import ConfigurationError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
# Changes with the code below, so that no stale conversion is read from the cache.
CONVERSION = "1"

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def _split(pattern: str, *before: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *before,
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: _split(GPT2_SPLIT, pre_tokenizers.Digits(individual_digits=True)),
    "gpt-2": lambda: _split(GPT2_SPLIT),
    "qwen2": lambda: _split(QWEN2_SPLIT),
    "llama-bpe": lambda: _split(LLAMA3_SPLIT),
}


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    context_length: int
    vocab_size: int


def gguf_cache(path: Path, name: str) -> Path:
    """Where something made from this very file is kept. The folder exists."""
    stat = path.stat()
    key = f"{CONVERSION}:{path}:{stat.st_size}:{stat.st_mtime_ns}"
    folder = cache_dir() / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def read_gguf(path: Path) -> GgufMetadata:
    """Metadata of a GGUF file; parsing takes seconds, so the result is cached beside the built-in model.

    Raises ConfigurationError if the file is no GGUF or its tokenizer cannot be rebuilt exactly.
    """
    cached = gguf_cache(path, "metadata.json")
    if cached.exists():
        data = json.loads(cached.read_text(encoding="utf-8"))
        return GgufMetadata(**{**data, "eos_token_ids": tuple(data["eos_token_ids"])})
    try:
        metadata = _parse(path)
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(f"{path} lacks tokenizer metadata: {error}") from None
    partial = cached.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(asdict(metadata)), encoding="utf-8")
    partial.replace(cached)
    return metadata


def _parse(path: Path) -> GgufMetadata:
    from gguf import GGUFReader  # slow to import, and needed once per model

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise ConfigurationError(f"{path} is not a readable GGUF file: {error}") from None
    fields: dict[str, Any] = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith(("general.arch", "tokenizer.")) or name.endswith(".context_length")
    }
    architecture = fields.get("general.architecture", "")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    tokenizer = build_tokenizer(fields)
    eos = {fields.get("tokenizer.ggml.eos_token_id"), fields.get("tokenizer.ggml.eot_token_id")}
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
    return GgufMetadata(
        tokenizer_json=tokenizer.to_str(),
        chat_template=fields.get("tokenizer.chat_template"),
        special_tokens={
            name: tokens[fields[f"tokenizer.ggml.{key}"]]
            for name, key in names.items()
            if f"tokenizer.ggml.{key}" in fields
        },
        eos_token_ids=tuple(sorted(token for token in eos if token is not None)),
        context_length=int(fields.get(f"{architecture}.context_length", 2048)),
        vocab_size=len(tokens),
    )


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The `tokenizers` object for a GGUF's byte-level BPE. Raises ConfigurationError on any other kind."""
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ConfigurationError(
            f"the GGUF's tokenizer ({model}, {pre}) cannot be rebuilt exactly; known: {', '.join(PRE_TOKENIZERS)}"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    if fields.get("tokenizer.ggml.add_bos_token"):
        bos = fields["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer
