"""What one node holds, as its engine's events tell it, keyed on our own hashes of the tokens in them.

Engines hash blocks in ways of their own, salted by process, and what they hash changes between releases. So the tokens
in an event are chained as a prompt's are (see core/blocks), and the engine's name of a block is kept for two things
only: to find the parent that the next event refers to, and the block that a removal does.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from extproc.core.blocks import TOKEN_BYTES
from extproc.core.types import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, EngineHash

Seed: TypeAlias = Callable[[str | None, str | None], int]
"""The salt of prompts of an adapter with a cache_salt: unsigned, 64 bits."""

MAX_ORPHANS = 4096
"""Blocks whose parent is not known. A late start sees one for each conversation that goes on; they cost 0.5 KB each."""

_MAX_PLACES = 16
"""Pairs of group and tier that are told apart; models have two or three groups, engines three or four tiers."""

_FEW_GAPS = 32
"""Up to so many, gaps are looked at one by one; with more of them a prompt is followed block by block."""

_TRIES = 2048
"""Hashes that one prompt may cost when orphans are held against it: 0.3 ms."""

_DROPPED_AT_ONCE = 256
"""Looking for the oldest leaves means going over what is older and no leaf: not to be done for each block."""

_NAME_BITS = (1 << 60) - 1
"""Of an engine's hash as many as a Python int of 32 bytes has room for (the next size is 48)."""

_UNNAMED = 1 << 63
_EVERYWHERE = (1 << _MAX_PLACES) - 1

_numbers: list[int] = []
"""The slot numbers in use anywhere: one int object for all nodes, instead of 32 bytes for each of their blocks."""


def _name(engine_hash: EngineHash) -> int:
    """vLLM's hashes as ints are the last eight bytes of those as bytes, SGLang's are signed: equal either way."""
    if isinstance(engine_hash, bytes):
        engine_hash = int.from_bytes(engine_hash[-8:])
    return engine_hash & _NAME_BITS


class _Orphan(NamedTuple):
    """A block that cannot be hashed yet, since nobody knows what comes before it."""

    parent: int
    tokens: bytes
    opaque: bytes
    places: int


class CachedBlocks:
    """A set of blocks per group and tier, as a forest: each block knows its parent and how many children it has.

    A block counts as held while any tier of the main group holds it: that is the lowest one of those that look at the
    whole prompt. A block that is not held and has children stays in the forest as a *gap*, so that a prefix can be
    measured by bisection and then cut at the gaps on its way.
    """

    def __init__(self, block_tokens: int, seed: Seed, max_blocks: int) -> None:
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        """Beyond it the oldest blocks without children are dropped."""
        self._seed = seed
        self.ignored = 0
        """Events that could not be used: another block size, or more groups and tiers than any engine has."""
        self.clears = 0
        """How often it was cleared."""
        self.clear()

    def clear(self) -> None:
        """It holds nothing."""
        self.clears += 1
        self.blocks = 0
        """How many the main group holds."""
        self._slots: dict[int, int] = {}
        """By our own hash; gaps, and what only another group holds, are in it as well."""
        self._named: dict[int, int] = {}
        """By the engine's name."""
        self._own, self._names = array("Q"), array("Q")
        self._parents, self._children, self._depths = array("i"), array("I"), array("I")
        self._places = array("H")
        """A bit for each group and tier that holds it."""
        self._free: list[int] = []
        self._bits: dict[tuple[int, str], int] = {}
        self._whole: set[int] = set()
        self._main = 0
        self._gaps: dict[int, int] = {}
        """Slot to depth."""
        self._orphans: OrderedDict[int, _Orphan] = OrderedDict()
        self._waiting: dict[int, list[int]] = {}
        """Name of an unknown parent to those of its children among the orphans."""

    @property
    def orphans(self) -> int:
        """How many blocks wait for their parent."""
        return len(self._orphans)

    def __contains__(self, own: int) -> bool:
        slot = self._slots.get(own)
        return slot is not None and self._places[slot] & self._main != 0

    # ---- reading ----

    def match(self, hashes: Sequence[int], guess: int = 0) -> int:
        """How many leading blocks of a prompt it holds. O(log blocks), but for prompts that meet many gaps.

        A right `guess` spares it the search: what is shared is often shared by all nodes alike.
        """
        low, high = 0, len(hashes)
        find, places, main = self._slots.get, self._places, self._main
        if not high or (slot := find(hashes[0])) is None or not places[slot] & main:
            return 0
        # A held block's ancestors are in the forest, so that what bisection passes over is held or a gap.
        low, middle = 1, min(guess, high) or (high + 2) >> 1
        while low < high:
            slot = find(hashes[middle - 1])
            if slot is not None and places[slot] & main:
                low = middle
                middle = middle + 1 if middle == guess else (low + high + 1) >> 1
            else:
                high = middle - 1
                middle = (low + high + 1) >> 1
        if self._gaps:
            if len(self._gaps) > _FEW_GAPS:
                return next((at for at in range(low) if hashes[at] not in self), low)
            for slot, depth in self._gaps.items():
                if depth < low and hashes[depth] == self._own[slot]:
                    low = depth
        return low

    # ---- writing ----

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Take events in their order; those that make no sense change nothing."""
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                self._remove(event)
            elif isinstance(event, CacheCleared):
                self.clear()

    def bind(self, hashes: Sequence[int]) -> int:
        """Hold orphans against a prompt that the node has computed; returns how many of them found their parent in it.

        An orphan's tokens chained to the right block of the prompt give the prompt's next one. What comes before was
        in the cache when the orphan was stored: it is held from now on, without a name, so that no removal can mean it;
        it goes with the last block that follows it.
        """
        tries, bound = _TRIES, 0
        for name in [name for siblings in self._waiting.values() for name in siblings][::-1]:
            orphan = self._orphans.get(name)
            if orphan is None or orphan.parent in self._orphans or orphan.opaque:
                continue
            for at in range(len(hashes) - 1, 0, -1):  # from the end: what is new in a prompt is at its end
                if tries <= 0:
                    return bound
                tries -= 1
                if xxh3_64_intdigest(orphan.tokens, hashes[at - 1]) == hashes[at]:
                    self._assume(hashes[:at], orphan.parent)
                    bound += 1
                    break
        return bound

    def _store(self, event: BlocksStored) -> None:
        size, hashes = self.block_tokens * TOKEN_BYTES, event.hashes
        bit = self._place_bit(event.group, event.tier, event.whole)
        if event.block_tokens != self.block_tokens or len(event.token_ids) != size * len(hashes) or not bit:
            self.ignored += 1
            return
        own, slot, after = 0, -1, 0
        if event.parent is None:
            own = self._seed(event.lora, event.salt)
        else:
            after = _name(event.parent)
            slot = self._named.get(after, -1)
            if slot >= 0:
                own = self._own[slot]
        known = event.parent is None or slot >= 0
        for i, engine_hash in enumerate(hashes):
            name, tokens = _name(engine_hash), event.token_ids[i * size : (i + 1) * size]
            opaque = event.opaque[i] if i < len(event.opaque) else b""
            if name == after and (i or event.parent is not None):
                self.ignored += 1  # a block that follows itself
                return
            if not known and name in self._named:
                slot, known = self._named[name], True
                own = self._own[slot]
                self._mark(slot, bit)
            elif known:
                slot = self._put(slot, own, tokens, opaque, name, bit)
                own = self._own[slot]
            else:
                self._adopt(name, _Orphan(after, tokens, opaque, bit))
            after = name
        self._drop_oldest()

    def _remove(self, event: BlocksRemoved) -> None:
        bit = self._bits.get((event.group, event.tier), 0)
        for engine_hash in event.hashes:
            name = _name(engine_hash)
            slot = self._named.get(name)
            if slot is not None:
                self._take(slot, bit)
            elif (orphan := self._orphans.get(name)) is not None:
                left = orphan.places & ~bit
                if left:
                    self._orphans[name] = orphan._replace(places=left)
                else:
                    self._forget_orphan(name)

    def _place_bit(self, group: int, tier: str, whole: bool) -> int:
        """The bit of a group and tier; 0 where there are too many."""
        bit = self._bits.get((group, tier), 0)
        if not bit or (whole and group not in self._whole):
            if not bit:
                if len(self._bits) >= _MAX_PLACES:
                    return 0
                bit = self._bits[group, tier] = 1 << len(self._bits)
            if whole:
                self._whole.add(group)
            main = min(self._whole, default=None)
            self._set_main(sum(each for (of, _), each in self._bits.items() if of == main))
        return bit

    def _set_main(self, main: int) -> None:
        if main == self._main:
            return
        self._main = main
        slots, places = self._slots.values(), self._places
        self.blocks = sum(places[slot] & main != 0 for slot in slots)
        self._gaps = {slot: self._depths[slot] for slot in slots if self._children[slot] and not places[slot] & main}

    # ---- the forest ----

    def _put(self, parent: int, own: int, tokens: bytes, opaque: bytes, name: int, bit: int) -> int:
        """A block behind `parent` (-1: behind nothing), whose hash is `own`, and with it what waited for it."""
        slot = self._hold(parent, _chained(own, tokens, opaque), name, bit)
        if self._orphans:
            self._forget_orphan(name)
            self._gather(slot)
        return slot

    def _gather(self, slot: int) -> None:
        """Put the orphans that wait for a block, and those that wait for these, behind it."""
        found = [slot]
        while found:
            above = found.pop()
            for child in self._waiting.pop(self._names[above], ()):
                tokens, opaque, places = self._orphans.pop(child)[1:]
                found.append(self._hold(above, _chained(self._own[above], tokens, opaque), child, places))

    def _hold(self, parent: int, own: int, name: int, bits: int) -> int:
        slot = self._slots.get(own)
        if slot is None:
            slot = self._new(parent, own)
        self._mark(slot, bits)
        was = self._names[slot]
        if was != name and name != _UNNAMED:
            if was != _UNNAMED:
                del self._named[was]
            before = self._named.get(name)
            self._named[name] = slot
            self._names[slot] = name
            if before is not None:  # the name was another block's
                self._names[before] = _UNNAMED
                self._take(before, _EVERYWHERE)
        return slot

    def _mark(self, slot: int, bits: int) -> None:
        """A block is in those places as well."""
        before = self._places[slot]
        self._places[slot] = before | bits
        if bits & self._main and not before & self._main:
            self.blocks += 1
            self._gaps.pop(slot, None)

    def _new(self, parent: int, own: int) -> int:
        depth = 0
        if parent >= 0:
            depth = self._depths[parent] + 1
            self._children[parent] += 1
            if not self._places[parent] & self._main:
                self._gaps[parent] = depth - 1
        if self._free:
            slot = self._free.pop()
            self._own[slot], self._names[slot] = own, _UNNAMED
            self._parents[slot], self._depths[slot] = parent, depth
        else:
            if len(self._own) == len(_numbers):
                _numbers.append(len(_numbers))
            slot = _numbers[len(self._own)]
            self._own.append(own)
            self._names.append(_UNNAMED)
            self._parents.append(parent)
            self._depths.append(depth)
            self._children.append(0)
            self._places.append(0)
        self._slots[own] = slot
        return slot

    def _take(self, slot: int, bits: int) -> None:
        """A block is not in those places any more."""
        before = self._places[slot]
        after = self._places[slot] = before & ~bits
        if before & self._main and not after & self._main:
            self.blocks -= 1
            if self._children[slot]:
                self._gaps[slot] = self._depths[slot]
        while slot >= 0 and not self._places[slot] and not self._children[slot]:
            name, parent = self._names[slot], self._parents[slot]
            del self._slots[self._own[slot]]
            if name != _UNNAMED:
                del self._named[name]
            self._gaps.pop(slot, None)
            self._free.append(slot)
            if parent >= 0:
                self._children[parent] -= 1
                if not self._children[parent]:
                    self._gaps.pop(parent, None)
                    if self._names[parent] == _UNNAMED and self._places[parent]:
                        self.blocks -= self._places[parent] & self._main != 0
                        self._places[parent] = 0
            slot = parent

    def _assume(self, hashes: Sequence[int], name: int) -> None:
        """These blocks are in the cache, the last of which the engine calls `name`; what is known of them counts."""
        slot = -1
        for own in hashes[:-1]:
            known = self._slots.get(own)
            slot = self._hold(slot, own, _UNNAMED, self._main & -self._main) if known is None else known
        slot = self._hold(slot, hashes[-1], name, self._main & -self._main)
        self._gather(slot)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Back within the bound: of what was stored longest ago, from the ends of prompts on."""
        while len(self._slots) > self.max_blocks:
            goal = self.max_blocks - min(_DROPPED_AT_ONCE, self.max_blocks // 8)
            leaves = (slot for slot in self._slots.values() if not self._children[slot])
            for leaf in list(islice(leaves, _DROPPED_AT_ONCE)):
                slot = leaf
                while slot >= 0 and not self._children[slot] and len(self._slots) > goal:
                    parent = self._parents[slot]
                    gone_with_it = parent >= 0 and self._children[parent] == 1 and not self._stays(parent)
                    self._take(slot, _EVERYWHERE)
                    slot = -1 if gone_with_it else parent

    def _stays(self, slot: int) -> bool:
        """Would it stay without children?"""
        return self._places[slot] != 0 and self._names[slot] != _UNNAMED

    # ---- orphans ----

    def _adopt(self, name: int, orphan: _Orphan) -> None:
        before = self._orphans.get(name)
        if before is not None:
            orphan = orphan._replace(places=orphan.places | before.places)
            self._forget_orphan(name)
        self._orphans[name] = orphan
        self._waiting.setdefault(orphan.parent, []).append(name)
        if len(self._orphans) > MAX_ORPHANS:
            self._forget_orphan(next(iter(self._orphans)))

    def _forget_orphan(self, name: int) -> None:
        orphan = self._orphans.pop(name, None)
        if orphan is not None:
            siblings = self._waiting[orphan.parent]
            siblings.remove(name)
            if not siblings:
                del self._waiting[orphan.parent]


def _chained(own: int, tokens: bytes, opaque: bytes) -> int:
    return xxh3_64_intdigest(tokens, xxh3_64_intdigest(opaque, own) if opaque else own)


class InFlight:
    """What the prompts in flight to a node will add to what it holds: counted, block by block.

    Events come some 10 ms after a block is computed; until then the brothers of a prompt would not find it.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, hashes: Sequence[int]) -> None:
        """A prompt is on its way, of which the node does not hold these."""
        counts = self._counts
        for own in hashes:
            counts[own] = counts.get(own, 0) + 1

    def remove(self, hashes: Sequence[int]) -> None:
        """It is over; what was not added is left alone."""
        counts = self._counts
        for own in hashes:
            count = counts.get(own, 0)
            if count > 1:
                counts[own] = count - 1
            elif count:
                del counts[own]

    def match(self, hashes: Sequence[int], begin: int) -> int:
        """How many leading blocks the node will hold, when it holds `begin` of them. O(log blocks)."""
        counts, low, high = self._counts, begin, len(hashes)
        if low >= high or hashes[low] not in counts:
            return low
        low += 1
        while low < high:
            middle = (low + high + 1) >> 1
            if hashes[middle - 1] in counts:
                low = middle
            else:
                high = middle - 1
        return low
