"""What the routes and the runner ask of where files and batches are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.router.core.batches import Batch, Order
from services.router.core.files import File


@dataclass(frozen=True, slots=True)
class ShelfLimits:
    """file_bytes: of one file. tenant_files, tenant_bytes, tenant_batches: the most that one tenant may have; 0 is no
    limit, of batches always one. ttl_s: how long files and finished batches are kept."""

    file_bytes: int = 16 << 20
    tenant_files: int = 1000
    tenant_bytes: int = 128 << 20
    tenant_batches: int = 1000
    ttl_s: int = 7 * 86_400


class LeaseLost(Exception):
    """Another router works on this batch."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch that this router works on. fence: no earlier owner has as high a one."""

    batch: str
    fence: str


class Shelf(Protocol):
    """Every call raises Unavailable when it is not answered for a while; all may be tried again."""

    # -- files

    async def put_chunk(self, file: str, index: int, data: bytes) -> None:
        """A chunk of a file to come. One that never comes is forgotten after a while."""
        ...

    async def put_file(self, tenant: str, file: File, claim: Claim | None = None) -> None:
        """Its chunks are a file now: within the tenant's limits, or under the claim of the batch whose result it is.
        Raises InvalidRequest or LeaseLost."""
        ...

    async def file(self, tenant: str, name: str) -> File:
        """Raises NotFound."""
        ...

    async def files(self, tenant: str) -> list[File]:
        """The newest first."""
        ...

    async def chunk(self, file: str, index: int) -> bytes | None:
        """None if it is gone."""
        ...

    async def delete_file(self, tenant: str, name: str) -> None:
        """Raises NotFound."""
        ...

    async def drop_chunks(self, file: str) -> None:
        """Of a file that will not come."""
        ...

    # -- batches

    async def create_batch(self, order: Order) -> Batch:
        """Raises Overloaded."""
        ...

    async def batch(self, tenant: str | None, name: str) -> Batch:
        """Raises NotFound, also when it is another tenant's; None is any."""
        ...

    async def batches(self, tenant: str, after: str, most: int) -> list[Batch]:
        """The newest first, at most so many, those after the one that is named. One that is not known ends the list."""
        ...

    async def cancel_batch(self, tenant: str, name: str) -> None:
        """Raises NotFound or Conflict."""
        ...

    # -- working on them

    async def claim(self, lease_ms: int) -> Claim | None:
        """A batch that nobody works on."""
        ...

    async def renew(self, claim: Claim, lease_ms: int) -> tuple[str, int]:
        """Keep a batch, or give it back with 0: its status, and the bytes of its results. Raises LeaseLost."""
        ...

    async def advance(self, claim: Claim, before: str, status: str, over: bool = False, **fields: Any) -> bool:
        """From one status to another, with what changes by it; over: it is worked on no more. False if it does not have
        the first one any more. Raises LeaseLost."""
        ...

    async def done(self, batch: str) -> set[int]:
        """The lines that have results."""
        ...

    async def put_result(self, claim: Claim, number: int, well: bool, line: bytes) -> None:
        """The first one of a line stays. Raises LeaseLost."""
        ...

    async def results(self, batch: str, numbers: Sequence[int]) -> list[tuple[bool, bytes] | None]:
        """(whether it went well, the line) of each, or None."""
        ...

    async def abort_request(self, request_id: str) -> None:
        """Nobody wants this request's answer any more."""
        ...
