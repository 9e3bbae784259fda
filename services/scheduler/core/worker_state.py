"""What the scheduler knows of one worker: its pools, its sequences, the plans in flight."""

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core.block_manager import BlockPool
from services.scheduler.core.cost import StepTimeModel
from services.scheduler.core.prefix_cache import block_digests
from services.scheduler.core.request import DecodeClock, Sequence, Status
from services.scheduler.core.step import Decodes, StepPlan, WorkerLimits

if TYPE_CHECKING:
    from services.scheduler.core.trials import Trial


class Claim(NamedTuple):
    """What a sequence that waits on a worker wants of its next plan."""

    blocks: int
    tokens: int


class WorkerState:
    """One worker (model replica) as the scheduler sees it.

    running: sequences that hold blocks here, by assignment, in the order of admission. Each is in one of
    prefilling, decoding (one token in every plan, until said otherwise), held (would decode, sits out) or is drained.
    queue: sequences bound to this worker, preempted here or placed here for its next plan, and what each wants.
    ended: their worker said so, the journal does not yet.
    """

    def __init__(self, name: str, limits: WorkerLimits, caches: bool, on_cache: Callable[[bytes, bool], None]) -> None:
        self.name = name
        self.limits = limits
        self.caches = caches
        self.pool = BlockPool(limits.num_blocks, limits.block_size, on_cache)
        self.host = BlockPool(limits.num_host_blocks, limits.block_size)
        self.model = StepTimeModel()
        self.running: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.held: dict[int, Sequence] = {}
        self.ended: dict[int, Sequence] = {}
        self.queue: dict[Sequence, Claim] = {}
        self.queued_blocks = 0
        self.queued_tokens = 0
        self.incoming: dict[Sequence, None] = {}  # moving here, and not yet arrived
        self.in_flight: deque[StepPlan] = deque()
        self.applied = 0
        self.next_plan = 1
        self.to_release: list[int] = []
        self.to_hold: set[int] = set()
        self.to_resume: set[int] = set()
        self.needs_block: list[Sequence] = []
        self.num_drained = 0
        # It was given sequences and started none: it is not asked again before something has changed here.
        self.declined = False
        self.draining = False  # it wants to go, or an operator wants it empty
        self.trial: Trial | None = None
        self.tpot_targets: Counter[float] = Counter()
        self._clock = DecodeClock()
        self._calendar: dict[int, list[Sequence]] = {}
        self._positions = 0  # of the decode set, less the clock's count for each member
        self._decodes: Decodes | None = None

    def suspects(self) -> list[Sequence]:
        """Who was in a step that has not come back."""
        in_flight = (item for plan in self.in_flight for item in plan.scheduled)
        still = (i.sequence for i in in_flight if i.sequence.sequence_id == i.sequence_id)
        return list(dict.fromkeys(s for s in still if s.status in (Status.RUNNING, Status.PREEMPTED)))

    @property
    def takes_new(self) -> bool:
        """Waiting sequences may be placed here."""
        return not (self.declined or self.draining or self.trial)

    # -- load

    @property
    def num_active(self) -> int:
        """Sequences that still need steps. One whose last token is already planned has left its slot."""
        return len(self.running) - self.num_drained

    @property
    def load(self) -> int:
        """Sequences that have a slot or are about to."""
        return len(self.running) - self.num_drained + len(self.queue) + len(self.incoming)

    @property
    def tpot_target(self) -> float:
        """The strictest target of those that run here, in seconds; 0 if none has one."""
        return min((target for target in self.tpot_targets if target), default=0.0)

    @property
    def attended(self) -> int:
        """Positions that the decode set attends to in its next step."""
        return self._positions + len(self.decoding) * (self._clock.count + 1)

    # -- the decode set

    def decodes(self) -> Decodes:
        """The set as the next plan runs it."""
        if self._decodes is None:
            self._decodes = Decodes(tuple(self.decoding.values()), tuple(self.decoding))
        return self._decodes

    def join(self, sequence: Sequence) -> None:
        """It decodes on, from the next plan made."""
        self.prefilling.pop(sequence.sequence_id, None)
        self.held.pop(sequence.sequence_id, None)
        if sequence.num_scheduled >= sequence.total_slots:
            self.drain(sequence)
            return
        self.decoding[sequence.sequence_id] = sequence
        sequence.follow(self._clock)
        self._positions += sequence.num_scheduled - self._clock.count
        self._decodes = None
        self._book(sequence)

    def _book(self, sequence: Sequence) -> None:
        """Note when its table will be full or its last token planned: nobody looks at it before that."""
        full = len(sequence.block_table) * self.limits.block_size
        steps = min(full, sequence.total_slots) - sequence.num_scheduled
        sequence.due = self._clock.count + steps
        if steps > 0:
            self._calendar.setdefault(sequence.due, []).append(sequence)
        else:
            self.needs_block.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It does not decode on, for now."""
        if self.decoding.pop(sequence.sequence_id, None) is not None:
            self._positions -= sequence.num_scheduled - self._clock.count
            sequence.unfollow()
            self._decodes = None

    def hold(self, sequence: Sequence) -> None:
        """It sits out until it joins again."""
        self.leave(sequence)
        self.held[sequence.sequence_id] = sequence

    def tick(self, plan: int) -> None:
        """A plan runs the decode set: every member is a token further."""
        clock = self._clock
        clock.count += 1
        clock.last_plan = plan
        for sequence in self._calendar.pop(clock.count, ()):
            if sequence.due != clock.count or self.decoding.get(sequence.sequence_id) is not sequence:
                continue  # it has left meanwhile, and was booked anew if it came back
            if sequence.num_scheduled >= sequence.total_slots:
                self.drain(sequence)
            else:
                self.needs_block.append(sequence)

    def grown(self, sequence: Sequence) -> None:
        """A member of the decode set has got blocks."""
        self._book(sequence)

    def drain(self, sequence: Sequence) -> None:
        """It needs no more steps, only results."""
        self.leave(sequence)
        self.held.pop(sequence.sequence_id, None)
        self.prefilling.pop(sequence.sequence_id, None)
        if not sequence.drained:
            sequence.drained = True
            self.num_drained += 1

    # -- coming and going

    def enqueue(self, sequence: Sequence, blocks: int, tokens: int = 0) -> None:
        """It is bound to this worker and waits for its next plan, or for blocks. tokens: that it will compute there, as
        far as is known."""
        self.queue[sequence] = Claim(blocks, tokens)
        self.queued_blocks += blocks
        self.queued_tokens += tokens

    def dequeue(self, sequence: Sequence) -> None:
        """It waits here no longer."""
        claim = self.queue.pop(sequence)
        self.queued_blocks -= claim.blocks
        self.queued_tokens -= claim.tokens

    def enter(self, sequence: Sequence) -> None:
        """It has a slot here."""
        self.running[sequence.sequence_id] = sequence
        self.prefilling[sequence.sequence_id] = sequence
        self.tpot_targets[sequence.slo.tpot_s] += 1

    def forget(self, sequence: Sequence, tell_worker: bool) -> None:
        """Take the sequence's blocks and slot back; what it computed stays in the cache as long as nobody needs
        the room."""
        self.leave(sequence)
        del self.running[sequence.sequence_id]
        self.held.pop(sequence.sequence_id, None)
        self.prefilling.pop(sequence.sequence_id, None)
        self.to_hold.discard(sequence.sequence_id)
        self.to_resume.discard(sequence.sequence_id)
        self.num_drained -= sequence.drained
        self.tpot_targets[sequence.slo.tpot_s] -= 1
        if not self.tpot_targets[sequence.slo.tpot_s]:
            del self.tpot_targets[sequence.slo.tpot_s]
        self.cache(sequence)
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []
        if tell_worker:
            self.to_release.append(sequence.sequence_id)

    def cache(self, sequence: Sequence) -> None:
        """Let the prefix cache know the blocks that are full by results already applied."""
        full = sequence.num_computed // self.limits.block_size
        if not self.caches or full <= sequence.num_hashed:
            return
        digests = block_digests(sequence, self.limits.block_size, full)
        for index in range(sequence.num_hashed, full):
            self.pool.remember(sequence.block_table[index], digests[index])
        sequence.num_hashed = full
