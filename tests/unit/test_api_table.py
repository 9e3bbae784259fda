"""docs/api.md says of every parameter whether it is supported, and every route is in the OpenAPI document."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from pydantic import BaseModel, TypeAdapter, ValidationError

from services.router.api.embeddings import EmbeddingRequest
from services.router.api.openapi import ROUTES
from services.router.api.wire import ChatRequest, CompletionRequest
from services.router.app import create_app

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
SECTIONS = {"chat": "## Chat", "completion": "## Completions", "embedding": "## Embeddings"}
APIS: list[tuple[str, type[BaseModel], Any]] = [
    ("chat", ChatRequest, ChatParams),
    ("completion", CompletionRequest, CompletionParams),
    ("embedding", EmbeddingRequest, EmbeddingCreateParams),
]


def table(api: str) -> dict[str, str]:
    """What the section's tables say, by parameter; completions have chat's that are not about messages, too."""
    text = DOCS.read_text()
    section = text[text.index(SECTIONS[api]) :].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", section, re.MULTILINE)
    return {name: said for names, said in rows for name in re.findall(r"`([a-z_]+)`", names)}


@pytest.mark.parametrize(("api", "wire", "theirs"), APIS, ids=[api for api, _, _ in APIS])
def test_every_parameter_is_told(api: str, wire: type[BaseModel], theirs: Any) -> None:
    told = table(api) | ({} if api == "chat" else table("chat"))
    known = {field.alias or name for name, field in wire.model_fields.items()}
    assert known <= told.keys() | {"user"}, "a parameter that the docs do not have"
    assert set(theirs.__annotations__) <= known, "one of the official client's is not known"
    assert table(api).keys() <= known, "the docs have one that is not there"


@pytest.mark.parametrize(("api", "wire", "theirs"), APIS, ids=[api for api, _, _ in APIS])
def test_refusals_are_told_in_their_words(api: str, wire: type[BaseModel], theirs: Any) -> None:
    told = {name: said for name, said in table(api).items() if said.startswith("refused: ")}
    assert len(told) == {"chat": 8, "completion": 0, "embedding": 1}[api]
    for name, said in told.items():
        field = wire.model_fields[name]
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(field.rebuild_annotation()).validate_python({"anything": 1})
        assert said == f"refused: `{caught.value.errors()[0]['msg'].removeprefix('Value error, ')}`"


def test_every_route_is_described() -> None:
    app = create_app(MagicMock(), MagicMock(), MagicMock(), [], MagicMock(), MagicMock())
    document = app.openapi()
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert described == ROUTES.keys()
    text = json.dumps(document)
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert references <= document["components"]["schemas"].keys()
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert "200" in operation["responses"]
