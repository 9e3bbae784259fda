"""The gRPC runtime that scheduler and worker share: one bidirectional stream, `orca.v1.Worker/Session`."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from services.common.pb.orca.v1 import worker_pb2

SESSION = "Session"
SERVICE = "orca.v1.Worker"
EPOCH = "orca-epoch"  # in the metadata of a session
OPTIONS = [
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]

Handler = Callable[[AsyncIterator[worker_pb2.SchedulerMessage], Any], AsyncIterator[worker_pb2.WorkerMessage]]


async def serve(handler: Handler, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Serve sessions; returns the server, started, and its port. Raises OSError if the port is taken."""
    server = grpc.aio.server(options=OPTIONS)
    rpc = grpc.stream_stream_rpc_method_handler(
        handler,
        request_deserializer=worker_pb2.SchedulerMessage.FromString,
        response_serializer=worker_pb2.WorkerMessage.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {SESSION: rpc}),))
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}") from error
    await server.start()
    return server, bound


def dial(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def open_session(channel: grpc.aio.Channel, epoch: int) -> Any:
    """A bidirectional call: write SchedulerMessage, read WorkerMessage. A worker that knows a later epoch refuses."""
    return channel.stream_stream(
        f"/{SERVICE}/{SESSION}",
        request_serializer=worker_pb2.SchedulerMessage.SerializeToString,
        response_deserializer=worker_pb2.WorkerMessage.FromString,
    )(metadata=((EPOCH, str(epoch)),))
