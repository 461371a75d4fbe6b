"""The two Envoy services, ext_proc and the access log: one Exchange per stream."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import msgspec
from cachetools import TTLCache

from extproc.core.router import Router
from extproc.core.types import End, Outcome, Refusal, Rejection, Settled, Ticket
from extproc.reader import Reader
from extproc.reading import Cause, Cut, Passed, Phases, Reading
from extproc.wire import access_log, messages
from extproc.wire.envoy_pb2 import StreamAccessLogsResponse
from extproc.wire.exchange import BodyMode, Exchange, ProtocolError, Step

log = logging.getLogger(__name__)

_TICK_S = 0.01
"""How often the collection deadlines are looked at."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the server needs of the configuration; replaced whole on reload."""

    max_streams: int
    head_bytes: int
    headers: frozenset[str]
    """Those of a request that anyone reads."""
    max_held_bytes: int
    collect_gap_s: float
    collect_total_s: float
    cluster_header: str
    destination_header: str
    set_cluster: bool
    set_destination: bool
    retry_on: str
    """Envoy's retry conditions for a request that it can repeat whole; empty: leave retries alone."""
    reject_when_empty: bool


class Observer(Protocol):
    """What the server tells telemetry. Every method is called on the loop and must be quick."""

    def routed(self, ticket: Ticket, exchange: Exchange, phases: Phases, metadata: Callable[[], Any]) -> None: ...
    def passed(self, cause: Cause) -> None: ...
    def settled(self, settled: Settled) -> None: ...
    def unknown_ticket(self) -> None: ...


class _KeptReads:
    """What Envoy says on one stream. A read that a deadline interrupts goes on, and the next call has its message: a
    cancelled `context.read()` loses it, and the one after that fails."""

    __slots__ = ("_context", "_pending")

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._pending: asyncio.Task[Any] | None = None

    async def read(self) -> Any:
        """The next message, or EOF."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._context.read())
        message = await asyncio.shield(self._pending)
        self._pending = None
        return message

    def close(self) -> None:
        """Nobody waits for the next message any more."""
        if self._pending is not None:
            self._pending.cancel()


class ExtProc:
    """Both Envoy services. `clock` is the router's clock, in seconds."""

    def __init__(
        self, router: Router, reader: Reader, settings: Settings, observer: Observer, clock: Callable[[], float]
    ) -> None:
        self.router = router
        self.reader = reader
        reader.report = self._log_bug
        self.settings = settings
        self.held_bytes = 0
        """All heads in hand."""
        self.streams = 0
        """Exchanges in hand."""
        self._observer = observer
        self._clock = clock
        self._until_s: dict[asyncio.Task[Any], float] = {}
        """The exchanges that wait for more of a body, and until when (loop time)."""
        self._timer: asyncio.TimerHandle | None = None
        self._logged: TTLCache[str, None] = TTLCache(256, 60.0, timer=clock)

    async def process(self, _: object, context: grpc.aio.ServicerContext) -> bytes:
        """One exchange: collect, decide, reply once, close. Whatever goes wrong, the request goes on.

        Returned is the last message, whatever was written before it: grpc sends the reply of a handler that it takes
        for a unary one together with the end of the stream, in one step instead of two.
        """
        exchange = Exchange(head_bytes=self.settings.head_bytes, keep=self.settings.headers)
        phases = Phases(received_s=self._clock())
        kept: _KeptReads | None = None
        replied = False
        self.streams += 1
        try:
            if self.streams > self.settings.max_streams:
                self._observer.passed(Cause.OVERLOADED)
                replied = True
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "max_streams exchanges are in hand")
            message = await context.read()
            last: bytes | None = None
            if message is not grpc.aio.EOF:
                step = exchange.receive(message)
                if exchange.mode is BodyMode.DUPLEX:
                    kept = _KeptReads(context)
                if step is Step.DECIDE or await self._collect(exchange, phases, context, kept, step):
                    phases.collected_s = self._clock()
                    last, ticket = await self._reply(exchange, phases, context)
                    replied = True
                    if kept is not None and exchange.has_body and not phases.rejected:
                        try:
                            await context.write(last)
                        except BaseException:
                            if ticket is not None:  # the reply did not reach Envoy: no access log will name this ticket
                                self._settle(ticket.id, Outcome(End.CUT), now=self._clock())
                            raise
                        last = await self._hand_back(exchange, kept, context)
            if last is None:
                if not replied:
                    self._observer.passed(Cause.CLIENT_GONE)
                    replied = True  # counted
                await context.abort(grpc.StatusCode.CANCELLED, "the request ended early")
                raise AssertionError  # abort does not return
            return last
        except ProtocolError as error:
            if not replied:
                self._observer.passed(Cause.PROTOCOL)
            self._log_once("exchange ended: %s", str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError from error  # abort does not return
        except asyncio.CancelledError:
            if not replied:
                self._observer.passed(Cause.CLIENT_GONE)
            raise
        finally:
            if kept is not None:
                kept.close()
            self.streams -= 1
            self.held_bytes -= exchange.held

    async def _collect(
        self,
        exchange: Exchange,
        phases: Phases,
        context: grpc.aio.ServicerContext,
        kept: _KeptReads | None,
        step: Step,
    ) -> bool:
        """Read until there is enough to decide on, or time or room for it is used up. False: the client left."""
        settings = self.settings
        # BUFFERED: Envoy waits for the headers' reply, and for no other before the body is whole, however long it takes
        patient = step is Step.CONTINUE
        if patient:
            await context.write(messages.CONTINUE_HEADERS)
        task = asyncio.current_task()
        assert task is not None
        read = context.read if kept is None else kept.read
        total_until_s = self._clock() + settings.collect_total_s
        if not patient:
            self._watch(task, min(settings.collect_gap_s, settings.collect_total_s))
        try:
            while True:
                message = await read()
                if message is grpc.aio.EOF:
                    return False
                before = exchange.held
                step = exchange.receive(message)
                self.held_bytes += exchange.held - before
                if self.held_bytes > settings.max_held_bytes:
                    phases.cut = Cut.NO_ROOM
                if step is Step.DECIDE:
                    return True
                if not patient:
                    if phases.cut is not None:
                        break
                    self._watch(task, min(settings.collect_gap_s, total_until_s - self._clock()))
        except asyncio.CancelledError:
            # the tick takes out whom it interrupts; all others who are cancelled still stand there
            if patient or task in self._until_s or task.uncancel():
                raise
            phases.cut = Cut.COLLECTION_DEADLINE
        finally:
            self._until_s.pop(task, None)
        exchange.cut()
        return True

    def _watch(self, task: asyncio.Task[Any], seconds: float) -> None:
        """Interrupt `task` after so long, unless it is watched anew or takes itself out.

        One timer looks after all: one for each would cost more than the rest of collecting, and almost none ever fires.
        """
        loop = task.get_loop()
        self._until_s[task] = loop.time() + seconds
        if self._timer is None:
            self._timer = loop.call_later(_TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for task in [task for task, until_s in self._until_s.items() if until_s <= now]:
            del self._until_s[task]
            task.cancel()
        self._timer = loop.call_later(_TICK_S, self._tick, loop) if self._until_s else None

    async def _reply(
        self, exchange: Exchange, phases: Phases, context: grpc.aio.ServicerContext
    ) -> tuple[bytes, Ticket | None]:
        """The reply, and the ticket that it carries."""
        in_body = exchange.mode is BodyMode.BUFFERED and exchange.has_body
        if in_body and exchange.trailers:  # in place of a body: the headers have gone on, and trailers cannot route
            self._observer.passed(Cause.EMPTY_BODY)
            return messages.echo_trailers(), None
        routed: Ticket | Rejection | None = None
        try:
            reading = await self.reader.begin(exchange, phases)
            await self.reader.finish(reading, phases)
            if phases.unkeyed is not None:
                self._log_once("pool %s: prompts are not keyed, cause: %s", reading.pool, phases.unkeyed)
            routed = self._route(reading, exchange, phases)
            if isinstance(routed, Ticket):
                reply = self._route_to(routed, exchange, in_body=in_body)
        except Passed as passed:
            self._observer.passed(passed.cause)
            return self._pass_on(exchange, in_body=in_body), None
        except Exception as error:  # a bug of ours must not become the user's
            self._observer.passed(Cause.ERROR)
            self._log_bug("request passed on", error)
            if isinstance(routed, Ticket):
                self._settle(routed.id, Outcome(End.CUT), now=self._clock())
            return self._pass_on(exchange, in_body=in_body), None
        if isinstance(routed, Rejection):
            self._observer.passed(Cause.NO_NODE)
            phases.rejected = True
            return messages.reject(503, _NO_NODE, retry_after_s=1), None
        phases.routed_s = self._clock()
        try:
            self._observer.routed(routed, exchange, phases, context.invocation_metadata)
        except Exception as error:
            self._log_bug("decision not counted", error)
        return reply, routed

    def _pass_on(self, exchange: Exchange, *, in_body: bool) -> bytes:
        settings = self.settings
        headers, remove = self._retries(exchange)
        return messages.mutate(headers, (*remove, settings.cluster_header, settings.destination_header), in_body)

    def _retries(self, exchange: Exchange) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
        """What to set and to remove so that Envoy repeats only a request whose end we have seen: of one that is still
        arriving it would forward a part twice (envoyproxy/envoy issues 36119 and 45470)."""
        retry_on = self.settings.retry_on
        if retry_on and exchange.complete and not exchange.trailers:
            return ((messages.RETRY_HEADER, retry_on),), ()
        return (), (messages.RETRY_HEADER,)

    def _route_to(self, ticket: Ticket, exchange: Exchange, *, in_body: bool) -> bytes:
        settings, decision = self.settings, ticket.decision
        headers, remove = self._retries(exchange)
        if settings.set_cluster:
            headers += ((settings.cluster_header, decision.node.cluster),)
        else:
            remove += (settings.cluster_header,)
        if settings.set_destination:
            addresses = ",".join([each.node.address for each in decision.ranked])
            headers += ((settings.destination_header, addresses),)
        else:
            remove += (settings.destination_header,)
        if decision.node.rank is not None:
            headers += ((messages.RANK_HEADER, str(decision.node.rank)),)
        mutation = messages.mutate(headers, remove, in_body)
        return mutation + messages.metadata(ticket.id, ticket.locality)

    def _route(self, reading: Reading, exchange: Exchange, phases: Phases) -> Ticket | Rejection:
        request = reading.request()
        phases.hashed_s = now = self._clock()
        name = exchange.headers.get(messages.NAME_HEADER)
        routed = self.router.route(request, now=now, name=name, received_at_s=phases.received_s)
        if isinstance(routed, Rejection):
            if self.settings.reject_when_empty and routed.refusal is Refusal.NO_NODE:
                return routed
            raise Passed(Cause(routed.refusal.value))
        if reading.rest is not None:
            reading.rest.add_done_callback(lambda _: self._extend(routed.id, reading))
        return routed

    def _extend(self, ticket_id: str, reading: Reading) -> None:
        """The rest of the prompt is hashed: the node holds that too."""
        try:
            if reading.job is not None and reading.job.done:
                self.router.extend(ticket_id, reading.request(), now=self._clock())
        except Exception as error:
            self._log_bug("prompt not extended", error)

    async def _hand_back(self, exchange: Exchange, kept: _KeptReads, context: grpc.aio.ServicerContext) -> bytes | None:
        """FULL_DUPLEX_STREAMED: what was collected, then each message as it comes, until the request ends. Returns the
        last reply, unwritten; None when the request has no end."""
        self.held_bytes -= exchange.held
        replies = messages.echo_collected(exchange.take_body(), exchange.complete, exchange.trailers)
        while True:
            reply = None
            for following in replies:
                if reply is not None:
                    await context.write(reply)
                reply = following
            if exchange.ended:
                return reply
            if reply is not None:
                await context.write(reply)
            message = await kept.read()
            if message is grpc.aio.EOF:
                return None
            exchange.receive(message)
            replies = messages.echo(message)

    async def stream_access_logs(self, _: object, context: grpc.aio.ServicerContext) -> StreamAccessLogsResponse:
        """Settle the ticket of each finished request."""
        while (message := await context.read()) is not grpc.aio.EOF:
            now = self._clock()
            for ticket_id, outcome in access_log.outcomes(message):
                self._settle(ticket_id, outcome, now=now)
        return StreamAccessLogsResponse()

    def _settle(self, ticket_id: str, outcome: Outcome, *, now: float) -> None:
        try:
            settled = self.router.settle(ticket_id, outcome, now=now)
            if settled is not None:
                self._observer.settled(settled)
            elif outcome.routed:
                self._observer.unknown_ticket()
        except Exception as error:  # the rest of the batch is not to blame
            self._log_bug("outcome not counted", error)

    def _log_bug(self, what: str, error: Exception) -> None:
        # the message may quote the prompt: the place and the kind are enough
        place = traceback.format_tb(error.__traceback__)[-1].strip()
        self._log_once("%s: %s at %s", what, type(error).__name__, place)

    def _log_once(self, text: str, *args: str) -> None:
        """One line a minute for each different text; the metrics count them all."""
        line = text % args
        if line not in self._logged:
            self._logged[line] = None
            log.warning("%s", line)


_NO_NODE = msgspec.json.encode(
    {"error": {"message": "no node is available for this model", "type": "server_error", "param": None, "code": 503}}
)
