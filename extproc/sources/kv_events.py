"""Follows what each node's engine publishes of its KV cache over ZMQ, one task a feed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest
from zmq.utils.monitor import parse_monitor_message

from extproc.core.types import CacheCleared, CacheEvent, FeedState, NodeId
from extproc.sources.kv_codec import END_OF_REPLAY, MAX_PAYLOAD_BYTES, BadMessage, Batch, decode, frames, pieces
from extproc.sources.kv_order import COUNTERS, Action, Ask, Message, Patience, Sequencer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the engine behind one node publishes."""

    pool: str
    node: NodeId
    events: str
    """tcp://host:port, or ipc://path."""
    replay: str | None = None
    """Always the engine's to bind."""
    topic: str = ""
    """Only topics that begin so."""
    bind: bool = False
    """The engine connects to us: vLLM does unless its own endpoint has a wildcard or is ipc."""
    rank: int | None = None
    """Only what this data-parallel rank says."""
    generation: int = 0
    """Another one: another node of the same name, of which nothing is known."""

    def of_rank(self, rank: int, *, node: NodeId) -> Endpoint:
        """That of another rank, as vLLM and SGLang lay them out: `rank` ports on. ValueError where there are none."""
        replay = None if self.replay is None else _ports_on(self.replay, rank)
        return replace(self, node=node, events=_ports_on(self.events, rank), replay=replay, rank=rank)


def _ports_on(address: str, rank: int) -> str:
    if not rank:
        return address
    host, _, port = address.rpartition(":")
    if not address.startswith("tcp://") or not port.isdecimal() or int(port) + rank > 65535:
        raise ValueError(f"rank {rank} has no port of its own at {address}")
    return f"{host}:{int(port) + rank}"


class Sink(Protocol):
    """Whom the events are for. A node that it does not know is ignored."""

    def cache_events(self, pool: str, node: NodeId, events: Sequence[CacheEvent], *, now: float) -> None: ...

    def feed(self, pool: str, node: NodeId, state: FeedState, *, now: float) -> None: ...


class FeedStatus(NamedTuple):
    """How one feed stands."""

    state: FeedState
    complete: bool
    """Known from an empty cache on."""
    lag_s: float
    """How much later than the promptest message the last one came, since the feed began."""
    counters: Mapping[str, int]


_SLICE_BLOCKS = 1_000
"""What the sink is given at once: 2 ms of its time."""
_SLICE_BYTES = 64 << 10
"""What is read and handed on in one turn of the loop, where a message counts for 1,000 bytes more than it has and a
block for 64: decoding takes 1 ms and the sink 2."""
_THREAD_BYTES = 32 << 10
"""A message larger than that (10,000 tokens or 500 removals: 0.5 to 1 ms) is decoded by a thread."""
_QUEUED = 2_000
"""Messages that a socket keeps for us. Of more the engine drops the youngest, which is a gap like another."""
_BACK_OFF_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class KvFeed:
    """Owns the feeds, one task each, and their sockets. All share the loop: one of them reads, a slice at a turn."""

    def __init__(self, sink: Sink, clock: Callable[[], float], *, patience: Patience | None = None) -> None:
        self._sink = sink
        self._clock = clock
        self._patience = patience or Patience()
        self._context: zmq.asyncio.Context | None = None
        self._turn = asyncio.Lock()
        self._feeds: dict[Endpoint, tuple[_Feed, asyncio.Task[None]]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._departed: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """Follow these and no others. What the nodes of the others told is void, as nobody says what became of it."""
        wanted = dict.fromkeys(endpoints)
        now = self._clock()
        for endpoint in self._feeds.keys() - wanted.keys():
            feed, task = self._feeds.pop(endpoint)
            task.cancel()
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)
            self._departed.update(feed.sequencer.counters)
            self._sink.feed(endpoint.pool, endpoint.node, FeedState.DOWN, now=now)
            self._sink.cache_events(endpoint.pool, endpoint.node, (CacheCleared(),), now=now)
        for endpoint in wanted:
            if endpoint not in self._feeds:
                if self._context is None:
                    self._context = zmq.asyncio.Context()
                    self._context.set(zmq.MAX_SOCKETS, 65_535)
                feed = _Feed(endpoint, self._context, self._sink, self._clock, self._turn, self._patience)
                task = asyncio.create_task(feed.run(), name=f"kv events of {endpoint.node}")
                task.add_done_callback(_ended)
                self._feeds[endpoint] = feed, task

    async def close(self) -> None:
        """Cancel and await every task, and close every socket."""
        tasks = [task for _, task in self._feeds.values()]
        self._feeds.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._cancelled, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def statuses(self) -> dict[Endpoint, FeedStatus]:
        """How each feed stands."""
        return {endpoint: feed.status() for endpoint, (feed, _) in self._feeds.items()}

    def counters(self) -> Counter[str]:
        """What all feeds counted so far, those that are gone included."""
        total = Counter(self._departed)
        for feed, _ in self._feeds.values():
            total.update(feed.sequencer.counters)
        return total


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s: ended by a fault of ours", task.get_name(), exc_info=error)


@dataclass(slots=True)
class _Sockets:
    live: zmq.asyncio.Socket
    monitor: zmq.asyncio.Socket
    poller: zmq.asyncio.Poller
    peers: int = 0
    replay: zmq.asyncio.Socket | None = None
    ask: Ask | None = None
    """What `replay` was asked."""

    def end_replay(self) -> None:
        if self.replay is not None:
            self.poller.unregister(self.replay)
            self.replay.close(linger=0)
        self.replay = self.ask = None

    def close(self) -> None:
        self.end_replay()
        self.live.disable_monitor()
        self.monitor.close(linger=0)
        self.live.close(linger=0)


@dataclass(slots=True)
class _Feed:
    endpoint: Endpoint
    context: zmq.asyncio.Context
    sink: Sink
    clock: Callable[[], float]
    turn: asyncio.Lock
    patience: Patience
    sequencer: Sequencer = field(init=False)
    lag_s: float = 0.0
    _promptest_s: float = math.inf

    def __post_init__(self) -> None:
        self.sequencer = Sequencer(replay=self.endpoint.replay is not None, patience=self.patience)

    def status(self) -> FeedStatus:
        return FeedStatus(self.sequencer.state, self.sequencer.complete, self.lag_s, self.sequencer.counters)

    async def run(self) -> None:
        failures = 0
        while True:
            try:
                sockets = self._open()
                failures = 0
                try:
                    await self._follow(sockets)
                finally:
                    sockets.close()
            except zmq.ZMQError as error:
                if failures == 0:
                    log.warning("%s: cannot listen to %s: %s", self.endpoint.node, self.endpoint.events, error)
                for state in self.sequencer.disconnected():
                    assert isinstance(state, FeedState)
                    self._tell(state)
                await asyncio.sleep(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
                failures += 1

    def _open(self) -> _Sockets:
        """ZMQError when the address cannot be bound, or is none."""
        live = self._socket(zmq.SUB)
        try:
            # half-open connections are found out: the engine's library answers
            live.set(zmq.HEARTBEAT_IVL, 5_000)
            live.set(zmq.HEARTBEAT_TIMEOUT, 10_000)
            live.set(zmq.RECONNECT_IVL_MAX, 5_000)
            live.set(zmq.SUBSCRIBE, self.endpoint.topic.encode())
            monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            (live.bind if self.endpoint.bind else live.connect)(self.endpoint.events)
        except zmq.ZMQError:
            live.disable_monitor()
            live.close(linger=0)
            raise
        poller = zmq.asyncio.Poller()
        poller.register(live, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        return _Sockets(live, monitor, poller)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, 1)  # and IPv4
        socket.set(zmq.RCVHWM, _QUEUED)
        socket.set(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        return socket

    async def _follow(self, sockets: _Sockets) -> None:
        while True:
            due = self.sequencer.due
            # rounded up: what is polled for a fraction of a millisecond is polled again and again
            wait_ms = None if due is None else max(int((due - self.clock()) * 1000) + 1, 0)
            ready = {socket for socket, _ in await sockets.poller.poll(wait_ms)}
            async with self.turn:
                if sockets.monitor in ready:
                    await self._connections(sockets)
                if sockets.replay is not None and sockets.replay in ready:
                    await self._read(sockets, sockets.replay)
                if sockets.live in ready:
                    await self._read(sockets, sockets.live)
                await self._do(self.sequencer.tick(self.clock()), sockets)
            # the lock alone would let this feed read on and on
            await asyncio.sleep(0)

    async def _connections(self, sockets: _Sockets) -> None:
        while (parts := await _received(sockets.monitor)) is not None:
            if parse_monitor_message(parts)["event"] == zmq.EVENT_DISCONNECTED:
                sockets.peers = max(sockets.peers - 1, 0)
                if not sockets.peers:
                    await self._do(self.sequencer.disconnected(), sockets)
            else:
                sockets.peers += 1
                await self._do(self.sequencer.connected(self.clock()), sockets)

    async def _read(self, sockets: _Sockets, socket: zmq.asyncio.Socket) -> None:
        """A slice of what has come; the rest is there at the next turn."""
        room = _SLICE_BYTES
        while room > 0 and not socket.closed and (parts := await _received(socket)) is not None:
            room -= sum(map(len, parts)) + 1_000
            try:
                frame = frames(parts)
            except BadMessage as error:
                self._bad(error)
                continue
            if socket is sockets.replay and frame.seq == END_OF_REPLAY:
                sockets.end_replay()
                actions = self.sequencer.replay_ended(self.clock())
            else:
                batch = await self._batch(frame.payload)
                room -= 64 * sum(0 if isinstance(event, CacheCleared) else len(event.hashes) for event in batch.events)
                if self.endpoint.rank is not None and batch.rank not in (None, self.endpoint.rank):
                    continue
                self.sequencer.counters["skipped"] += batch.skipped
                message = Message(frame.seq, xxh3_64_intdigest(frame.payload), len(frame.payload), batch.events)
                if socket is sockets.replay:
                    actions = self.sequencer.replayed(message, self.clock())
                else:
                    self._late_by(batch.ts_s)
                    actions = self.sequencer.live(message, self.clock())
            await self._do(actions, sockets)

    async def _batch(self, payload: bytes) -> Batch:
        """One that cannot be read is empty: it has its place in the order all the same."""
        try:
            return await asyncio.to_thread(decode, payload) if len(payload) > _THREAD_BYTES else decode(payload)
        except BadMessage as error:
            self._bad(error)
            return Batch(math.inf, (), None, 0)

    def _late_by(self, ts_s: float) -> None:
        # the clocks have nothing in common, but their difference has a least value
        if math.isfinite(ts_s):
            difference = self.clock() - ts_s
            self._promptest_s = min(self._promptest_s, difference)
            self.lag_s = difference - self._promptest_s

    def _bad(self, error: BadMessage) -> None:
        if not self.sequencer.counters["skipped"]:
            log.warning("%s: what it publishes is not understood: %s", self.endpoint.node, error)
        self.sequencer.counters["skipped"] += 1

    async def _do(self, actions: Sequence[Action], sockets: _Sockets) -> None:
        events: list[CacheEvent] = []
        for action in actions:
            if isinstance(action, Ask):
                sockets.end_replay()
                if action is self.sequencer.asking:
                    self._request(action, sockets)
            elif isinstance(action, FeedState):
                await self._hand_on(events)
                events = []
                self._tell(action)
            else:
                events.append(action)
        await self._hand_on(events)
        if sockets.ask is not self.sequencer.asking:
            sockets.end_replay()

    async def _hand_on(self, events: list[CacheEvent]) -> None:
        for number, (piece, _) in enumerate(pieces(events, max_blocks=_SLICE_BLOCKS)):
            if number:
                await asyncio.sleep(0)
            self.sink.cache_events(self.endpoint.pool, self.endpoint.node, piece, now=self.clock())

    def _tell(self, state: FeedState) -> None:
        counters = self.sequencer.counters
        level = logging.INFO if state is FeedState.LIVE else logging.WARNING
        log.log(level, "%s: its cache events are %s (%s)", self.endpoint.node, state, dict(counters))
        self.sink.feed(self.endpoint.pool, self.endpoint.node, state, now=self.clock())

    def _request(self, ask: Ask, sockets: _Sockets) -> None:
        """A socket for each replay, so that what an abandoned one still says is not taken for the next one's."""
        assert self.endpoint.replay is not None
        replay = self._socket(zmq.DEALER)
        try:
            replay.connect(self.endpoint.replay)
            replay.send_multipart((b"", ask.start.to_bytes(8, "big")), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            replay.close(linger=0)
            log.warning("%s: cannot ask %s for a replay: %s", self.endpoint.node, self.endpoint.replay, error)
            return
        sockets.replay, sockets.ask = replay, ask
        sockets.poller.register(replay, zmq.POLLIN)


async def _received(socket: zmq.asyncio.Socket) -> list[bytes] | None:
    """A message that is there already."""
    try:
        return await socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
