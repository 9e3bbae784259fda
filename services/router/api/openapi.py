"""The OpenAPI document: every route in one table, with what it takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from services.router.api import answers
from services.router.api.batches import BatchRequest
from services.router.api.embeddings import EmbeddingRequest
from services.router.api.messages.wire import CountRequest, MessagesRequest
from services.router.api.responses.wire import ResponsesRequest
from services.router.api.tokens import DetokenizeRequest, TokenizeRequest
from services.router.api.wire import ChatRequest, CompletionRequest

JSON, EVENTS = "application/json", "text/event-stream"
UPLOAD = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
    "required": ["file", "purpose"],
}
REFUSALS = {
    400: "the request is not valid",
    401: "no API key, or an unknown one",
    404: "there is no such model or object",
    408: "the body did not arrive in time",
    409: "it is not in a state for this",
    413: "the body is too large",
    422: "the idempotency key was used with another request",
    429: "too much is asked for: try again after Retry-After seconds",
    500: "the generation failed",
    503: "nothing here can serve it now",
    504: "it did not end in time",
}


@dataclass(frozen=True)
class Route:
    """summary: what it does. takes: its body. gives: its answer; None is of any type. streams: or events."""

    summary: str
    gives: type[BaseModel] | None
    takes: type[BaseModel] | None = None
    streams: bool = False
    query: tuple[tuple[str, dict[str, Any]], ...] = ()


LIMIT = ("limit", {"type": "integer", "minimum": 1, "maximum": 100})
MANY = ("limit", {"type": "integer", "minimum": 1, "maximum": 10_000})
AFTER = ("after", {"type": "string"})
ORDER = ("order", {"enum": ["asc", "desc"]})
ROUTES: dict[tuple[str, str], Route] = {
    ("post", "/v1/chat/completions"): Route("Answer a conversation", answers.ChatCompletion, ChatRequest, True),
    ("post", "/v1/completions"): Route("Complete a text", answers.Completion, CompletionRequest, True),
    ("post", "/v1/embeddings"): Route("Texts as vectors", answers.Embeddings, EmbeddingRequest),
    ("post", "/v1/responses"): Route("Answer, and keep the answer", answers.Response, ResponsesRequest, True),
    ("get", "/v1/responses/{response_id}"): Route(
        "A response as it stands",
        answers.Response,
        streams=True,
        query=(("stream", {"type": "boolean"}), ("starting_after", {"type": "integer", "minimum": 0})),
    ),
    ("post", "/v1/responses/{response_id}/cancel"): Route("Stop a response", answers.Response),
    ("delete", "/v1/responses/{response_id}"): Route("Forget a response", answers.Deleted),
    ("get", "/v1/responses/{response_id}/input_items"): Route(
        "What a response was asked", answers.Items, query=(LIMIT, AFTER, ORDER)
    ),
    ("post", "/v1/messages"): Route("Answer, in Anthropic's form", answers.AnthropicMessage, MessagesRequest, True),
    ("post", "/v1/messages/count_tokens"): Route("Tokens of a conversation", answers.TokenCount, CountRequest),
    ("post", "/v1/files"): Route("Upload a file of requests", answers.File),
    ("get", "/v1/files"): Route("Files, the newest first", answers.Files, query=(MANY, AFTER)),
    ("get", "/v1/files/{name}"): Route("What is known of a file", answers.File),
    ("get", "/v1/files/{name}/content"): Route("A file's bytes", None),
    ("delete", "/v1/files/{name}"): Route("Delete a file", answers.Deleted),
    ("post", "/v1/batches"): Route("Run a file of requests behind all others", answers.Batch, BatchRequest),
    ("get", "/v1/batches"): Route("Batches, the newest first", answers.Batches, query=(LIMIT, AFTER)),
    ("get", "/v1/batches/{name}"): Route("How far a batch is", answers.Batch),
    ("post", "/v1/batches/{name}/cancel"): Route("Stop a batch", answers.Batch),
    ("get", "/v1/streams/{request_id}"): Route("Go on with a stream", None, streams=True),
    ("get", "/v1/usage"): Route("Tokens of this tenant so far", answers.TenantUsage),
    ("get", "/v1/models"): Route("The models", answers.Models),
    ("get", "/v1/models/{name}"): Route("One model", answers.Model),
    ("post", "/tokenize"): Route("Text to token ids", answers.Tokens, TokenizeRequest),
    ("post", "/detokenize"): Route("Token ids to text", answers.Text, DetokenizeRequest),
    ("get", "/health"): Route("Whether this router takes requests", answers.Health),
    ("get", "/health/ready"): Route("Whether this router takes requests", answers.Health),
    ("get", "/health/live"): Route("Whether this process lives", answers.Health),
    ("get", "/health/started"): Route("Whether this process has started", answers.Health),
    ("get", "/metrics"): Route("Prometheus metrics of the fleet", None),
}


def describer(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """For `app.openapi`: made once, when first asked for. Raises KeyError on a route that is not in the table."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    return describe


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: dict[str, Any] = {}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _describe(operation, path, ROUTES[method, path], schemas)
            if path.startswith("/v1"):
                operation["security"] = [{"bearer": []}, {"key": []}, {}]
    document["components"] = {"schemas": schemas, "securitySchemes": keys}
    return document


def _describe(operation: dict[str, Any], path: str, route: Route, schemas: dict[str, Any]) -> None:
    operation["summary"] = route.summary
    if route.takes is not None:
        operation["requestBody"] = _body(JSON, _schema(route.takes, schemas, "validation"))
    elif path == "/v1/files" and operation["operationId"].endswith("post"):
        operation["requestBody"] = _body("multipart/form-data", UPLOAD)
    known = {parameter["name"] for parameter in operation.get("parameters", [])}
    for name, schema in route.query:
        if name not in known:
            operation.setdefault("parameters", []).append({"name": name, "in": "query", "schema": schema})
    content: dict[str, Any] = {}
    if route.gives is not None:
        content[JSON] = {"schema": _schema(route.gives, schemas, "serialization")}
    if route.streams:
        content[EVENTS] = {}
    success: dict[str, Any] = {"description": "it was done"}
    if content:
        success["content"] = content
    error: type[BaseModel] = answers.AnthropicError if path.startswith("/v1/messages") else answers.Error
    if path.startswith("/health"):
        error = answers.Health
    refusal = {JSON: {"schema": _schema(error, schemas, "serialization")}}
    statuses = REFUSALS if path.startswith(("/v1", "/tok", "/detok")) else {503: "not now"}
    operation["responses"] = {"200": success} | {
        str(status): {"description": why, "content": refusal} for status, why in statuses.items()
    }
    if path == "/v1/streams/{request_id}":
        operation["responses"]["204"] = {"description": "there is nothing more of it"}


def _body(media: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {media: {"schema": schema}}}


def _schema(model: type[BaseModel], schemas: dict[str, Any], mode: Any) -> dict[str, Any]:
    """A reference to a model, which is put among the schemas with all that it refers to, under names of their own."""
    prefix = model.__module__.split(".")[-2] if model.__module__.endswith(".wire") else ""
    own = model.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}", mode=mode)
    for name, schema in own.pop("$defs", {}).items():
        assert schemas.setdefault(prefix + name, schema) == schema, f"two schemas are called {prefix + name}"
    assert schemas.setdefault(prefix + model.__name__, own) == own, f"two schemas are called {prefix + model.__name__}"
    return {"$ref": f"#/components/schemas/{prefix}{model.__name__}"}
