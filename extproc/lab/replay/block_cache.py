"""The KV blocks of one simulated node: a prefix tree of segments, least recently used blocks first to go."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from extproc.core.types import HASH_BYTES, Chain

_STALE = 4
"""The heap is built anew when it is that many times as long as there are segments."""


class Segment:
    """Successive blocks that one parent follows, and that the same requests hold."""

    __slots__ = ("begin", "children", "hashes", "parent", "pins", "stamp")

    def __init__(self, hashes: bytes, parent: Segment | None, begin: int, pins: int, stamp: int) -> None:
        self.hashes = hashes
        self.parent = parent
        self.begin = begin
        """How many blocks come before it."""
        self.pins = pins
        """Requests that hold all of it; -1: it was evicted."""
        self.stamp = stamp
        """Of the release that left it without pins."""
        self.children: dict[bytes, Segment] = {}

    @property
    def blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES


class BlockCache:
    """What a request holds is pinned from its root to a segment; the rest is in the order in which it was released.

    As in vLLM: of what one request releases, the tail is evicted before the head. So a block never outlives the blocks
    before it, and what is evicted next is always the end of a segment without children. The bound is its owner's, who
    calls `evict`.
    """

    def __init__(self) -> None:
        self.root = Segment(b"", None, 0, 1, 0)
        self.blocks = 0
        """All that are there."""
        self.pinned = 0
        """Those of them that requests hold."""
        self._segments = 0
        self._stamp = 0
        self._pushed = 0
        self._order: list[tuple[int, int, int, Segment]] = []
        """A heap: stamp, deepest first. An entry that its segment no longer agrees with is stale."""

    def find(self, chain: Chain, most: int) -> tuple[int, int]:
        """How many leading blocks are there, up to `most`, and how many of those nobody holds. Changes nothing."""
        segment, at, end, idle = self.root, 0, min(len(chain), most * HASH_BYTES), 0
        while at < end:
            child = segment.children.get(chain[at : at + HASH_BYTES])
            if child is None:
                break
            common = _common(chain, at, end, child.hashes)
            if not child.pins:
                idle += common // HASH_BYTES
            at += common
            if common < len(child.hashes):
                break
            segment = child
        return at // HASH_BYTES, idle

    def pin(self, chain: Chain, most: int) -> Segment:
        """Hold the leading blocks that are there, up to `most`; returns the last segment, to be released."""
        segment, at, end = self.root, 0, min(len(chain), most * HASH_BYTES)
        while at < end:
            child = segment.children.get(chain[at : at + HASH_BYTES])
            if child is None:
                break
            common = _common(chain, at, end, child.hashes)
            if common < len(child.hashes):
                child = self._split(child, common)
            if not child.pins:
                self.pinned += common // HASH_BYTES
            child.pins += 1
            at += common
            segment = child
        return segment

    def extend(self, held: Segment, chain: Chain, begin: int, end: int) -> Segment:
        """`held` goes on with blocks `begin` to `end` of `chain`; returns what is held now.

        Those that are there already, computed by another request at the same time, are held in place of new ones."""
        at, limit = begin * HASH_BYTES, min(end * HASH_BYTES, len(chain))
        while at < limit:
            child = held.children.get(chain[at : at + HASH_BYTES])
            if child is None:
                added = chain[at:limit]
                new = len(added) // HASH_BYTES
                if held.pins == 1 and not held.children and held.parent is not None:  # nobody else's: it grows in place
                    held.hashes += added
                else:
                    longer = Segment(added, held, at // HASH_BYTES, 1, 0)
                    held.children[added[:HASH_BYTES]] = longer
                    self._segments += 1
                    held = longer
                self.blocks += new
                self.pinned += new
                break
            common = _common(chain, at, limit, child.hashes)
            if common < len(child.hashes):
                child = self._split(child, common)
            if not child.pins:
                self.pinned += common // HASH_BYTES
            child.pins += 1
            at += common
            held = child
        return held

    def release(self, held: Segment) -> None:
        """A request ended: what nobody else holds may be evicted from now on, its tail first."""
        self._stamp += 1
        segment: Segment | None = held
        while segment is not None and segment.parent is not None:
            segment.pins -= 1
            if not segment.pins:
                self.pinned -= segment.blocks
                segment.stamp = self._stamp
                self._push(segment)
            segment = segment.parent
        if len(self._order) > _STALE * self._segments + 64:
            self._order = [entry for entry in self._order if _current(entry)]
            heapify(self._order)

    def evict(self, blocks: int) -> None:
        """Drop that many blocks that nobody holds; there must be as many."""
        order = self._order
        while blocks > 0:
            entry = order[0]
            if not _current(entry):
                heappop(order)
                continue
            segment = entry[3]
            keep = segment.blocks - blocks
            if keep > 0:
                segment.hashes = segment.hashes[: keep * HASH_BYTES]
                self.blocks -= blocks
                return
            heappop(order)
            assert segment.parent is not None
            del segment.parent.children[segment.hashes[:HASH_BYTES]]
            blocks -= segment.blocks
            self.blocks -= segment.blocks
            self._segments -= 1
            segment.pins = -1

    def _push(self, segment: Segment) -> None:
        self._pushed += 1
        heappush(self._order, (segment.stamp, -segment.begin, self._pushed, segment))

    def _split(self, segment: Segment, at: int) -> Segment:
        """Cut it after `at` bytes and return the head, which is new: those that hold the segment hold its tail."""
        parent = segment.parent
        assert parent is not None
        head = Segment(segment.hashes[:at], parent, segment.begin, segment.pins, segment.stamp)
        parent.children[head.hashes[:HASH_BYTES]] = head
        segment.hashes, segment.parent = segment.hashes[at:], head
        segment.begin += at // HASH_BYTES
        head.children[segment.hashes[:HASH_BYTES]] = segment
        self._segments += 1
        if not segment.pins:
            self._push(head)
            self._push(segment)
        return head


def _current(entry: tuple[int, int, int, Segment]) -> bool:
    stamp, depth, _, segment = entry
    return segment.pins == 0 and segment.stamp == stamp and segment.begin == -depth


def _common(chain: Chain, at: int, end: int, hashes: bytes) -> int:
    """How many bytes of `hashes` stand in `chain` from `at` to `end`, in whole blocks; the first block is known to.

    Chained hashes make equality monotone, so where it is not all of it, the last common block is bisected for."""
    size = min(len(hashes), end - at)
    if chain[at + size - HASH_BYTES : at + size] == hashes[size - HASH_BYTES : size]:
        return size
    low, high = 1, size // HASH_BYTES - 1
    while low < high:
        middle = (low + high + 1) >> 1
        stop = middle * HASH_BYTES
        if chain[at + stop - HASH_BYTES : at + stop] == hashes[stop - HASH_BYTES : stop]:
            low = middle
        else:
            high = middle - 1
    return low * HASH_BYTES
