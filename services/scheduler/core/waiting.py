"""The queue of sequences that no worker has yet, in the order of an order policy."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.scheduler.core.order import OrderPolicy
from services.scheduler.core.request import Sequence


class WaitingQueue:
    """Sorted flows. Adding, removing and looking at the first cost next to nothing, however many wait."""

    def __init__(self, order: OrderPolicy) -> None:
        self._order = order
        self._flows: dict[str, list[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for flow in self._flows.values() for sequence in flow)

    @property
    def flows(self) -> dict[str, list[Sequence]]:
        """The flows that have something waiting, each sorted."""
        return self._flows

    def add(self, sequence: Sequence, returned: bool = False) -> None:
        """returned: it was here a moment ago, so its flow has not been away."""
        name = self._order.flow(sequence)
        flow = self._flows.get(name)
        if flow is None:
            if not returned:
                self._order.on_enter(name, self._flows)
            flow = self._flows[name] = []
        insort(flow, sequence, key=self._order.key)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError if the sequence does not wait here."""
        name = self._order.flow(sequence)
        flow = self._flows.get(name, [])
        index = bisect_left(flow, self._order.key(sequence), key=self._order.key)
        if index == len(flow) or flow[index] is not sequence:
            raise ValueError(f"{sequence.request_id}/{sequence.choice} does not wait")
        del flow[index]
        self._count -= 1
        if not flow:
            del self._flows[name]
            self._order.on_leave(name)

    def first(self) -> Sequence | None:
        """Who comes next, over all flows."""
        if len(self._flows) <= 1:
            return next((flow[0] for flow in self._flows.values()), None)
        rank = self._order.rank
        return self._flows[min(self._flows, key=lambda name: (rank(name), self._order.key(self._flows[name][0])))][0]
