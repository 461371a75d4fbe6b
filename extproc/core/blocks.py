"""Prompt bytes to chained block hashes, for each block size in use, as the bytes come."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from extproc.core.types import HASH_BYTES, Chain

TOKEN_BYTES = 4
"""A token id is 4 bytes, little-endian; of text without a tokenizer 4 bytes count as one token."""


class Mark(NamedTuple):
    """How far a prompt is hashed: all that is needed to go on, and none of the prompt but its last unfinished block."""

    length: int
    """Bytes so far."""
    parents: tuple[int, ...]
    """The hash of the last full block, for each block size."""
    tail: bytes
    """What follows the last full block, of the block size that has most of it."""


def beginning(salt: int, sizes: Sequence[int]) -> Mark:
    """Nothing hashed yet. `salt` separates key spaces (unsigned, 64 bits); `sizes` are block sizes in tokens."""
    return Mark(0, (salt,) * len(sizes), b"")


def extend(mark: Mark, data: bytes, sizes: Sequence[int]) -> tuple[Mark, tuple[Chain, ...]]:
    """`data` behind what is hashed: the new mark, and the hashes of the blocks that it completes, for each size.

    A partial block has no hash (engines cache full blocks only). 0.15 us a block, so callers on an event loop give a
    slice at a time.
    """
    joined = mark.tail + data
    before, length = len(mark.tail), mark.length + len(data)
    parents, completed, kept = [], [], 0
    for size, parent in zip(sizes, mark.parents, strict=True):
        block = size * TOKEN_BYTES
        hashes = array("Q")
        for at in range(before - mark.length % block, len(joined) - block + 1, block):
            parent = xxh3_64_intdigest(joined[at : at + block], parent)
            hashes.append(parent)
        parents.append(parent)
        completed.append(hashes.tobytes())
        kept = max(kept, length % block)
    return Mark(length, tuple(parents), joined[len(joined) - kept :]), tuple(completed)


def block_hashes(data: bytes, *, block_tokens: int, salt: int) -> Chain:
    """All `len(data) // (4 * block_tokens)` hashes at once."""
    _, (chain,) = extend(beginning(salt, (block_tokens,)), data, (block_tokens,))
    return chain


def chain_blocks(chain: Chain) -> int:
    """How many blocks a chain has."""
    return len(chain) // HASH_BYTES
