"""Loads a transformers model for serving: decoder-only families on an allow-list, safetensors or GGUF, never pickle."""

import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model

from services.common.errors import ConfigurationError
from services.common.models.gguf_tokenizer import gguf_cache
from services.common.models.resolve import ModelFiles

log = logging.getLogger(__name__)

ATTENTION = "orca_paged"
# Each has a mixed-batch golden test (tests/golden/test_families.py).
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
KEEP_BELOW_BYTES = 2 << 30
ROPE_KINDS = {"default", "linear", "llama3", "yarn"}  # dynamic and longrope depend on the batch


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it natively, else float32. Raises ConfigurationError."""
    if name != "auto":
        if name == "float16" and device.type == "cpu":
            raise ConfigurationError("--dtype float16 is for GPUs; use bfloat16 or float32 on a CPU")
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.bfloat16
    native = bool(torch.cpu._is_avx512_bf16_supported())
    return torch.bfloat16 if native else torch.float32


def check_config(config: Any) -> None:
    """Refuse in one line what the paged attention cannot do right. A window as wide as the context is dropped."""
    family = getattr(config, "model_type", "?")
    if family not in FAMILIES:
        raise ConfigurationError(f"model family {family!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise ConfigurationError(f"rotary embedding {kind!r} depends on the batch and is not supported")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings:
        raise ConfigurationError("sliding-window attention is not supported")
    if window:
        config.sliding_window = None


def load_model(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in eval mode with the paged attention. Raises ConfigurationError in one line."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _from_gguf(files.path, dtype) if files.is_gguf else _from_folder(files.path, dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{files.name} cannot be loaded: {str(error).splitlines()[0]}") from None
    model.eval().requires_grad_(False)
    return model.to(device)


def _from_folder(folder: Path, dtype: torch.dtype, **gguf: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **gguf)
    check_config(config)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        **gguf,
    )


def _from_gguf(path: Path, dtype: torch.dtype) -> Any:
    """De-quantising takes many seconds, so a small model's float32 weights are kept as safetensors in the cache."""
    kept = gguf_cache(path, "weights")
    if kept.exists():
        return _from_folder(kept, dtype)
    model = _from_folder(path.parent, torch.float32, gguf_file=path.name)
    if sum(p.numel() for p in model.parameters()) * 4 <= KEEP_BELOW_BYTES:
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            partial = Path(folder) / "weights"
            partial.mkdir()
            # Not save_pretrained: it refuses whatever came out of a GGUF, though these are plain float32 weights now.
            save_model(model, str(partial / "model.safetensors"), metadata={"format": "pt"})
            config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
            (partial / "config.json").write_text(json.dumps(config))
            try:
                partial.rename(kept)  # atomic: another worker sees nothing or all
            except OSError:
                log.info("another process kept the weights first")
    return model.to(dtype)
