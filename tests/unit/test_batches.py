"""The pure parts of files and batches: lines, validation, results, pages."""

import json
from itertools import chain
from typing import Any

import pytest

from services.common.errors import ConfigurationError, InvalidRequest
from services.router.api.upload import _Form
from services.router.core import batches
from services.router.core.batches import (
    Batch,
    Lines,
    Order,
    Validation,
    metadata_fault,
    reason_to_stop,
    result_line,
    unrun_line,
)
from services.router.core.files import CHUNK_BYTES, File, Pieces, derived_name, following, page
from services.router.core.tenants import KeyRing, digest

URL = "/v1/completions"


def _line(**other: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": URL, "body": {}} | other).encode()


def _validated(*lines: bytes, most: int = 1000) -> Validation:
    validation = Validation(URL, most)
    validation.look(iter(list(enumerate(lines, 1))))
    validation.end()
    return validation


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_lines_do_not_depend_on_how_they_come(size: int, end: bytes) -> None:
    text = b"one\ntwo\n\n  \nfive\r\n\xc3\xa9" + end
    lines = Lines()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = list(chain.from_iterable(map(lines.push, pieces))) + lines.end()
    assert [(number, line.strip()) for number, line in found] == [
        (1, b"one"),
        (2, b"two"),
        (5, b"five"),
        (6, b"\xc3\xa9"),
    ]


def test_pieces_have_one_size() -> None:
    pieces, chunks = Pieces(), []
    for _ in range(25):
        chunks += pieces.push(b"x" * 100_000)
    chunks += pieces.rest()
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 2_500_000 - 2 * CHUNK_BYTES]
    assert pieces.size == 2_500_000
    assert File("f", "", "batch", pieces.size, 0, 1).num_chunks == 3
    assert File("f", "", "batch", CHUNK_BYTES, 0, 1).num_chunks == 1
    assert not Pieces().rest()


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (_line(), None, None),
        (_line(body={"stream": False}), None, None),
        (b"{", "invalid_json_line", None),
        (b'{"custom_id": NaN}', "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (_line(custom_id=None), "missing_required_parameter", "custom_id"),
        (_line(custom_id=""), "missing_required_parameter", "custom_id"),
        (_line(custom_id=5), "missing_required_parameter", "custom_id"),
        (_line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (_line(method="post"), "invalid_method", "method"),
        (_line(url="/v1/chat/completions"), "invalid_url", "url"),
        (_line(body=None), "missing_required_parameter", "body"),
        (_line(body=[]), "missing_required_parameter", "body"),
        (_line(body={"stream": True}), "invalid_request", "body.stream"),
        (_line(body={"prompt": "x" * 1000}), "line_too_large", None),
    ],
)
def test_each_fault_of_a_line_has_its_name(line: bytes, code: str | None, param: str | None) -> None:
    errors = _validated(line).errors
    if code is None:
        assert errors == []
        return
    ((error),) = errors
    assert (error["code"], error["param"], error["line"]) == (code, param, 1)
    assert error["message"]


def test_a_batch_of_too_many_or_no_lines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_LINES", 3)
    lines = [_line(custom_id=f"{index}") for index in range(5)]
    assert _validated(*lines[:3]).errors == []
    assert [error["code"] for error in _validated(*lines).errors] == ["too_many_lines"]
    assert [error["code"] for error in _validated().errors] == ["empty_file"]
    assert _validated(*lines).hopeless


def test_the_errors_that_are_told_are_bounded() -> None:
    validation = _validated(*[_line()] * 500)
    assert len(validation.errors) == batches.MAX_ERRORS
    assert {error["code"] for error in validation.errors} == {"duplicate_custom_id"}


def test_result_lines_are_the_same_whoever_writes_them() -> None:
    line = json.loads(result_line("b", 3, "mine", 200, "r1", {"x": 1}))
    assert line == json.loads(result_line("b", 3, "mine", 200, "r1", {"x": 1}))
    assert line["response"] == {"status_code": 200, "request_id": "r1", "body": {"x": 1}}
    assert (line["custom_id"], line["error"]) == ("mine", None)
    other = json.loads(unrun_line("b", 4, "yours", batches.EXPIRED))
    assert other["id"] != line["id"]
    assert other["response"] is None
    assert other["error"]["code"] == "batch_expired"
    assert derived_name("file-", "b", 1) == derived_name("file-", "b", 1) != derived_name("file-", "b", 2)


def test_why_a_batch_stops() -> None:
    assert reason_to_stop("in_progress", 100, 99, 5, 10) is None
    assert reason_to_stop("in_progress", 100, 99, 5_000, 0) is None
    assert reason_to_stop("cancelling", 100, 101, 50, 10) == batches.CANCELLED
    assert reason_to_stop("in_progress", 100, 100, 50, 10) == batches.EXPIRED
    assert reason_to_stop("in_progress", 100, 99, 10, 10) == batches.TOO_LARGE


def test_metadata_is_bounded() -> None:
    assert metadata_fault(None) is None
    assert metadata_fault({"k" * 64: "v" * 512}) is None
    assert metadata_fault({"k" * 65: "v"})
    assert metadata_fault({"k": "v" * 513})
    assert metadata_fault({str(index): "" for index in range(17)})


def test_pages() -> None:
    made = [Batch(Order(f"b{index}", "", URL, "f", index, index), "completed") for index in range(5)]
    first = page(following(made, ""), 2)
    assert ([one["id"] for one in first["data"]], first["has_more"], first["last_id"]) == (["b0", "b1"], True, "b1")
    last = page(following(made, "b2"), 2)
    assert ([one["id"] for one in last["data"]], last["has_more"]) == (["b3", "b4"], False)
    assert page(following(made, "unknown"), 2)["data"] == []
    assert page([], 2)["first_id"] is None


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    b"one\r\n--two\r\n--x\r\n"
    b'Content-Disposition: form-data; name="more"\r\n\r\n\xc3\xa9\r\n--x--\r\n'
)


@pytest.mark.parametrize("size", [1, 2, 5, 50, 1000])
def test_a_form_does_not_depend_on_how_it_comes(size: int) -> None:
    form, data = _Form(b"x"), b""
    for at in range(0, len(FORM), size):
        form.push(FORM[at : at + size])
        data += bytes(form.fresh)
        form.fresh.clear()
    assert form.ended
    assert data == b"one\r\n--two"
    assert form.upload.filename == "in.jsonl"
    assert form.upload.fields == {"purpose": "batch", "more": "é"}


@pytest.mark.parametrize(
    "form",
    [
        b"no form",
        b"--x\r\nbad header\r\n\r\n",
        FORM.removesuffix(b"--\r\n") + b"\r\n" + FORM[FORM.index(b"\r\n") + 2 :].replace(b"purpose", b"x"),
        FORM.replace(b'"file"', b'"other"'),
        FORM.replace(b"batch", b"b" * 5000),
        b"".join(b'--x\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n' % index for index in range(18)),
    ],
)
def test_a_form_that_is_none_is_refused(form: bytes) -> None:
    with pytest.raises(InvalidRequest):
        _Form(b"x").push(form)


def test_a_tenant_is_known_by_its_name() -> None:
    text = json.dumps({"tenants": [{"name": "a", "keys": [digest("k")], "priority": 3}]})
    ring = KeyRing.parse(text)
    found = ring.named("a")
    assert found is not None
    assert found.priority == 3
    assert ring.named("b") is None
    with pytest.raises(ConfigurationError):
        KeyRing.parse("{")
