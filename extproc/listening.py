"""What answers on the port: both Envoy services and gRPC health."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.server import ExtProc
from extproc.wire.envoy_pb2 import (
    ProcessingRequest,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"


class Health:
    """gRPC health for Envoy's health check and for probes."""

    _SERVICES: Sequence[str] = ("", EXT_PROC, "readiness")

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()

    async def serving(self, yes: bool) -> None:
        """SERVING or NOT_SERVING for every service but liveness, which only says that the process answers."""
        status = health_pb2.HealthCheckResponse.SERVING if yes else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._SERVICES:
            await self.servicer.set(service, status)
        await self.servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)


def build(ext_proc: ExtProc, health_state: Health, *, listen: str, max_message_bytes: int) -> grpc.aio.Server:
    """The server, bound but not started; OSError when it cannot bind."""
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # a second server on the port is a mistake, and must not share the traffic
            ("grpc.max_receive_message_length", max_message_bytes),
        ],
    )
    process = grpc.stream_unary_rpc_method_handler(  # to Envoy it is the stream it asked for: see ExtProc.process
        ext_proc.process, ProcessingRequest.FromString
    )
    logs = grpc.stream_unary_rpc_method_handler(
        ext_proc.stream_access_logs, StreamAccessLogsMessage.FromString, StreamAccessLogsResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(EXT_PROC, {"Process": process}),
            grpc.method_handlers_generic_handler(ACCESS_LOG, {"StreamAccessLogs": logs}),
        )
    )
    health_pb2_grpc.add_HealthServicer_to_server(health_state.servicer, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:  # what grpc raises here
        raise OSError(f"cannot listen on {listen}: {error}") from error
    if not port and not listen.startswith("unix:"):
        raise OSError(f"cannot listen on {listen}")
    return server
