"""A Kubernetes API server as clients see it: resource versions, conflicts, expired watches, and RBAC as some manifests
grant it. It shows what our client does, not what a cluster does."""

import asyncio
import contextlib
import copy
import json
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from services.cli.ports import free_port

KINDS = {"leases": ("coordination.k8s.io", "Lease"), "endpointslices": ("discovery.k8s.io", "EndpointSlice")}
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
BOOKMARK_S = 1.0

Object = dict[str, Any]
Key = tuple[str, str]  # plural, namespace


class Refused(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason

    @property
    def status(self) -> Object:
        return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": self.code, "reason": self.reason}


class KubeApi:
    """State, and the server over it, on a thread of its own. `leave` and `come_back` are the API server going away."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.seen: Counter[tuple[str, int]] = Counter()  # (verb, status)
        self.sent: Counter[str] = Counter()  # changes told to watchers, by the object's name
        self.forbidden: list[str] = []
        self._version = 100
        self._oldest = 0  # changes up to this one are forgotten
        self._objects: dict[Key, dict[str, Object]] = {}
        self._changes: list[tuple[int, str, Key, Object]] = []
        self._rules: dict[str, list[Object]] = {}  # by token
        self._condition = threading.Condition()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    # -- the server

    def come_back(self) -> None:
        path = "/apis/{group}/v1/namespaces/{namespace}/{plural}"
        routes = [
            Route(path, self._collection, methods=["GET", "POST"]),
            Route(path + "/{name}", self._single, methods=["GET", "PUT", "DELETE"]),
        ]
        app = Starlette(routes=routes, exception_handlers={Refused: self._refused})
        config = uvicorn.Config(
            app, self._host, self.port, log_config=None, lifespan="off", timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)

    def leave(self) -> None:
        """Cut every connection, and listen no more; the state stays."""
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = self._server.force_exit = True
        with self._condition:
            self._condition.notify_all()
        self._thread.join()

    # -- who may do what

    def grant(self, token: str, account: str, manifests: Iterable[Object]) -> None:
        """What these manifests' Roles and RoleBindings grant to a service account."""
        manifests = list(manifests)
        roles = {m["metadata"]["name"]: m["rules"] for m in manifests if m["kind"] == "Role"}
        self._rules[token] = [
            rule
            for m in manifests
            if m["kind"] == "RoleBinding" and any(subject["name"] == account for subject in m["subjects"])
            for rule in roles[m["roleRef"]["name"]]
        ]

    def _authorise(self, request: Request, verb: str, name: str = "") -> Key:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        group, plural = request.path_params["group"], request.path_params["plural"]
        if plural not in KINDS or KINDS[plural][0] != group:
            raise Refused(404, "NotFound")
        allowed = any(
            group in rule["apiGroups"]
            and plural in rule["resources"]
            and verb in rule["verbs"]
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self._rules.get(token, ())
        )
        if not allowed:
            self.forbidden.append(f"{verb} {plural}/{name}")
            raise Refused(403 if token in self._rules else 401, "Forbidden")
        return plural, request.path_params["namespace"]

    # -- state

    def put(self, plural: str, namespace: str, item: Object) -> Object:
        """As a controller would: create or overwrite."""
        with self._condition:
            known = item["metadata"]["name"] in self._objects.get((plural, namespace), {})
            return self._store("MODIFIED" if known else "ADDED", (plural, namespace), item)

    def delete(self, plural: str, namespace: str, name: str) -> None:
        with self._condition:
            self._store("DELETED", (plural, namespace), self._objects[plural, namespace].pop(name))

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        return copy.deepcopy(self._objects.get((plural, namespace), {}).get(name))

    def compact(self) -> None:
        """Forget the history, as etcd does after some minutes: watches from before are answered with 410, those under
        way end."""
        with self._condition:
            self._version += 1
            self._oldest = self._version
            self._changes.clear()
            self._condition.notify_all()

    def _store(self, change: str, key: Key, item: Object) -> Object:
        self._version += 1
        group, kind = KINDS[key[0]]
        stored = copy.deepcopy(item) | {"apiVersion": f"{group}/v1", "kind": kind}
        stored["metadata"] |= {"namespace": key[1], "resourceVersion": str(self._version)}
        if change != "DELETED":
            self._objects.setdefault(key, {})[stored["metadata"]["name"]] = stored
        self._changes.append((self._version, change, key, stored))
        self._condition.notify_all()
        return stored

    # -- requests

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        self.seen[request.method, error.code] += 1
        return JSONResponse(error.status, error.code)

    async def _collection(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._create(request)
        watching = request.query_params.get("watch", "").lower() in ("true", "1")
        key = self._authorise(request, "watch" if watching else "list")
        selector = _selector(request.query_params.get("labelSelector", ""))
        self.seen["WATCH" if watching else "LIST", 200] += 1
        if watching:
            return StreamingResponse(self._watch(request, key, selector), media_type="application/json")
        with self._condition:
            items = [copy.deepcopy(o) for o in self._objects.get(key, {}).values() if _selected(o, selector)]
            # An empty list of endpoints is null on the wire.
            for item in items:
                if item.get("endpoints") == []:
                    item["endpoints"] = None
            return JSONResponse(
                {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": items or None}
            )

    async def _create(self, request: Request) -> Response:
        key = self._authorise(request, "create")
        body = _checked(key[0], await request.body())  # read before the state is looked at
        with self._condition:
            if body["metadata"]["name"] in self._objects.get(key, {}):
                raise Refused(409, "AlreadyExists")
            return JSONResponse(self._store("ADDED", key, body), 201)

    async def _single(self, request: Request) -> Response:
        name = request.path_params["name"]
        key = self._authorise(request, {"GET": "get", "PUT": "update", "DELETE": "delete"}[request.method], name)
        body = _checked(key[0], await request.body()) if request.method == "PUT" else None
        with self._condition:
            known = self._objects.get(key, {}).get(name)
            if known is None:
                raise Refused(404, "NotFound")
            if body is not None:
                if body["metadata"].get("resourceVersion") not in (None, known["metadata"]["resourceVersion"]):
                    raise Refused(409, "Conflict")
                known = self._store("MODIFIED", key, body)
            self.seen[request.method, 200] += 1
            return JSONResponse(known)

    async def _watch(self, request: Request, key: Key, selector: dict[str, str]) -> AsyncIterator[str]:
        after = int(request.query_params.get("resourceVersion") or 0)
        ends = asyncio.get_running_loop().time() + int(request.query_params.get("timeoutSeconds") or 60)
        server, began, told = self._server, self._oldest, 0.0
        while asyncio.get_running_loop().time() < ends and server is self._server and not server.should_exit:
            with self._condition:
                if after < self._oldest:
                    if began < self._oldest:
                        return  # it was under way when the history went
                    self.seen["WATCH", 410] += 1
                    yield _line("ERROR", Refused(410, "Expired").status)
                    return
                changes = [change for change in self._changes if change[0] > after]
                after = self._version
            for _, change, where, item in changes:
                if where == key and _selected(item, selector):
                    yield _line(change, item)
                    self.sent[item["metadata"]["name"]] += 1
            now = asyncio.get_running_loop().time()
            if request.query_params.get("allowWatchBookmarks") and now - told > BOOKMARK_S:
                told = now
                yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(after)}})
            await asyncio.sleep(0.02)


def _line(change: str, item: Object) -> str:
    return json.dumps({"type": change, "object": item}) + "\n"


def _selector(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",") if part)


def _selected(item: Object, selector: dict[str, str]) -> bool:
    return selector.items() <= item["metadata"].get("labels", {}).items()


def _checked(plural: str, data: bytes) -> Object:
    body: Object = json.loads(data)
    for field in ("acquireTime", "renewTime") if plural == "leases" else ():
        if not MICRO_TIME.fullmatch(body["spec"].get(field) or ""):
            raise Refused(400, f"BadRequest: {field} is no MicroTime")
    return body


def slice_of(worker: str, port: int, labels: dict[str, str], serving: bool = True) -> Object:
    """What the controller makes of a worker's pod behind its Service."""
    return {
        "metadata": {"name": f"slice-{worker}", "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": ["127.0.0.1"],
                "conditions": {"ready": serving, "serving": serving, "terminating": False},
                "targetRef": {"kind": "Pod", "name": worker},
            }
        ],
    }


def kubeconfig(path: Path, api: KubeApi, token: str) -> Path:
    """A file that makes a client of `api` with this token."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": api.url}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@contextlib.contextmanager
def kube_api() -> Any:
    api = KubeApi()
    api.come_back()
    try:
        yield api
    finally:
        if api._thread is not None and api._thread.is_alive():
            api.leave()
