"""From what the user typed after --model to files on disk and the facts that every process needs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ConfigurationError
from services.common.models.builtin import fetch_builtin
from services.common.models.gguf_tokenizer import GgufMetadata, read_gguf


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.

    path: a folder of safetensors or a GGUF file. tokenizer_json: in the format of the `tokenizers` library.
    eos_token_ids: any of them ends a generation. add_bos: raw prompts start with the BOS token.
    """

    name: str
    path: Path
    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def resolve_model(spec: str) -> ModelFiles:
    """`builtin:NAME`, a folder or a .gguf file. Raises ConfigurationError in one line."""
    if spec.startswith("builtin:"):
        name = spec.removeprefix("builtin:")
        return _from_gguf(name, fetch_builtin(name))
    path = Path(spec or "/nothing-given").expanduser()
    if not path.exists():
        raise ConfigurationError(f"no model at {spec}")
    if path.is_dir():
        return _from_folder(path.resolve())
    if path.suffix != ".gguf":
        raise ConfigurationError(f"{spec} is neither a model folder nor a .gguf file")
    return _from_gguf(path.stem, path.resolve())


def _from_gguf(name: str, path: Path) -> ModelFiles:
    metadata: GgufMetadata = read_gguf(path)
    return ModelFiles(
        name=name,
        path=path,
        tokenizer_json=metadata.tokenizer_json,
        chat_template=metadata.chat_template,
        special_tokens=metadata.special_tokens,
        eos_token_ids=metadata.eos_token_ids,
        max_model_len=metadata.context_length,
        vocab_size=metadata.vocab_size,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return data


def _from_folder(path: Path) -> ModelFiles:
    config = _read_json(path / "config.json")
    if not config:
        raise ConfigurationError(f"{path} has no config.json")
    if not list(path.glob("*.safetensors")):
        raise ConfigurationError(f"{path} has no .safetensors weights (other formats are not loaded)")
    tokenizer = path / "tokenizer.json"
    if not tokenizer.exists():
        raise ConfigurationError(f"{path} has no tokenizer.json")
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    return ModelFiles(
        name=path.name,
        path=path,
        tokenizer_json=tokenizer.read_text(encoding="utf-8"),
        chat_template=_chat_template(path, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        eos_token_ids=_eos_ids(_read_json(path / "generation_config.json"), config),
        max_model_len=_count(config, "max_position_embeddings", path),
        vocab_size=_count(config, "vocab_size", path),
    )


def _count(config: dict[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{path}/config.json: {name} is missing or no positive number")
    return value


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _eos_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    for config in configs:
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(int(item) for item in value)
    return ()
