"""What the formatters of all APIs share. A formatter is a fold too: deltas in, objects out, the same on any router."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import OrcaError
from services.common.journal import TokenDetail
from services.common.text.detokenizer import TokenBytes
from services.router.api import sse
from services.router.api.errors import error_body
from services.router.core.document import Document
from services.router.core.emission import Delta, Usage

FINGERPRINT = "orca-0.1.0"
LOGPROB_FLOOR = -9999.0  # minus infinity is no JSON


@dataclass
class Call:
    """One tool call, collected."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Whole:
    """One choice, collected."""

    index: int
    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    stop: str | None = None
    token_ids: list[int] = field(default_factory=list)
    details: list[TokenDetail] = field(default_factory=list)
    prompt: list[TokenDetail] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    embedding: tuple[float, ...] = ()

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.token_ids += delta.token_ids
        self.details += delta.details
        self.prompt += delta.prompt
        self.finish = delta.finish or self.finish
        self.stop = delta.stop or self.stop
        self.embedding = self.embedding or delta.embedding
        for call in delta.calls:
            if call.name is not None:
                self.calls.append(Call(call.call_id, call.name))
            self.calls[call.index].arguments += call.arguments

    @property
    def mean_logprob(self) -> float:
        return sum(detail.logprob for detail in self.details) / max(1, len(self.details))


class Formatter(ABC):
    """One request's answer in the form of its API."""

    def __init__(self, document: Document, table: TokenBytes) -> None:
        self.document = document
        self.table = table

    # -- streamed

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The objects that tell a delta."""

    @abstractmethod
    def end(self, usage: Usage) -> list[dict[str, Any]]:
        """The objects that come after all deltas. usage: tokens of all prompts, and made."""

    def frame(self, data: dict[str, Any], event_id: str | None = None) -> bytes:
        """One object as an event."""
        return sse.event(data, event_id)

    def failed(self, error: OrcaError) -> bytes:
        """The event that tells of a failure."""
        return self.frame(error_body(error))

    closing = sse.DONE  # after the last event, also after that of a failure
    id_headers: tuple[str, ...] = ()  # where this API's clients look for a request's id, beside X-Request-Id

    # -- whole

    @abstractmethod
    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        """The answer as one object."""

    def shown(self, token_id: int, logprob: float) -> tuple[str, float]:
        """A token as it is told beside its log-probability."""
        return self.table.shown(token_id), max(logprob, LOGPROB_FLOOR)
