"""Each family on the allow-list: a mixed batch (prefill chunks and decodes) on random weights against generate."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import ConfigurationError
from services.common.models.resolve import resolve_model
from services.common.request import SamplingParams
from services.worker.executor.torch_executor import TorchExecutor
from services.worker.model.loader import FAMILIES
from tests.golden.conftest import needs_fast_kernels
from tests.harness import LocalSystem
from tests.unit.tiny_tokenizer import BYTES_JSON

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_folder(folder: Path, family: str, **more: Any) -> Any:
    """A model folder with random weights, as a user would have; returns the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SHAPE | more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():  # they begin as zeros and ones
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(BYTES_JSON)
    return model


BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("kernels", ["reference", pytest.param("fast", marks=needs_fast_kernels)])
@pytest.mark.parametrize(("family", "more"), [*((family, {}) for family in sorted(FAMILIES)), ("llama", BIASED)])
def test_mixed_batch_equals_generate(tmp_path: Path, family: str, more: dict[str, Any], kernels: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = make_folder(tmp_path / family, family, **more)
        files = resolve_model(str(tmp_path / family))
        executor = TorchExecutor(files, torch.float32, torch.device("cpu"), 64, 16, kernels=kernels)
        system = LocalSystem([executor], token_budget=20, max_model_len=256)
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(2, 256, (n,), generator=generator).tolist() for n in (3, 40, 17, 8, 25)]
        for index, prompt in enumerate(prompts):
            system.submit(f"r{index}", prompt, SamplingParams(max_tokens=12, temperature=0.0))
            system.step()
        got = system.run()
        reference.generation_config.eos_token_id = None
        for index, prompt in enumerate(prompts):
            want = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )
            assert got[f"r{index}"].tokens == want[0, len(prompt) :].tolist(), f"prompt {index}"
        assert max(system.batch_sizes) > 1


def test_every_sampling_parameter_works_on_the_executor_s_own_tensors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_folder(tmp_path / "m", "llama")
    executor = TorchExecutor(resolve_model(str(tmp_path / "m")), torch.float32, torch.device("cpu"), 64, 8)
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {17: 100.0}},
        {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.5, "seed": 3},
        {"min_tokens": 5, "stop_token_ids": (3, 4)},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.01, "logprobs": 3},
    ]
    for company in (False, True):
        system = LocalSystem([executor], eos=(1,))
        for index, variant in enumerate(variants):
            system.submit(f"r{index}", [5, 6, 7, 8], SamplingParams(max_tokens=10, **variant))
            if not company:
                system.run()
        got = system.run()
        if not company:
            alone = got
    assert [record.tokens for record in got.values()] == [record.tokens for record in alone.values()]
    assert got["r1"].tokens == [17] * 10
    assert len(got["r4"].tokens) >= 5
    assert all(len(detail.top) == 3 for detail in got["r5"].logprobs)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "gpt2"}, "not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "depends on the batch"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding-window"),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    from services.worker.model.loader import load_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_folder(tmp_path / "m", "llama")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigurationError, match=why):
        load_model(resolve_model(str(tmp_path / "m")), torch.float32, torch.device("cpu"))


def test_model_paths_that_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "x.gguf").write_text("no gguf")
    (tmp_path / "empty").mkdir()
    for spec in ("/nonexistent", str(tmp_path / "x.txt"), str(tmp_path / "empty"), "builtin:none"):
        with pytest.raises(ConfigurationError):
            resolve_model(spec)
    with pytest.raises(ConfigurationError, match="not a readable GGUF"):
        resolve_model(str(tmp_path / "x.gguf"))
