"""/v1/embeddings: the last hidden state of each input, of length 1."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from services.common.request import SamplingParams
from services.router.api.endpoint import Endpoint, Prepared
from services.router.api.prepare import encode_prompts
from services.router.api.service import Service
from services.router.api.wire import Prompts, Strict, refused
from services.router.core.document import View
from services.router.core.limits import FleetLimits


class EmbeddingRequest(Strict):
    model: str = Field(min_length=1, max_length=512)
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[None, refused("this model's embeddings cannot be shortened")] = None
    user: str | None = Field(None, max_length=512)


async def prepare_embeddings(service: Service, body: EmbeddingRequest, limits: FleetLimits) -> Prepared:
    """Raises InvalidRequest or Overloaded."""
    return Prepared(
        model=body.model,
        prompts=await encode_prompts(service, body.input, limits, 1, "input"),
        # A step that samples gives the last hidden state with its token, which nobody wants.
        params=SamplingParams(max_tokens=1, temperature=0.0, embed=True),
        labels={} if body.user is None else {"user": body.user},
        view=View(detail={"encoding_format": body.encoding_format or "float"}),
    )


def build(service: Service) -> APIRouter:
    router = APIRouter()
    endpoint = Endpoint(service, "embedding", EmbeddingRequest, prepare_embeddings)

    @router.post("/v1/embeddings")
    async def embeddings(request: Request) -> Any:
        return await endpoint(request)

    return router
