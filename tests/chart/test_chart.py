"""The chart, rendered by the real Helm and checked against the schemas of the Kubernetes versions that it is for."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.router.settings import RouterSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from tests.chart.tools import CHART, VALUES_FILES, documents, helm, of_kind, render

VERSIONS = [f"1.{minor}" for minor in range(29, 35)]
SETTINGS = {"router": RouterSettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}
BAD = {
    "router.replicas=0": "router/replicas",
    "router.replicas=many": "router/replicas",
    "router.port=80": "router/port",
    "router.drainSeconds=-1": "router/drainSeconds",
    "router.service.type=ExternalName": "router/service/type",
    "router.replcas=2": "replcas",
    "scheduler.policy=fastest": "scheduler/policy",
    "scheduler.order=random": "scheduler/order",
    "scheduler.replicas=99": "scheduler/replicas",
    "workers.pools=null": "workers",
    "workers.pools.main.device=tpu": "workers/pools/main/device",
    "workers.pools.main.gpuMemoryUtilization=1.5": "workers/pools/main/gpuMemoryUtilization",
    "workers.pools.main.blockSize=0": "workers/pools/main/blockSize",
    "workers.pools.UPPER.replicas=1": "UPPER",
    "workers.defaults.quantize=int4": "workers/defaults/quantize",
    "model.name=smollm": "model/name",
    "redis.maxMemory=lots": "redis/maxMemory",
    "redis.storage.size=big": "redis/storage/size",
    "otlpEndpoint=collector:4317": "otlpEndpoint",
    "image.router.digest=latest": "image/router/digest",
    "unknown=1": "unknown",
    "extraEnv[0].nam=X": "extraEnv/0",
}
REFUSED = {
    ("redis.deploy=false",): "redis.urlSecret.name is needed when redis.deploy is false",
    ("router.ingress.enabled=true",): "router.ingress.host is needed",
    ("router.terminationGracePeriodSeconds=20",): "less than preStopSeconds + drainSeconds, 35",
    ("workers.pools.main.terminationGracePeriodSeconds=5",): "less than drainSeconds, 20",
}


def test_lint_has_nothing_to_say() -> None:
    for files in VALUES_FILES.values():
        done = helm("lint", "--strict", CHART, *(word for path in files for word in ("--values", path)))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VALUES_FILES)
def test_every_manifest_is_valid_for_every_version(name: str, tmp_path: Path) -> None:
    for version in VERSIONS:
        docs = documents(render(*VALUES_FILES[name], version=version))
        known = [doc for doc in docs if doc["kind"] != "HTTPRoute"]  # no part of Kubernetes: its test is below
        manifest = tmp_path / f"{version}.yaml"
        manifest.write_text("\n---\n".join(_dump(doc) for doc in known))
        command = [Path(sys.executable).with_name("kubernetes-validate"), "-k", version, "--strict", manifest]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "WARN" not in said, said
        assert said.count("INFO") >= len(known), "not every document was looked at"


def _dump(document: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(document)


@pytest.mark.parametrize("value", BAD)
def test_a_bad_value_is_refused_by_its_name(value: str) -> None:
    done = helm("template", "orca", CHART, "--set", value)
    assert done.returncode != 0
    assert BAD[value] in done.stderr.replace(".", "/") or BAD[value] in done.stderr, done.stderr


@pytest.mark.parametrize("values", REFUSED)
def test_values_that_do_not_go_together_are_refused_in_a_sentence(values: tuple[str, ...]) -> None:
    done = helm("template", "orca", CHART, *(word for value in values for word in ("--set", value)))
    assert done.returncode != 0
    assert REFUSED[values] in done.stderr


@pytest.mark.parametrize("name", VALUES_FILES)
def test_every_environment_variable_is_a_setting(name: str) -> None:
    """What the chart says must be what the processes read."""
    for doc in documents(render(*VALUES_FILES[name])):
        component = doc["metadata"]["labels"]["app.kubernetes.io/component"]
        if doc["kind"] not in ("Deployment", "StatefulSet") or component not in SETTINGS:
            continue
        [container] = doc["spec"]["template"]["spec"]["containers"]
        given = {item["name"] for item in container["env"] if not item["name"].startswith("OTEL_")}
        given -= {"XDG_CACHE_HOME"}
        known = {f"ORCA_{field.upper()}" for field in SETTINGS[component].model_fields}
        assert given <= known, given - known
        plain = {item["name"]: item["value"] for item in container["env"] if "value" in item}
        for variable, text in plain.items():
            if variable.startswith("ORCA_"):
                SETTINGS[component](**{variable.removeprefix("ORCA_").lower(): text})


@pytest.mark.parametrize("name", VALUES_FILES)
def test_every_pod_is_hardened_and_probed(name: str) -> None:
    docs = documents(render(*VALUES_FILES[name]))
    pods = [doc["spec"]["template"]["spec"] for doc in docs if doc["kind"] in ("Deployment", "StatefulSet")]
    assert len(pods) >= 3
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]
            if container["name"] in SETTINGS:
                paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
                assert paths == ["/health/started", "/health/ready", "/health/live"]


@pytest.mark.parametrize("name", VALUES_FILES)
def test_only_the_scheduler_may_ask_the_api_server_and_for_little(name: str) -> None:
    docs = documents(render(*VALUES_FILES[name]))
    for doc in docs:
        if doc["kind"] in ("Deployment", "StatefulSet"):
            scheduler = doc["metadata"]["labels"]["app.kubernetes.io/component"] == "scheduler"
            assert doc["spec"]["template"]["spec"]["automountServiceAccountToken"] is scheduler
    [role] = of_kind(docs, "Role")
    granted = {(r, verb) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]}
    assert granted == {
        *(("endpointslices", verb) for verb in ("get", "list", "watch")),
        *(("leases", verb) for verb in ("create", "get", "update")),
    }


def test_no_secret_is_in_an_argument_or_a_config_map() -> None:
    docs = documents(render())
    [secret] = of_kind(docs, "Secret")
    password = secret["stringData"]["password"]
    assert len(password) >= 32
    for doc in docs:
        if doc["kind"] != "Secret":
            assert password not in _dump(doc)


def test_pools_override_the_defaults_and_pdbs_guard_what_is_more_than_one() -> None:
    docs = documents(render(*VALUES_FILES["gpu-pools"]))
    sets = {doc["metadata"]["name"]: doc for doc in of_kind(docs, "StatefulSet", "worker")}
    assert set(sets) == {"orca-h100", "orca-spot", "orca-cpu"}
    [h100] = sets["orca-h100"]["spec"]["template"]["spec"]["containers"]
    assert h100["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    [cpu] = sets["orca-cpu"]["spec"]["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in cpu["resources"]["limits"]
    budgets = {doc["metadata"]["name"] for doc in of_kind(docs, "PodDisruptionBudget")}
    assert budgets == {"orca-router", "orca-scheduler", "orca-h100", "orca-spot"}


def test_the_http_route_has_the_fields_of_the_gateway_api() -> None:
    """Of gateway.networking.k8s.io/v1, those that we use."""
    [route] = of_kind(documents(render(*VALUES_FILES["hardened"])), "HTTPRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert set(route["spec"]) == {"parentRefs", "hostnames", "rules"}
    [rule] = route["spec"]["rules"]
    assert set(rule) == {"backendRefs", "timeouts"}
    [service] = of_kind(documents(render(*VALUES_FILES["hardened"])), "Service", "router")
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}]
