"""The built-in model's weights in the formats that the peers load: `make bench-setup` runs this."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from safetensors.torch import save_model

from loadtest.peers.servers import BUILD, MODEL
from services.common.models.resolve import ModelFiles, resolve_model
from services.common.settings import DEFAULT_MODEL
from services.worker.model import paged
from services.worker.model.loader import load_model

SKIPPED = {"general.architecture", "general.file_type", "general.quantization_version"}


def folder(files: ModelFiles, target: Path) -> None:
    """safetensors in bfloat16 with configuration and tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    paged.register()
    model = load_model(files, torch.bfloat16, torch.device("cpu"))
    save_model(model, str(target / "model.safetensors"), metadata={"format": "pt"})
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    (target / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    )
    (target / "tokenizer.json").write_text(files.tokenizer_json)
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": files.max_model_len}
    (target / "tokenizer_config.json").write_text(json.dumps(special | kind))


def bf16_gguf(source: Path, target: Path) -> None:
    """The shipped GGUF with its weights as bfloat16."""
    reader, writer = GGUFReader(source), GGUFWriter(target, "llama")
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key in SKIPPED:
            continue
        if entry.types[0] == GGUFValueType.ARRAY:
            writer.add_array(key, entry.contents())
        else:
            writer.add_key_value(key, entry.contents(), entry.types[0])
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    files = resolve_model(DEFAULT_MODEL)
    models = BUILD / "models"
    folder(files, models / MODEL)
    sixteen, four = models / f"{MODEL}-bf16.gguf", models / f"{MODEL}-q4_0.gguf"
    bf16_gguf(files.path, sixteen)
    tools = sorted((BUILD / "llamacpp").rglob("llama-quantize"))
    if not tools:
        print("llama-quantize is not there; the bfloat16 model is ready", file=sys.stderr)
        return 1
    subprocess.run([str(tools[0]), "--allow-requantize", str(sixteen), str(four), "Q4_0", "2"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
