"""Which back end runs the model here."""

import logging

import torch

from services.common.errors import ConfigurationError
from services.common.models.resolve import ModelFiles
from services.worker.model import paged
from services.worker.model.backend import Backend, Unavailable
from services.worker.model.loader import load_model
from services.worker.model.reference import ReferenceBackend

log = logging.getLogger(__name__)


def make_backend(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    kernels: str = "auto",
    quantize: str = "none",
    threads: int = 1,
) -> Backend:
    """kernels: auto (the fast ones, where they can run the model), fast or reference. quantize: none or int8.
    Raises ConfigurationError if what was asked for by name cannot be had."""
    paged.register()
    model = load_model(files, dtype, device)
    weights = "int8" if quantize == "int8" else str(dtype).removeprefix("torch.")
    required = kernels == "fast" or quantize != "none"
    if quantize != "none" and kernels == "reference":
        raise ConfigurationError("--quantize needs the fast kernels")
    if kernels != "reference":
        try:
            if device.type != "cpu":
                raise Unavailable("they are for CPUs")
            from services.worker.model.cpu.decoder import CpuDecoder

            return CpuDecoder(model, weights, block_size, files.max_model_len, threads)
        except Unavailable as error:
            if required:
                raise ConfigurationError(f"the fast kernels cannot run {files.name}: {error}") from None
            if device.type == "cpu":
                log.warning("%s runs on the reference back end, several times slower: %s", files.name, error)
    return ReferenceBackend(model, dtype, device, block_size)
