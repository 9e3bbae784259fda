"""Builds one step plan: the vocabulary in which batching policies speak."""

from collections import Counter
from collections.abc import Callable, Container, Iterator

from services.scheduler.core.block_manager import blocks_for
from services.scheduler.core.explain import Explain, Reason
from services.scheduler.core.order import OrderPolicy
from services.scheduler.core.prefix_cache import reusable_digests
from services.scheduler.core.request import Sequence, Status
from services.scheduler.core.step import Features, Scheduled, StepPlan
from services.scheduler.core.worker_state import WorkerState

# Of the TPOT target, the part that a step is planned to take: the rest is for what the model cannot foresee.
SLO_MARGIN = 0.9


class StepBuilder:
    """The step being decided, for one worker. Policies call its verbs; it keeps blocks and counters right."""

    def __init__(
        self,
        worker: WorkerState,
        order: OrderPolicy,
        next_id: Callable[[], int],
        spare: Callable[[WorkerState, int], int],
        explain: Explain | None = None,
    ) -> None:
        self.worker = worker
        self.limits = worker.limits
        self.num_preempted = 0
        self.num_swapped = 0
        self.num_hit_tokens = 0
        self.num_recomputed = 0
        self.num_displaced = 0
        self._order = order
        self._next_id = next_id
        self._spare = spare
        self._explain = explain
        self._prefill_tokens = 0
        self._attended = 0
        self._context = 0
        self._prefills: list[Scheduled] = []
        self._added: list[Scheduled] = []
        self._granted: dict[int, list[int]] = {}
        self._copies: list[tuple[int, int]] = []
        self._swap_out: list[tuple[int, tuple[int, ...]]] = []
        self._swap_in: list[tuple[int, tuple[int, ...]]] = []
        self._host_blocks_freed: list[int] = []
        self._kept: set[int] = set()  # got their place in this very plan: no victims
        self._grown: list[Sequence] = []
        if explain:
            explain.plan = worker.next_plan

    # -- room

    @property
    def num_scheduled(self) -> int:
        return len(self.worker.decoding) + len(self._prefills)

    @property
    def num_prefills(self) -> int:
        """Sequences in this step that do not merely decode on."""
        return len(self._prefills)

    @property
    def has_slot(self) -> bool:
        """Room for one more sequence in this step."""
        return self.num_scheduled < self.limits.max_num_seqs

    @property
    def budget(self) -> int:
        """Tokens that may still be scheduled, by the operator's limit."""
        return self.limits.token_budget - len(self.worker.decoding) - self._prefill_tokens

    def prefill_budget(self) -> int:
        """Tokens of prefill that may still be scheduled: within the operator's limit, and so that the step ends within
        the TPOT target of every sequence that decodes in it. A block at least, if the limit allows: prefills that never
        end would break every TTFT target."""
        worker = self.worker
        target = worker.tpot_target * SLO_MARGIN
        if not target or not worker.decoding or not worker.model.num_observed or self.budget <= 0:
            return self.budget
        decodes = Features(len(worker.decoding), len(worker.decoding), worker.attended, worker.attended)
        context = worker.attended // len(worker.decoding)
        allowed = max(worker.model.budget(target, decodes, context), self.limits.block_size)
        return min(self.budget, allowed - self._prefill_tokens)

    # -- running sequences

    def decode(self, limit: int) -> None:
        """One token of every sequence that decodes, the first in order if there are more than `limit`; blocks on
        demand, from the last in order if need be (PagedAttention, SOSP'23, section 4.5)."""
        worker = self.worker
        if self.limits.stages > 1:
            self._rotate(limit)
        elif worker.held or len(worker.decoding) > limit:
            self._choose([*worker.decoding.values(), *worker.held.values()], limit)
        self._extend_all()

    def decode_only(self, wanted: Container[Sequence]) -> None:
        """One token of every sequence that decodes and is wanted; the others sit out."""
        worker = self.worker
        self._choose([sequence for sequence in worker.decoding.values() if sequence not in wanted], 0)
        mine = [s for s in (*worker.decoding.values(), *worker.held.values()) if s in wanted]
        ready = mine if self.limits.stages == 1 else [s for s in mine if s.last_plan <= worker.applied]
        self._choose([sequence for sequence in mine if sequence not in ready], 0)
        self._choose(ready, self.limits.max_num_seqs)
        self._extend_all()

    def _extend_all(self) -> None:
        worker = self.worker
        if worker.needs_block:
            wanting, worker.needs_block = worker.needs_block, []
            for sequence in sorted(wanting, key=self._order.urgency):
                self._extend(sequence)

    def rest(self) -> None:
        """Every sequence that decodes sits this step out."""
        self._choose(list(self.worker.decoding.values()), 0)

    def _rotate(self, limit: int) -> None:
        """With pipeline stages, a token must have come out before the next goes in."""
        worker = self.worker
        candidates = [*worker.decoding.values(), *worker.held.values()]
        ready = [sequence for sequence in candidates if sequence.last_plan <= worker.applied]
        busy = [sequence for sequence in worker.decoding.values() if sequence.last_plan > worker.applied]
        self._choose(busy, 0)
        self._choose(ready, limit)

    def _choose(self, candidates: list[Sequence], limit: int) -> None:
        """Of the candidates, the first `limit` in order decode and the others sit out."""
        if len(candidates) > limit:
            candidates.sort(key=self._order.urgency)
        for sequence in candidates[:limit]:
            if sequence.sequence_id in self.worker.held:
                self.worker.join(sequence)
                self._say(sequence.sequence_id, self.worker.to_resume, self.worker.to_hold)
        for sequence in candidates[limit:]:
            if sequence.sequence_id in self.worker.decoding:
                self.worker.hold(sequence)
                self._say(sequence.sequence_id, self.worker.to_hold, self.worker.to_resume)
                self._note(sequence, Reason.HELD)

    @staticmethod
    def _say(sequence_id: int, to: set[int], instead_of: set[int]) -> None:
        """Tell the worker, unless this only takes back what it would have been told."""
        if sequence_id in instead_of:
            instead_of.discard(sequence_id)
        else:
            to.add(sequence_id)

    def _extend(self, sequence: Sequence) -> None:
        """A block for the next token of a member of the decode set."""
        worker = self.worker
        held = len(sequence.block_table)
        if worker.decoding.get(sequence.sequence_id) is not sequence:
            return
        if held * self.limits.block_size > sequence.num_scheduled:
            return
        while not self._grow(sequence, held + 1):
            victim = max(worker.running.values(), key=self._order.urgency)
            self.preempt(victim, f"{sequence.request_id} needs its blocks")
            if victim is sequence:
                return
        worker.grown(sequence)
        self._grown.append(sequence)

    def has_prefills(self) -> bool:
        """Something could be prefilled in this step."""
        return bool(self.worker.prefilling or self.worker.queue)

    def prefills(self) -> list[Sequence]:
        """Running sequences whose known tokens are not all computed, first in order first."""
        return sorted(self.worker.prefilling.values(), key=self._order.urgency)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule a chunk of a prefill; admission has reserved its blocks."""
        self._schedule(sequence, num_tokens)

    # -- waiting sequences

    def candidates(self) -> Iterator[Sequence]:
        """Sequences bound to this worker that could start, first in order first. Safe against admission meanwhile."""
        for sequence in sorted(self.worker.queue, key=self._order.urgency):
            # A preempted sequence comes back only when its last results are known: they are part of its prompt now.
            if sequence.status is Status.PREEMPTED and sequence.last_plan > self.worker.applied:
                self._note(sequence, Reason.RESULTS_DUE)
            elif self.worker.num_active >= self.limits.max_active and not self.may_displace(sequence):
                self._note(sequence, Reason.NO_SLOT)
                return
            else:
                yield sequence

    def admit(self, sequence: Sequence, budget: int, reserve: int) -> bool:
        """Start a waiting sequence with up to `budget` tokens and with blocks for `reserve` positions, those of its
        prompt that are cached among them. False, and nothing changed, if the blocks are not free or the watermark
        would be passed."""
        if sequence.host_table:
            return self._swap_back(sequence, budget, reserve)
        hits = self._find_prefix(sequence)
        if not self._fits(sequence, hits, reserve):
            self._note(sequence, Reason.NO_BLOCKS)
            return False
        worker = self.worker
        worker.dequeue(sequence)
        sequence.sequence_id = self._next_id()
        sequence.worker = worker.name
        sequence.move_to(Status.RUNNING)
        worker.enter(sequence)
        worker.pool.share(hits)
        sequence.block_table = list(hits)
        sequence.restart(len(hits) * self.limits.block_size)
        sequence.num_hashed = len(hits)
        if hits:
            self._granted[sequence.sequence_id] = list(hits)
        granted = self._grow(sequence, blocks_for(reserve, self.limits.block_size))
        assert granted, "free blocks were counted"
        self._copy_tail(sequence)
        self.num_hit_tokens += sequence.num_computed
        self.num_recomputed += max(0, sequence.num_lost - sequence.num_computed)
        sequence.num_lost = 0
        sequence.refundable = False
        self._note(sequence, Reason.ADMITTED, f"{sequence.num_computed} tokens from the cache")
        computed = sequence.num_computed
        self._added.append(self._schedule(sequence, min(budget, sequence.remaining), computed))
        return True

    def start(self, sequence: Sequence, budget: int, reserve: int) -> bool:
        """Admit a waiting sequence, in the place of running ones if the order says so."""
        if self.has_slot and self.worker.num_active < self.limits.max_active and self.admit(sequence, budget, reserve):
            return True
        return self._make_room(sequence, reserve) and self.admit(sequence, budget, reserve)

    def lacks_budget(self, sequence: Sequence) -> None:
        """It would start now, but the step's tokens are spent."""
        self._note(sequence, Reason.NO_BUDGET)

    def returned(self, wanted: Container[Sequence]) -> list[Sequence]:
        """Wanted sequences bound to this worker that can start, first in order first."""
        ready = (s for s in self.worker.queue if s.status is Status.WAITING or s.last_plan <= self.worker.applied)
        return sorted((s for s in ready if s in wanted), key=self._order.urgency)

    def displace(self, sequence: Sequence, budget: int, reserve: int, spared: Container[Sequence]) -> bool:
        """Admit a waiting sequence whatever it takes: who is not spared gives way, the last in order first."""
        worker = self.worker
        victims = sorted(
            (s for i, s in worker.running.items() if i not in self._kept and s not in spared), key=self._order.urgency
        )
        while not (
            self.has_slot
            and worker.num_active < self.limits.max_active
            and self.admit(sequence, min(budget, self.budget), reserve)
        ):
            if not victims:
                return False
            self.preempt(victims.pop(), f"{sequence.request_id} is on trial")
            self.num_displaced += 1
        return True

    def may_displace(self, sequence: Sequence) -> bool:
        """True if something runs here that must give way to this sequence."""
        order = self._order
        return order.acts_on_running and any(order.outranks(sequence, s) for s in self.worker.running.values())

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its beginning."""
        if not self.worker.caches:
            return []
        return self.worker.pool.find(reusable_digests(sequence, self.limits.block_size))

    def _copy_tail(self, sequence: Sequence) -> None:
        """Copy on write: of a block that a choice shares in part only, it gets a copy, and computes the prompt's last
        token alone."""
        leader, size = sequence.leader, self.limits.block_size
        last = sequence.num_prompt_tokens - 1
        if leader is None or sequence.output or not self.worker.caches or not sequence.reuses:
            return
        if sequence.num_computed >= last:
            return
        alive = self.worker.running.get(leader.sequence_id) is leader
        if alive and leader.num_computed >= last and sequence.num_computed // size == last // size:
            self._kept.add(leader.sequence_id)  # what is copied from must last until the copy
            self._copies.append((leader.block_table[last // size], sequence.block_table[last // size]))
            sequence.restart(last)
            sequence.num_hashed = last // size

    def _fits(self, sequence: Sequence, hits: list[int], reserve: int) -> bool:
        """Running sequences may want blocks soon; an empty worker holds nothing back."""
        pool = self.worker.pool
        needed = blocks_for(reserve, self.limits.block_size) - len(hits) + pool.num_idle(hits)
        return pool.num_free - needed >= self._spare(self.worker, 0)

    def _swap_back(self, sequence: Sequence, budget: int, reserve: int) -> bool:
        """Bring a sequence back from host memory, where its KV is whole."""
        worker, size = self.worker, self.limits.block_size
        needed = blocks_for(max(reserve, sequence.num_tokens, sequence.num_scheduled + 1), size)
        if worker.pool.num_free - needed < self._spare(worker, 0):
            self._note(sequence, Reason.NO_BLOCKS)
            return False
        blocks = worker.pool.allocate(needed)
        assert blocks is not None, "free blocks were counted"
        worker.dequeue(sequence)
        sequence.move_to(Status.RUNNING)
        worker.enter(sequence)
        self._swap_in.append((sequence.sequence_id, tuple(blocks)))
        # The copy back is part of this very plan: until it is made, nothing may be swapped onto these blocks.
        self._host_blocks_freed += sequence.host_table
        sequence.host_table, sequence.block_table = [], blocks
        self._note(sequence, Reason.ADMITTED, "from host memory")
        self._schedule(sequence, min(sequence.remaining, budget))
        return True

    # -- taking

    def preempt(self, sequence: Sequence, why: str = "") -> None:
        """Take all blocks of a running sequence; it resumes in its old place, output kept: from a copy in host memory,
        or by computing it again, whichever is foreseen to cost less."""
        assert sequence.sequence_id not in self._kept, "a scheduled sequence is no victim"
        worker = self.worker
        swap = self._should_swap(sequence)
        self._grown = [other for other in self._grown if other is not sequence]
        self._granted.pop(sequence.sequence_id, None)  # the worker will not hear of a block that it never used
        if swap:
            self._move_to_host(sequence)
        worker.forget(sequence, tell_worker=not swap)
        sequence.move_to(Status.PREEMPTED)
        if not swap:
            sequence.num_lost = max(sequence.num_lost, sequence.num_computed)
            sequence.restart()
        sequence.drained = False
        sequence.num_preemptions += 1
        self.num_preempted += 1
        self.num_swapped += swap
        worker.enqueue(sequence, blocks_for(sequence.num_tokens, self.limits.block_size))
        self._note(sequence, Reason.SWAPPED if swap else Reason.PREEMPTED, why)

    def _should_swap(self, sequence: Sequence) -> bool:
        worker = self.worker
        used = blocks_for(sequence.num_scheduled, self.limits.block_size)
        if not used or worker.host.num_free < used or sequence.drained:
            return False
        again = sequence.num_scheduled * worker.model.token_s(sequence.num_scheduled // 2)
        return 2 * used * self.limits.swap_s < again

    def _move_to_host(self, sequence: Sequence) -> None:
        used = blocks_for(sequence.num_scheduled, self.limits.block_size)
        host = self.worker.host.allocate(used)
        assert host is not None, "host blocks were counted"
        sequence.host_table = host
        self._swap_out.append((sequence.sequence_id, tuple(host)))

    def _make_room(self, sequence: Sequence, reserve: int) -> bool:
        """Preempt running sequences that the order says must give way to a waiting one, the last in order first, and no
        more than it takes. False, and nothing changed, if all of them would not be enough."""
        worker, order = self.worker, self._order
        victims = sorted(
            (s for i, s in worker.running.items() if i not in self._kept and order.outranks(sequence, s)),
            key=order.urgency,
            reverse=True,
        )
        hits = self._find_prefix(sequence)
        chosen: list[Sequence] = []
        while not self._fits_without(chosen, hits, reserve):
            if len(chosen) == len(victims):
                return False
            chosen.append(victims[len(chosen)])
        for victim in reversed(list(chosen)):  # one may have been in vain: the next had what was missing
            rest = [other for other in chosen if other is not victim]
            if self._fits_without(rest, hits, reserve):
                chosen = rest
        for victim in chosen:
            self.preempt(victim, f"{sequence.request_id} comes first")
        return bool(chosen)

    def _fits_without(self, victims: list[Sequence], hits: list[int], reserve: int) -> bool:
        """Would there be a slot and the blocks, if these sequences were gone?"""
        worker, pool = self.worker, self.worker.pool
        decoding = sum(victim.sequence_id in worker.decoding for victim in victims)
        active = worker.num_active - sum(not victim.drained for victim in victims)
        if self.num_scheduled - decoding >= self.limits.max_num_seqs or active >= self.limits.max_active:
            return False
        given_up = Counter(block for victim in victims for block in victim.block_table)
        free = pool.num_free + sum(pool.ref_cnt(block) == count for block, count in given_up.items())
        idle_hits = sum(pool.ref_cnt(block) == given_up[block] for block in hits)
        needed = blocks_for(reserve, self.limits.block_size) - len(hits) + idle_hits
        return free - needed >= self._spare(worker, len(victims))

    # -- the plan

    def build(self) -> StepPlan | None:
        """The plan, as a delta; None if there is nothing to run and nobody to let go."""
        worker = self.worker
        if not self.num_scheduled and not self._swap_out and not (worker.to_release and not worker.in_flight):
            return None
        decodes = worker.decodes()
        number = worker.next_plan
        plan = StepPlan(
            number=number,
            worker=worker.name,
            decodes=decodes,
            prefills=tuple(self._prefills),
            features=Features(
                len(decodes.ids) + self._prefill_tokens,
                self.num_scheduled,
                worker.attended + self._attended,
                worker.attended + self._context,
            ),
            add=tuple(self._added),
            blocks=tuple((sequence_id, tuple(blocks)) for sequence_id, blocks in self._granted.items()),
            copies=tuple(self._copies),
            swap_out=tuple(self._swap_out),
            swap_in=tuple(self._swap_in),
            hold=tuple(sorted(worker.to_hold)),
            resume=tuple(sorted(worker.to_resume)),
            release=tuple(worker.to_release),
            full=number == 1,
            grown=tuple(self._grown),
            trial=worker.trial,
        )
        worker.to_release.clear()
        worker.to_hold.clear()
        worker.to_resume.clear()
        worker.host.free(self._host_blocks_freed)
        worker.next_plan += 1
        worker.in_flight.append(plan)
        if decodes.ids:
            worker.tick(number)
        for item in self._prefills:
            if item.samples:
                worker.join(item.sequence)
        if self._explain:
            for item in plan.scheduled:
                self._note(item.sequence, Reason.SCHEDULED, str(item.num_tokens))
        return plan

    def _grow(self, sequence: Sequence, num_blocks: int) -> bool:
        missing = num_blocks - len(sequence.block_table)
        if missing <= 0:
            return True
        blocks = self.worker.pool.allocate(missing)
        if blocks is None:
            return False
        sequence.block_table += blocks
        self._granted.setdefault(sequence.sequence_id, []).extend(blocks)
        return True

    def _schedule(self, sequence: Sequence, num_tokens: int, num_computed: int = 0) -> Scheduled:
        start = sequence.num_scheduled
        samples = start + num_tokens >= sequence.num_tokens
        item = Scheduled(sequence, sequence.sequence_id, num_tokens, samples, num_computed)
        sequence.schedule(num_tokens, self.worker.next_plan)
        self._prefill_tokens += num_tokens
        self._attended += num_tokens * (2 * start + num_tokens + 1) // 2
        self._context += start + num_tokens
        self._prefills.append(item)
        self._kept.add(sequence.sequence_id)
        return item

    def _note(self, sequence: Sequence, reason: Reason, detail: str = "") -> None:
        if self._explain:
            self._explain.note(self.worker.name, sequence, reason, detail)
