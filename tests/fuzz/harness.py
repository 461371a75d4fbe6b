"""A server without a network, what is sent to it, and what comes of that."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import gc
import logging
import pstats
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from extproc import config
from extproc.app import apply_pools, reading_settings_of, settings_of
from extproc.config import ModelConfig, NodeConfig, ServerConfig
from extproc.core.router import Router
from extproc.core.types import End, Outcome, Settled, Ticket
from extproc.models import load_encoder
from extproc.reader import Reader
from extproc.reading import Cause, Interpreter, Phases
from extproc.server import ExtProc
from extproc.tokens.encoder import Encoder
from extproc.tokens.memo import Memo
from extproc.wire.envoy_pb2 import ProcessingRequest, ProcessingResponse
from extproc.wire.exchange import BodyMode, Exchange
from tests.builders import body as body_message
from tests.builders import headers as headers_message
from tests.builders import trailers, until
from tests.fuzz.apis import ADAPTER, FAST, PLAIN, SLOW, UNLOADED
from tests.fuzz.bodies import Case, Ending
from tests.fuzz.measuring import CASE, Findings, Loop, Threads, place, watch
from tests.tokens import vocabularies

SHORT_HEAD_BYTES = 2048
PAUSE_S = 0.04
_GAP_S = 0.02

_BUGS = ("request passed on", "decision not counted", "prompt not extended", "outcome not counted")
"""How lines of the server's log begin that tell of a mistake of ours."""

# ---- one request ----


class Script:
    """Envoy's side of one stream: says what the case says, and keeps what it is told."""

    def __init__(self, case: Case) -> None:
        self.replies: list[bytes] = []
        self.status: grpc.StatusCode | None = None
        self._messages = deque(_messages(case))
        self._pause_at = len(self._messages) - 1 if case.ending is Ending.PAUSES else -1

    async def read(self) -> Any:
        if len(self._messages) == self._pause_at:
            self._pause_at = -1
            await asyncio.sleep(PAUSE_S)
        await asyncio.sleep(0)
        return self._messages.popleft() if self._messages else grpc.aio.EOF

    async def write(self, reply: bytes) -> None:
        self.replies.append(reply)
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.status = code
        raise grpc.aio.AbortError(details)

    def invocation_metadata(self) -> tuple[()]:
        return ()


def _messages(case: Case) -> Iterator[ProcessingRequest]:
    yield headers_message(*case.headers, path=case.path, mode=case.mode)
    places = [0, *(case.cuts if case.mode is not BodyMode.BUFFERED else ()), len(case.body)]
    chunks = [case.body[start:stop] for start, stop in pairwise(places)]
    if case.ending is Ending.LEAVES:
        yield from map(body_message, chunks[:-1])
        return
    last = case.ending is not Ending.TRAILERS
    for chunk in chunks[:-1]:
        yield body_message(chunk)
    yield body_message(chunks[-1], end=last)
    if not last and case.mode is not BodyMode.BUFFERED:
        yield trailers()


def _wrong(case: Case, script: Script, last: bytes | None) -> str | None:
    """What the replies do to the body that they must not."""
    replies = [ProcessingResponse.FromString(each) for each in (*script.replies, *([] if last is None else [last]))]
    if any(each.HasField("immediate_response") for each in replies):
        return "the client was answered by us"
    if case.mode is not BodyMode.DUPLEX:
        if any(
            each.request_headers.response.HasField("body_mutation")
            or each.request_body.response.HasField("body_mutation")
            for each in replies
        ):
            return "a reply changes the body"
        expected = 2 if case.mode is BodyMode.BUFFERED else 1
        return None if last is None or len(replies) == expected else f"{len(replies)} replies"
    if replies and (
        not replies[0].HasField("request_headers") or replies[0].request_headers.response.HasField("body_mutation")
    ):
        return "the first reply is not one to the headers"
    echoed = [
        each.request_body.response.body_mutation.streamed_response
        for each in replies[1:]
        if each.HasField("request_body")
    ]
    together = b"".join(each.body for each in echoed)
    if last is None:
        return None if case.body.startswith(together) else "the body came back changed"
    if together != case.body:
        return "the body came back changed"
    ends = [each.end_of_stream for each in echoed]
    if case.ending is Ending.TRAILERS:
        return None if not any(ends) and replies[-1].HasField("request_trailers") else "the end came back changed"
    return None if ends[-1:] == [True] and not any(ends[:-1]) else "the end came back changed"


# ---- the server ----


class World:
    """Two servers, one of which sees but a short head, over one router; they tell `findings` what comes of a case."""

    def __init__(self, findings: Findings, threads: Threads, encoders: dict[str, Encoder]) -> None:
        self.findings = findings
        self.threads = threads
        self.encoders = encoders
        nodes = [
            tuple(NodeConfig(name=f"{m}{i}", address=f"10.0.{p}.{i}:80") for i in range(2))
            for p, m in enumerate(_POOLS)
        ]
        made = tuple(
            ModelConfig(
                name=name,
                adapters=(ADAPTER,) if name == FAST else (),
                aliases=("*",) if name == PLAIN else (),
                tokenizer=None if name == PLAIN else name,
                nodes=its,
            )
            for name, its in zip(_POOLS, nodes, strict=True)
        )
        server = ServerConfig(collect_gap_s=_GAP_S, isolate_by_header="x-tenant")
        pools: dict[str, Any] = {}
        apply_pools(pools, config.Config(models=made, server=server))
        self.router = Router(pools, ticket_ttl_s=600.0, ticket_prefix="t-")
        self.servers: dict[bool, ExtProc] = {}
        for small in (False, True):
            head_bytes = SHORT_HEAD_BYTES if small else server.head_bytes
            whole = config.Config(models=made, server=ServerConfig(collect_gap_s=_GAP_S, head_bytes=head_bytes))
            reader = Reader(
                Interpreter(self.router.pools, reading_settings_of(whole, salt=7)), threads, threads, time.monotonic
            )
            reader.interpreter.encoders = encoders
            self.servers[small] = ExtProc(self.router, reader, settings_of(whole), self, time.monotonic)

    # ---- what the server tells ----

    def routed(self, ticket: Ticket, exchange: Exchange, phases: Phases, metadata: Callable[[], Any]) -> None:
        request, outcomes = ticket.request, self.findings.outcomes
        how = "exact tokens" if request.exact else "approximate tokens" if request.matchable else "load alone"
        outcomes[f"routed by {how}"] += 1
        if phases.cut is not None:
            outcomes[f"cut: {phases.cut}"] += 1
        if phases.unkeyed is not None:
            outcomes[f"unkeyed: {phases.unkeyed}"] += 1
        self.router.settle(ticket.id, Outcome(End.CUT), now=time.monotonic())

    def passed(self, cause: Cause) -> None:
        self.findings.outcomes[f"passed: {cause}"] += 1
        if cause is Cause.ERROR:
            error = sys.exc_info()[1]
            self.findings.fault(f"{cause}: {'' if error is None else place(error)}", CASE.get())

    def settled(self, settled: Settled) -> None:
        self.findings.fault("an outcome that nobody sent")

    def unknown_ticket(self) -> None:
        self.findings.fault("an outcome that nobody sent")

    # ---- what is sent ----

    async def send(self, case: Case) -> None:
        """Send one request, and look at what comes back."""
        script, last = Script(case), None
        context = copy_context()
        context.run(CASE.set, case)
        process = self.servers[case.small].process(None, script)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(60):
                last = await asyncio.get_running_loop().create_task(process, context=context)
        except grpc.aio.AbortError:
            self.findings.outcomes[f"aborted: {script.status.name if script.status else None}"] += 1
            if case.ending is not Ending.LEAVES:
                self.findings.fault(f"aborted: {script.status}", case)
        except (Exception, asyncio.CancelledError) as error:
            self.findings.fault(f"escaped: {place(error)}", case)
            return
        if (wrong := _wrong(case, script, last)) is not None:
            self.findings.fault(wrong, case)

    async def send_all(
        self, cases: Iterable[Case], *, beside: int = 16, told: Callable[[], None] = lambda: None
    ) -> None:
        """Send them, so many at a time; `told` is called after each."""
        source = iter(cases)

        async def sending() -> None:
            for case in source:
                await self.send(case)
                told()

        watching = asyncio.create_task(watch(self.threads, self.findings))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(beside):
                    group.create_task(sending())
            await self._rest()
        finally:
            watching.cancel()

    async def _rest(self) -> None:
        """When all is done nothing must be left."""
        readers = [server.reader for server in self.servers.values()]
        with contextlib.suppress(TimeoutError):
            await until(lambda: all(reader.waiting_bytes <= 0 for reader in readers), timeout_s=60)
        left = Counter[str]()
        for server in self.servers.values():
            left["waiting_bytes"] += server.reader.waiting_bytes
            left["held_bytes"] += server.held_bytes
            left["streams"] += server.streams
        left["tickets"] += len(self.router)
        for name, number in left.items():
            if number:
                self.findings.fault(f"{name} is {number} in the end")
        for name, encoder in self.encoders.items():
            if encoder.mismatches:
                self.findings.fault(f"the encoder {name} found conversations that went on wrongly")


_POOLS = (FAST, SLOW, UNLOADED, PLAIN)


class _Log(logging.Handler):
    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings

    def emit(self, record: logging.LogRecord) -> None:
        if (line := record.getMessage()).startswith(_BUGS):
            self._findings.fault(f"log: {line}", CASE.get())


def load() -> dict[str, Encoder]:
    """The encoders of the models that have one; takes some seconds."""
    memo = Memo(64 << 20)
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: load_encoder(
                ModelConfig(name=name, tokenizer=str(vocabularies.make(kind, Path(folder) / name))),
                memo,
                clock=time.monotonic,
                now=datetime.now,
            )
            for name, kind in ((FAST, "qwen2"), (SLOW, "metaspace"))
        }


def fuzz(
    cases: Iterable[Case],
    encoders: dict[str, Encoder],
    *,
    beside: int = 16,
    told: Callable[[Findings], None] = lambda _: None,
) -> Findings:
    """Send all cases, and return what came of them."""
    findings = Findings()
    log, handler = logging.getLogger("extproc.server"), _Log(findings)
    propagated, log.propagate = log.propagate, False
    log.addHandler(handler)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: findings.fault(f"loop: {context['message']}", CASE.get())
        )
        threads = Threads(findings)
        try:
            await World(findings, threads, encoders).send_all(cases, beside=beside, told=lambda: told(findings))
        finally:
            threads.shutdown()

    loop = Loop(findings)
    gc.callbacks.append(loop.collected)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())
    finally:
        gc.callbacks.remove(loop.collected)
        log.removeHandler(handler)
        log.propagate = propagated
    return findings


def explain(case: Case, encoders: dict[str, Encoder]) -> str:
    """Where the time of a case goes, when it is sent alone: the functions with most of it."""
    profile, log = cProfile.Profile(), logging.getLogger("extproc.server")

    async def main() -> None:
        threads = Threads(Findings())
        world = World(Findings(), threads, encoders)
        profile.enable()
        await world.send(case)
        profile.disable()
        threads.shutdown()

    log.disabled = True
    try:
        asyncio.run(main())
    finally:
        log.disabled = False
    rows = [
        (total, f"{name} ({Path(file).name}:{line})" if line else name)
        for (file, line, name), (_, _, total, _, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
        if "select" not in name and "poll" not in name
    ]
    return "; ".join(f"{total * 1e3:.1f} ms {name}" for total, name in sorted(rows, reverse=True)[:4])
