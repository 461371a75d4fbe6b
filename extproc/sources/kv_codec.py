"""What vLLM and SGLang publish of their KV caches, as the core's events; whatever is not understood is counted."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct
from xxhash import xxh3_64_digest

from extproc.core.types import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, EngineHash

MAX_PAYLOAD_BYTES = 64 << 20
END_OF_REPLAY = 2**64 - 1
"""The sequence number of the message that ends a replay."""

_MAX_TOKENS = 1_000_000
_MAX_BLOCKS = 1_000_000
_MAX_EVENTS = 100_000
"""Of one message. An engine's step stores as many tokens as it computed, 8,192 by default, and may remove as many."""

_TIERS = {"GPU": "gpu", "CPU": "cpu", "CPU_PINNED": "cpu", "DISK": "disk", "STORAGE": "disk", "EXTERNAL": "external"}
_PARTIAL = frozenset(
    (
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "encoder_only_attention",
        "cross_attention",
    )
)
"""Kinds of layer groups that do not look back over the whole prompt."""


class BadMessage(ValueError):
    """Not a message of a feed, or not a batch of events."""


class Frame(NamedTuple):
    """One message of a feed or of a replay."""

    topic: bytes
    seq: int
    """END_OF_REPLAY in the message that ends one."""
    payload: bytes


class Batch(NamedTuple):
    """What one message tells, in order."""

    ts_s: float
    """When, by the engine's wall clock."""
    events: tuple[CacheEvent, ...]
    rank: int | None
    """The data-parallel rank that speaks."""
    skipped: int
    """Events that were not understood."""


_Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
_Hash: TypeAlias = int | Annotated[bytes, Meta(max_length=64)]
_Hashes: TypeAlias = Annotated[list[_Hash], Meta(min_length=1, max_length=_MAX_BLOCKS)]
_ABSENT = Raw(b"\xc0")


# vLLM's events are arrays through 0.22 and maps from 0.25 on, where what is None may be left out. What a struct does
# not name is skipped; whatever follows the fields of an array is, too.
class _StoredArray(Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: Raw
    block_size: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]
    lora_id: int | _Text | None = None
    medium: _Text | None = None
    lora_name: _Text | None = None
    extra_keys: Raw = _ABSENT
    group_idx: Annotated[int, Meta(ge=0, le=1023)] | None = None
    kv_cache_spec_kind: _Text | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: _Text | None = None


class _StoredMap(_StoredArray, array_like=False, tag="BlockStored", gc=False):
    cache_salt: _Text | None = None


class _RemovedArray(Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: _Hashes
    medium: _Text | None = None
    group_idx: Annotated[int, Meta(ge=0, le=1023)] | None = None
    locality: _Text | None = None


class _RemovedMap(_RemovedArray, array_like=False, tag="BlockRemoved", gc=False):
    pass


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _ClearedMap(Struct, tag="AllBlocksCleared", gc=False):
    pass


_Events: TypeAlias = Annotated[list[Raw], Meta(max_length=_MAX_EVENTS)]


class _BatchArray(Struct, array_like=True, gc=False):
    ts: float
    events: _Events
    data_parallel_rank: Raw = _ABSENT


class _BatchMap(Struct, gc=False):
    ts: float
    events: _Events
    data_parallel_rank: Raw = _ABSENT
    attn_dp_rank: Raw = _ABSENT


_batch_array = msgspec.msgpack.Decoder(_BatchArray)
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_event_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_event_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_tokens = msgspec.msgpack.Decoder(Annotated[list[int], Meta(max_length=_MAX_TOKENS)])
_pairs = msgspec.msgpack.Decoder(Annotated[list[tuple[int, int]], Meta(max_length=_MAX_TOKENS)])
_no_keys = msgspec.msgpack.Decoder(Annotated[list[None], Meta(max_length=_MAX_BLOCKS)] | None)
_keys = msgspec.msgpack.Decoder(Annotated[list[Raw], Meta(max_length=_MAX_BLOCKS)])
_keys_of_block = msgspec.msgpack.Decoder(Annotated[list[Raw], Meta(max_length=1024)] | None)
_rank = msgspec.msgpack.Decoder(Annotated[int, Meta(ge=0, le=65_535)])
_text = msgspec.msgpack.Decoder(_Text)

# What a decoder raises, of which RecursionError is not a ValueError: too deeply nested.
_REFUSED = (ValueError, RecursionError)


def frames(parts: Sequence[bytes]) -> Frame:
    """The parts of a message: [topic, seq, payload] live, ["", seq, payload] or ["", topic, seq, payload] replayed.

    BadMessage for anything else. Read from the end, which all forms share.
    """
    if not 3 <= len(parts) <= 4 or len(parts[-2]) != 8:
        raise BadMessage(f"{len(parts)} parts, of which the one before the last is no sequence number")
    return Frame(parts[-3], int.from_bytes(parts[-2], "big"), parts[-1])


def decode(payload: bytes) -> Batch:
    """The batch. BadMessage when it is none; an event that is not understood, or impossible, is skipped and counted.

    7 us, 2 us an event and 0.04 us a token.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BadMessage(f"{len(payload)} bytes are more than the {MAX_PAYLOAD_BYTES} of the largest batch")
    try:
        batch: _BatchArray | _BatchMap = (_batch_map if _is_map(payload) else _batch_array).decode(payload)
    except _REFUSED as error:
        raise BadMessage(f"not a batch of events: {error}") from None
    if not math.isfinite(batch.ts):
        raise BadMessage("not a batch of events: its time is no number")
    events: list[CacheEvent] = []
    tokens = blocks = skipped = 0
    for raw in batch.events:
        try:
            event = _event(raw)
        except _REFUSED:
            skipped += 1
            continue
        if isinstance(event, BlocksStored):
            tokens += len(event.hashes) * event.block_tokens
            blocks += len(event.hashes)
        elif isinstance(event, BlocksRemoved):
            blocks += len(event.hashes)
        if tokens > _MAX_TOKENS or blocks > _MAX_BLOCKS:
            skipped += len(batch.events) - len(events) - skipped
            break
        events.append(event)
    rank = _rank_in(batch.data_parallel_rank)
    if rank is None and isinstance(batch, _BatchMap):
        rank = _rank_in(batch.attn_dp_rank)
    return Batch(batch.ts, tuple(events), rank, skipped)


def pieces(events: Sequence[CacheEvent], *, max_blocks: int) -> Iterator[tuple[list[CacheEvent], int]]:
    """The same events in the same order, at most `max_blocks` at a time, and how many blocks: long ones are split."""
    piece: list[CacheEvent] = []
    room = max_blocks
    for event in events:
        if isinstance(event, CacheCleared):
            piece.append(event)
            continue
        at = 0
        while at < len(event.hashes):
            end = min(at + room, len(event.hashes))
            piece.append(event if end - at == len(event.hashes) else _part(event, at, end))
            room -= end - at
            at = end
            if not room:
                yield piece, max_blocks
                piece, room = [], max_blocks
    if piece:
        yield piece, max_blocks - room


def _part(event: BlocksStored | BlocksRemoved, start: int, end: int) -> CacheEvent:
    if isinstance(event, BlocksRemoved):
        return event._replace(hashes=event.hashes[start:end])
    block_bytes = 4 * event.block_tokens
    return event._replace(
        hashes=event.hashes[start:end],
        parent=event.hashes[start - 1] if start else event.parent,
        token_ids=event.token_ids[start * block_bytes : end * block_bytes],
        salt=None if start else event.salt,
        opaque=event.opaque[start:end],
    )


def _is_map(encoded: bytes | Raw) -> bool:
    first = memoryview(encoded)[:1].tobytes()
    return b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")


def _rank_in(raw: Raw) -> int | None:
    try:
        return _rank.decode(raw)
    except _REFUSED:
        return None


def _event(raw: Raw) -> CacheEvent:
    """ValueError or RecursionError when it cannot be understood."""
    event = (_event_map if _is_map(raw) else _event_array).decode(raw)
    if isinstance(event, _StoredArray):
        return _stored(event)
    if isinstance(event, _RemovedArray):
        return BlocksRemoved(tuple(event.block_hashes), _tier(event.medium, event.locality), event.group_idx or 0)
    return CacheCleared()


def _stored(event: _StoredArray) -> BlocksStored:
    hashes: tuple[EngineHash, ...] = tuple(event.block_hashes)
    blocks, parent = len(hashes), event.parent_block_hash
    distinct = set(hashes)
    if len(distinct) != blocks or parent in distinct:
        raise ValueError("a block is its own ancestor")
    token_ids = _token_ids(event.token_ids)
    if len(token_ids) != 4 * blocks * event.block_size:
        raise ValueError("tokens and blocks disagree")
    # Older releases give the adapter's number alone, which is no name that a request has.
    lora = event.lora_name or (None if event.lora_id in (None, "") else f"id:{event.lora_id}")
    salt = event.cache_salt or None if isinstance(event, _StoredMap) and parent is None else None
    rests = _rests(event.extra_keys, event.lora_name, blocks)
    if parent is None and rests and rests[0] and (found := _string(rests[0][-1])) is not None:
        # untagged, but of a prompt's first block the salt is the one string that is not the adapter's name
        salt = found
        rests[0].pop()
    opaque = tuple(xxh3_64_digest(b"".join(rest)) if rest else b"" for rest in rests) or (b"",) * blocks
    tier = _tier(event.medium, event.locality)
    group = event.group_idx or 0
    whole = event.kv_cache_spec_sliding_window is None and event.kv_cache_spec_kind not in _PARTIAL
    return BlocksStored(hashes, parent, token_ids, event.block_size, lora, salt, opaque, tier, group, whole)


def _token_ids(raw: Raw) -> bytes:
    try:
        ids = _tokens.decode(raw)
    except msgspec.ValidationError:
        # SGLang's speculative decoding keys on each token with the one after it: the first of each pair is the prompt
        ids = [first for first, _ in _pairs.decode(raw)]
    try:
        packed = array("I", ids)
    except OverflowError:
        raise ValueError("a token id that is none") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _rests(extra_keys: Raw, lora: str | None, blocks: int) -> list[list[bytes]]:
    """The extra keys of each block without the adapter's name, each as it was encoded; empty when no block has any."""
    try:
        none = _no_keys.decode(extra_keys)
    except msgspec.ValidationError:
        rests = [[bytes(key) for key in _keys_of_block.decode(raw) or ()] for raw in _keys.decode(extra_keys)]
        if len(rests) != blocks:
            raise ValueError("extra keys and blocks disagree") from None
        return [rest[1:] if rest and lora and _string(rest[0]) == lora else rest for rest in rests]
    if none and len(none) != blocks:
        raise ValueError("extra keys and blocks disagree")
    return []


def _string(encoded: bytes) -> str | None:
    try:
        return _text.decode(encoded)
    except _REFUSED:
        return None


def _tier(medium: str | None, locality: str | None) -> str:
    """The tier's name; no medium is the GPU, and what lies with another machine is "external" wherever it lies."""
    if locality == "REMOTE":
        return "external"
    return "gpu" if medium is None else _TIERS.get(medium.upper(), medium.lower()[:32])
