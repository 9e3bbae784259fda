"""Text to token ids and back: /tokenize and /detokenize, in vLLM's form. They see exactly what a generation would."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, ValidationError, model_validator

from services.common.errors import InvalidRequest
from services.common.text.detokenizer import Detokenizer
from services.router.api.body import read_json
from services.router.api.errors import from_validation
from services.router.api.prepare import conversation, encode_chat
from services.router.api.service import Service
from services.router.api.wire import MAX_MESSAGES, MAX_PROMPT_IDS, Message, Strict, TokenId, Tool
from services.router.api.wire.chat import MAX_TOOLS


class TokenizeRequest(Strict):
    """A prompt as /v1/completions takes it, or messages as /v1/chat/completions does."""

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is needed")
        return self


class DetokenizeRequest(Strict):
    model: str | None = Field(None, max_length=512)
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS)]


async def _tokenize(service: Service, body: TokenizeRequest) -> list[int]:
    """Raises ContextLengthError on what is far too long, before the work."""
    longest = service.files.max_model_len
    if body.messages is not None:
        return (await encode_chat(service, conversation(body.messages, body.tools or []), longest)).ids
    prompt = body.prompt or ""
    service.check_length(len(prompt.encode()), longest, "prompt")
    return await service.offload(service.encoder.encode_raw, prompt)


def build(service: Service) -> APIRouter:
    """Both routes over one service."""
    router = APIRouter()

    async def parsed(request: Request, wire: type[Any]) -> Any:
        service.caller(request)
        try:
            body = wire.model_validate(await read_json(request, service.max_body_bytes))
        except ValidationError as error:
            raise from_validation(error) from None
        service.check_model(body.model or service.files.name)
        return body

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        body: TokenizeRequest = await parsed(request, TokenizeRequest)
        tokens = await _tokenize(service, body)
        shown = [service.table.shown(token) for token in tokens] if body.return_token_strs else None
        longest = service.files.max_model_len
        return {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": shown}

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Any:
        body: DetokenizeRequest = await parsed(request, DetokenizeRequest)
        if max(body.tokens, default=0) >= service.files.vocab_size:
            raise InvalidRequest(f"tokens: not all within 0 .. {service.files.vocab_size - 1}", "tokens")
        detokenizer = Detokenizer(service.table)
        text = "".join(map(detokenizer.push, body.tokens)) + detokenizer.flush()
        return {"prompt": text}

    return router
