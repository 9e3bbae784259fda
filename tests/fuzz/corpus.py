"""Valid requests of every route: what the byte-level mutators start from, and what must be answered well as it is.

Each must end soon on the fake executor, and none may change what another one sees (except files and batches, which
only ever add).
"""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.conftest import MODEL

USER = [{"role": "user", "content": "Hi"}]
JSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": JSON_SCHEMA}}]
BOUNDARY = "orca-fuzz-boundary"
BATCH_LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": MODEL, "prompt": "a", "max_tokens": 2},
}
UPLOAD = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="batch.jsonl"\r\n'
    f"Content-Type: application/jsonl\r\n\r\n{json.dumps(BATCH_LINE)}\r\n--{BOUNDARY}--\r\n"
).encode()


@dataclass(frozen=True)
class Seed:
    """One valid request. head: its headers but for Host and Content-Length. statuses: what is a good answer."""

    name: str
    method: str
    path: str
    body: bytes = b""
    head: tuple[tuple[bytes, bytes], ...] = ()
    statuses: tuple[int, ...] = (200,)
    fields: Any = field(default=None, compare=False)

    def raw(self, body: bytes | None = None, head: list[tuple[bytes, bytes]] | None = None) -> bytes:
        """The bytes of it, with another body or other headers if given."""
        body = self.body if body is None else body
        lines = [f"{self.method} {self.path} HTTP/1.1".encode()]
        lines += [name + b": " + value for name, value in (self.headers(body) if head is None else head)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def headers(self, body: bytes) -> list[tuple[bytes, bytes]]:
        """All headers of this request with that body."""
        length = [(b"Content-Length", str(len(body)).encode())] if body or self.method == "POST" else []
        return [(b"Host", b"127.0.0.1"), *self.head, *length]


def _post(name: str, path: str, more: dict[str, str] | None = None, **fields: Any) -> Seed:
    head = {"Content-Type": "application/json", "Authorization": "Bearer none", **(more or {})}
    pairs = tuple((key.encode(), value.encode()) for key, value in head.items())
    return Seed(name, "POST", path, json.dumps(fields, ensure_ascii=False).encode(), pairs, (200,), fields)


def _get(name: str, path: str, *statuses: int) -> Seed:
    return Seed(name, "GET", path, statuses=statuses or (200,))


def _chat(name: str, **fields: Any) -> Seed:
    return _post(name, "/v1/chat/completions", model=MODEL, **{"messages": USER, "max_tokens": 3, **fields})


def _completion(name: str, **fields: Any) -> Seed:
    return _post(name, "/v1/completions", model=MODEL, **{"prompt": "a b", "max_tokens": 3, **fields})


def _constrained() -> list[Seed]:
    """Of the structured outputs: what constrains the tokens must hold against anything."""
    schema = {"name": "s", "schema": JSON_SCHEMA, "strict": True}
    return [
        _chat("json object", response_format={"type": "json_object"}),
        _chat("json schema", response_format={"type": "json_schema", "json_schema": schema}),
        _completion("regex", structured_outputs={"regex": "[ab]{1,3}"}),
        _completion("choice", structured_outputs={"choice": ["yes", "no"]}),
        _completion("grammar", structured_outputs={"grammar": 'start: "a" | "b" start'}),
        _completion("json", structured_outputs={"json": JSON_SCHEMA}),
        _chat("tools", tools=TOOLS, tool_choice="auto"),
        _chat("required tool", tools=TOOLS, tool_choice="required"),
        _chat("named tool", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "look_up"}}),
    ]


def _other_apis() -> list[Seed]:
    """Anthropic's API, and the newer ones of OpenAI."""
    anthropic = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
    tool = {"name": "look_up", "input_schema": JSON_SCHEMA}
    upload = (b"Content-Type", f"multipart/form-data; boundary={BOUNDARY}".encode())
    return [
        _post("messages", "/v1/messages", anthropic, model=MODEL, max_tokens=3, messages=USER, system="Be brief."),
        _post("messages stream", "/v1/messages", anthropic, model=MODEL, max_tokens=3, messages=USER, stream=True),
        _post("messages tool", "/v1/messages", anthropic, model=MODEL, max_tokens=3, messages=USER, tools=[tool]),
        _post("count tokens", "/v1/messages/count_tokens", anthropic, model=MODEL, messages=USER),
        _post("responses", "/v1/responses", model=MODEL, input="Hi", max_output_tokens=16),
        _post("responses stream", "/v1/responses", model=MODEL, input=USER, max_output_tokens=16, stream=True),
        _post("embeddings", "/v1/embeddings", model=MODEL, input=["a", "b c"]),
        Seed("upload", "POST", "/v1/files", UPLOAD, (upload,)),
        _get("files", "/v1/files"),
        _get("no file", "/v1/files/file-none", 404),
        _get("batches", "/v1/batches"),
        _get("no batch", "/v1/batches/batch_none", 404),
    ]


def seeds() -> list[Seed]:
    """All of them."""
    asked = {"X-Request-Id": "abc-1", "Idempotency-Key": "fuzz-1", "X-Orca-Resumable": "true", "X-Orca-Timeout": "30"}
    return [
        _chat("chat"),
        _chat("chat stream", stream=True, stream_options={"include_usage": True}),
        _chat("chat logprobs", logprobs=True, top_logprobs=3, n=2, seed=5, temperature=0.7),
        _chat("chat parts", messages=[{"role": "user", "content": [{"type": "text", "text": "é 🐋"}]}]),
        _chat("chat stops", stop=["x", "yy"], logit_bias={"300": 1.5}, presence_penalty=0.5, top_p=0.9, top_k=40),
        _completion("completion"),
        _completion("completion stream", stream=True, n=2),
        _completion("completion ids", prompt=[[34, 32], [36]], seed=1, min_tokens=1, stop_token_ids=[5]),
        _completion("completion likely", logprobs=2, frequency_penalty=0.1, repetition_penalty=1.1, min_p=0.1),
        _completion("echo", echo=True, logprobs=1),
        _completion("best of", best_of=2, n=1),
        _post("asked", "/v1/completions", asked, model=MODEL, prompt="a", max_tokens=3, stream=True),
        _post("tokenize", "/tokenize", model=MODEL, prompt="wörld 🐋", return_token_strs=True),
        _post("tokenize chat", "/tokenize", messages=USER),
        _post("detokenize", "/detokenize", tokens=[34, 32, 300]),
        *_constrained(),
        *_other_apis(),
        _get("models", "/v1/models"),
        _get("model", f"/v1/models/{MODEL}"),
        _get("no model", "/v1/models/none", 404),
        _get("no stream", "/v1/streams/none", 404),
        _get("usage", "/v1/usage"),
        _get("live", "/health/live"),
        _get("ready", "/health/ready"),
        _get("nothing", "/v1/nothing", 404),
        _get("schema", "/openapi.json"),
    ]
