"""Runs with podman what the chart renders: the same containers with the same environment, arguments, volumes and
security, taken from the manifests. (`podman kube play` knows no StatefulSets.) What a cluster would fill in is filled
in here: names, addresses, namespaces."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def podman(*arguments: str | Path, environment: dict[str, str] | None = None, timeout: float = 120) -> str:
    """Its output. Fails with its message."""
    done = subprocess.run(
        ["podman", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=os.environ | (environment or {}),
    )
    assert done.returncode == 0, f"podman {arguments[0]}: {done.stderr}"
    return done.stdout.strip()


class Pod:
    """The first pod of a Deployment or StatefulSet; it has one container."""

    def __init__(self, docs: list[Document], workload: Document, network: str, address: str, folder: Path) -> None:
        self.name = f"{workload['metadata']['name']}-0"
        self.address = address
        self._docs, self._network, self._folder = docs, network, folder
        template = workload["spec"]["template"]
        self._labels: dict[str, str] = template["metadata"]["labels"]
        self._spec: Document = template["spec"]
        [self.container] = self._spec["containers"]
        self._volumes = {volume["name"]: volume for volume in self._spec.get("volumes", ())}
        for claim in workload["spec"].get("volumeClaimTemplates", ()):
            self._volumes[claim["metadata"]["name"]] = {"emptyDir": {}}

    def start(self, *more: str | Path, environment: dict[str, str] | None = None) -> None:
        """more: options of podman run. environment: beside the manifest's."""
        variables = self._environment() | (environment or {})
        security = self._spec["securityContext"]
        options: list[str | Path] = ["--name", self.name, "--hostname", self.name, "--network", self._network]
        options += ["--ip", self.address, *(f"--network-alias={name}" for name in self._services())]
        options += ["--user", f"{security['runAsUser']}:{security['runAsGroup']}", "--stop-signal", "SIGTERM"]
        if self.container["securityContext"]["readOnlyRootFilesystem"]:
            options += ["--read-only", "--read-only-tmpfs=false"]
        for capability in self.container["securityContext"]["capabilities"]["drop"]:
            options += ["--cap-drop", capability]
        options += ["--security-opt", "no-new-privileges"]
        options += ["--memory", self.container["resources"]["limits"]["memory"].lower().removesuffix("i")]
        # Their values go by our own environment: an argument is for all to see.
        options += [word for name in variables for word in ("--env", name)]
        options += [word for mount in self.container.get("volumeMounts", ()) for word in self._mount(mount)]
        if "command" in self.container:
            options += ["--entrypoint", json.dumps(self.container["command"])]
        image = self.container["image"]
        podman("run", "--detach", *options, *more, image, *self.container.get("args", ()), environment=variables)

    def _services(self) -> list[str]:
        services = (doc for doc in self._docs if doc["kind"] == "Service")
        return [s["metadata"]["name"] for s in services if s["spec"]["selector"].items() <= self._labels.items()]

    def _environment(self) -> dict[str, str]:
        fields = {"metadata.name": self.name, "metadata.namespace": "llm", "status.podIP": self.address}
        out = {}
        for item in self.container.get("env", ()):
            if "value" in item:
                out[item["name"]] = item["value"]
            elif "fieldRef" in item["valueFrom"]:
                out[item["name"]] = fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                wanted = item["valueFrom"]["secretKeyRef"]
                out[item["name"]] = self._find("Secret", wanted["name"])["stringData"][wanted["key"]]
        return out

    def _find(self, kind: str, name: str) -> Document:
        return next(doc for doc in self._docs if doc["kind"] == kind and doc["metadata"]["name"] == name)

    def _mount(self, mount: Document) -> list[str]:
        volume = self._volumes[mount["name"]]
        if "emptyDir" in volume:
            return ["--tmpfs", f"{mount['mountPath']}:mode=1777"]
        folder = self._folder / self.name / mount["name"]
        folder.mkdir(parents=True)
        for file, text in self._find("ConfigMap", volume["configMap"]["name"])["data"].items():
            (folder / file).write_text(text)
        return ["--volume", f"{folder}:{mount['mountPath']}:ro"]

    def stop(self, seconds: int) -> int:
        """SIGTERM, and SIGKILL after so long; its exit code."""
        podman("stop", "--time", str(seconds), self.name, timeout=seconds + 30)
        return int(podman("inspect", "--format", "{{.State.ExitCode}}", self.name))

    def logs(self) -> str:
        done = subprocess.run(["podman", "logs", self.name], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr
