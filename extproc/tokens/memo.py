"""What was hashed before, by salted hashes of what it was: no text, and of token ids less than one block."""

from __future__ import annotations

import threading
from typing import NamedTuple

from cachetools import LRUCache

from extproc.core.blocks import Mark
from extproc.core.types import Chain

_ENTRY_BYTES = 600
"""Of an entry beside its hashes and tail: key, tuples, numbers, links (measured)."""


class Entry(NamedTuple):
    """Hashes up to a place in a prompt, for each block size."""

    mark: Mark
    chains: tuple[Chain, ...]
    """Of all blocks so far, or of those since the entry before: as the key says."""
    behind: int = 0
    """Characters of the rendered text behind the place; they are encoded with what follows."""
    asked: int = 0
    """Tokens of the whole prompt, where it asked for an answer."""


def _size(entry: Entry) -> int:
    return _ENTRY_BYTES + len(entry.mark.tail) + sum(map(len, entry.chains))


class Memo:
    """A bounded map for all threads; the least recently used goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._entries: LRUCache[bytes, Entry] = LRUCache(max_bytes, getsizeof=_size)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Bytes that it takes, at most `max_bytes`."""
        return int(self._entries.currsize)

    def get(self, key: bytes) -> Entry | None:
        with self._lock:
            return self._entries.get(key)

    def put(self, key: bytes, entry: Entry) -> None:
        """An entry that would not fit at all is left out."""
        with self._lock:
            if _size(entry) <= self._entries.maxsize:
                self._entries[key] = entry
