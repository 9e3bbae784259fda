"""Sequence states from deltas: applies plans, lists a step's rows, applies each request's own end rules."""

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence

from services.common import digest as digests
from services.worker.core.plan import (
    BatchRow,
    BlockCopy,
    Constraint,
    Copy,
    NewSequence,
    Plan,
    Sampled,
    SequenceOutput,
    SequenceState,
    StepInput,
)

# The constraint of a grammar, after the output so far.
Constrain = Callable[[str, Sequence[int]], Constraint]


class PlanError(Exception):
    """The plan contradicts what the worker holds or can do; nothing of the step was run."""


class InputBatch:
    """All sequences that this worker knows, and the step to run next."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eos_token_ids: Collection[int],
        num_host_blocks: int = 0,
        constrain: Constrain | None = None,
    ) -> None:
        """constrain: what makes the constraint of a sequence that has a grammar."""
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self._eos = frozenset(eos_token_ids)
        self._constrain = constrain
        self.sequences: dict[int, SequenceState] = {}
        # What full blocks hold, also after their sequences have gone: a new leader finds its prefixes by it.
        self.contents: dict[int, bytes] = {}

    def apply(self, plan: Plan) -> StepInput:
        """Take over a plan's deltas; returns the step to run. Raises PlanError."""
        if plan.full:
            self.sequences.clear()
        for sequence_id in plan.release:
            self.drop(sequence_id)
        for new in plan.add:
            self._add(new, plan.epoch)
        copies = [
            *(self._swap_out(sequence_id, blocks) for sequence_id, blocks in plan.swap_out),
            *(self._swap_in(sequence_id, blocks) for sequence_id, blocks in plan.swap_in),
            self._copy(plan.copies),
        ]
        for sequence_id, blocks in plan.blocks:
            self._grant(sequence_id, blocks)
        for sequence_id in [s.sequence_id for s in self.sequences.values() if s.ended]:
            self.drop(sequence_id)
        self._set_held(plan.hold, True)
        self._set_held(plan.resume, False)
        return StepInput(self._rows(plan), [copy for copy in copies if copy.sources])

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ones too (it may have ended by its own rules)."""
        self.sequences.pop(sequence_id, None)

    def _add(self, new: NewSequence, epoch: int) -> None:
        if new.sequence_id in self.sequences:
            raise PlanError(f"sequence {new.sequence_id} is already here")
        if not new.prompt:
            raise PlanError(f"sequence {new.sequence_id} has no prompt")
        params, num_prompt = new.params, len(new.prompt)
        constraint = None
        if params.grammar:
            if self._constrain is None:
                raise PlanError(f"sequence {new.sequence_id} has a grammar, and this worker knows none")
            constraint = self._constrain(params.grammar, new.output)
        self.sequences[new.sequence_id] = SequenceState(
            sequence_id=new.sequence_id,
            request_id=new.request_id,
            choice=new.choice,
            prompt_index=new.prompt_index,
            epoch=epoch,
            attempt=new.attempt,
            params=params,
            num_prompt=num_prompt,
            tokens=[*new.prompt, *new.output],
            num_computed=new.num_computed,
            digest=new.cache_root,
            constraint=constraint,
            num_cached=min(new.num_computed, num_prompt),
            end_tokens=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
            end_from=num_prompt + params.min_tokens,
            end_at=num_prompt + params.max_tokens,
        )

    @staticmethod
    def _check(blocks: Iterable[int], limit: int) -> None:
        if any(not 0 <= block < limit for block in blocks):
            raise PlanError(f"block ids {blocks} are not all within the pool of {limit}")

    def _copy(self, pairs: tuple[tuple[int, int], ...]) -> BlockCopy:
        sources, targets = tuple(source for source, _ in pairs), tuple(target for _, target in pairs)
        self._check((*sources, *targets), self.num_blocks)
        self._overwrite(targets)
        return BlockCopy(Copy.WITHIN, sources, targets)

    def _swap_out(self, sequence_id: int, host_blocks: tuple[int, ...]) -> BlockCopy:
        """The sequence rests, its KV in host memory. One that has ended by its own rules needs no copy."""
        self._check(host_blocks, self.num_host_blocks)
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return BlockCopy(Copy.TO_HOST, (), ())
        if len(host_blocks) > len(sequence.block_table):
            raise PlanError(f"{sequence.request_id} has fewer blocks than shall be swapped out")
        sources = tuple(sequence.block_table[: len(host_blocks)])
        sequence.block_table, sequence.host_table, sequence.held = [], list(host_blocks), True
        return BlockCopy(Copy.TO_HOST, sources, host_blocks)

    def _swap_in(self, sequence_id: int, blocks: tuple[int, ...]) -> BlockCopy:
        """It goes on in other blocks. What it computes next is said by a chunk."""
        self._check(blocks, self.num_blocks)
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return BlockCopy(Copy.TO_DEVICE, (), ())
        if len(blocks) < len(sequence.host_table):
            raise PlanError(f"{sequence.request_id} has more blocks in host memory than come back")
        sources = tuple(sequence.host_table)
        self._overwrite(blocks)
        sequence.block_table, sequence.host_table = list(blocks), []
        sequence.held = sequence.decoding = False
        return BlockCopy(Copy.TO_DEVICE, sources, blocks[: len(sources)])

    def _grant(self, sequence_id: int, blocks: tuple[int, ...]) -> None:
        self._check(blocks, self.num_blocks)
        sequence = self.sequences.get(sequence_id)
        if sequence is not None:
            held = max(0, sequence.num_computed // self.block_size - len(sequence.block_table))
            self._overwrite(blocks[held:])  # the others come from the prefix cache
            sequence.block_table.extend(blocks)

    def _overwrite(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.contents.pop(block, None)

    def _set_held(self, sequence_ids: tuple[int, ...], held: bool) -> None:
        for sequence_id in sequence_ids:
            if sequence_id in self.sequences:
                self.sequences[sequence_id].held = held

    def _rows(self, plan: Plan) -> list[BatchRow]:
        rows = [
            self._row(sequence, 1) for sequence in self.sequences.values() if sequence.decoding and not sequence.held
        ]
        for sequence_id, num_tokens in plan.chunks:
            sequence = self.sequences.get(sequence_id)
            if sequence is not None:
                sequence.decoding = False
                rows.append(self._row(sequence, num_tokens))
        return rows

    def _row(self, sequence: SequenceState, num_tokens: int) -> BatchRow:
        end = sequence.num_computed + num_tokens
        if num_tokens < 1 or end > len(sequence.tokens):
            raise PlanError(f"{num_tokens} tokens planned for {sequence.request_id}, more than there are")
        if end > len(sequence.block_table) * self.block_size:
            raise PlanError(f"{sequence.request_id} has no slot for position {end - 1}")
        return BatchRow(sequence, sequence.num_computed, num_tokens)

    def finish_step(self, rows: list[BatchRow], sampled: list[Sampled]) -> list[SequenceOutput]:
        """Apply a step's samples, one per row that samples, in order."""
        samples = iter(sampled)
        return [self._finish_row(row, next(samples) if row.samples else None) for row in rows]

    def _finish_row(self, row: BatchRow, sample: Sampled | None) -> SequenceOutput:
        sequence, _, num_tokens = row
        sequence.num_computed += num_tokens
        if sequence.num_computed // self.block_size > sequence.num_digested:
            self._digest(sequence)
        tokens = sequence.tokens
        index = len(tokens) - sequence.num_prompt
        if sample is None:
            return SequenceOutput(sequence, num_tokens, index, (), (), None)
        sequence.decoding = True
        token, logprobs = sample
        if token is None:
            self.drop(sequence.sequence_id)
            return SequenceOutput(sequence, num_tokens, index, (), (), "error")
        tokens.append(token)
        complete = sequence.constraint is not None and sequence.constraint.accept(token)
        # A text that is complete with its very last token is whole, not cut off.
        reason = "stop" if complete else self._end(sequence, token, len(tokens))
        if reason:
            self.drop(sequence.sequence_id)
        return SequenceOutput(sequence, num_tokens, index, (token,), (logprobs,) if logprobs else (), reason)

    @staticmethod
    def _end(sequence: SequenceState, token: int, length: int) -> str | None:
        """The request's own end rules; stop strings are found later, where text is made."""
        if token in sequence.end_tokens and length >= sequence.end_from:
            return "stop"
        return "length" if length >= sequence.end_at else None

    def banned(self, sequence: SequenceState) -> list[int]:
        """Tokens that may not be sampled now: the end tokens, before min_tokens."""
        if len(sequence.tokens) >= sequence.end_from:
            return []
        return [*self._eos, *sequence.params.stop_token_ids]

    def _digest(self, sequence: SequenceState) -> None:
        """Note what its newly full blocks hold."""
        size = self.block_size
        for index in range(sequence.num_digested, sequence.num_computed // size):
            content = array("I", sequence.tokens[index * size : (index + 1) * size]).tobytes()
            sequence.digest = digests.chain(sequence.digest, content)
            self.contents[sequence.block_table[index]] = sequence.digest
            sequence.num_digested += 1
