"""Bodies of chat and completions to prompts and parameters."""

from services.router.api.endpoint import Prepared
from services.router.api.sampling import sampling
from services.router.api.service import Service
from services.router.api.wire import ChatRequest, CompletionRequest
from services.router.core.limits import FleetLimits, check_token_ids, output_limit


async def _chat_prompt(service: Service, body: ChatRequest, limits: FleetLimits) -> list[int]:
    messages = [message.for_template() for message in body.messages]
    service.check_length(sum(len(m["content"].encode()) for m in messages), limits.max_model_len, "messages")
    ids = await service.offload(service.chat.encode, messages)
    check_token_ids(ids, limits, "messages")
    return ids


async def _completion_prompts(service: Service, body: CompletionRequest, limits: FleetLimits) -> list[list[int]]:
    out = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            service.check_length(len(prompt.encode()), limits.max_model_len, "prompt")
            prompt = await service.offload(service.encoder.encode_raw, prompt)
        check_token_ids(prompt, limits, "prompt")
        output_limit(limits, len(prompt), body.max_tokens, "prompt")  # before the next one is even looked at
        out.append(prompt)
    return out


async def prepare_chat(service: Service, body: ChatRequest, limits: FleetLimits) -> Prepared:
    """Raises InvalidRequest or Overloaded."""
    prompt = await _chat_prompt(service, body, limits)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most = output_limit(limits, len(prompt), asked, "messages", name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Prepared(
        model=body.model,
        prompts=[prompt],
        params=sampling(body, most, logprobs, limits),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=body.includes_usage,
    )


async def prepare_completion(service: Service, body: CompletionRequest, limits: FleetLimits) -> Prepared:
    """Raises InvalidRequest or Overloaded."""
    prompts = await _completion_prompts(service, body, limits)
    most = min(output_limit(limits, len(prompt), body.max_tokens, "prompt") for prompt in prompts)
    return Prepared(
        model=body.model,
        prompts=prompts,
        params=sampling(body, most, body.logprobs, limits),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=body.includes_usage,
    )
