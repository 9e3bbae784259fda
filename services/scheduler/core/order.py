"""Order policies: who comes first, and so who is the victim (the last) when blocks run out."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from services.scheduler.core.request import Sequence

Key = tuple[float, ...]

# What a token of input and of output costs a tenant (VTC, OSDI'24, section 3.1).
INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
MAX_TENANTS = 10_000


class OrderPolicy:
    """First come, first served, and what the other policies change of it.

    Sequences wait in flows. Within a flow they are sorted by `key`, which must not change while a sequence waits;
    `rank` says which flow goes first, and may change at any time. Smaller comes first.
    """

    name = "fcfs"
    counts_service = False
    acts_on_running = False

    def flow(self, sequence: Sequence) -> str:
        return ""

    def rank(self, flow: str) -> float:
        return 0.0

    def key(self, sequence: Sequence) -> Key:
        """A total order: ties are broken by arrival and choice."""
        return (sequence.arrival, sequence.choice)

    def urgency(self, sequence: Sequence) -> Key:
        """The order across flows, as it is now."""
        return (self.rank(self.flow(sequence)), *self.key(sequence))

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """True if `running` should give way to `waiting`. Must be a strict order, or the two would take turns."""
        return False

    def on_enter(self, flow: str, others: Collection[str]) -> None:
        """A flow that had nothing waiting has something now; `others` have too."""

    def on_leave(self, flow: str) -> None:
        """A flow has nothing waiting any more."""

    def on_selected(self, sequence: Sequence) -> None:
        """A sequence leaves the queue for a worker."""

    def on_returned(self, sequence: Sequence) -> None:
        """It could not start there."""

    def on_tokens(self, tokens: Mapping[str, int]) -> None:
        """Output tokens that the tenants got."""


class Fcfs(OrderPolicy):
    """First come, first served."""


class Priority(OrderPolicy):
    """Higher priority first; the same priority first come, first served. Acts on running work: a waiting sequence
    takes the place of a running one of lower priority in the next plan made."""

    name = "priority"
    acts_on_running = True

    def key(self, sequence: Sequence) -> Key:
        return (-sequence.priority, sequence.arrival, sequence.choice)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.priority > running.priority


class Deadline(OrderPolicy):
    """Earliest deadline first, on the next token: arrival + TTFT target + TPOT target x tokens so far. Optimal while
    the load can be borne; under overload the late come first, which makes more of them late."""

    name = "deadline"

    def key(self, sequence: Sequence) -> Key:
        slo = sequence.slo
        due = sequence.arrived_s + slo.ttft_s + slo.tpot_s * len(sequence.output)
        return (due, sequence.arrival, sequence.choice)


class Fair(OrderPolicy):
    """Virtual Token Counter (Sheng et al., OSDI'24, algorithm 2): the tenant served least goes first.

    Service is weighted input and output tokens, divided by the tenant's own weight (weighted VTC there). A tenant that
    comes back is lifted to the least counter among those that wait, so that nobody saves up. Of two tenants of weight 1
    that both have work waiting all the time, neither gets more than 2 * max(w_in * L, w_out * M) more service than the
    other, with L the longest input and M the most tokens that the workers hold at once (theorem 4.4 there).
    """

    name = "fair"
    counts_service = True

    def __init__(self) -> None:
        self.counters: defaultdict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = {}  # where they are not 1
        self._last_left = ""

    def flow(self, sequence: Sequence) -> str:
        return sequence.tenant

    def rank(self, flow: str) -> float:
        return self.counters[flow]

    def on_enter(self, flow: str, others: Collection[str]) -> None:
        least = min((self.counters[other] for other in others), default=self.counters[self._last_left])
        if len(self.counters) > MAX_TENANTS:
            # Whoever has been served less than the least would be lifted to it anyway on coming back.
            self.counters = defaultdict(float, {k: v for k, v in self.counters.items() if v > least or k in others})
        self.counters[flow] = max(self.counters[flow], least)

    def on_leave(self, flow: str) -> None:
        self._last_left = flow

    def on_selected(self, sequence: Sequence) -> None:
        # What is computed again after a preemption, a move or a crash is our cost, not service.
        if not sequence.charged:
            sequence.charged = sequence.refundable = True
            self._note_weight(sequence)
            self.counters[sequence.tenant] += INPUT_WEIGHT * sequence.num_prompt_tokens / sequence.weight

    def _note_weight(self, sequence: Sequence) -> None:
        if sequence.weight != 1.0 and len(self._weights) < MAX_TENANTS:
            self._weights[sequence.tenant] = sequence.weight
        else:
            self._weights.pop(sequence.tenant, None)

    def on_returned(self, sequence: Sequence) -> None:
        if sequence.refundable:
            sequence.charged = sequence.refundable = False
            self.counters[sequence.tenant] -= INPUT_WEIGHT * sequence.num_prompt_tokens / sequence.weight

    def on_tokens(self, tokens: Mapping[str, int]) -> None:
        for tenant, count in tokens.items():
            self.counters[tenant] += OUTPUT_WEIGHT * count / self._weights.get(tenant, 1.0)


ORDER_POLICIES: dict[str, type[OrderPolicy]] = {policy.name: policy for policy in (Fcfs, Priority, Deadline, Fair)}
