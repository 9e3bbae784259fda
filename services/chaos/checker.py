"""Is what a client got what it would have got undisturbed? Pure.

Two ways to know: the outcome of the undisturbed run, where texts are the same in every run; and the journal, where
every incarnation of a worker samples otherwise (salted): then what counts is that one sequence of valid tokens was
published, and that the client has exactly its text.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.chaos.client import Outcome
from services.chaos.requests import Request, params_of
from services.common.journal import JournalEntry
from services.common.request import SamplingParams
from services.common.text.detokenizer import Detokenizer, TokenBytes
from services.common.text.grammar import Grammars
from services.worker.core.plan import Constraint, allowed_tokens
from services.worker.executor.fake import NUM_SALTS, sample

# The worst first: what a stream is counted as.
KINDS = ("hung", "failed", "lost", "doubled", "changed")


@dataclass(slots=True)
class Verdict:
    """What is wrong with one stream: (kind, what), none if nothing is."""

    faults: list[tuple[str, str]] = field(default_factory=list)

    def add(self, kind: str, what: str) -> None:
        self.faults.append((kind, what))

    @property
    def kind(self) -> str | None:
        kinds = {kind for kind, _ in self.faults}
        return next((kind for kind in KINDS if kind in kinds), None)


def compare(outcome: Outcome, expected: Outcome, request: Request) -> Verdict:
    """Against the undisturbed run's outcome."""
    verdict = _ended_well(outcome, request)
    if verdict.kind in ("hung", "failed"):
        return verdict
    for index, want in expected.choices.items():
        got = outcome.choice(index)
        if got.text != want.text:
            verdict.add(how_it_differs(got.text, want.text), f"choice {index}: {_excerpt(got.text, want.text)}")
        if got.tokens != want.tokens:
            kind = _more_or_less(len(got.tokens), len(want.tokens))
            verdict.add(kind, f"choice {index}: {len(got.tokens)} logprob entries, not {len(want.tokens)}")
        if got.finish != want.finish:
            verdict.add("changed" if got.finish else "lost", f"choice {index}: finish {got.finish}, not {want.finish}")
    if len(outcome.choices) > len(expected.choices):
        verdict.add("doubled", f"{len(outcome.choices)} choices, not {len(expected.choices)}")
    if outcome.usage != expected.usage:
        verdict.add("changed" if outcome.usage else "lost", f"usage {outcome.usage}, not {expected.usage}")
    return verdict


def _ended_well(outcome: Outcome, request: Request) -> Verdict:
    """What can be said without knowing the text."""
    verdict = Verdict()
    if outcome.hung:
        verdict.add("hung", outcome.hung)
    if outcome.failed:
        verdict.add("failed", outcome.failed)
    if outcome.num_done != 1 and not verdict.faults:
        verdict.add("lost" if not outcome.num_done else "doubled", f"[DONE] came {outcome.num_done} times")
    for anomaly, count in Counter(outcome.anomalies).items():
        verdict.add("doubled", f"{anomaly} ({count}x)")
    if request.is_stream and request.is_chat and not verdict.faults:
        without = [index for index, choice in outcome.choices.items() if choice.num_roles != 1]
        if without:
            verdict.add("lost", f"choices {without} have no role")
    return verdict


def how_it_differs(got: str, want: str) -> str:
    """lost: `want` with one part cut out; doubled: `want` with one part put in; else changed."""
    shorter, longer = sorted((got, want), key=len)
    same_start = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    same_end = next(
        (i for i, (a, b) in enumerate(zip(shorter[::-1], longer[::-1], strict=False)) if a != b), len(shorter)
    )
    if len(shorter) == len(longer) or same_start + same_end < len(shorter):
        return "changed"
    return _more_or_less(len(got), len(want))


def _more_or_less(got: int, want: int) -> str:
    if got == want:
        return "changed"
    return "lost" if got < want else "doubled"


def _excerpt(got: str, want: str) -> str:
    """Both texts from where they part."""
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    return f"at {at} of {len(want)} {got[at : at + 40]!r}, not {want[at : at + 40]!r} (length {len(got)})"


# -- salted: against the journal


@dataclass(frozen=True, slots=True)
class Model:
    """What the check of a journal needs to know of the model."""

    table: TokenBytes
    vocab_size: int
    eos_token_ids: Collection[int]
    grammars: Grammars

    def constraint(self, params: SamplingParams) -> Constraint | None:
        return self.grammars.constrain(params.grammar, ()) if params.grammar else None


@dataclass(slots=True)
class _Journalled:
    ids: list[int] = field(default_factory=list)
    finish: str | None = None


def check_journal(
    outcome: Outcome, request: Request, prompt: Sequence[int], entries: Sequence[JournalEntry], model: Model
) -> Verdict:
    """The journal is one valid generation, and the client has its text. prompt: token ids."""
    verdict = _ended_well(outcome, request)
    params = params_of(request)
    choices, usages = _read_journal(entries, verdict)
    for index in range(request.num_choices):
        journalled = choices.get(index, _Journalled())
        _check_tokens(verdict, index, journalled.ids, prompt, params, model)
        _check_end(verdict, index, journalled, params, model)
        if not outcome.failed and not outcome.hung:
            _check_client(verdict, index, journalled, outcome, params, model)
    want = (len(prompt), sum(len(choice.ids) for choice in choices.values()))
    if usages != [want]:
        verdict.add("changed", f"usage in the journal {usages}, not once {want}")
    if outcome.usage is not None and outcome.usage != want:
        verdict.add("changed", f"usage {outcome.usage}, not {want}")
    if outcome.usage is None and _wants_usage(request) and not outcome.failed:
        verdict.add("lost", "no usage")
    return verdict


def _wants_usage(request: Request) -> bool:
    return not request.is_stream or bool(request.body.get("stream_options", {}).get("include_usage"))


def _read_journal(
    entries: Sequence[JournalEntry], verdict: Verdict
) -> tuple[dict[int, _Journalled], list[tuple[int, int]]]:
    """Token ids per choice and all usages; positions that are not contiguous are faults."""
    choices: dict[int, _Journalled] = {}
    usages = []
    for entry in entries:
        for item in entry.items:
            choice = choices.setdefault(item.choice, _Journalled())
            # A finish alone names no position.
            if item.token_ids and item.index != len(choice.ids):
                kind = "lost" if item.index > len(choice.ids) else "doubled"
                verdict.add(kind, f"choice {item.choice}: the journal goes from {len(choice.ids)} to {item.index}")
            if choice.finish is not None:
                verdict.add("doubled", f"choice {item.choice}: an item after the finish in the journal")
            choice.ids += item.token_ids
            choice.finish = item.finish or choice.finish
        if entry.usage is not None:
            usages.append(entry.usage)
    return choices, usages


def _check_tokens(
    verdict: Verdict, choice: int, ids: Sequence[int], prompt: Sequence[int], params: SamplingParams, model: Model
) -> None:
    """Each token is what some incarnation samples after exactly these tokens."""
    tokens = np.asarray([*prompt, *ids], dtype=np.int32)
    salts = list(range(NUM_SALTS))
    constraint, allowed = model.constraint(params), None
    for position, token in enumerate(ids):
        read = tokens[: len(prompt) + position]
        banned = frozenset(model.eos_token_ids) if position < params.min_tokens else frozenset()
        if constraint is not None:
            allowed = allowed_tokens(constraint, model.vocab_size)
            constraint.accept(token)
        for salt in salts:
            if sample(read, params, choice, salt, banned, model.vocab_size, allowed=allowed).token_id == token:
                salts.remove(salt)
                salts.insert(0, salt)  # the next token is most likely the same worker's
                break
        else:
            verdict.add("changed", f"choice {choice}: no worker samples token {token} at {position}")
            return


def _check_end(verdict: Verdict, index: int, choice: _Journalled, params: SamplingParams, model: Model) -> None:
    """It ends where its own rules say, and not a token later."""
    text, stopped_at = cut(choice.ids, params, model.table)
    del text
    if stopped_at is not None:
        want, length = "stop", stopped_at
    elif (complete_at := _complete_at(choice.ids, model.constraint(params))) is not None:
        want, length = "stop", complete_at
    elif choice.ids and choice.ids[-1] in model.eos_token_ids and not params.ignore_eos:
        want, length = "stop", len(choice.ids)
    else:
        want, length = "length", params.max_tokens
    if choice.finish != want:
        verdict.add("changed" if choice.finish else "lost", f"choice {index}: finish {choice.finish}, not {want}")
    if len(choice.ids) != length:
        kind = _more_or_less(len(choice.ids), length)
        verdict.add(kind, f"choice {index}: {len(choice.ids)} tokens in the journal, not {length}")


def _complete_at(ids: Sequence[int], constraint: Constraint | None) -> int | None:
    """After how many tokens nothing can follow under the constraint."""
    if constraint is None:
        return None
    return next((position + 1 for position, token in enumerate(ids) if constraint.accept(token)), None)


def _check_client(
    verdict: Verdict, index: int, choice: _Journalled, outcome: Outcome, params: SamplingParams, model: Model
) -> None:
    got = outcome.choice(index)
    text, _ = cut(choice.ids, params, model.table)
    if got.text != text:
        verdict.add(how_it_differs(got.text, text), f"choice {index}: {_excerpt(got.text, text)}")
    if got.finish != choice.finish:
        verdict.add("changed" if got.finish else "lost", f"choice {index}: finish {got.finish}, not {choice.finish}")
    if params.grammar and got.finish == "stop" and not _is_json(got.text):
        verdict.add("changed", f"choice {index}: no JSON: {got.text[:100]!r}")
    entries = len(choice.ids) if params.logprobs is not None else 0
    if len(got.tokens) != entries:
        kind = _more_or_less(len(got.tokens), entries)
        verdict.add(kind, f"choice {index}: {len(got.tokens)} logprob entries, not {entries}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def cut(ids: Sequence[int], params: SamplingParams, table: TokenBytes) -> tuple[str, int | None]:
    """The text up to its stop string, and after how many tokens that is complete (None: it has none).

    Written anew and not with the router's and worker's matcher, which is under test.
    """
    detokenizer = Detokenizer(table)
    before, after = "", ""
    for position, token in enumerate(ids):
        text = detokenizer.push(token)
        if position < params.min_tokens:
            before += text
            continue
        after += text
        found = [(at + len(stop), at) for stop in params.stop if (at := after.find(stop)) >= 0]
        if found:
            return before + after[: min(found)[1]], position + 1
    return before + after + detokenizer.flush(), None
