"""What the baselines keep of one node: the blocks they believe it to hold, those in use, and its recent work."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice

from extproc.core.types import Chain


def hashes_of(chain: Chain) -> Sequence[int]:
    """One number for each block of `chain`."""
    return array("Q", chain).tolist()


def _depth(hashes: Sequence[int], present: Callable[[int], bool]) -> int:
    """How many leading blocks are present. A block is only present with all before it, so that bisection finds it."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if present(hashes[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low


class RecentBlocks:
    """The prefix index of one node: blocks of what was sent there, the least recently used dropped at `capacity`.

    Tails are older than their heads, so that no head is dropped before its tail. `ttl_s`: how long a block counts.
    """

    __slots__ = ("_last_use", "capacity", "ttl_s")

    def __init__(self, capacity: int, ttl_s: float = math.inf) -> None:
        self.capacity = capacity
        self.ttl_s = ttl_s
        self._last_use: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last_use)

    def match(self, hashes: Sequence[int], now: float) -> int:
        """How many leading blocks it holds. O(log blocks)."""
        if not hashes or hashes[0] not in self._last_use:
            return 0
        if self.ttl_s == math.inf:
            return _depth(hashes, self._last_use.__contains__)
        since = now - self.ttl_s
        return _depth(hashes, lambda block: self._last_use.get(block, -math.inf) >= since)

    def store(self, hashes: Sequence[int], now: float) -> None:
        """It is about to hold these blocks, or holds them already. O(blocks)."""
        last_use = self._last_use
        for block in reversed(hashes):
            last_use[block] = now
            last_use.move_to_end(block)
        while len(last_use) > self.capacity:
            last_use.popitem(last=False)
        since = now - self.ttl_s
        while last_use and next(iter(last_use.values())) < since:
            last_use.popitem(last=False)

    def victims(self, new: int, since: float) -> int:
        """How many blocks that were used after `since` have to go for `new` more. O(new)."""
        gone = len(self._last_use) + new - self.capacity
        if gone <= 0:
            return 0
        return sum(used >= since for used in islice(self._last_use.values(), gone))

    def clear(self) -> None:
        """It lost them all."""
        self._last_use.clear()


class ActiveBlocks:
    """The blocks of the prompts that one node is answering; what several of them share counts once."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        self._users: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._users)

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are in use. O(log blocks)."""
        return _depth(hashes, self._users.__contains__)

    def add(self, hashes: Sequence[int]) -> None:
        """One more prompt of these blocks is being answered."""
        users = self._users
        for block in hashes:
            users[block] = users.get(block, 0) + 1

    def remove(self, hashes: Sequence[int]) -> None:
        """One prompt that was added is answered."""
        users = self._users
        for block in hashes:
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]


class RecentWork:
    """Seconds of work that one node was given in the last `window_s`."""

    __slots__ = ("_given", "_total_s", "window_s")

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._given: deque[tuple[float, float]] = deque()
        self._total_s = 0.0

    def add(self, work_s: float, now: float) -> None:
        """It was given this much."""
        self._given.append((now, work_s))
        self._total_s += work_s

    def total_s(self, now: float) -> float:
        """All of it, as of `now`."""
        given = self._given
        while given and given[0][0] < now - self.window_s:
            self._total_s -= given.popleft()[1]
        if not given:
            self._total_s = 0.0  # whatever rounding left
        return self._total_s
