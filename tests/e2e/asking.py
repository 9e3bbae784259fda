"""Asking in all the ways that there are: chat and completions, streamed and whole, as one kind of answer."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.conftest import MODEL

APIS = ("chat", "completion")
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


@dataclass
class Choice:
    """text and finish as told; pieces: the text as it came; entries: one per token with log-probabilities."""

    text: str = ""
    finishes: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    roles: int = 0


@dataclass
class Answer:
    status: int
    body: Any = None
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Any = None
    error: Any = None
    num_done: int = 0
    raw: str = ""

    @property
    def text(self) -> str:
        return self.choices[0].text

    def shown(self) -> Any:
        """What must be the same however it was asked for."""
        return [(index, c.text, c.finishes, c.entries) for index, c in sorted(self.choices.items())]


def body_of(api: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": prompt}]} if api == "chat" else {"prompt": prompt}
    if api == "chat" and "logprobs" in fields:
        fields = {**fields, "logprobs": True, "top_logprobs": fields["logprobs"]}
    return {"model": MODEL, "max_tokens": 20, "temperature": 0, **asked, **fields}


async def ask(http: httpx.AsyncClient, api: str, prompt: Any, stream: bool = False, **fields: Any) -> Answer:
    """One request, and its whole answer."""
    body = body_of(api, prompt, **fields)
    if stream:
        body["stream"] = True
    return read(await http.post(PATHS[api], json=body))


def read(response: httpx.Response) -> Answer:
    answer = Answer(response.status_code, raw=response.text)
    if not response.headers["content-type"].startswith("text/event-stream"):
        answer.body = response.json()
        answer.error = answer.body.get("error")
        for choice in answer.body.get("choices", []):
            _take(answer, choice)
        answer.usage = answer.body.get("usage")
        return answer
    for line in response.text.split("\n"):
        if line == "data: [DONE]":
            answer.num_done += 1
        elif line.startswith("data: "):
            assert not answer.num_done, "nothing comes after [DONE]"
            chunk = json.loads(line.removeprefix("data: "))
            answer.error = chunk.get("error") or answer.error
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk.get("choices", []):
                _take(answer, choice)
    return answer


def _take(answer: Answer, choice: dict[str, Any]) -> None:
    mine = answer.choices.setdefault(choice["index"], Choice())
    assert not mine.finishes, "nothing comes after a finish"
    part = choice.get("message") or choice.get("delta") or {}
    text = choice.get("text", part.get("content")) or ""
    mine.roles += "role" in part
    mine.text += text
    mine.pieces.append(text)
    if choice["finish_reason"]:
        mine.finishes.append(choice["finish_reason"])
    logprobs = choice.get("logprobs")
    if logprobs and "content" in logprobs:
        mine.entries += logprobs["content"]
    elif logprobs:
        mine.entries += zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        mine.offsets += logprobs["text_offset"]
