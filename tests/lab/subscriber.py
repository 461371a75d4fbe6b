"""What a reader of a node's KV events does, as simply as possible: it follows the feed, and knows what is cached."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from extproc.lab.kv_publisher import END_OF_REPLAY, Feed

Frames = list[bytes]


class Subscriber:
    """A SUB socket and, for each replay, a DEALER."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        (self._socket.bind if feed.connect else self._socket.connect)(feed.endpoint)

    async def __aenter__(self) -> Subscriber:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def connected(self, publish: Callable[[], None]) -> None:
        """`publish` sends a batch each time; return once one has come and no more are under way."""
        while not await self._socket.poll(20):
            publish()
        while await self.next(0.1) is not None:
            pass

    async def next(self, within_s: float) -> Frames | None:
        """The next message; None: none came."""
        return await self._socket.recv_multipart() if await self._socket.poll(int(1000 * within_s)) else None

    async def replay(self, start: int, within_s: float = 5.0) -> list[Frames]:
        """Every reply but the last, which says that there are no more. TimeoutError: there is no such reply."""
        assert self._feed.replay_endpoint is not None
        replies = []
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set_hwm(0)
            dealer.connect(self._feed.replay_endpoint)
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            async with asyncio.timeout(within_s):
                while (reply := await dealer.recv_multipart())[-2] != END_OF_REPLAY:
                    replies.append(reply)
        assert reply == [b"", b"", END_OF_REPLAY, b""]
        return replies


class Cached:
    """What one rank holds, known from its events alone: a set of blocks by chains of our own."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._own: dict[Any, Any] = {}  # by the engine's hash
        self._copies: Counter[Any] = Counter()
        self._held: set[Any] = set()
        self.removed = 0
        self.cleared = 0

    def take(self, payload: bytes) -> None:
        """One batch."""
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    for engine_hash in event["block_hashes"]:
                        self.removed += 1
                        self._held.discard(self._own[engine_hash])
                        self._copies[self._own[engine_hash]] -= 1
                case "AllBlocksCleared":
                    self.cleared += 1
                    self._held.clear()
                    self._copies.clear()

    def _store(self, event: dict[str, Any]) -> None:
        parent, tokens, size = event["parent_block_hash"], event["token_ids"], event["block_size"]
        assert size == self._block_tokens
        assert len(tokens) == size * len(event["block_hashes"])
        own = None if parent is None else self._own[parent]
        for i, (engine_hash, extra) in enumerate(
            zip(event["block_hashes"], event.get("extra_keys") or [None] * len(tokens), strict=False)
        ):
            own = self._link(own, tokens[i * size : (i + 1) * size], extra)
            self._own[engine_hash] = own
            self._held.add(own)
            self._copies[own] += 1

    def expect(self, tokens: Sequence[int], *, salt: str | None = None, lora: str | None = None) -> tuple[int, bool]:
        """How many tokens of a prompt are cached, and: can there be no more? Of a block that was there twice we cannot
        tell when one copy goes, so we take it for gone."""
        own, found = None, 0
        for end in range(self._block_tokens, len(tokens), self._block_tokens):  # never the last token
            extra = [each for each in (lora, salt if own is None else None) if each]
            own = self._link(own, list(tokens[end - self._block_tokens : end]), extra or None)
            if own not in self._held:
                return found, self._copies[own] == 0
            found = end
        return found, True

    def _link(self, parent: Any, tokens: list[int], extra: Any) -> Any:
        """Blocks of one chain share what is before them, so that it is compared by hash alone."""
        return hash((parent, tuple(tokens), tuple(extra or ())))
