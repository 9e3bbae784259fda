"""What any router needs to go on with a stream: kept with the request's state, so that routers need not be."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from services.common.request import GenerateRequest


@dataclass(frozen=True, slots=True)
class View:
    """How a request's tokens are shown, beyond their text.

    shown: the best so many of each prompt's choices, by mean log-probability; 0 is all. echo: prompts, by number, to
    show before their outputs. scores_only: the one token that was made is not shown. logprobs: whether those are shown;
    None is where there are any. calls: the format in which the model writes calls of these functions, "" for none.
    reasoning: where its thoughts are set apart: "" nowhere, "inside" from the beginning, "marked" when it begins with
    the mark. detail: what the API repeats in its answer, as JSON.
    """

    shown: int = 0
    echo: tuple[tuple[int, ...], ...] = ()
    scores_only: bool = False
    logprobs: bool | None = None
    calls: str = ""
    functions: tuple[str, ...] = ()
    reasoning: str = ""
    tier: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "View":
        return cls(**values | {"echo": tuple(map(tuple, values["echo"])), "functions": tuple(values["functions"])})


PLAIN = View()


@dataclass(frozen=True, slots=True)
class Document:
    """How one request's tokens become its client's answer. api: chat, completion, ... created: unix time in s.

    choices: of all prompts. n: of each prompt.
    """

    request_id: str
    api: str
    model: str
    created: int
    choices: int
    n: int = 1
    tenant: str = ""
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    traceparent: str = ""
    view: View = PLAIN

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        api: str,
        created: int,
        stream: bool,
        include_usage: bool,
        view: View = PLAIN,
    ) -> "Document":
        params = request.params
        return cls(
            request_id=request.request_id,
            api=api,
            model=request.model,
            created=created,
            choices=request.num_choices,
            n=request.n,
            tenant=request.tenant,
            stop=params.stop,
            min_tokens=params.min_tokens,
            logprobs=params.logprobs is not None if view.logprobs is None else view.logprobs,
            stream=stream,
            include_usage=include_usage,
            traceparent=request.traceparent,
            view=view,
        )

    @classmethod
    def from_json(cls, text: str) -> "Document":
        values = json.loads(text)
        return cls(**values | {"stop": tuple(values["stop"]), "view": View.from_dict(values["view"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))
