"""Order policies: who comes first, and so who is the victim (the last) when blocks run out."""

from typing import Protocol

from services.scheduler.core.request import Sequence

OrderKey = tuple[int, ...]


class OrderPolicy(Protocol):
    name: str

    def key(self, sequence: Sequence) -> OrderKey:
        """Smaller comes first. Must be a total order: ties are broken by arrival and choice."""
        ...


class Fcfs:
    """First come, first served."""

    name = "fcfs"

    def key(self, sequence: Sequence) -> OrderKey:
        return (sequence.arrival, sequence.choice)


ORDER_POLICIES: dict[str, type[OrderPolicy]] = {policy.name: policy for policy in (Fcfs,)}
