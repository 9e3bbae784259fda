"""Requests to protobuf and back. For adapters only: protobuf stops there."""

from collections.abc import Iterable, Sequence

from services.common.journal import TokenDetail
from services.common.pb.orca.v1 import common_pb2, generate_pb2
from services.common.request import GenerateRequest, SamplingParams


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=params.grammar,
        embed=params.embed,
    )


def sampling_from_proto(proto: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=proto.temperature,
        top_k=proto.top_k,
        top_p=proto.top_p,
        min_p=proto.min_p,
        seed=proto.seed,
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        repetition_penalty=proto.repetition_penalty,
        logit_bias=dict(proto.logit_bias),
        min_tokens=proto.min_tokens,
        max_tokens=proto.max_tokens,
        ignore_eos=proto.ignore_eos,
        stop=tuple(proto.stop),
        stop_token_ids=tuple(proto.stop_token_ids),
        logprobs=proto.logprobs if proto.HasField("logprobs") else None,
        prompt_logprobs=proto.prompt_logprobs,
        grammar=proto.grammar,
        embed=proto.embed,
    )


def request_to_bytes(request: GenerateRequest) -> bytes:
    return generate_pb2.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        prompts=[generate_pb2.Prompt(token_ids=prompt) for prompt in request.prompts],
        n=request.n,
        sampling=sampling_to_proto(request.params),
        tenant=request.tenant,
        priority=request.priority,
        traceparent=request.traceparent,
        timeout_s=request.timeout_s,
        weight=request.weight,
    ).SerializeToString()


def request_from_bytes(data: bytes) -> GenerateRequest:
    """Raises google.protobuf.message.DecodeError."""
    proto = generate_pb2.GenerateRequest.FromString(data)
    return GenerateRequest(
        request_id=proto.request_id,
        model=proto.model,
        prompts=tuple(tuple(prompt.token_ids) for prompt in proto.prompts),
        params=sampling_from_proto(proto.sampling),
        n=max(1, proto.n),
        tenant=proto.tenant,
        priority=proto.priority,
        traceparent=proto.traceparent,
        timeout_s=proto.timeout_s,
        weight=proto.weight or 1.0,
    )


Details = tuple[tuple[TokenDetail, ...], tuple[TokenDetail, ...], tuple[float, ...], int]
NO_DETAILS: Details = ((), (), (), 0)
# A detail as the worker has it: the chosen token's log-probability and (token id, log-probability) of alternatives.
Scored = tuple[float, tuple[tuple[int, float], ...]]


def details_from_bytes(payload: bytes) -> Details:
    """Of the tokens of a journal item, of the tokens of its prompt, its prompt's embedding, and how much of that was
    cached."""
    if not payload:  # nearly always
        return NO_DETAILS
    proto = common_pb2.TokenDetails.FromString(payload)
    return _details(proto.tokens), _details(proto.prompt), tuple(proto.embedding), proto.cached


def _details(protos: Iterable[common_pb2.TokenDetail]) -> tuple[TokenDetail, ...]:
    return tuple(TokenDetail(d.logprob, tuple((t.token_id, t.logprob) for t in d.top)) for d in protos)


def details_to_bytes(
    token: Scored | None, prompt: Sequence[Scored] = (), embedding: Sequence[float] = (), cached: int = 0
) -> bytes:
    """The payload of a journal item of one token."""
    return common_pb2.TokenDetails(
        tokens=[_scored(token)] if token else [], prompt=map(_scored, prompt), embedding=embedding, cached=cached
    ).SerializeToString()


def _scored(scored: Scored) -> common_pb2.TokenDetail:
    chosen, top = scored
    alternatives = [common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in top]
    return common_pb2.TokenDetail(logprob=chosen, top=alternatives)
