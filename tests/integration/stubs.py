"""Stand-ins for both ends of Envoy: a server that steers as the request itself says, a node that tells what it got."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc
import grpc.aio
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.wire import envoy_pb2 as pb

CLUSTER_HEADER = "x-upstream-cluster"
DESTINATION_HEADER = "x-gateway-destination-endpoint"
RETRY_HEADER = "x-envoy-retry-on"
REQUEST_HEADER = "x-kvaffinity-request"
RETRY_ON = "connect-failure,refused-stream,reset-before-request,reset"
HEAD_BYTES = 65536
DUPLEX_CHUNK_BYTES = 62_000
MODE = pb.ProtocolConfiguration


class StubServer:
    """An ext_proc server that decides as the request says (`stub-set: name=value;...`, `stub-ticket` and others)."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[dict[str, str]] = []  # the request headers it was shown
        self.decided = 0  # so many replies were handed to grpc
        self.logged: list[pb.HttpAccessLogEntry] = []
        self._server = grpc.aio.server()

    async def __aenter__(self) -> Self:
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "envoy.service.ext_proc.v3.ExternalProcessor",
                    {
                        "Process": grpc.stream_stream_rpc_method_handler(
                            self._process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
                        )
                    },
                ),
                grpc.method_handlers_generic_handler(
                    "envoy.service.accesslog.v3.AccessLogService",
                    {
                        "StreamAccessLogs": grpc.stream_unary_rpc_method_handler(
                            self._access_log,
                            pb.StreamAccessLogsMessage.FromString,
                            pb.StreamAccessLogsResponse.SerializeToString,
                        )
                    },
                ),
            ]
        )
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def _process(
        self, messages: AsyncIterator[pb.ProcessingRequest], context: Any
    ) -> AsyncIterator[pb.ProcessingResponse]:
        first = await anext(messages)
        mode = first.protocol_config.request_body_mode
        headers = {each.key: each.raw_value.decode() for each in first.request_headers.headers.headers}
        self.asked.append(headers)
        if "stub-silent" in headers:
            await asyncio.Event().wait()
        if "stub-reject" in headers:
            yield rejection()
            return
        ended = first.request_headers.end_of_stream
        if mode == MODE.BUFFERED and not ended:
            yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())
            await anext(messages)
            reply = decision(headers, whole=True)
            yield pb.ProcessingResponse(
                request_body=pb.BodyResponse(response=reply.request_headers.response),
                dynamic_metadata=reply.dynamic_metadata,
            )
            return
        body = bytearray()
        while not ended and (mode == MODE.FULL_DUPLEX_STREAMED or len(body) < HEAD_BYTES):
            message = await anext(messages)
            body += message.request_body.body
            ended = message.request_body.end_of_stream
        self.decided += 1
        yield decision(headers, whole=ended)
        if mode == MODE.FULL_DUPLEX_STREAMED:
            for start in range(0, len(body), DUPLEX_CHUNK_BYTES):
                chunk = bytes(body[start : start + DUPLEX_CHUNK_BYTES])
                yield duplex(chunk, end_of_stream=start + DUPLEX_CHUNK_BYTES >= len(body))

    async def _access_log(
        self, messages: AsyncIterator[pb.StreamAccessLogsMessage], context: Any
    ) -> pb.StreamAccessLogsResponse:
        async for message in messages:
            self.logged.extend(message.http_logs.log_entry)
        return pb.StreamAccessLogsResponse()


def decision(headers: dict[str, str], *, whole: bool) -> pb.ProcessingResponse:
    """The headers reply that `stub-set` and `stub-ticket` ask for; retries where the whole body was seen."""
    chosen = dict(each.split("=", 1) for each in headers.get("stub-set", "").split(";") if each)
    if whole:
        chosen[RETRY_HEADER] = RETRY_ON
    options = [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value.encode()),
            append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in chosen.items()
    ]
    common = pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=options), clear_route_cache=True)
    reply = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
    if "stub-ticket" in headers:
        reply.dynamic_metadata.update({"kvaffinity": {"ticket": headers["stub-ticket"], "locality": 0.5}})
    return reply


def rejection() -> pb.ProcessingResponse:
    """A 503 with a JSON body."""
    header = pb.HeaderValueOption(header=pb.HeaderValue(key="content-type", raw_value=b"application/json"))
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=503), headers=pb.HeaderMutation(set_headers=[header]), body=b'{"error":{}}'
        )
    )


def duplex(chunk: bytes, *, end_of_stream: bool) -> pb.ProcessingResponse:
    """One echoed chunk of the body."""
    streamed = pb.StreamedBodyResponse(body=chunk, end_of_stream=end_of_stream)
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
    return pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))


class StubNode:
    """An upstream that answers with its name and the body's SHA-256; /stream sends headers first, a chunk later."""

    FIRST_CHUNK_AFTER_S = 0.3

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port
        self.seen: list[dict[str, str]] = []  # the headers of each request
        self.drop = 0  # so many requests are read whole and then cut off without an answer
        application = web.Application(client_max_size=1 << 30)
        application.router.add_get("/health", self._health)
        application.router.add_post("/stream", self._stream)
        application.router.add_route("*", "/{path:.*}", self._echo)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.seen.append({name.lower(): value for name, value in request.headers.items()})
        if self.drop:
            self.drop -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"node": self.name, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.seen.append({name.lower(): value for name, value in request.headers.items()})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await asyncio.sleep(self.FIRST_CHUNK_AFTER_S)  # the time it stands for, not a wait for anything
        await answer.write(b"data: {}\n\n")
        await answer.write_eof()
        return answer


async def serve(port: int) -> None:
    """The stub server as a process of its own, so that it can be stopped and killed."""
    async with StubServer(port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
