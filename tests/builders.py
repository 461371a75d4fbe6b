"""What the tests of the wire, the server and the sources are built from: messages, settings, a running server."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import grpc

from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.types import Node, Policy, Settled, Ticket
from extproc.listening import ACCESS_LOG, EXT_PROC, Health, build
from extproc.policies.least_ttft import LeastTtft
from extproc.reader import Reader
from extproc.reading import Cause, Cut, Interpreter, Phases, ReadingSettings, Unkeyed
from extproc.server import ExtProc, Settings
from extproc.tokens.encoder import Encoder
from extproc.wire.envoy_pb2 import (
    HeaderMutation,
    HttpAccessLogEntry,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)
from extproc.wire.exchange import HEADERS, BodyMode, Exchange
from extproc.wire.messages import RETRY_HEADER

CHAT = "/v1/chat/completions"
CLUSTER = "x-upstream-cluster"
DESTINATION = "x-gateway-destination-endpoint"

_CONFIGS = {
    BodyMode.HEAD: ProtocolConfiguration(
        request_body_mode=ProtocolConfiguration.STREAMED, send_body_without_waiting_for_header_response=True
    ),
    BodyMode.BUFFERED: ProtocolConfiguration(request_body_mode=ProtocolConfiguration.BUFFERED),
    BodyMode.DUPLEX: ProtocolConfiguration(request_body_mode=ProtocolConfiguration.FULL_DUPLEX_STREAMED),
}


# ---- requests ----


def headers(
    *extra: tuple[str, str], path: str = CHAT, method: str = "POST", mode: BodyMode = BodyMode.HEAD, end: bool = False
) -> ProcessingRequest:
    """The first message of a stream; `extra` come after the pseudo-headers, in order."""
    message = ProcessingRequest(protocol_config=_CONFIGS[mode])
    for key, value in ((":method", method), (":path", path), *extra):
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    message.request_headers.end_of_stream = end
    return message


def body(data: bytes, *, end: bool = False) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_body.body = data
    message.request_body.end_of_stream = end
    return message


def trailers() -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_trailers.trailers.headers.add(key="x-checksum", raw_value=b"1")
    return message


def chat(*texts: str, model: str | None = "m", **fields: Any) -> bytes:
    """A chat body: user and assistant take turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    named = {} if model is None else {"model": model}
    return json.dumps({**named, "messages": messages, **fields}, ensure_ascii=False).encode()


def prose(characters: int, *, about: str = "a") -> str:
    """Text of that length in which no block repeats."""
    return "".join(f"{about}{i} " for i in range(characters // (len(about) + 2)))[:characters].ljust(characters, ".")


# ---- replies ----


def _mutation(reply: ProcessingResponse) -> HeaderMutation:
    """What a reply does to the headers, wherever it carries it."""
    return (reply.request_body if reply.HasField("request_body") else reply.request_headers).response.header_mutation


def mutated(reply: ProcessingResponse) -> dict[str, str]:
    """The headers that a reply sets, but for the one about retries."""
    sets = {each.header.key: each.header.raw_value.decode() for each in _mutation(reply).set_headers}
    sets.pop(RETRY_HEADER, None)
    return sets


def removed(reply: ProcessingResponse) -> set[str]:
    """The headers that a reply removes, but for the one about retries."""
    return set(_mutation(reply).remove_headers) - {RETRY_HEADER}


def retries(reply: ProcessingResponse) -> str | None:
    """When Envoy may repeat the request; None: the reply takes away what the client says of it."""
    sets = [each.header.raw_value.decode() for each in _mutation(reply).set_headers if each.header.key == RETRY_HEADER]
    assert sets or RETRY_HEADER in _mutation(reply).remove_headers
    return sets[0] if sets else None


def node_of(reply: ProcessingResponse) -> str:
    """The node that a reply chose; here its cluster is named after it."""
    return mutated(reply)[CLUSTER].removeprefix("cluster-")


def ticket_of(reply: ProcessingResponse) -> str:
    return str(reply.dynamic_metadata["kvaffinity"]["ticket"])


# ---- access log ----


def entry(
    ticket: str | None,
    *,
    code: int = 200,
    served_by: str | None = "10.0.0.1:8000",
    ttft_us: str = "50000",
    engine_ttft_us: str = "40000",
    content_type: str = "text/event-stream",
    attempts: int = 1,
    flags: Iterable[str] = (),
) -> HttpAccessLogEntry:
    """One finished request as Envoy logs it."""
    made = HttpAccessLogEntry()
    common = made.common_properties
    if ticket is not None:
        common.metadata.filter_metadata["kvaffinity"].update({"ticket": ticket, "locality": 0.5})
    if served_by is not None:
        host, _, port = served_by.rpartition(":")
        common.upstream_remote_address.socket_address.address = host.strip("[]")
        common.upstream_remote_address.socket_address.port_value = int(port)
    tags = {"ttft_us": ttft_us, "engine_ttft_us": engine_ttft_us, "content_type": content_type}
    for key, value in tags.items():
        common.custom_tags[key] = value
    for flag in flags:
        setattr(common.response_flags, flag, True)
    common.duration.FromMilliseconds(1200)
    common.upstream_request_attempt_count = attempts
    made.response.response_code.value = code
    return made


def log_of(*entries: HttpAccessLogEntry) -> StreamAccessLogsMessage:
    message = StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    return message


# ---- the core and the server ----


@dataclass(slots=True)
class Clock:
    """Time as the test says; `step_s` passes with each look at it."""

    now_s: float = 1000.0
    step_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@dataclass(slots=True)
class Seen:
    """An observer that keeps what it is told."""

    tickets: list[Ticket] = field(default_factory=list)
    cuts: list[Cut | None] = field(default_factory=list)
    unkeyed: list[Unkeyed | None] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    ends: list[Settled] = field(default_factory=list)
    unknown: int = 0

    def routed(self, ticket: Ticket, exchange: Exchange, phases: Phases, metadata: Callable[[], Any]) -> None:
        self.tickets.append(ticket)
        self.cuts.append(phases.cut)
        self.unkeyed.append(phases.unkeyed)

    def passed(self, cause: Cause) -> None:
        self.causes.append(cause)

    def settled(self, settled: Settled) -> None:
        self.ends.append(settled)

    def unknown_ticket(self) -> None:
        self.unknown += 1


def pool_of(
    *nodes: str,
    block_tokens: int = 16,
    cache_tokens: int = 1_000_000,
    policy: Policy | None = None,
    exact: bool = False,
    first: int = 1,
) -> Pool:
    """A pool whose nodes have the addresses 10.0.0.1:8000, 10.0.0.2:8000 and so on."""
    fleet = Fleet(PrefillRate(10_000.0), limits=LoadLimits(), price_weight=2.0)
    pool = Pool(fleet, policy or LeastTtft(), block_tokens, cache_tokens, exact)
    pool.replace([Node(name, f"10.0.0.{i}:8000", f"cluster-{name}") for i, name in enumerate(nodes, first)])
    return pool


def settings(**changes: Any) -> tuple[Settings, ReadingSettings]:
    """As the configuration's defaults say, but without haste, for one pool named m."""
    values: dict[str, Any] = {
        "head_bytes": 1 << 20,
        "headers": HEADERS | {"x-session-id", "x-tenant"},
        "max_held_bytes": 256 << 20,
        "collect_gap_s": 5.0,
        "collect_total_s": 10.0,
        "decide_s": 5.0,
        "decide_s_per_16_kib": 0.001,
        "cluster_header": CLUSTER,
        "destination_header": DESTINATION,
        "set_cluster": True,
        "set_destination": True,
        "max_streams": 10_000,
        "retry_on": "connect-failure,reset",
        "reject_when_empty": False,
        "pool_of": {"m": "m"},
        "adapters": frozenset(),
        "session_hints": ("x-session-id", "user"),
        "isolate_by_header": "",
        "salt": 1,
        "backlog_bytes": 16 << 20,
    } | changes
    server, reading = ({each.name for each in fields(kind)} for kind in (Settings, ReadingSettings))
    assert values.keys() == server | reading
    return (
        Settings(**{key: value for key, value in values.items() if key in server}),
        ReadingSettings(**{key: value for key, value in values.items() if key in reading}),
    )


@dataclass(slots=True)
class Running:
    """A server on a Unix socket, and a client that speaks to it as Envoy does."""

    ext_proc: ExtProc
    router: Router
    seen: Seen
    clock: Clock
    health: Health
    channel: grpc.aio.Channel

    def open(self, metadata: Iterable[tuple[str, str]] = ()) -> grpc.aio.StreamStreamCall:
        process = self.channel.stream_stream(
            f"/{EXT_PROC}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )
        return process(metadata=tuple(metadata))

    async def say(self, *messages: ProcessingRequest) -> list[ProcessingResponse]:
        """All replies to a script; the last message is followed by the end of the stream."""
        return await self._talk(messages, end=True)

    async def say_on(self, *messages: ProcessingRequest) -> list[ProcessingResponse]:
        """The same with the stream left open, so that the server has to end it."""
        return await self._talk(messages, end=False)

    async def ask(
        self, data: bytes, *extra: tuple[str, str], path: str = CHAT, metadata: Iterable[tuple[str, str]] = ()
    ) -> ProcessingResponse:
        """The reply to one whole request in prompt-head mode."""
        script = (headers(*extra, path=path), body(data, end=True))
        (reply,) = await self._talk(script, end=False, metadata=metadata)
        return reply

    async def _talk(
        self, messages: Iterable[ProcessingRequest], *, end: bool, metadata: Iterable[tuple[str, str]] = ()
    ) -> list[ProcessingResponse]:
        call = self.open(metadata)
        replies = []
        try:
            async with asyncio.timeout(20):
                for message in messages:
                    await call.write(message)
                if end:
                    await call.done_writing()
                while (reply := await call.read()) is not grpc.aio.EOF:
                    replies.append(reply)
        finally:
            call.cancel()
        return replies

    async def log(self, *entries: HttpAccessLogEntry) -> None:
        """One batch of the access log, taken in when this returns."""
        logs = self.channel.stream_unary(
            f"/{ACCESS_LOG}/StreamAccessLogs",
            StreamAccessLogsMessage.SerializeToString,
            StreamAccessLogsResponse.FromString,
        )
        await logs(iter((log_of(*entries),)))

    def in_flight(self) -> int:
        return sum(n for pool in self.router.pools.values() for n, _ in pool.fleet.in_flight().values())

    async def idle(self) -> None:
        """Every stream has ended."""
        await until(lambda: not self.ext_proc.streams)


@asynccontextmanager
async def running(
    pools: Mapping[str, Pool] | None = None,
    *,
    observer: Callable[[Router], Any] = lambda _: Seen(),
    clock: Any = None,
    encoders: Mapping[str, Encoder] | None = None,
    **changes: Any,
) -> AsyncIterator[Running]:
    """A server with `pools` (one named m with two nodes, when left out) and `settings(**changes)`."""
    router = Router(dict(pools or {"m": pool_of("n1", "n2")}), ticket_ttl_s=600.0, ticket_prefix="t-")
    seen, clock, health = observer(router), clock or Clock(), Health()
    of_server, of_reading = settings(**changes)
    with ThreadPoolExecutor(1) as parsers, ThreadPoolExecutor(1) as threads, tempfile.TemporaryDirectory() as folder:
        reader = Reader(Interpreter(router.pools, of_reading), parsers, threads, clock)
        reader.interpreter.encoders.update(encoders or {})
        ext_proc = ExtProc(router, reader, of_server, seen, clock)
        listen = f"unix:{Path(folder) / 's'}"
        server = build(ext_proc, health, listen=listen, max_message_bytes=64 << 20)
        await health.serving(True)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(listen) as channel:
                yield Running(ext_proc, router, seen, clock, health, channel)
        finally:
            await server.stop(0)


async def until(condition: Callable[[], bool | Awaitable[bool]], *, timeout_s: float = 30.0) -> None:
    """Poll until `condition` holds; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.005)
