"""Who leads a partition. Electing is one thing, fencing another: the epoch lives in Redis, the thing that it protects,
whoever elects."""

import asyncio
import logging
import time
from typing import Protocol

from services.common import process
from services.common.failpoints import failpoint
from services.common.redis.store import CONNECTION_ERRORS, Store, until_answered

log = logging.getLogger(__name__)

# A lead is renewed every RENEW_S and lapses after its time to live; a standby that sees it lapsed waits CLAIM_S more,
# in which a leader that was only cut off from Redis renews it.
LEAD_TTL_MS = 900
RENEW_S = 0.2
CLAIM_S = 0.3
STANDBY_S = 0.1


class LeadLost(process.ProcessEnded):
    """Another scheduler leads: this process ends, and its supervisor starts it as a standby."""


class Leadership(Protocol):
    """At most one at a time is meant to lead; that no other can do harm is what the epoch is for."""

    async def take(self) -> int:
        """Wait until the lead is ours; returns the epoch, raised. May be cancelled."""
        ...

    async def keep(self, epoch: int) -> None:
        """Renew the lead until cancelled; cut off from who elects, go on. Raises LeadLost when another has it."""
        ...

    async def resign(self) -> None:
        """Let another lead at once. Raises one of CONNECTION_ERRORS."""
        ...


async def hold_epoch(store: Store, identity: str, epoch: int) -> None:
    """Look after the epoch until cancelled; cut off from Redis, go on under it. Raises LeadLost when it is over."""
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            lead = await store.lead(identity, LEAD_TTL_MS, epoch)
        except CONNECTION_ERRORS:
            log.debug("Redis does not answer; going on under epoch %d", epoch)
            continue
        if not isinstance(lead, tuple) or lead[0] != epoch:
            raise LeadLost(f"epoch {epoch} is over")


class RedisLeadership:
    """Elected by a lock in Redis."""

    def __init__(self, store: Store, identity: str) -> None:
        self._store = store
        self._identity = identity

    async def take(self) -> int:
        vacant_since: float | None = None
        said = False
        while True:
            claim = vacant_since is not None and time.monotonic() - vacant_since >= CLAIM_S
            try:
                lead = await self._store.lead(self._identity, LEAD_TTL_MS, claim="vacant" if claim else "")
            except CONNECTION_ERRORS as error:
                log.log(logging.DEBUG if said else logging.WARNING, "Redis does not answer (%s); trying again", error)
                lead = None
            else:
                if lead is None and not said:
                    log.info("another scheduler leads; standing by")
            if isinstance(lead, tuple):
                failpoint("lead.taken")
                await until_answered(self._store.load_functions)
                return lead[0]
            if lead != "vacant":
                vacant_since = None
            elif vacant_since is None:
                vacant_since = time.monotonic()
            said = True
            await asyncio.sleep(STANDBY_S)

    async def keep(self, epoch: int) -> None:
        await hold_epoch(self._store, self._identity, epoch)

    async def resign(self) -> None:
        await self._store.lead(self._identity, 0)
