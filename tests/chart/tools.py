"""Helm and what checks its output. `make test-chart` fetches them."""

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "orca"
HELM = Path(os.environ.get("ORCA_HELM", ROOT / "build" / "helm" / "helm"))
VALUES = Path(__file__).parent / "values"
VALUES_FILES = {
    "defaults": [],
    "cpu": [CHART / "values-cpu.yaml"],
    **{path.stem: [path] for path in sorted(VALUES.glob("*.yaml"))},
}


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(*values: Path, sets: tuple[str, ...] = (), release: str = "orca", version: str = "1.31") -> str:
    """The manifests as text. Fails with Helm's own message."""
    files = [word for path in values for word in ("--values", path)]
    options = [word for value in sets for word in ("--set", value)]
    done = helm("template", release, CHART, "--namespace", "llm", "--kube-version", version, *files, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(docs: list[dict[str, Any]], kind: str, component: str = "") -> list[dict[str, Any]]:
    label = "app.kubernetes.io/component"
    return [d for d in docs if d["kind"] == kind and component in ("", d["metadata"]["labels"][label])]
