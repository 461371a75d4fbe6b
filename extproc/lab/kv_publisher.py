"""KV events on ZMQ as vLLM 0.32 sends them, their replay, and the ways in which a feed can fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from extproc.lab.engine import Event, Removed, Stored

BUFFER_STEPS = 10_000
HIGH_WATER_MARK = 100_000
END_OF_REPLAY = b"\xff" * 8
REORDER_PATIENCE_S = 1.0
"""A batch that waits to be overtaken goes out after that when none comes."""
_SENT_WITHOUT_PAUSE = 256


@dataclass(frozen=True, slots=True)
class Feed:
    """Where the events of a node go. With several ranks, rank r has the ports r above these."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    connect: bool = False
    """The subscriber binds. vLLM does so with every endpoint that has neither * nor :: in it."""

    def of_rank(self, rank: int) -> Feed:
        """The feed of one data-parallel rank. ValueError: an endpoint that cannot be told apart by its port."""
        replay = None if self.replay_endpoint is None else _offset(self.replay_endpoint, rank)
        return replace(self, endpoint=_offset(self.endpoint, rank), replay_endpoint=replay)

    def described(self) -> dict[str, Any]:
        """As GET /kv_event_sources shows it."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": BUFFER_STEPS,
            "hwm": HIGH_WATER_MARK,
            "max_queue_size": HIGH_WATER_MARK,
            "topic": self.topic,
        }


def _offset(endpoint: str, rank: int) -> str:
    if rank == 0:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise ValueError(f"{endpoint}: only a TCP port tells ranks apart")
    return f"{base}:{int(port) + rank}"


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong on purpose; what is left out is in order."""

    events: Literal["ok", "cut", "delay", "duplicate", "reorder"] = "ok"
    """cut: batches get their number and enter the buffer, but are not sent. reorder: every two change places."""
    replay: Literal["ok", "refuse", "gap"] = "ok"
    """refuse: no answer. gap: batches that were cut are missing there as well."""
    delay_s: float = 10.0
    rank: int | None = None
    """None: all ranks."""


class Batch(NamedTuple):
    """What one step did, as it is sent."""

    seq: int
    payload: bytes
    sent: bool
    """False: it was cut."""


def encode(
    events: Sequence[Event], *, at_s: float, rank: int, block_tokens: int, adapters: Sequence[str] = ()
) -> bytes:
    """The payload of one batch. `at_s`: wall clock; `adapters`: the place of one, counted from 1, is its id."""

    def hash_of(key: bytes) -> int:
        return int.from_bytes(key[-8:], "big")

    told: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Stored):
            lora = [] if event.lora is None else [event.lora]
            first = [*lora, event.salt] if event.salt and event.parent is None else lora
            told.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [hash_of(key) for key in event.keys],
                    "parent_block_hash": None if event.parent is None else hash_of(event.parent),
                    "token_ids": _ids(event.tokens),
                    "block_size": block_tokens,
                    "lora_id": None if event.lora is None else adapters.index(event.lora) + 1,
                    "medium": "GPU",
                    "lora_name": event.lora,
                    "extra_keys": [each or None for each in (first, *[lora] * (len(event.keys) - 1))],
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            )
        elif isinstance(event, Removed):
            told.append({"type": "BlockRemoved", "block_hashes": [hash_of(event.key)], "medium": "GPU", "group_idx": 0})
        else:
            told.append({"type": "AllBlocksCleared"})
    return msgspec.msgpack.encode([at_s, told, rank])


def _ids(tokens: bytes) -> list[int]:
    ids = array("I", tokens)
    return ids.tolist()


class KvPublisher:
    """The events of one rank: numbered, sent, and kept for replay. Bounded by BUFFER_STEPS, whatever is late as well.

    Use with `async with`, in the event loop that the engine runs in.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        rank: int = 0,
        block_tokens: int,
        adapters: Sequence[str] = (),
        faults: Faults | None = None,
    ) -> None:
        self.feed = feed
        self.buffer: deque[Batch] = deque(maxlen=BUFFER_STEPS)
        self.next_seq = 0
        self._rank = rank
        self._block_tokens = block_tokens
        self._adapters = adapters
        self._faults = faults or Faults()
        self._late: deque[tuple[list[bytes], asyncio.TimerHandle]] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publisher: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._replies: asyncio.Task[None] | None = None

    async def __aenter__(self) -> KvPublisher:
        """ValueError: an endpoint is no good, or taken."""
        self._context = context = zmq.Context()
        try:
            self._publisher = context.socket(zmq.PUB)
            self._publisher.set_hwm(HIGH_WATER_MARK)
            _attach(self._publisher, self.feed.endpoint, connect=self.feed.connect)
            if self.feed.replay_endpoint is not None:
                self._router = zmq.asyncio.Socket(context, zmq.ROUTER)
                self._router.set_hwm(BUFFER_STEPS + 1)  # beyond it replies are dropped
                _attach(self._router, self.feed.replay_endpoint, connect=False)
                self._replies = asyncio.create_task(self._reply(self._router))
        except ValueError:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Every socket is closed, and its address free again, when this returns. Late batches are lost."""
        self._cancel_late()
        if self._replies is not None:
            self._replies.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replies
        for socket in (self._publisher, self._router):
            if socket is not None:
                socket.close(linger=0)
        self._publisher = None
        if self._context is not None:
            self._context.term()

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        """From now on; what was late until now goes out at once, in order."""
        late = self._cancel_late()
        self._faults = faults
        for frames in late:
            self._send(frames)

    def publish(self, events: Sequence[Event]) -> None:
        """Send what one step did. Never waits: a subscriber that is too slow misses it."""
        payload = encode(
            events, at_s=time.time(), rank=self._rank, block_tokens=self._block_tokens, adapters=self._adapters
        )
        batch = Batch(self.next_seq, payload, self._faults.events != "cut")
        self.next_seq += 1
        self.buffer.append(batch)
        frames = self._frames(batch)
        match self._faults.events:
            case "ok":
                self._send(frames)
            case "duplicate":
                self._send(frames)
                self._send(frames)
            case "delay":
                self._put_off(frames, self._faults.delay_s)
            case "reorder":
                held = self._cancel_late()
                if held:
                    self._send(frames)
                    self._send(held[0])
                else:
                    self._put_off(frames, REORDER_PATIENCE_S)

    def _frames(self, batch: Batch) -> list[bytes]:
        return [self.feed.topic.encode(), batch.seq.to_bytes(8, "big"), batch.payload]

    def _send(self, frames: list[bytes]) -> None:
        if self._publisher is not None:
            self._publisher.send_multipart(frames)

    def _put_off(self, frames: list[bytes], delay_s: float) -> None:
        if len(self._late) == BUFFER_STEPS:
            self._late.popleft()[1].cancel()
        self._late.append((frames, asyncio.get_running_loop().call_later(delay_s, self._send_late)))

    def _send_late(self) -> None:
        """As many calls as batches, so the oldest has its turn."""
        self._send(self._late.popleft()[0])

    def _cancel_late(self) -> list[list[bytes]]:
        late = []
        while self._late:
            frames, timer = self._late.popleft()
            timer.cancel()
            late.append(frames)
        return late

    async def _reply(self, router: zmq.asyncio.Socket) -> None:
        while True:
            request = await router.recv_multipart()
            if len(request) != 3 or self._faults.replay == "refuse":
                continue
            client, _, start = request
            first, gap = int.from_bytes(start, "big"), self._faults.replay == "gap"
            wanted = [batch for batch in self.buffer if batch.seq >= first and (batch.sent or not gap)]
            for number, batch in zip(itertools.count(1), wanted, strict=False):
                await router.send_multipart([client, b"", *self._frames(batch)])
                if number % _SENT_WITHOUT_PAUSE == 0:
                    await asyncio.sleep(0)
            await router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


def _attach(socket: zmq.Socket[Any], endpoint: str, *, connect: bool) -> None:
    try:
        if connect:
            socket.connect(endpoint)
        else:
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot {'connect to' if connect else 'bind'} {endpoint}: {error}") from error
