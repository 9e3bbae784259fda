"""The API server of the tests in a container of its own: api_server.py MANIFESTS ACCOUNT TOKEN WORKER ADDRESS. The
worker is in an EndpointSlice from the start."""

import sys
import threading
from pathlib import Path

import yaml

from tests.support.kube import KubeApi, slice_of

PORT = 6443


def main() -> None:
    manifests, account, token, worker, address = sys.argv[1:]
    docs = [doc for doc in yaml.safe_load_all(Path(manifests).read_text()) if doc]
    api = KubeApi("0.0.0.0", PORT)
    api.grant(token, account, docs)
    component = "app.kubernetes.io/component"
    [service] = [d for d in docs if d["kind"] == "Service" and d["metadata"]["labels"][component] == "worker"]
    item = slice_of(worker, service["spec"]["ports"][0]["port"], service["metadata"]["labels"])
    item["endpoints"][0]["addresses"] = [address]
    api.put("endpointslices", "llm", item)
    api.come_back()
    threading.Event().wait()


if __name__ == "__main__":
    main()
