"""Follows what each node's engine publishes of its KV cache over ZMQ: gaps, replays and restarts, one task a feed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest
from zmq.utils.monitor import parse_monitor_message

from extproc.core.types import CacheCleared, CacheEvent, FeedState, NodeId
from extproc.sources.kv_codec import END_OF_REPLAY, MAX_PAYLOAD_BYTES, BadMessage, Batch, decode, frames, pieces

log = logging.getLogger(__name__)

COUNTERS = ("received", "skipped", "duplicates", "gaps", "replays", "restarts", "lost")
"""What is counted of a feed: messages, events and messages not understood, messages seen before, gaps, replays asked
for, restarts of the engine, and gaps that could not be repaired."""


# ---- in what order, and what is missing: no I/O, no clock ----


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a feed waits for what, and how much it keeps meanwhile."""

    reorder_s: float = 0.5
    reorder_messages: int = 64
    """A message that comes late by more than either is missing."""
    settle_s: float = 0.05
    """From the connection until the replay is asked for: the engine has the subscription by then."""
    replay_s: float = 2.0
    """A replay that says nothing for so long has failed. Engines look for requests every 0.1 s."""
    tries: int = 4
    back_off_s: float = 1.0
    back_off_max_s: float = 30.0
    heal_s: float = 30.0
    """One that is lost asks for all that the engine can still replay, so long after and then less often (to 16)."""
    held_messages: int = 10_000
    held_bytes: int = 16 << 20
    """Encoded; four times that at most when decoded."""


class Message(NamedTuple):
    """One message, as far as its order is concerned."""

    seq: int
    digest: int
    """Of its payload: two messages of one sequence number with different ones are of two lives of an engine."""
    size: int
    events: tuple[CacheEvent, ...]


@dataclass(eq=False, slots=True)
class Ask:
    """A request for everything from `start` on."""

    start: int
    fresh: bool
    """As if nothing were known; otherwise `start` is the last message seen, and is compared."""
    until: float
    answered: bool = False
    moved: bool = False
    """It brought something new."""


Action: TypeAlias = CacheEvent | FeedState | Ask


class Sequencer:
    """Says what to apply in which order: each message once, and what to do where one is missing.

    Every call returns what is to be done, in order: events to apply (CacheCleared among them where what was known is
    void), a new state of the feed, a replay to ask for. The replay that is wanted is `asking`; what another one
    answers is not to be passed on. Call `tick` when it is `due`.
    """

    def __init__(self, *, replay: bool, patience: Patience | None = None) -> None:
        self.state = FeedState.DOWN
        self.complete = False
        """What was applied since the last CacheCleared is all that the engine did since its cache was empty."""
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.asking: Ask | None = None
        self._replay = replay
        self._patience = patience or Patience()
        self._connected = False
        self._lost = False
        self._next: int | None = None
        """The sequence number to apply; None: whichever comes first."""
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Digests of the last `reorder_messages` messages applied."""
        self._first: int | None = None
        """That of message 0."""
        self._held: dict[int, Message] = {}
        self._held_bytes = 0
        self._held_since = 0.0
        self._retry_at: float | None = None
        self._tries = 0
        self._from_start = False
        """All that the engine keeps is being replayed, and so far nothing of it was missing."""
        self._heal_at: float | None = None
        self._heals = 0
        """Attempts since it was lost."""
        self._out: list[Action] = []

    @property
    def due(self) -> float | None:
        """When `tick` has something to do; None: when something else happened first."""
        if self.asking is not None:
            return self.asking.until
        if self._retry_at is not None:
            return self._retry_at
        if self._held:
            late = self._held_since + self._patience.reorder_s
            return late if self._heal_at is None else min(late, self._heal_at)
        return self._heal_at

    def connected(self, now: float) -> list[Action]:
        """The engine can be heard: what it said before has to be asked for."""
        self._connected = True
        self._abandon()
        if self._replay:
            self._retry_at = now + self._patience.settle_s
        return self._done()

    def disconnected(self) -> list[Action]:
        """It cannot. What is held is dropped: it is replayed, or its numbers are used again by another life."""
        self._connected = False
        self._abandon()
        self._held.clear()
        self._held_bytes = 0
        self._heal_at = None
        self._say(FeedState.DOWN)
        return self._done()

    def live(self, message: Message, now: float) -> list[Action]:
        """A message as it was published."""
        self.counters["received"] += 1
        if self._next is not None and message.seq < self._next:
            self._old(message, now)
        elif not self._connected:
            # said before the connection broke: in order it is as good as ever, out of order it will be replayed
            if message.seq == self._next:
                self._apply(message)
        elif self._repairing:
            self._hold(message, now)
        elif self._next is None or message.seq == self._next:
            self._apply(message)
            self._drain(now)
            self._up()
        else:
            self._hold(message, now)
            if len(self._held) > self._patience.reorder_messages:
                self._gap(now)
        return self._done()

    def replayed(self, message: Message, now: float) -> list[Action]:
        """A message of the replay that is wanted."""
        ask = self.asking
        if ask is None or message.seq < ask.start:
            return []
        self.counters["received"] += 1
        ask.until = now + self._patience.replay_s
        if not ask.answered:
            ask.answered = True
            if ask.fresh:
                if self._next is not None:
                    self._void()
                self._next = message.seq
            elif message.seq > ask.start:
                # what was seen last is kept no longer: so much was missed that it cannot be told from another life
                self._lose(now)
                self._next = message.seq
            elif message.digest != self._seen.get(message.seq):
                self._restarted(now)
                return self._done()
        if message.seq == self._next:
            self._unhold(message.seq)
            self._apply(message)
            ask.moved = True
        elif self._next is not None and message.seq > self._next and self._room_for(message):
            # An engine drops the middle of what it replays faster than we read; the rest is asked for when it ends.
            self._keep(message, now)
        return self._done()

    def replay_ended(self, now: float) -> list[Action]:
        """The replay that is wanted has said all it has."""
        ask, self.asking = self.asking, None
        if ask is None:
            return []
        if not ask.answered and not self._held and not ask.fresh:
            # an engine keeps its last message, so this one has published fewer than were seen: it is another life
            self._restarted(now)
            return self._done()
        if not ask.answered and self._next is None and (not self._held or 0 in self._held):
            self._next, self.complete = 0, True
        self._drain(now)
        if self._held or (not ask.answered and self._seen and ask.fresh):
            self._unsatisfied(ask, now)
            return self._done()
        if self._from_start:
            self._lost = self._from_start = False
        self._tries = 0
        self._heal_later(now)
        self._up()
        return self._done()

    def tick(self, now: float) -> list[Action]:
        """What has to be done because time passed."""
        due = self.due
        if due is None or now < due:
            return []
        ask, self.asking = self.asking, None
        if ask is not None:
            self._unsatisfied(ask, now)
        elif self._retry_at is not None:
            self._ask(now)
        elif self._heal_at is not None and now >= self._heal_at:
            self._heals += 1
            self._ask(now, fresh=True)
        else:
            self._gap(now)
        return self._done()

    @property
    def _repairing(self) -> bool:
        return self.asking is not None or self._retry_at is not None

    def _done(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _say(self, state: FeedState) -> None:
        if state is not self.state:
            self.state = state
            self._out.append(state)

    def _up(self) -> None:
        if self._connected:
            self._say(FeedState.LOST if self._lost else FeedState.LIVE)

    def _apply(self, message: Message) -> None:
        self._out += message.events
        self._next = message.seq + 1
        self._seen[message.seq] = message.digest
        if len(self._seen) > self._patience.reorder_messages:
            self._seen.popitem(last=False)
        if message.seq == 0:
            self._first, self.complete = message.digest, True
        if any(isinstance(event, CacheCleared) for event in message.events):
            self.complete, self._lost, self._heal_at = True, False, None
            if self.state is FeedState.LOST:
                self._up()

    def _hold(self, message: Message, now: float) -> None:
        if (known := self._held.get(message.seq)) is not None:
            if known.digest == message.digest:
                self.counters["duplicates"] += 1
            else:
                self._restarted(now, message)
            return
        room = self._room_for(message)
        self._keep(message, now)
        if not room:
            self._give_up(now)

    def _room_for(self, message: Message) -> bool:
        return (
            len(self._held) < self._patience.held_messages
            and self._held_bytes + message.size <= self._patience.held_bytes
        )

    def _keep(self, message: Message, now: float) -> None:
        if message.seq not in self._held:
            if not self._held:
                self._held_since = now
            self._held[message.seq] = message
            self._held_bytes += message.size

    def _unhold(self, seq: int) -> Message | None:
        message = self._held.pop(seq, None)
        if message is not None:
            self._held_bytes -= message.size
        return message

    def _drain(self, now: float) -> None:
        """Apply what is held and next. What is held after that follows a gap, which begins now."""
        if self._next is None or not self._held:
            return
        while (message := self._unhold(self._next)) is not None:
            self._apply(message)
        for seq in [seq for seq in self._held if seq < self._next]:
            self._unhold(seq)
        self._held_since = now

    def _old(self, message: Message, now: float) -> None:
        """One whose number was applied before: the same again, or another life of the engine."""
        known = self._first if message.seq == 0 else self._seen.get(message.seq)
        if known == message.digest:
            self.counters["duplicates"] += 1
        elif not self._connected:
            pass
        elif known is not None or message.seq == 0 or not self._replay:
            self._restarted(now, message)
        elif not self._repairing:
            # too old to be remembered: compared with what the engine replays, both cases can be told
            self._ask(now)

    def _restarted(self, now: float, message: Message | None = None) -> None:
        """The engine began anew, with an empty cache; `message` is what told."""
        self.counters["restarts"] += 1
        self._void()
        self._abandon()
        self._held.clear()
        self._held_bytes = 0
        self._lost, self._heal_at = False, None
        if message is not None and message.seq == 0:
            self._apply(message)
            self._up()
            return
        if message is not None:
            self._hold(message, now)
        if self._replay:
            self._ask(now)
        else:
            self._give_up(now)

    def _gap(self, now: float) -> None:
        self.counters["gaps"] += 1
        if self._replay:
            self._ask(now)
        else:
            self._give_up(now)

    def _ask(self, now: float, *, fresh: bool = False) -> None:
        self.counters["replays"] += 1
        self._retry_at = None
        fresh = fresh or not self._seen
        self._from_start = self._from_start or fresh
        self.asking = Ask(0 if fresh else next(reversed(self._seen)), fresh, now + self._patience.replay_s)
        self._out.append(self.asking)

    def _abandon(self) -> None:
        self.asking = self._retry_at = None
        self._tries = 0
        self._from_start = False

    def _unsatisfied(self, ask: Ask, now: float) -> None:
        """A replay did not bring all that is missing: asked again where it got on, less and less often where not."""
        if ask.moved:
            self._tries = 0
            self._ask(now)
            return
        if ask.fresh and not ask.answered and self._seen:
            # an attempt to heal; what was learnt since the loss is kept
            self._abandon()
            self._drain(now)
            self._heal_later(now)
            self._up()
            return
        self._tries += 1
        if self._tries >= self._patience.tries:
            self._give_up(now)
        else:
            back_off_s = self._patience.back_off_s * 2 ** (self._tries - 1)
            self._retry_at = now + min(back_off_s, self._patience.back_off_max_s)

    def _void(self) -> None:
        """What was known is no longer so."""
        self._out.append(CacheCleared())
        self.complete = False
        self._seen.clear()
        self._first = self._next = None

    def _lose(self, now: float) -> None:
        self.counters["lost"] += 1
        self._void()
        self._lost, self._from_start = True, False
        self._heal_later(now)
        self._up()

    def _heal_later(self, now: float) -> None:
        """An attempt can cost as much as all that the engine keeps, so they become fewer."""
        if self._lost and self._replay:
            self._heal_at = now + self._patience.heal_s * min(2**self._heals, 16)
        else:
            self._heal_at, self._heals = None, 0

    def _give_up(self, now: float) -> None:
        """What is missing stays missing: go on with what came after the last gap."""
        self._lose(now)
        self._abandon()
        for seq in sorted(self._held):
            if self._next is not None and seq != self._next:
                self._void()
            self._apply(self._held[seq])
        self._held.clear()
        self._held_bytes = 0


# ---- sockets ----


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
