"""What the chart renders, as podman can play it: a StatefulSet or Deployment becomes its first pod, with the same
containers, environment, arguments and volumes; what only a cluster has (service accounts, spreading) is left out."""

from typing import Any

Document = dict[str, Any]
ONLY_IN_CLUSTERS = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "topologySpreadConstraints",
    "priorityClassName",
    "runtimeClassName",
)


def playable(docs: list[Document]) -> list[Document]:
    """Secrets and ConfigMaps as they are, then a pod for each workload."""
    kept = [doc for doc in docs if doc["kind"] in ("Secret", "ConfigMap")]
    for secret in kept:  # podman knows data only
        if "stringData" in secret:
            secret["data"] = {key: _base64(value) for key, value in secret.pop("stringData").items()}
    return kept + [_pod(doc) for doc in docs if doc["kind"] in ("Deployment", "StatefulSet")]


def _base64(text: str) -> str:
    import base64

    return base64.b64encode(text.encode()).decode()


def _pod(workload: Document) -> Document:
    name = f"{workload['metadata']['name']}-0"
    template = workload["spec"]["template"]
    spec = {key: value for key, value in template["spec"].items() if key not in ONLY_IN_CLUSTERS}
    claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())]
    spec["volumes"] = [*spec.get("volumes", ()), *({"name": claim, "emptyDir": {}} for claim in claims)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": spec,
    }
