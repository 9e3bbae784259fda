"""Compiles the kernels once per machine and source, with whatever C++ compiler is there, and loads them."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from services.common.cache import cached
from services.worker.model.backend import Unavailable

KERNELS = Path(__file__).parent / "kernels"
FLAGS = [
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w"),
    *(f"-m{feature}" for feature in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx512vnni", "fma")),
]
BUILD_TIMEOUT_S = 300


def load_kernels() -> ctypes.CDLL:
    """The library, compiled into the cache if it is not there yet. Raises Unavailable."""
    if not torch.cpu._is_avx512_supported():
        raise Unavailable("this CPU has no AVX-512")
    library = cached(library_name())
    if not library.exists():
        compile_kernels(library)
    return ctypes.CDLL(str(library))


def library_name() -> str:
    """Of these sources and flags."""
    sources = sorted(KERNELS.iterdir())
    digest = hashlib.sha256("".join([*FLAGS, *(source.read_text() for source in sources)]).encode()).hexdigest()[:16]
    return f"kernels-{digest}.so"


def find_compiler() -> str | None:
    """What CXX names, else g++ or clang++; None if there is none."""
    return shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")


def compile_kernels(library: Path) -> None:
    """For any CPU that can run them, not for this one alone. Raises Unavailable."""
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("there is no C++ compiler")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *FLAGS, "-o", str(built), str(KERNELS / "decoder.cpp")]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S, text=True)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"the kernels do not compile: {(error.stderr or 'no message').splitlines()[0]}") from None
        except subprocess.TimeoutExpired:
            raise Unavailable("the kernels took too long to compile") from None
        built.rename(library)  # atomic: another worker sees nothing or all


if __name__ == "__main__":  # for images: compile them into this folder now
    compile_kernels(Path(sys.argv[1]) / library_name())
