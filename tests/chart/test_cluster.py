"""The scheduler in a cluster: real processes, with an API server that enforces what the chart's Role grants."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.ports import free_port
from services.common.redis.store import Store, connect
from services.scheduler.adapters.kubernetes import EndpointSlices, Lease, addresses_of, api_client
from tests.chart.tools import documents, of_kind, render
from tests.e2e.conftest import MODEL, eventually
from tests.support.kube import KubeApi, kube_api, kubeconfig, slice_of
from tests.support.processes import Process

NAMESPACE = "llm"
TOKEN = "scheduler-token"
AWAY_S = float(os.environ.get("ORCA_TEST_AWAY_S", "30"))


def scheduler_pod() -> dict[str, Any]:
    """The scheduler's environment as the chart renders it, without what a cluster fills in."""
    docs = documents(render())
    [deployment] = of_kind(docs, "Deployment", "scheduler")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def worker_labels() -> dict[str, str]:
    """Of the workers' Service, which its EndpointSlices get too."""
    [service] = of_kind(documents(render()), "Service", "worker")
    labels: dict[str, str] = service["metadata"]["labels"]
    return labels


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[KubeApi]:
    with kube_api() as made:
        manifests = documents(render())
        [account] = of_kind(manifests, "ServiceAccount")
        made.grant(TOKEN, account["metadata"]["name"], manifests)
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", made, TOKEN)))
        yield made
        assert not made.forbidden, "something was asked for that the chart's Role does not grant"


class Cluster:
    """Two schedulers, two workers, a router; the test is the kubelet and the controllers."""

    def __init__(self, api: KubeApi, redis_url: str, folder: Path) -> None:
        self.api = api
        self._folder = folder
        common = {"ORCA_REDIS_URL": redis_url, "ORCA_PARTITION": folder.name[:30].replace("_", "-")}
        self._common = common
        self.store = Store(connect(redis_url), common["ORCA_PARTITION"])
        own = scheduler_pod() | common | {"ORCA_NAMESPACE": NAMESPACE, "ORCA_METRICS_HOST": "127.0.0.1"}
        own |= {"ORCA_LEASE_SECONDS": "2"}
        self.lease = own["ORCA_LEASE"]
        self.schedulers = [Process("scheduler", f"scheduler-{i}", folder, own) for i in range(2)]
        self._ports: dict[str, int] = {}
        self.workers: dict[str, Process] = {}
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.router = Process("router", "router-0", folder, common | {"ORCA_PORT": str(port)})

    def start_worker(self, name: str) -> None:
        self._ports[name] = free_port()
        own = {"ORCA_EXECUTOR": "fake", "ORCA_FAKE_STEP_MS": "10", "ORCA_PORT": str(self._ports[name])}
        self.workers[name] = Process("worker", name, self._folder, self._common | own)

    def publish(self, name: str, serving: bool = True) -> None:
        self.api.put("endpointslices", NAMESPACE, slice_of(name, self._ports[name], worker_labels(), serving))

    @property
    def holder(self) -> str:
        lease = self.api.get("leases", NAMESPACE, self.lease)
        return lease["spec"]["holderIdentity"] if lease else ""

    @property
    def leader(self) -> Process | None:
        return next((s for s in self.schedulers if s.ended is None and self.holder.startswith(s.name)), None)

    async def ready(self) -> None:
        async with httpx.AsyncClient() as http:

            async def answers() -> bool:
                try:
                    return (await http.get(f"{self.url}/health/ready")).status_code == 200
                except httpx.HTTPError:
                    return False

            await eventually(answers, 60)
        await eventually(lambda: self.leader is not None, 30)

    async def complete(self, tokens: int) -> str:
        """The text of a streamed completion."""
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{self.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == tokens
        text: str = answer.json()["choices"][0]["text"]
        return text

    def _gauge(self, name: str) -> float:
        """Of the leader; -1 while there is none, or it has only just taken the lead."""
        leader = self.leader
        try:
            return leader.metric(name) if leader else -1
        except (httpx.HTTPError, StopIteration):
            return -1

    def connected(self) -> float:
        return self._gauge("orca_workers")

    def count(self, state: str) -> float:
        """Sequences that are running or waiting."""
        return self._gauge(f"orca_requests_{state}")

    async def stop(self) -> None:
        processes = [self.router, *self.workers.values(), *self.schedulers]
        for process in processes:
            await asyncio.to_thread(process.terminate)
        assert self.holder == "", "the last leader gave the Lease up"
        assert await self.store.num_requests() == 0
        await self.store.aclose()


@pytest.fixture
async def cluster(api: KubeApi, redis_url: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(api, redis_url, tmp_path)
    made.start_worker("orca-main-0")
    await made.ready()
    yield made
    await made.stop()


async def test_a_worker_serves_once_it_is_in_the_endpoints_and_no_more_when_it_is_not(cluster: Cluster) -> None:
    request = asyncio.create_task(cluster.complete(20))
    await eventually(lambda: cluster.count("waiting") == 1)
    assert cluster.connected() == 0, "it has registered in Redis, but it is in no EndpointSlice"
    cluster.publish("orca-main-0", serving=False)
    await eventually(lambda: cluster.api.sent["slice-orca-main-0"] == 1)
    assert cluster.connected() == 0, "it does not serve yet"
    cluster.publish("orca-main-0")
    text = await request

    cluster.start_worker("orca-main-1")
    await eventually(lambda: cluster.workers["orca-main-1"].health("ready")[0] == 200, 30)
    cluster.publish("orca-main-1")
    await eventually(lambda: cluster.connected() == 2)

    leaving = cluster.workers.pop("orca-main-0")
    request = asyncio.create_task(cluster.complete(300))
    await eventually(lambda: cluster.count("running") == 1)
    cluster.publish("orca-main-0", serving=False)  # its readiness probe fails as it drains
    await asyncio.to_thread(leaving.terminate)
    cluster.api.delete("endpointslices", NAMESPACE, "slice-orca-main-0")
    await eventually(lambda: cluster.connected() == 1)
    assert (await request).startswith(text)
    assert await cluster.complete(20) == text


async def test_a_killed_leader_is_followed_and_its_streams_go_on(cluster: Cluster) -> None:
    cluster.publish("orca-main-0")
    text = await cluster.complete(300)
    epoch = await cluster.store.epoch()
    first = cluster.leader
    assert first is not None
    request = asyncio.create_task(cluster.complete(300))
    await eventually(lambda: cluster.count("running") == 1)
    first.kill()
    assert await request == text
    assert await cluster.store.epoch() > epoch, "another epoch, in Redis"
    second = cluster.leader
    assert second is not None
    assert second is not first
    lease = cluster.api.get("leases", NAMESPACE, cluster.lease)
    assert lease is not None
    assert lease["spec"]["leaseTransitions"] == 1


async def test_a_leader_that_hangs_is_followed_and_finds_its_epoch_over(cluster: Cluster) -> None:
    cluster.publish("orca-main-0")
    text = await cluster.complete(300)
    first = cluster.leader
    assert first is not None
    request = asyncio.create_task(cluster.complete(300))
    await eventually(lambda: cluster.count("running") == 1)
    first.send(signal.SIGSTOP)
    assert await request == text
    first.send(signal.SIGCONT)
    await eventually(lambda: first.ended == 1, 10)
    assert "is over" in first.log.read_text() or "has the Lease" in first.log.read_text()
    first.killed = True  # its supervisor would start it again


async def test_serving_goes_on_while_the_api_server_is_away(cluster: Cluster) -> None:
    cluster.publish("orca-main-0")
    text = await cluster.complete(50)
    leader, epoch = cluster.leader, await cluster.store.epoch()
    cluster.api.leave()
    ends = time.monotonic() + AWAY_S
    served = 0
    while time.monotonic() < ends:
        assert await cluster.complete(50) == text
        served += 1
    assert served > AWAY_S / 2, "it served at its usual pace"
    renewed = cluster.api.seen["PUT", 200]
    cluster.api.come_back()
    await eventually(lambda: cluster.api.seen["PUT", 200] > renewed + 2 * 5, 15)  # two terms of the Lease
    assert await cluster.store.epoch() == epoch, "the same leader, under the same epoch"
    assert cluster.leader is leader

    cluster.start_worker("orca-main-1")
    await eventually(lambda: cluster.workers["orca-main-1"].health("ready")[0] == 200, 30)
    cluster.publish("orca-main-1")
    await eventually(lambda: cluster.connected() == 2, 15)


async def test_a_history_that_is_gone_is_listed_anew(cluster: Cluster) -> None:
    cluster.publish("orca-main-0")
    await eventually(lambda: cluster.connected() == 1)
    lists = cluster.api.seen["LIST", 200]
    cluster.start_worker("orca-main-1")
    await eventually(lambda: cluster.workers["orca-main-1"].health("ready")[0] == 200, 30)
    cluster.api.compact()
    cluster.publish("orca-main-1")
    cluster.api.compact()
    await eventually(lambda: cluster.connected() == 2, 15)
    assert cluster.api.seen["WATCH", 410] >= 1
    assert cluster.api.seen["LIST", 200] > lists


def lease_of(identity: str, duration_s: int = 2) -> Lease:
    return Lease(api_client(), NAMESPACE, "orca-default", identity, duration_s)


def test_one_of_many_wins_a_lease_again_and_again(api: KubeApi) -> None:
    """Concurrent creates and replaces: the losers get a 409, which is no error."""
    racers = [lease_of(f"racer-{index}") for index in range(6)]
    for _ in range(10):
        start = threading.Barrier(len(racers))
        won: list[int] = []

        def race(index: int, start: threading.Barrier = start, won: list[int] = won) -> None:
            start.wait()
            if racers[index].acquire():
                won.append(index)

        threads = [threading.Thread(target=race, args=(index,)) for index in range(len(racers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [winner] = won
        held = api.get("leases", NAMESPACE, "orca-default")
        assert held is not None
        assert held["spec"]["holderIdentity"] == f"racer-{winner}"
        racers[winner].release()
    assert api.seen["POST", 409] + api.seen["PUT", 409] > 0, "they never met"


def test_a_lease_is_taken_only_when_it_was_not_renewed(api: KubeApi) -> None:
    holder, other = lease_of("holder"), lease_of("other")
    assert holder.acquire()
    ends = time.monotonic() + 3
    while time.monotonic() < ends:
        assert not other.acquire()
        assert holder.acquire()
        time.sleep(0.2)
    deadline = time.monotonic() + 10
    while not other.acquire():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not holder.acquire()


async def test_slices_are_read_as_kubernetes_writes_them(api: KubeApi) -> None:
    labels = worker_labels()
    selector = scheduler_pod()["ORCA_WORKER_SELECTOR"]
    api.put("endpointslices", NAMESPACE, slice_of("w0", 1001, labels))
    api.put("endpointslices", NAMESPACE, slice_of("another-app", 1002, {"app": "other"}))
    api.put("endpointslices", NAMESPACE, slice_of("empty", 1003, labels) | {"endpoints": []})  # null on the wire
    slices = EndpointSlices(api_client(), NAMESPACE, selector)

    async def known() -> dict[str, str]:
        return {name: found["address"] for name, found in (await slices.workers()).items()}

    async def has(expected: dict[str, str]) -> bool:
        return await known() == expected

    await eventually(lambda: has({"w0": "127.0.0.1:1001"}))
    api.put("endpointslices", NAMESPACE, slice_of("w1", 1004, labels))
    await eventually(lambda: has({"w0": "127.0.0.1:1001", "w1": "127.0.0.1:1004"}))
    api.delete("endpointslices", NAMESPACE, "slice-w0")
    await eventually(lambda: has({"w1": "127.0.0.1:1004"}))
    slices.close()
    assert "endpoint-slices" not in {thread.name for thread in threading.enumerate()}


def test_an_ipv6_address_is_dialled_in_brackets() -> None:
    item = slice_of("w0", 50051, {})
    item["endpoints"][0]["addresses"] = ["fd00::1"]
    assert addresses_of(item) == {"w0": "[fd00::1]:50051"}


def test_what_the_role_does_not_grant_is_refused(api: KubeApi) -> None:
    """The server would have told us."""
    other = Lease(api_client(), NAMESPACE, "another-lease", "holder", 2)
    with pytest.raises(Exception, match="403"):
        other.acquire()
    assert api.forbidden == ["get leases/another-lease"]
    api.forbidden.clear()
