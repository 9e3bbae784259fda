"""Bodies of chat and completions to prompts and parameters."""

from dataclasses import replace
from typing import Any, NamedTuple

from services.common.errors import ContextLengthError, InvalidRequest
from services.router.api.endpoint import Prepared
from services.router.api.sampling import sampling
from services.router.api.service import Service
from services.router.api.wire import ChatRequest, CompletionRequest, Message, SamplingFields, Tool
from services.router.core.chat import Conversation, Encoded, text_bytes
from services.router.core.document import View
from services.router.core.limits import FleetLimits, check_token_ids, output_limit
from services.router.core.tools import call_grammar

MAX_SCORES = 200_000
ANY_JSON = {"type": "object"}


def conversation(messages: list[Message], tools: list[Tool]) -> Conversation:
    """Raises InvalidRequest with the number of the message that is wrong."""
    out = []
    for index, message in enumerate(messages):
        try:
            out.append(message.for_template())
        except ValueError as error:
            raise InvalidRequest(f"messages.{index}.tool_calls: {error}", "messages") from None
    return Conversation(out, [tool.model_dump(exclude_none=True) for tool in tools])


async def encode_chat(service: Service, chat: Conversation, max_tokens: int) -> Encoded:
    """Raises InvalidRequest, also on what is too long for any tokenization, before the work."""
    service.check_length(text_bytes([chat.messages, chat.tools]), max_tokens, "messages")
    return await service.offload(service.chat.encode, chat)


async def _chat_prompt(service: Service, body: ChatRequest, limits: FleetLimits) -> Encoded:
    variables = dict(body.chat_template_kwargs or {})
    service.chat.check_variables(variables, "chat_template_kwargs")
    if body.reasoning_effort is not None:
        service.chat.check_variables(["reasoning_effort"], "reasoning_effort")
        variables["reasoning_effort"] = body.reasoning_effort
    chat = conversation(body.messages, body.offered)
    longest = limits.max_model_len
    chat = Conversation(chat.messages, chat.tools, variables, longest)
    encoded = await encode_chat(service, chat, longest)
    check_token_ids(encoded.ids, limits, "messages")
    return encoded


async def encode_prompts(
    service: Service, prompts: list[str] | list[list[int]], limits: FleetLimits, max_tokens: int | None, param: str
) -> list[list[int]]:
    """Raises InvalidRequest or Overloaded."""

    def encode(text: str) -> list[int]:
        if service.encoder.surely_longer(text, limits.max_model_len):
            raise ContextLengthError(f"{param} has far more than {limits.max_model_len} tokens", param)
        return service.encoder.encode_raw(text)

    out = []
    for prompt in prompts:
        if isinstance(prompt, str):
            service.check_length(len(prompt.encode()), limits.max_model_len, param)
            prompt = await service.offload(encode, prompt)
        check_token_ids(prompt, limits, param)
        output_limit(limits, len(prompt), max_tokens, param)  # before the next one is even looked at
        out.append(prompt)
    return out


class Wanted(NamedTuple):
    """What a text must match: a kind of grammar and what it is made of, and the parameter that says so."""

    kind: str
    value: Any
    param: str


def _wanted(body: SamplingFields) -> Wanted | None:
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form.type == "json_schema":
        schema = form.json_schema.schema_
        return Wanted("schema", ANY_JSON if schema is None else schema, "response_format")
    if form is not None and form.type == "json_object":
        return Wanted("schema", ANY_JSON, "response_format")
    if outputs is None:
        return None
    if outputs.json_object:
        return Wanted("schema", ANY_JSON, "structured_outputs")
    given = {"schema": outputs.json_, "regex": outputs.regex, "choice": outputs.choice, "grammar": outputs.grammar}
    kind, value = next((kind, value) for kind, value in given.items() if value is not None)
    return Wanted(kind, value, "structured_outputs")


async def _grammar(service: Service, body: SamplingFields) -> str:
    """ "" for any text. Raises InvalidRequest, Overloaded or Unavailable."""
    wanted = _wanted(body)
    if isinstance(body, ChatRequest) and body.calls_surely:
        wanted = Wanted("lark", _call_grammar(service, body), "tools")
    return "" if wanted is None else await service.grammars.build(*wanted)


def _call_grammar(service: Service, body: ChatRequest) -> str:
    chosen = None if isinstance(body.tool_choice, str) or body.tool_choice is None else body.tool_choice.function.name
    functions = [tool.function for tool in body.offered if chosen in (None, tool.function.name)]
    several = chosen is None and body.parallel_tool_calls is not False
    schemas = [(function.name, dict(function.parameters or {})) for function in functions]
    return call_grammar(service.chat.call_format, schemas, several, service.chat.special_id)


async def prepare_chat(service: Service, body: ChatRequest, limits: FleetLimits) -> Prepared:
    """Raises InvalidRequest or Overloaded."""
    encoded = await _chat_prompt(service, body, limits)
    name, asked = body.most_asked
    most = output_limit(limits, len(encoded.ids), asked, "messages", name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar = await _grammar(service, body)
    calls = service.chat.call_format if body.offered and not body.is_formatted else ""
    return Prepared(
        model=body.model,
        prompts=[encoded.ids],
        params=sampling(body, most, logprobs, limits, grammar),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=body.includes_usage,
        tier=body.service_tier,
        labels=labels(body, safety_identifier=body.safety_identifier),
        view=View(
            calls=calls,
            functions=tuple(tool.function.name for tool in body.offered) if calls else (),
            reasoning="" if grammar else encoded.reasoning,  # what is constrained has no room for thoughts
            tier=_tier(body),
        ),
    )


async def prepare_completion(service: Service, body: CompletionRequest, limits: FleetLimits) -> Prepared:
    """Raises InvalidRequest or Overloaded."""
    prompts = await encode_prompts(service, body.prompt, limits, body.max_tokens, "prompt")
    most = min(output_limit(limits, len(prompt), body.max_tokens, "prompt") for prompt in prompts)
    if body.echo and body.logprobs is not None:
        _check_scores(body, prompts)
    ranked = body.generated > (body.n or 1)
    # A prompt is scored on the way to its first token, which is made, and not shown.
    params = sampling(body, max(1, most), body.logprobs, limits, await _grammar(service, body))
    return Prepared(
        model=body.model,
        prompts=prompts,
        params=replace(
            params,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
            logprobs=0 if ranked and body.logprobs is None else body.logprobs,
        ),
        n=body.generated,
        stream=bool(body.stream),
        include_usage=body.includes_usage,
        tier=body.service_tier,
        labels=labels(body),
        view=View(
            shown=(body.n or 1) if ranked else 0,
            echo=tuple(map(tuple, prompts)) if body.echo else (),
            scores_only=body.max_tokens == 0,
            logprobs=body.logprobs is not None,
            tier=_tier(body),
        ),
    )


def _check_scores(body: CompletionRequest, prompts: list[list[int]]) -> None:
    """The answer must not be out of all proportion: it has every prompt's scores once for each choice."""
    shown = sum(map(len, prompts)) * (body.n or 1) * ((body.logprobs or 0) + 1)
    if shown > MAX_SCORES:
        raise InvalidRequest(
            f"echo: prompts, n and logprobs together ask for {shown} values, more than {MAX_SCORES}", "echo"
        )


def labels(body: SamplingFields, **more: str | None) -> dict[str, str]:
    """What the caller says of its request, for its trace."""
    said = {"user": body.user, **more}
    metadata = {f"metadata.{key}": text for key, text in (body.metadata or {}).items()}
    return metadata | {name: text for name, text in said.items() if text is not None}


def _tier(body: SamplingFields) -> str:
    """As it is told: what was asked for is what is given."""
    return "" if body.service_tier is None else "default" if body.service_tier == "auto" else body.service_tier
