"""What any router needs to go on with a stream: kept with the request's state, so that routers need not be."""

import json
from dataclasses import asdict, dataclass

from services.common.request import GenerateRequest


@dataclass(frozen=True, slots=True)
class Document:
    """How one request's tokens become its client's answer. api: chat or completion. created: unix time in s."""

    request_id: str
    api: str
    model: str
    created: int
    choices: int
    tenant: str = ""
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    traceparent: str = ""

    @classmethod
    def of(cls, request: GenerateRequest, api: str, created: int, stream: bool, include_usage: bool) -> "Document":
        params = request.params
        return cls(
            request_id=request.request_id,
            api=api,
            model=request.model,
            created=created,
            choices=request.num_choices,
            tenant=request.tenant,
            stop=params.stop,
            min_tokens=params.min_tokens,
            logprobs=params.logprobs is not None,
            stream=stream,
            include_usage=include_usage,
            traceparent=request.traceparent,
        )

    @classmethod
    def from_json(cls, text: str) -> "Document":
        values = json.loads(text)
        return cls(**values | {"stop": tuple(values["stop"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))
