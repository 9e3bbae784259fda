"""The built-in model, loaded once a session. The default profile makes few tokens; ORCA_GOLDEN=full makes 64."""

import os
import warnings
from typing import Any

import pytest
import torch

from services.common.models.resolve import ModelFiles, resolve_model
from services.common.text.tokenizer import TextEncoder
from services.router.core.chat import ChatEncoder, Conversation
from services.worker.executor.torch_executor import TorchExecutor
from services.worker.model.cpu.build import find_compiler
from tests.golden.prompts import CHAT, RAW


def why_no_fast_kernels() -> str:
    """Only what a machine lacks: kernels that do not compile where they could fail the tests. CI has a compiler."""
    if find_compiler() is None and not os.environ.get("CI"):
        return "there is no C++ compiler"
    return "" if torch.cpu._is_avx512_bf16_supported() else "this CPU does not multiply bfloat16"


needs_fast_kernels = pytest.mark.skipif(bool(why_no_fast_kernels()), reason=why_no_fast_kernels())
FULL_TOKENS = 64
NUM_TOKENS = FULL_TOKENS if os.environ.get("ORCA_GOLDEN") == "full" else 10


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    return resolve_model("builtin:smollm2-135m")


@pytest.fixture(scope="session")
def transformers_model(files: ModelFiles) -> Any:
    """The same weights, in transformers' hands. On one thread: two wait for each other whenever anything else runs."""
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            files.path.parent, gguf_file=files.path.name, dtype=torch.float32, local_files_only=True
        ).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def executor(files: ModelFiles) -> TorchExecutor:
    made = TorchExecutor(files, torch.float32, torch.device("cpu"), 1200, 16, num_host_blocks=64)
    assert made.batch_invariant
    return made


def _prompts(files: ModelFiles) -> tuple[tuple[int, ...], ...]:
    encoder = TextEncoder(files.tokenizer_json)
    chat = ChatEncoder(files, encoder)
    raw = [tuple(encoder.encode_raw(text)) for text in RAW]
    return (*raw, *(tuple(chat.encode(Conversation(messages)).ids) for messages in CHAT))


@pytest.fixture(scope="session")
def prompts(files: ModelFiles) -> tuple[tuple[int, ...], ...]:
    made = _prompts(files)
    lengths = [len(prompt) for prompt in made]
    assert len(made) == 24
    assert min(lengths) <= 3
    assert 560 <= max(lengths) <= 600
    return made
