"""What every route works with: the model's text, the queue, who asks."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from services.common.errors import ContextLengthError, ModelNotFound
from services.common.metrics import RouterMetrics
from services.common.models.resolve import ModelFiles
from services.common.text.detokenizer import TokenBytes
from services.common.text.tokenizer import TextEncoder
from services.router.api.caller import Caller, caller
from services.router.api.errors import from_validation
from services.router.api.stream import Backend
from services.router.core.chat import ChatEncoder
from services.router.core.tenants import KeyRing

if TYPE_CHECKING:
    from services.router.api.spans import Spans

W = TypeVar("W", bound=BaseModel)

A = TypeVar("A")
R = TypeVar("R")


class Offload(Protocol):
    """Runs a function on a thread, so that the event loop goes on. Raises Overloaded."""

    def __call__(self, function: Callable[[A], R], argument: A, /) -> Awaitable[R]: ...


class GrammarCheck(Protocol):
    async def build(self, kind: str, value: Any, param: str) -> str:
        """A grammar that a worker can follow. Raises InvalidRequest naming the parameter, Overloaded or Unavailable."""
        ...


@dataclass(frozen=True)
class Service:
    """What the routes need; wired by the app."""

    backend: Backend
    files: ModelFiles
    encoder: TextEncoder
    chat: ChatEncoder
    grammars: GrammarCheck
    table: TokenBytes
    metrics: RouterMetrics
    offload: Offload
    usage: Callable[[], Awaitable[dict[str, dict[str, int]]]]
    max_body_bytes: int
    keep_alive_s: float
    timeout_s: float
    model_names: frozenset[str]
    started: int
    spans: "Spans | None" = None
    ring: Callable[[], KeyRing | None] = lambda: None

    def caller(self, request: Request) -> Caller:
        """Raises Unauthenticated or InvalidRequest."""
        return caller(request, self.ring())

    def parse(self, data: dict[str, Any], wire: type[W]) -> W:
        """The validated body. Raises InvalidRequest or ModelNotFound."""
        try:
            body = wire.model_validate(data)
        except ValidationError as error:
            raise from_validation(error) from None
        self.check_model(getattr(body, "model", None) or self.files.name)
        return body

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name not in self.model_names:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist; there is {self.files.name!r}", "model")

    def check_length(self, text_bytes: int, max_tokens: int, param: str) -> None:
        """Refuse what is too long for any tokenization, before the work of tokenizing."""
        if text_bytes > max_tokens * self.table.longest:
            raise ContextLengthError(f"{param} cannot fit into {max_tokens} tokens", param)
