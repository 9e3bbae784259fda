"""Other processes' metrics, shown with the router's own: one page for a fleet on one machine."""

import asyncio
import logging
from collections.abc import Sequence

import httpx
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def _scrape(client: httpx.AsyncClient, port: str) -> list[Metric]:
    try:
        response = await client.get(f"http://127.0.0.1:{port}/metrics")
        return list(text_string_to_metric_families(response.raise_for_status().text))
    except (httpx.HTTPError, ValueError) as error:  # it may be starting, or another process has its port by now
        log.debug("port %s gives no metrics: %s", port, error)
        return []


async def exposition(own: CollectorRegistry, ports: Sequence[str]) -> bytes:
    """The text of /metrics: our registry and what the other processes say, families of one name merged."""
    if not ports:
        return generate_latest(own)
    # Plain HTTP on this machine: certificates would take 20 ms to load, in which no stream goes on.
    async with httpx.AsyncClient(timeout=2, verify=False) as client:
        scraped = await asyncio.gather(*(_scrape(client, port) for port in ports))
    merged: dict[str, Metric] = {}
    for family in (family for families in scraped for family in families):
        if family.name in merged:
            merged[family.name].samples += family.samples
        else:
            merged[family.name] = family
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(merged.values())))
    return generate_latest(own) + generate_latest(registry)
