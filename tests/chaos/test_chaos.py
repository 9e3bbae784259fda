"""Faults by seed over a real system; and the checker, the schedule and the mix by themselves.

ORCA_CHAOS_RUNS=200 makes it a long test; by default it is the few runs that a change can wait for.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from services.chaos import requests
from services.chaos.checker import Model, Verdict, check_journal, compare, cut, how_it_differs
from services.chaos.client import Choice, Outcome, split_events
from services.chaos.faults import MAX_FAULTS, MID, TARGETS, Fault, catalogue, schedule
from services.chaos.main import main
from services.chaos.report import FaultReport, Report, RunReport
from services.chaos.requests import Request, mix, params_of
from services.chaos.target import LocalTarget
from services.common.journal import JournalEntry, JournalItem, TokenDetail
from services.common.text.detokenizer import TokenBytes
from services.common.text.grammar import Grammars
from services.worker.executor.fake import sample

RUNS = int(os.environ.get("ORCA_CHAOS_RUNS") or 0)
MODEL = "smollm2-135m"


# -- the real system


def chaos(few: int, *flags: str) -> int:
    """A few runs of one mix, or many of several."""
    return main(["--runs", str(RUNS or few), "--mixes", "4" if RUNS else "1", *flags])


def test_no_client_notices_more_than_a_pause(tmp_path: Path) -> None:
    """Two routers, two schedulers, two workers and Redis, each killed, stopped and restarted; then a poisoned request,
    which kills every worker that runs it: 63 others get their text, and it gets an error in bounded time."""
    report = tmp_path / "report.json"
    assert chaos(1, "--seed", "18", "--poison", "--json", str(report)) == 0
    total = orjson.loads(report.read_bytes())
    assert total["faults"] > total["runs"] - 1, "faults were really injected"
    assert [run["scenario"] for run in total["each"]][-1] == "poison"


def test_workers_that_sample_otherwise_after_a_restart_never_mix_two_texts() -> None:
    assert chaos(1, "--salted", "--seed", "101") == 0


# -- what is drawn


def test_every_fault_has_its_turn() -> None:
    everything = catalogue()
    first = {(f.kind, f.target, f.where) for seed in range(len(everything)) for f in schedule(seed)[:1]}
    assert first == set(everything)
    for seed in range(500):
        faults = schedule(seed)
        assert faults == schedule(seed)
        assert 1 <= len(faults) <= MAX_FAULTS
        points = [fault.where for fault in faults if fault.where != MID]
        assert len(points) == len(set(points)), "a failpoint holds one fault"
        assert all((fault.kind == "stop") == (fault.stopped_s > 0) for fault in faults)


@pytest.mark.parametrize("target", TARGETS)
def test_only_one_target(target: str) -> None:
    assert {fault.target for seed in range(50) for fault in schedule(seed, target, failpoints=False)} == {target}


def test_the_mix_has_everything_and_is_repeatable() -> None:
    for seed in range(20):
        drawn = mix(seed, 64, MODEL)
        assert drawn == mix(seed, 64, MODEL)
        names = {name for request in drawn for name in request.body}
        assert names >= {
            *("n", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty"),
            *(
                "min_tokens",
                "logit_bias",
                "stream_options",
                "messages",
                "prompt",
                "seed",
                "top_p",
                "structured_outputs",
            ),
        }
        assert {request.body["temperature"] == 0 for request in drawn} == {True, False}
        assert {request.is_stream for request in drawn} == {True, False}
        assert sum(request.wants_stop for request in drawn) >= 8


def test_a_chosen_stop_string_straddles_two_pieces() -> None:
    pieces = ["alpha", "beta", "gamma", "delta", "epsilon"]
    for seed in range(20):
        stop = requests.choose_stop(pieces, random.Random(seed))
        assert stop is not None
        assert stop in "".join(pieces)
        assert not any(stop in piece for piece in pieces)


# -- what is seen


def test_events_are_split_at_empty_lines_only() -> None:
    buffer = bytearray('id: 1-0\ndata: {"a":"x\u2028y\u0085"}\n\n: keep-alive\n\ndata: [DO'.encode())
    assert list(split_events(buffer)) == [("1-0", '{"a":"x\u2028y\u0085"}')]
    assert bytes(buffer) == b"data: [DO"
    buffer += b"NE]\n\n"
    assert list(split_events(buffer)) == [("", "[DONE]")]


STREAM = Request(0, requests.COMPLETIONS, {"model": MODEL, "stream": True, "max_tokens": 3, "temperature": 0})


def outcome_of(text: str, **changed: object) -> Outcome:
    made = Outcome(choices={0: Choice([text], finish="length")}, num_done=1, request_id="r", ended=True)
    for name, value in changed.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("got", "kind"),
    [
        (outcome_of("one two three"), None),
        (outcome_of("one three"), "lost"),
        (outcome_of("one two"), "lost"),
        (outcome_of("one two two three"), "doubled"),
        (outcome_of("one TWO three"), "changed"),
        (outcome_of("one two three", num_done=0), "lost"),
        (outcome_of("one two three", anomalies=["the event id 1-0 came twice"]), "doubled"),
        (outcome_of("one two three", usage=(1, 2)), "changed"),
        (outcome_of("one", hung="no byte for 60 s"), "hung"),
        (outcome_of("one", failed="404"), "failed"),
    ],
)
def test_classification(got: Outcome, kind: str | None) -> None:
    assert compare(got, outcome_of("one two three"), STREAM).kind == kind


def test_a_longer_text_that_is_another_is_changed() -> None:
    assert how_it_differs("one deux trois quatre", "one two three") == "changed"


# -- the journal

VOCABULARY = 600
EOS = (2,)


@pytest.fixture(scope="module")
def model() -> Model:
    """Every token is two letters, so that a stop string of two letters straddles tokens half the time."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocab = {letters[i % 26] + letters[i // 26]: i for i in range(VOCABULARY)}
    table = TokenBytes(
        '{"decoder":{"type":"ByteLevel"},"model":{"vocab":%s}}' % str(vocab).replace("'", '"')  # noqa: UP031
    )
    return Model(table, VOCABULARY, EOS, Grammars("", VOCABULARY, EOS))


PROMPT = [5, 6, 7]
ASKED = Request(
    0,
    requests.COMPLETIONS,
    {"model": MODEL, "stream": True, "max_tokens": 12, "temperature": 0.5, "seed": 3, "logprobs": 0},
)


def generate(request: Request, salts: Sequence[int]) -> list[int]:
    """What workers with these salts, one a token, make of it."""
    ids: list[int] = []
    for salt in salts:
        read = np.asarray([*PROMPT, *ids], dtype=np.int32)
        token = sample(read, params_of(request), 0, salt, EOS, VOCABULARY).token_id
        assert token is not None
        ids.append(token)
    return ids


def journal(ids: Sequence[int], finish: str = "length", usage: tuple[int, int] | None = None) -> list[JournalEntry]:
    """An entry a token."""
    detail = (TokenDetail(-1.0, ()),)
    last = len(ids) - 1
    return [
        JournalEntry(
            "r",
            f"{i + 1}-0",
            "worker-0",
            i,
            (JournalItem(0, i, (token,), finish if i == last else None, detail),),
            (usage or (len(PROMPT), len(ids))) if i == last else None,
        )
        for i, token in enumerate(ids)
    ]


def received(text: str, num_tokens: int, finish: str = "length") -> Outcome:
    choice = Choice([text], [f"{i}:x" for i in range(num_tokens)], finish)
    return Outcome(choices={0: choice}, num_done=1, request_id="r", ended=True)


def verdict_of(ids: Sequence[int], model: Model, text: str | None = None, request: Request = ASKED) -> Verdict:
    whole, stopped = cut(ids, params_of(request), model.table)
    finish = "length" if stopped is None else "stop"
    outcome = received(whole if text is None else text, len(ids), finish)
    return check_journal(outcome, request, PROMPT, journal(ids, finish), model)


def test_a_move_to_another_incarnation_is_valid(model: Model) -> None:
    assert verdict_of(generate(ASKED, [7] * 5 + [63] * 7), model).faults == []


def test_a_token_that_no_worker_samples_here(model: Model) -> None:
    ids = generate(ASKED, [7] * 12)
    ids[6] = (ids[6] + 1) % VOCABULARY or 1
    assert verdict_of(ids, model).kind == "changed"


def test_a_client_with_another_text_than_the_journal(model: Model) -> None:
    ids = generate(ASKED, [7] * 12)
    text, _ = cut(ids, params_of(ASKED), model.table)
    assert verdict_of(ids, model, text[:10] + text[12:]).kind == "lost"
    assert verdict_of(ids, model, text[:10] + text[8:]).kind == "doubled"


def test_a_gap_and_a_repetition_in_the_journal(model: Model) -> None:
    ids = generate(ASKED, [7] * 12)
    text, _ = cut(ids, params_of(ASKED), model.table)
    entries = journal(ids)
    for wrong, kind in (([*entries[:4], *entries[5:]], "lost"), ([*entries[:4], *entries[3:]], "doubled")):
        found = check_journal(received(text, 12), ASKED, PROMPT, wrong, model).faults
        assert any(fault == kind and "the journal goes from" in what for fault, what in found)


def test_a_stop_string_ends_the_journal_at_its_token(model: Model) -> None:
    ids = generate(ASKED, [7] * 12)
    text, _ = cut(ids, params_of(ASKED), model.table)
    request = replace(ASKED, body=ASKED.body | {"stop": [text[9:13]]})
    kept, stopped = cut(ids, params_of(request), model.table)
    assert (kept, stopped) == (text[:9], 7)
    assert verdict_of(ids[:7], model, request=request).faults == []
    found = verdict_of(ids, model, request=request).faults
    assert ("doubled", "choice 0: 12 tokens in the journal, not 7") in found


# -- the report


def test_a_fault_that_hit_nobody_is_missed() -> None:
    hit = FaultReport("kill", "worker", "step.after", "worker-0", 1.2, 0.8)
    missed = FaultReport("stop", "leader", "finish.before")
    report = Report([RunReport(1, 64, faults=[hit, missed], reconnects=2)])
    total = report.to_json()
    assert (total["faults"], total["missed"]) == (1, {"stop leader at finish.before": 1})
    assert total["failpoint_hits"] == {"step.after": 1}
    assert total["recovery_s"] == {"kill worker": 0.8}
    assert report.passed
    assert "passed" in report.table()
    report.runs[0].violations.append("lost: request 3")
    assert not report.passed
    assert "FAILED" in report.table()


def test_an_armed_point_is_a_whole_file_and_its_hit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = LocalTarget.__new__(LocalTarget)  # without a system
    monkeypatch.setattr(target, "failpoints", tmp_path, raising=False)
    monkeypatch.setattr(target, "pids", lambda: {"worker-1": 42}, raising=False)
    fault = Fault("kill", "worker", "step.after", skip=3)
    target.arm(fault)
    assert (tmp_path / "step.after").read_text() == "worker kill 3\n"
    assert target.hit_at(fault) is None
    (tmp_path / "step.after").rename(tmp_path / "step.after.hit-42")
    hit = target.hit_at(fault)
    assert hit is not None
    assert (hit.name, hit.pid) == ("worker-1", 42)
    target.disarm(fault)
