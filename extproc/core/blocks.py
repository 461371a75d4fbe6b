"""Prompt bytes to chained block hashes, a slice at a time."""

from __future__ import annotations

from array import array

from xxhash import xxh3_64_intdigest

from extproc.core.types import HASH_BYTES, Chain

TOKEN_BYTES = 4
"""A token id is 4 bytes, little-endian; of text without a tokenizer 4 bytes count as one token."""


class BlockHasher:
    """Hashes full blocks of `data` from its start; a partial tail has no hash (engines cache full blocks only).

    `salt` separates key spaces (an unsigned 64-bit seed). A block costs about 0.15 us, so callers on an event loop ask
    for a slice at a time and may stop early: the chain so far is the chain of the shorter prompt.
    """

    __slots__ = ("_block_bytes", "_data", "_hashes", "_parent", "blocks")

    def __init__(self, data: bytes, *, block_tokens: int, salt: int) -> None:
        self._data = data
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._parent = salt
        self._hashes = array("Q")
        self.blocks = len(data) // self._block_bytes
        """How many full blocks there are in all."""

    def advance(self, blocks: int) -> bool:
        """Hash up to `blocks` more; True when all are done."""
        data, size, parent, hashes = self._data, self._block_bytes, self._parent, self._hashes
        done = len(hashes)
        end = min(done + blocks, self.blocks)
        for at in range(done * size, end * size, size):
            parent = xxh3_64_intdigest(data[at : at + size], parent)
            hashes.append(parent)
        self._parent = parent
        return end == self.blocks

    @property
    def chain(self) -> Chain:
        """The hashes so far, HASH_BYTES each."""
        return self._hashes.tobytes()


def block_hashes(data: bytes, *, block_tokens: int, salt: int) -> Chain:
    """All `len(data) // (4 * block_tokens)` hashes at once."""
    hasher = BlockHasher(data, block_tokens=block_tokens, salt=salt)
    hasher.advance(hasher.blocks)
    return hasher.chain


def chain_blocks(chain: Chain) -> int:
    """How many blocks a chain has."""
    return len(chain) // HASH_BYTES
