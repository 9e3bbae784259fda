"""Protobuf to the worker's records and back."""

from collections.abc import Iterable

from services.common.codec import sampling_from_proto
from services.common.pb.orca.v1 import common_pb2, worker_pb2
from services.worker.adapters.publisher import Outcome
from services.worker.core.plan import NewSequence, Plan, StepOutput

FINISH = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORT,
    "error": common_pb2.FINISH_REASON_ERROR,
}


def plan_from_proto(proto: worker_pb2.StepPlan) -> Plan:
    return Plan(
        number=proto.number,
        epoch=proto.epoch,
        full=proto.full,
        release=tuple(proto.release),
        add=tuple(_new_sequence(new) for new in proto.add),
        blocks=_grants(proto.blocks),
        copies=tuple((copy.source, copy.target) for copy in proto.copies),
        swap_out=_grants(proto.swap_out),
        swap_in=_grants(proto.swap_in),
        chunks=tuple((chunk.sequence_id, chunk.num_tokens) for chunk in proto.chunks),
        hold=tuple(proto.hold),
        resume=tuple(proto.resume),
    )


def _grants(grants: Iterable[worker_pb2.BlockGrant]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((grant.sequence_id, tuple(grant.block_ids)) for grant in grants)


def _new_sequence(proto: worker_pb2.NewSequence) -> NewSequence:
    return NewSequence(
        sequence_id=proto.sequence_id,
        request_id=proto.request_id,
        choice=proto.choice,
        prompt_index=proto.prompt_index,
        attempt=proto.attempt,
        prompt=list(proto.prompt),
        output=list(proto.output),
        params=sampling_from_proto(proto.sampling),
        num_computed=proto.num_computed_tokens,
        cache_root=proto.cache_root,
        traceparent=proto.traceparent,
    )


def result_to_proto(step: StepOutput) -> worker_pb2.WorkerMessage:
    sequences = [
        worker_pb2.SequenceResult(
            sequence_id=output.sequence.sequence_id,
            num_computed=output.num_computed,
            token_ids=output.token_ids,
            finish_reason=FINISH[output.finish_reason],
        )
        for output in step.outputs
    ]
    result = worker_pb2.StepResult(
        plan_number=step.plan.number,
        sequences=sequences,
        started_ns=step.started_ns,
        finished_ns=step.finished_ns,
        idle_ns=step.idle_ns,
        error=step.error,
    )
    return worker_pb2.WorkerMessage(result=result)


def outcomes_to_proto(outcomes: list[Outcome]) -> worker_pb2.WorkerMessage:
    answers = [
        worker_pb2.PublishOutcome(
            sequence_id=outcome.sequence_id,
            answer=f"PUBLISH_ANSWER_{outcome.answer.upper()}",
            finish_reason=FINISH[outcome.finish_reason],
        )
        for outcome in outcomes
    ]
    return worker_pb2.WorkerMessage(published=worker_pb2.Published(outcomes=answers))
