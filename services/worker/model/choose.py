"""Which back end runs the model here."""

import logging
from typing import Any

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
            return _fast(model, weights, dtype, device, block_size, files.max_model_len, threads)
        except Unavailable as error:
            if required:
                raise ConfigurationError(f"the fast kernels cannot run {files.name}: {error}") from None
            log.warning("%s runs on the reference back end, several times slower: %s", files.name, error)
    return ReferenceBackend(model, dtype, device, block_size)


def _fast(
    model: Any, weights: str, dtype: torch.dtype, device: torch.device, block_size: int, max_len: int, threads: int
) -> Backend:
    """The one for this device; each is imported only where it is used. Raises Unavailable."""
    if device.type == "cpu":
        from services.worker.model.cpu.decoder import CpuDecoder

        return CpuDecoder(model, weights, block_size, max_len, threads)
    if weights == "int8":
        raise Unavailable("int8 weights are for CPUs")
    from services.worker.model.cuda.backend import cuda_backend

    return cuda_backend(model, dtype, device, block_size)
