"""The core's records to protobuf and back."""

from services.common.codec import sampling_to_proto
from services.common.pb.orca.v1 import common_pb2, worker_pb2
from services.scheduler.core.prefix_cache import cache_root
from services.scheduler.core.request import FinishReason
from services.scheduler.core.step import StepPlan, StepResult, WorkerLimits
from services.scheduler.engine import Assignment, PublishOutcome

FINISH: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


def plan_to_proto(plan: StepPlan, added: list[Assignment], epoch: int) -> worker_pb2.SchedulerMessage:
    return worker_pb2.SchedulerMessage(
        plan=worker_pb2.StepPlan(
            number=plan.number,
            epoch=epoch,
            full=plan.full,
            release=plan.release,
            add=[_new_sequence(assignment) for assignment in added],
            blocks=_grants(plan.blocks),
            copies=[worker_pb2.BlockCopy(source=source, target=target) for source, target in plan.copies],
            swap_out=_grants(plan.swap_out),
            swap_in=_grants(plan.swap_in),
            chunks=[worker_pb2.Chunk(sequence_id=i, num_tokens=tokens) for i, tokens in plan.chunks],
            hold=plan.hold,
            resume=plan.resume,
        )
    )


def _grants(grants: tuple[tuple[int, tuple[int, ...]], ...]) -> list[worker_pb2.BlockGrant]:
    return [worker_pb2.BlockGrant(sequence_id=sequence_id, block_ids=blocks) for sequence_id, blocks in grants]


def _new_sequence(assignment: Assignment) -> worker_pb2.NewSequence:
    sequence = assignment.item.sequence
    return worker_pb2.NewSequence(
        sequence_id=assignment.item.sequence_id,
        request_id=sequence.request_id,
        choice=sequence.choice,
        attempt=assignment.attempt,
        prompt=sequence.prompt,
        output=sequence.output,
        sampling=sampling_to_proto(assignment.params),
        prompt_index=sequence.prompt_index,
        num_computed_tokens=assignment.item.num_computed,
        cache_root=cache_root(sequence),
        traceparent=assignment.traceparent,
    )


def result_from_proto(proto: worker_pb2.StepResult) -> StepResult:
    tokens = {item.sequence_id: item.token_ids[0] if item.token_ids else None for item in proto.sequences}
    finished = {item.sequence_id: FINISH[item.finish_reason] for item in proto.sequences if item.finish_reason}
    seconds = (proto.finished_ns - proto.started_ns) / 1e9
    return StepResult(proto.plan_number, tokens, finished, seconds, proto.finished_ns / 1e9)


def outcome_from_proto(proto: worker_pb2.PublishOutcome) -> PublishOutcome:
    answer = worker_pb2.PublishAnswer.Name(proto.answer).removeprefix("PUBLISH_ANSWER_").lower()
    return PublishOutcome(proto.sequence_id, answer, FINISH.get(proto.finish_reason))


def contents_from_hello(hello: worker_pb2.Hello) -> dict[int, bytes]:
    """What the worker's full blocks hold. Blocks that it cannot have are none."""
    return {block.block_id: block.digest for block in hello.cached if block.block_id < hello.num_blocks}


def limits_from_hello(hello: worker_pb2.Hello, max_num_seqs: int, token_budget: int) -> WorkerLimits:
    return WorkerLimits(
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_model_len=hello.max_model_len,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_in_flight=hello.max_in_flight,
        stages=hello.stages,
        num_host_blocks=hello.num_host_blocks,
        swap_s=hello.swap_s,
    )
