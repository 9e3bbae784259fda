"""Discovery by EndpointSlices and leadership by a Lease.

The client of Kubernetes is synchronous: it runs on threads, and the event loop sees only what they have found. While
the API server is away what was known stays: a worker that goes is noticed by its session, and nobody else can take the
Lease either. Fencing is by the epoch, which stays in Redis.
"""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.watch.watch import iter_resp_lines
from urllib3.exceptions import HTTPError

from services.common import process
from services.common.errors import ConfigurationError
from services.common.redis.store import Store, until_answered
from services.scheduler.adapters.leadership import LEAD_TTL_MS, LeadLost, hold_epoch

log = logging.getLogger(__name__)

API_ERRORS = (ApiException, HTTPError, OSError)
TIMEOUT_S = (3, 5)  # connect, read
# The server ends a watch by itself after so long; a connection that is dead without our knowing is found then.
WATCH_S = 30
RETRY_S = (0.2, 5.0)
CONFLICT, NOT_FOUND, GONE = 409, 404, 410


def api_client() -> client.ApiClient:
    """Of the cluster that this process runs in, else of the user's kubeconfig. Raises ConfigurationError."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        try:
            path = os.environ.get("KUBECONFIG")
            config.load_kube_config(path, client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise ConfigurationError(f"no Kubernetes API: {str(error).splitlines()[0]}") from None
    configuration.retries = 0  # we retry ourselves, and say so
    return client.ApiClient(configuration)


def _reason(error: BaseException) -> str:
    return f"{error.status} {error.reason}" if isinstance(error, ApiException) else type(error).__name__


class EndpointSlices:
    """Workers that serve, by the name of their pod. Watches on a thread of its own, from the first question on."""

    def __init__(self, api: client.ApiClient, namespace: str, selector: str) -> None:
        self._api = client.DiscoveryV1Api(api)
        self._namespace, self._selector = namespace, selector
        self._slices: dict[str, dict[str, str]] = {}  # slice's name -> worker's name -> address
        self._version = ""  # of what we know; "" is to list everything
        self._away = False
        self._ended = threading.Event()
        self._watched: Any = None  # the answer that is being read
        self._thread = threading.Thread(target=self._run, name="endpoint-slices", daemon=True)

    async def workers(self) -> dict[str, dict[str, Any]]:
        if self._thread.ident is None:
            self._thread.start()
        return {name: {"address": address} for found in self._slices.values() for name, address in found.items()}

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()
        watched = self._watched
        if watched is not None:
            watched.shutdown()  # wakes the thread that reads it
        if self._thread.ident is not None:
            self._thread.join(sum(TIMEOUT_S))

    def _run(self) -> None:
        delay = RETRY_S[0]
        while not self._ended.is_set():
            try:
                if not self._version:
                    self._list()
                self._follow()
                delay = RETRY_S[0]
            except API_ERRORS as error:
                if isinstance(error, ApiException) and error.status == GONE:
                    self._version = ""  # too old to go on from
                    continue
                if not self._away and not self._ended.is_set():
                    log.warning("the API server does not answer (%s); the workers known so far stay", _reason(error))
                    self._away = True
                self._ended.wait(delay)
                delay = min(RETRY_S[1], 2 * delay)

    def _get(self, **options: Any) -> Any:
        """The raw answer: the model classes refuse the null that a slice without endpoints has. Raises API_ERRORS."""
        answer: Any = self._api.list_namespaced_endpoint_slice(
            self._namespace, label_selector=self._selector, _preload_content=False, **options
        )
        if answer.status != 200:
            raise ApiException(http_resp=answer)
        if self._away:
            log.warning("the API server is back")
            self._away = False
        return answer

    def _list(self) -> None:
        found = json.loads(self._get(_request_timeout=TIMEOUT_S).data)
        self._slices = {item["metadata"]["name"]: addresses_of(item) for item in found.get("items") or ()}
        self._version = str(found["metadata"]["resourceVersion"])

    def _follow(self) -> None:
        """Apply what changes, until the server ends the watch."""
        timeouts = {"timeout_seconds": WATCH_S, "_request_timeout": (TIMEOUT_S[0], WATCH_S + TIMEOUT_S[1])}
        answer = self._get(watch=True, resource_version=self._version, allow_watch_bookmarks=True, **timeouts)
        self._watched = answer
        try:
            for line in iter_resp_lines(answer):  # type: ignore[no-untyped-call]
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiException(status=event["object"].get("code"), reason=event["object"].get("reason"))
                self._apply(event["type"], event["object"])
                self._version = str(event["object"]["metadata"]["resourceVersion"])
        finally:
            self._watched = None
            answer.close()

    def _apply(self, kind: str, item: dict[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        name = item["metadata"]["name"]
        others = {key: value for key, value in self._slices.items() if key != name}
        self._slices = others if kind == "DELETED" else {**others, name: addresses_of(item)}


def addresses_of(item: dict[str, Any]) -> dict[str, str]:
    """Of the endpoints in a slice those that serve, also while they end. The port is the one called grpc."""
    port = next((port["port"] for port in item.get("ports") or () if port.get("name") == "grpc"), None)
    out = {}
    for endpoint in item.get("endpoints") or ():
        serving = (endpoint.get("conditions") or {}).get("serving") is not False  # absent: it does
        name = (endpoint.get("targetRef") or {}).get("name")
        if port and name and endpoint.get("addresses") and serving:
            address = endpoint["addresses"][0]
            out[name] = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return out


class Lease:
    """A Lease that at most one holds. Every method calls the API server, and may raise API_ERRORS."""

    def __init__(self, api: client.ApiClient, namespace: str, name: str, identity: str, duration_s: int) -> None:
        self._api = client.CoordinationV1Api(api)
        self._namespace, self._name, self._identity = namespace, name, identity
        self.duration_s = duration_s
        self._version = ""  # of the Lease when last read
        self._read_at: float | None = None  # when; None if the latest attempt failed
        self._silent_s = 0.0  # how long we have watched that version

    def acquire(self) -> bool:
        """Take it or renew it; False while another holds it. Whether it has run out is judged by our own clock, from
        when we saw it change: clocks of two machines are not compared. Only the time between two reads that were
        answered counts: while the API server is away its holder cannot renew it either."""
        read_at, self._read_at = self._read_at, None
        try:
            lease = self._api.read_namespaced_lease(self._name, self._namespace, _request_timeout=TIMEOUT_S)
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise
            return self._create()
        assert lease.spec is not None
        assert lease.metadata is not None
        self._watch(lease.metadata.resource_version or "", read_at)
        holder = lease.spec.holder_identity or ""
        lapsed = self._silent_s > (lease.spec.lease_duration_seconds or self.duration_s)
        if holder not in ("", self._identity) and not lapsed:
            return False
        if holder != self._identity:
            lease.spec.acquire_time = _now()
            lease.spec.lease_transitions = (lease.spec.lease_transitions or 0) + 1
        lease.spec.holder_identity = self._identity
        lease.spec.lease_duration_seconds = self.duration_s
        lease.spec.renew_time = _now()
        return self._replace(lease)

    def _watch(self, version: str, read_at: float | None) -> None:
        self._read_at = time.monotonic()
        if version != self._version:
            self._version, self._silent_s = version, 0.0
        elif read_at is not None:
            self._silent_s += self._read_at - read_at

    def release(self) -> None:
        """Let another have it at once."""
        lease = self._api.read_namespaced_lease(self._name, self._namespace, _request_timeout=TIMEOUT_S)
        if lease.spec is not None and lease.spec.holder_identity == self._identity:
            lease.spec.holder_identity = ""
            self._replace(lease)

    def _create(self) -> bool:
        now = _now()
        spec = client.V1LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=self.duration_s,
            acquire_time=now,
            renew_time=now,
            lease_transitions=0,
        )
        body = client.V1Lease(metadata=client.V1ObjectMeta(name=self._name), spec=spec)
        return _won(lambda: self._api.create_namespaced_lease(self._namespace, body, _request_timeout=TIMEOUT_S))

    def _replace(self, lease: client.V1Lease) -> bool:
        """Of the version that was read, or not at all."""
        name, namespace = self._name, self._namespace
        return _won(lambda: self._api.replace_namespaced_lease(name, namespace, lease, _request_timeout=TIMEOUT_S))


def _won(call: Callable[[], Any]) -> bool:
    """False if somebody else was faster."""
    try:
        call()
    except ApiException as error:
        if error.status != CONFLICT:
            raise
        return False
    return True


def _now() -> datetime:
    """With microseconds always: the API server refuses a time without."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond or 1)


class LeaseLeadership:
    """Elected by a Lease, fenced by the epoch in Redis."""

    def __init__(self, lease: Lease, store: Store, identity: str) -> None:
        self._lease = lease
        self._store = store
        self._identity = identity
        self._renew_s = lease.duration_s / 5

    async def _acquire(self) -> bool | None:
        """None if the API server does not answer."""
        try:
            return await asyncio.to_thread(self._lease.acquire)
        except API_ERRORS as error:
            log.warning("the API server does not answer (%s)", _reason(error))
            return None

    async def take(self) -> int:
        said = False
        while not (acquired := await self._acquire()):
            if acquired is False and not said:
                log.info("another scheduler leads; standing by")
                said = True
            await asyncio.sleep(self._renew_s)
        await until_answered(self._store.load_functions)
        lead = await until_answered(lambda: self._store.lead(self._identity, LEAD_TTL_MS, claim="elected"))
        assert isinstance(lead, tuple)
        return lead[0]

    async def keep(self, epoch: int) -> None:
        """The API server away, we go on: nobody else can be elected then. And should we alone not see it, the epoch of
        whoever was elected ends ours."""
        tasks = [
            asyncio.ensure_future(hold_epoch(self._store, self._identity, epoch)),
            asyncio.ensure_future(self._renew()),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            await process.end(*tasks)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            if await self._acquire() is False:
                raise LeadLost("another scheduler has the Lease")

    async def resign(self) -> None:
        try:
            await asyncio.to_thread(self._lease.release)
        except API_ERRORS as error:
            log.warning("could not give up the Lease (%s)", _reason(error))
