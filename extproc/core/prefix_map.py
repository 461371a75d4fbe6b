"""Which node holds which prefix: a rolling map, bounded per node when it is written.

Blocks that arrived together are kept as one *segment* (the bytes of their hashes). A segment is found by its first
hash, and hashes are chained, so that one dictionary is the whole tree: where a chain leaves a segment, the next one is
looked up by the chain's next hash. A segment knows its holders as a bit set of the nodes that hold all of it, and, for
the few that were trimmed, how many of its leading blocks they still hold.

Per node, segments stand in the order of last use, a chain's tail before its head. What is dropped is always the end of
the least recently used segment, so a head outlives every tail that hangs on it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from extproc.core.types import HASH_BYTES, Chain, NodeId, Stored

_SHARDS = 1024
"""The index is split so that growing one dictionary never stalls the loop: 4 M segments are 4,000 in each."""

_BLOCKS_PER_SEGMENT = 8
_MIN_SEGMENTS = 1024
"""A node is to hold capacity / 8 segments, at least 1024: short scattered prompts cost memory by the segment (0.5 KB).
"""

_DROPPED_AT_ONCE = 64
"""Segments beyond that bound go this many at a store: prompts of other nodes may part one node's segments in thousands,
and dropping all of them at once would stall the loop and empty the node."""


@dataclass(slots=True)
class _Holding:
    """What one node holds. `order` maps segment to the stamp of its last use, least recently used first."""

    bit: int
    capacity: int
    order: OrderedDict[int, float] = field(default_factory=OrderedDict)
    blocks: int = 0

    @property
    def max_segments(self) -> int:
        return max(_MIN_SEGMENTS, self.capacity // _BLOCKS_PER_SEGMENT)


def _common(chain: Chain, at: int, hashes: bytes) -> int:
    """How many leading hashes of `hashes` stand in `chain` from byte `at`; the first is known to.

    Chained hashes make equality monotone, so the end is found by bisection.
    """
    low, high = 1, min(len(hashes), len(chain) - at) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * HASH_BYTES
        if chain[at + end - HASH_BYTES : at + end] == hashes[end - HASH_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixMap:
    """Block to nodes. Every method is synchronous and touches no clock; `now` only has to grow."""

    def __init__(self) -> None:
        self._index: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        # Segments as a struct of lists: a few long-lived objects for the garbage collector, however many segments.
        self._hashes: list[bytes] = []
        self._full: list[int] = []
        self._partial: list[dict[int, int] | None] = []
        self._free: list[int] = []
        self._holdings: dict[NodeId, _Holding] = {}
        self._by_bit: dict[int, NodeId] = {}
        self._last_stamp = 0.0
        self._walk: tuple[Chain, list[int], int] | None = None
        """The chain last matched, the segments that it follows whole, and where it leaves them: storing it goes on from
        there. Any write ends it."""

    # ---- nodes ----

    def add_node(self, node: NodeId, capacity: int) -> None:
        """Start an empty map for `node` that never holds more than `capacity` blocks; an existing one is resized."""
        holding = self._holdings.get(node)
        if holding is None:
            bit = 1
            while bit in self._by_bit:
                bit <<= 1
            self._holdings[node] = _Holding(bit, capacity)
            self._by_bit[bit] = node
        else:
            holding.capacity = capacity
            self._evict(holding)

    def remove_node(self, node: NodeId) -> None:
        """Forget `node` and everything it holds."""
        self.clear(node)
        del self._by_bit[self._holdings.pop(node).bit]

    def clear(self, node: NodeId) -> None:
        """`node` holds nothing any more (it restarted)."""
        holding = self._holdings[node]
        for segment in list(holding.order):
            self._drop(holding, segment)

    def blocks(self, node: NodeId) -> int:
        """How many blocks `node` is believed to hold; never more than its capacity."""
        return self._holdings[node].blocks

    def segments(self) -> int:
        """How many segments exist; what memory is proportional to."""
        return len(self._hashes) - len(self._free)

    # ---- reading ----

    def match(self, chain: Chain) -> dict[NodeId, int]:
        """How many leading blocks each node holds; nodes that hold none are absent. O(segments + nodes).

        Changes nothing but where `store` may begin, when it is given the same chain next.
        """
        matched: dict[NodeId, int] = {}
        path: list[int] = []
        self._walk = None
        alive = 0
        at, end = 0, len(chain)
        while at < end:
            first = chain[at : at + HASH_BYTES]
            segment = self._shard(first).get(first)
            if segment is None:
                break
            hashes = self._hashes[segment]
            size = len(hashes)
            # comparing whole segments is one memcmp, and the common case
            if chain[at : at + size] == hashes:
                common = size // HASH_BYTES
                if self._walk is None:
                    path.append(segment)
            else:
                common = _common(chain, at, hashes)
                self._walk = self._walk or (chain, path, at)
            full, partial = self._full[segment], self._partial[segment]
            if at == 0:
                alive = full
                for bit in partial or ():
                    alive |= bit
            stay = alive & full
            if partial:
                for bit, held in partial.items():
                    if alive & bit:
                        if held >= common:
                            stay |= bit
                        else:
                            matched[self._by_bit[bit]] = at // HASH_BYTES + held
                            alive ^= bit
            if stay != alive:
                self._name(alive & ~stay, at // HASH_BYTES, matched)
            alive = stay
            at += common * HASH_BYTES
            if not alive:
                break
        self._walk = self._walk or (chain, path, at)
        self._name(alive, at // HASH_BYTES, matched)
        return matched

    def _name(self, bits: int, blocks: int, matched: dict[NodeId, int]) -> None:
        if not blocks:
            return
        by_bit = self._by_bit
        while bits:
            bit = bits & -bits
            matched[by_bit[bit]] = blocks
            bits ^= bit

    # ---- writing ----

    def store(self, node: NodeId, chain: Chain, *, now: float) -> Stored:
        """`node` is about to hold `chain`: record it, refresh what is there, drop what no longer fits.

        A chain longer than the node's capacity is kept up to it, head first.
        """
        holding = self._holdings[node]
        stamp = self._last_stamp = max(now, math.nextafter(self._last_stamp, math.inf))
        path, at = self._walk[1:] if self._walk is not None and self._walk[0] is chain else ([], 0)
        self._walk = None
        end = len(chain)
        while at < end:
            first = chain[at : at + HASH_BYTES]
            shard = self._shard(first)
            segment = shard.get(first)
            if segment is None:
                segment = self._new(chain[at:])
                shard[first] = segment
            else:
                hashes = self._hashes[segment]
                size = len(hashes)
                if chain[at : at + size] != hashes:
                    segment = self._split(segment, _common(chain, at, hashes), path)
            path.append(segment)
            at += len(self._hashes[segment])
        bit, before, new_from = holding.bit, 0, end // HASH_BYTES
        for segment in path:
            blocks = len(self._hashes[segment]) // HASH_BYTES
            if not self._full[segment] & bit:
                held = self._held_bit(bit, segment)
                new_from = min(new_from, before + held)
                self._hold(holding, segment, held)
            before += blocks
        order = holding.order
        for segment in reversed(path):  # tail first: the head ends as the youngest
            order[segment] = stamp
            order.move_to_end(segment)
        self._evict(holding)
        return Stored(chain, new_from, stamp)

    def take_back(self, node: NodeId, stored: Stored) -> None:
        """The request failed before `node` could cache it: forget the blocks it added, unless used again since."""
        holding = self._holdings.get(node)
        if holding is None:
            return
        for segment, at, blocks in self._along(stored.chain):
            keep = max(0, stored.from_block - at)
            if keep < blocks and holding.order.get(segment) == stored.stamp:
                self._trim(holding, segment, keep)

    def trim(self, node: NodeId, chain: Chain, blocks: int) -> None:
        """Of `chain`, which shares no block with another, `node` keeps that many blocks, whoever used them."""
        holding = self._holdings[node]
        for segment, at, _ in list(self._along(chain)):
            if segment in holding.order:
                self._trim(holding, segment, max(0, blocks - at))

    def extend(self, node: NodeId, stored: Stored, chain: Chain, *, now: float) -> Stored:
        """`chain` goes on from `stored.chain`: record it, so that it is taken back with what `stored` added.

        Whoever used blocks of it since used them from the head on: what is still its own is a tail.
        """
        order, own = self._holdings[node].order, None
        for segment, at, blocks in self._along(stored.chain):
            if stored.from_block < at + blocks and order.get(segment) == stored.stamp:
                own = max(stored.from_block, at)
                break
        longer = self.store(node, chain, now=now)
        return longer if own is None else longer._replace(from_block=min(own, longer.from_block))

    def _along(self, chain: Chain) -> Iterator[tuple[int, int, int]]:
        """Each segment on the way of `chain`, its first block's number, and how many blocks it has."""
        at, end = 0, len(chain) // HASH_BYTES
        while at < end:
            first = chain[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            segment = self._shard(first).get(first)
            if segment is None:
                break
            blocks = len(self._hashes[segment]) // HASH_BYTES
            yield segment, at, blocks
            at += blocks

    # ---- segments ----

    def _shard(self, first: bytes) -> dict[bytes, int]:
        """Where a hash is indexed."""
        return self._index[(first[0] << 8 | first[1]) % _SHARDS]

    def _new(self, hashes: bytes) -> int:
        if self._free:
            segment = self._free.pop()
            self._hashes[segment] = hashes
            return segment
        self._hashes.append(hashes)
        self._full.append(0)
        self._partial.append(None)
        return len(self._hashes) - 1

    def _split(self, segment: int, blocks: int, path: list[int]) -> int:
        """Cut `segment` after `blocks`; returns the new head. The tail keeps its id and its place in every order.

        The head goes to the young end of its holders' orders, and `path`, the segments before it, after it: once per
        split a shared head looks younger than it is, and a head is never dropped before its tail.
        """
        hashes = self._hashes[segment]
        cut = blocks * HASH_BYTES
        head = self._new(hashes[:cut])
        tail_first = hashes[cut : cut + HASH_BYTES]
        self._shard(hashes)[hashes[:HASH_BYTES]] = head
        self._shard(tail_first)[tail_first] = segment
        self._hashes[segment] = hashes[cut:]
        full, partial = self._full[segment], self._partial[segment]
        self._full[head] = full
        holders = full
        if partial:
            head_partial: dict[int, int] = {}
            tail_partial: dict[int, int] = {}
            for bit, held in partial.items():
                holders |= bit
                if held > blocks:
                    tail_partial[bit] = held - blocks
                if held >= blocks:
                    self._full[head] |= bit
                else:
                    head_partial[bit] = held
            self._partial[head] = head_partial or None
            self._partial[segment] = tail_partial or None
        while holders:
            bit = holders & -holders
            holders ^= bit
            order = self._holdings[self._by_bit[bit]].order
            order[head] = order[segment]
            for above in reversed(path):
                order.move_to_end(above)
            if not self._held_bit(bit, segment):
                del order[segment]
        self._forget_unheld(segment)
        return head

    def _held_bit(self, bit: int, segment: int) -> int:
        if self._full[segment] & bit:
            return len(self._hashes[segment]) // HASH_BYTES
        partial = self._partial[segment]
        return partial.get(bit, 0) if partial else 0

    def _held(self, holding: _Holding, segment: int) -> int:
        return self._held_bit(holding.bit, segment)

    def _hold(self, holding: _Holding, segment: int, held: int) -> None:
        """From `held` blocks to all of them."""
        self._full[segment] |= holding.bit
        if held:
            self._forget_partial(holding.bit, segment)
        holding.blocks += len(self._hashes[segment]) // HASH_BYTES - held

    def _forget_partial(self, bit: int, segment: int) -> None:
        partial = self._partial[segment]
        if partial is not None and partial.pop(bit, None) is not None and not partial:
            self._partial[segment] = None

    def _trim(self, holding: _Holding, segment: int, keep: int) -> None:
        """The node keeps the first `keep` blocks of a segment it holds; 0 drops it."""
        if not keep:
            self._drop(holding, segment)
            return
        held = self._held(holding, segment)
        if held <= keep:
            return
        self._full[segment] &= ~holding.bit
        partial = self._partial[segment]
        if partial is None:
            partial = self._partial[segment] = {}
        partial[holding.bit] = keep
        holding.blocks -= held - keep

    def _drop(self, holding: _Holding, segment: int) -> None:
        self._walk = None
        holding.blocks -= self._held(holding, segment)
        self._full[segment] &= ~holding.bit
        self._forget_partial(holding.bit, segment)
        del holding.order[segment]
        self._forget_unheld(segment)

    def _forget_unheld(self, segment: int) -> None:
        if not self._full[segment] and self._partial[segment] is None:
            first = self._hashes[segment][:HASH_BYTES]
            del self._shard(first)[first]
            self._hashes[segment] = b""
            self._free.append(segment)

    def _evict(self, holding: _Holding) -> None:
        """Back within the node's bounds: the end of the least recently used segment goes first."""
        order, limit = holding.order, holding.max_segments
        while holding.blocks > holding.capacity:
            oldest = next(iter(order))
            self._trim(holding, oldest, max(0, self._held(holding, oldest) + holding.capacity - holding.blocks))
        for _ in range(min(len(order) - limit, _DROPPED_AT_ONCE)):
            self._drop(holding, next(iter(order)))
