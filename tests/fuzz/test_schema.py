"""Generated requests from the server's own OpenAPI schema: what is valid by it, and what is not (schemathesis).

ORCA_FUZZ_CASES=20000 makes it a long test, ORCA_FUZZ_SEED another one.
"""

import random
from collections import Counter
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis.strategies import composite
from schemathesis import checks
from schemathesis.core.errors import InvalidSchema
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as openapi

from loadtest.up import Up
from tests.e2e.conftest import MODEL
from tests.fuzz.conftest import cases, run_seed

CASES = cases(300)
# The last one is for what was made wrong.
CHECKS = [
    checks.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_headers_conformance,
    openapi.response_schema_conformance,
    openapi.negative_data_rejection,
]
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
# One request may take its whole pool of 256 tokens; many choices of that size would take turns for a minute.
MOST = {"max_tokens": 32, "max_completion_tokens": 32, "max_output_tokens": 32, "n": 4, "best_of": 4}
VALID_CHOICES = 128
# One of so many valid requests keeps the name and the sizes that were drawn for it, which no schema knows to be wrong.
KEPT = 8
PLAIN: dict[str, Any] = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}
NEEDED = {*PLAIN, "model", "max_tokens", "tokens", "file", "purpose", "input_file_id", "endpoint", "completion_window"}
TIMEOUT_S = 30


def bounded(case: schemathesis.Case, mode: GenerationMode, index: int) -> schemathesis.Case:
    """Little is asked for in what is valid; what is not (-1, "5") stays as it is. Most valid requests are helped to be
    good ones: no schema says which model there is, and asking for everything at once breaks some rule nearly always."""
    if not isinstance(case.body, dict):
        return case
    helped = mode is GenerationMode.POSITIVE and index % KEPT > 0
    if helped:
        case.body = _good(case, random.Random(index))
    for name, most in MOST.items():
        value = case.body.get(name)
        if type(value) is int and value > most and (value <= VALID_CHOICES or helped):
            case.body[name] = value % most + 1
    return case


def _good(case: schemathesis.Case, rng: random.Random) -> dict[str, Any]:
    """Some of the optional fields, mostly a plain text, the model that is there, 5 where a schema takes 5.0 for it."""
    body = {name: _whole(value) for name, value in case.body.items() if name in NEEDED or rng.random() < 0.3}
    if rng.random() < 0.7:
        body |= {name: plain for name, plain in PLAIN.items() if name in body}
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    return body


def _whole(value: Any) -> Any:
    """With integers for floats that are whole."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


# They name something that only an earlier request could have made.
NEVER_WELL = {
    "GET /v1/models/{name}",
    "GET /v1/streams/{request_id}",
    "GET /v1/files/{name}",
    "GET /v1/files/{name}/content",
    "DELETE /v1/files/{name}",
    "GET /v1/batches/{name}",
    "POST /v1/batches",
    "POST /v1/batches/{name}/cancel",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel",
    "GET /v1/responses/{response_id}/input_items",
}


class Session:
    """Counts what was sent and answered, by operation and mode. requests: the plain client underneath."""

    def __init__(self, up: Up) -> None:
        self.schema = schemathesis.openapi.from_url(f"{up.url}/openapi.json")
        self.schema.config.output.sanitization.update(enabled=False)  # it hides max_tokens, for its name
        self.schema.config.checks.negative_data_rejection.expected_statuses.append("413")  # also refused
        self.counts: Counter[tuple[str, str, int]] = Counter()
        self.faults: dict[str, str] = {}
        self.num_undrawable = 0

    def operations(self) -> list[Any]:
        """Raises what makes one of them unusable."""
        return [result.ok() for result in self.schema.get_all_operations()]

    def send(self, case: schemathesis.Case, mode: GenerationMode) -> None:
        """One case. Its faults are noted by kind, with the first request that shows them."""
        response = case.call(timeout=TIMEOUT_S)
        self.counts[case.operation.label, mode.value, response.status_code] += 1
        try:
            wrong = mode is GenerationMode.NEGATIVE and not vanishes(case)
            case.validate_response(response, checks=CHECKS if wrong else CHECKS[:-1])
        except schemathesis.core.failures.FailureGroup as group:
            for failure in group.exceptions:
                kind = f"{case.operation.label} {type(failure).__name__} {response.status_code}"
                self.faults.setdefault(kind, f"{kind}: {str(failure)[:600]}\n  {case.as_curl_command()[:1500]}")

    def table(self) -> str:
        statuses = sorted({status for *_, status in self.counts if status})
        rows = sorted({(label, mode) for label, mode, _ in self.counts})
        lines = [f"{'':56}" + "".join(f"{status:>7}" for status in statuses)]
        lines += [
            f"{label:44}{mode:12}" + "".join(f"{self.counts[label, mode, s] or '':>7}" for s in statuses)
            for label, mode in rows
        ]
        total = {s: sum(n for (*_, status), n in self.counts.items() if status == s) for s in statuses}
        return "\n".join([*lines, f"{'all':56}" + "".join(f"{total[s]:>7}" for s in statuses)])


def vanishes(case: schemathesis.Case) -> bool:
    """What is wrong with it may not be sent at all: a form has no way to say that a field is an empty list."""
    form = case.media_type == "multipart/form-data" and isinstance(case.body, dict)
    return form and any(value in ([], None) for value in case.body.values())


@composite
def _drawable(draw: Any, session: Session, cases: Any) -> Any:
    """A case, where there is one: some of the schemas that schemathesis makes wrong, it cannot draw from."""
    try:
        return draw(cases)
    except InvalidSchema:
        session.num_undrawable += 1
        hypothesis.reject()


def run(session: Session, operation: Any, mode: GenerationMode, number: int) -> None:
    """That many cases of one operation, by seed. Where every text is valid (a name in a path), nothing can be wrong:
    that is said, and no other mode may come to it."""

    @hypothesis.seed(run_seed())
    @hypothesis.settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(_drawable(session, operation.as_strategy(generation_mode=mode)))
    def each(case: schemathesis.Case) -> None:
        session.send(bounded(case, mode, sum(session.counts.values())), mode)

    try:
        each()
    except hypothesis.errors.Unsatisfiable:
        if mode is GenerationMode.POSITIVE:
            raise
        session.counts[operation.label, "no negative", 0] += 0


def has_input(operation: Any) -> bool:
    """Whether something of it can be wrong."""
    return bool(list(operation.iter_parameters()) or list(operation.body))


@pytest.fixture
def session(unharmed: Up) -> Session:
    return Session(unharmed)


def test_requests_by_the_schema_get_answers_by_the_schema(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    plans = [(o, m) for o in session.operations() for m in MODES if m is GenerationMode.POSITIVE or has_input(o)]
    wide = [plan for plan in plans if has_input(plan[0])]
    for operation, mode in plans:
        number = max(1, CASES // len(wide)) if has_input(operation) else 1
        run(session, operation, mode, number)
    sent = sum(session.counts.values())
    with capsys.disabled():
        print(f"\n{sent} generated requests (seed {run_seed()}), {session.num_undrawable} not drawable:")
        print(session.table())
    assert not session.faults, f"{len(session.faults)} kinds of faults\n" + "\n".join(session.faults.values())
    assert {label for label, _, status in session.counts if status} == {
        operation.label for operation in session.operations()
    }
    if CASES >= 5000:
        assert not {o.label for o in session.operations() if not session.counts[o.label, "positive", 200]} - NEVER_WELL
    assert session.num_undrawable < 0.05 * sent
    assert sent >= CASES * 0.7, "hypothesis gives less where there is little to choose from"


def test_every_route_says_what_it_takes_and_gives(fuzz_up: Up) -> None:
    """A schema with holes would let the test above pass without testing anything."""
    document = httpx.get(f"{fuzz_up.url}/openapi.json").json()
    holes = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            has_body = method == "post" and not path.endswith("/cancel")
            if has_body and not operation.get("requestBody", {}).get("content"):
                holes.append(f"{method} {path}: no request body")
            if not any(_described(response) for response in operation["responses"].values()):
                holes.append(f"{method} {path}: no response with a schema")
            if path.startswith("/v1/") and not any(status.startswith("4") for status in operation["responses"]):
                holes.append(f"{method} {path}: no error is documented")
    assert not holes


def _described(response: dict[str, Any]) -> bool:
    """A body with a schema that says something, or one that is text, or none at all."""
    content = response.get("content")
    return content is None or any(media.get("schema") or "json" not in kind for kind, media in content.items())
