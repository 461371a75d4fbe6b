"""What engines publish, as bytes, against what the core is told; and that no bytes can do harm."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from extproc.core.types import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from extproc.sources.kv_codec import END_OF_REPLAY, BadMessage, Batch, Frame, decode, frames, pieces

CAPTURES = Path(__file__).parents[3] / "shared" / "lab" / "captures"


def tokens(*ids: int) -> bytes:
    return b"".join(one.to_bytes(4, "little") for one in ids)


def stored(
    hashes: tuple[int | bytes, ...],
    ids: bytes,
    *,
    parent: int | bytes | None = None,
    lora: str | None = None,
    salt: str | None = None,
    opaque: tuple[bytes, ...] = (),
    tier: str = "gpu",
    group: int = 0,
    whole: bool = True,
) -> BlocksStored:
    """Of two tokens a block."""
    return BlocksStored(hashes, parent, ids, 2, lora, salt, opaque or (b"",) * len(hashes), tier, group, whole)


AT = b"\xcb?\xf8\x00\x00\x00\x00\x00\x00"
"""1.5 s."""
ONE, TWO, ZERO = b"\x01" * 32, b"\x02" * 32, b"\x00" * 32

MESSAGES: dict[str, tuple[bytes, Batch]] = {
    "no events": (b"\x92" + AT + b"\x90", Batch(1.5, (), None, 0)),
    "vLLM 0.11": (
        b"\x93" + AT + b"\x91\x97\xabBlockStored\x92\x0b\xcf\x80\x00\x00\x00\x00\x00\x00\x05"
        b"\xc0\x94\x01\x02\xce\x00\x01\x11p\x04\x02\xc0\xa3GPU\x00",
        Batch(1.5, (stored((11, 2**63 + 5), tokens(1, 2, 70_000, 4)),), 0, 0),
    ),
    "vLLM 0.11, an adapter that has a number only": (
        b"\x93" + AT + b"\x91\x97\xabBlockStored\x91M\r\x92\x01\x02\x02\x01\xa3GPU\x00",
        Batch(1.5, (stored((77,), tokens(1, 2), parent=13, lora="id:1"),), 0, 0),
    ),
    "vLLM 0.15, an adapter": (
        b"\x93" + AT + b"\x91\x98\xabBlockStored\x91M\r\x92\x01\x02\x02\x01\xa3GPU\xa2ad\x00",
        Batch(1.5, (stored((77,), tokens(1, 2), parent=13, lora="ad"),), 0, 0),
    ),
    "vLLM 0.19, an adapter and a salt": (
        b"\x93" + AT + b"\x91\x99\xabBlockStored\x92\x07\x08\xc0\x94\x01\x02\x03\x04\x02\x01\xa3GPU\xa2ad"
        b"\x92\x92\xa2ad\xa1s\x91\xa2ad\x00",
        Batch(1.5, (stored((7, 8), tokens(1, 2, 3, 4), lora="ad", salt="s"),), 0, 0),
    ),
    "vLLM 0.22, a removal and a store in one batch, in a group": (
        b"\x93" + AT + b"\x93\x94\xacBlockRemoved\x91\r\xa3GPU\x01\x9c\xabBlockStored\x91\r\xc0\x92\x01\x02\x02\xc0"
        b"\xa3GPU\xc0\x91\xc0\x01\xaesliding_window@\x91\xb0AllBlocksCleared\x00",
        Batch(
            1.5,
            (BlocksRemoved((13,), "gpu", 1), stored((13,), tokens(1, 2), group=1, whole=False), CacheCleared()),
            0,
            0,
        ),
    ),
    "vLLM 0.32, maps, byte hashes, an image in the second block, offloaded": (
        b"\x93" + AT + b"\x91\x8d\xa4type\xabBlockStored\xacblock_hashes\x92\xc4 " + ONE + b"\xc4 " + TWO +
        b"\xb1parent_block_hash\xc4 " + ZERO + b"\xa9token_ids\x94\x01\x02\x03\x04\xaablock_size\x02\xa7lora_id\xc0"
        b"\xa6medium\xa3CPU\xa9lora_name\xc0\xaaextra_keys\x92\xc0\x91\x92\xa3img\x00\xa9group_idx\x02"
        b"\xb2kv_cache_spec_kind\xaefull_attention\xa9ownership\xa1x\xaasession_id\xa1y\x01",
        Batch(
            1.5,
            (
                stored(
                    (ONE, TWO),
                    tokens(1, 2, 3, 4),
                    parent=ZERO,
                    opaque=(b"", xxh3_64_digest(b"\x92\xa3img\x00")),
                    tier="cpu",
                    group=2,
                ),
            ),
            1,
            0,
        ),
    ),
    "vLLM 0.32, a removal from a store that lies elsewhere": (
        b"\x93" + AT + b"\x92\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\xc4 " + ONE +
        b"\xa6medium\xa7STORAGE\xa8locality\xa6REMOTE\x81\xa4type\xb0AllBlocksCleared\x01",
        Batch(1.5, (BlocksRemoved((ONE,), "external", 0), CacheCleared()), 1, 0),
    ),
    "a batch that is a map": (
        b"\x83\xa2ts\x01\xa6events\x91\x81\xa4type\xb0AllBlocksCleared\xb2data_parallel_rank\x03",
        Batch(1.0, (CacheCleared(),), 3, 0),
    ),
    "SGLang, signed hashes, an adapter and a salt": (
        b"\x93" + AT + b"\x92\x89\xa4type\xabBlockStored\xacblock_hashes\x92\xfb\x06\xb1parent_block_hash\xc0"
        b"\xa9token_ids\x94\x01\x02\x03\x04\xaablock_size\x02\xa7lora_id\xc0\xa6medium\xaaCPU_PINNED\xaacache_salt\xa1s"
        b"\xa9lora_name\xa2ad\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\xfb\xa6medium\xa4DISK\x02",
        Batch(
            1.5,
            (
                stored((-5, 6), tokens(1, 2, 3, 4), lora="ad", salt="s", tier="cpu"),
                BlocksRemoved((-5,), "disk", 0),
            ),
            2,
            0,
        ),
    ),
    "SGLang, pairs of tokens, and a salt that is the first block's alone": (
        b"\x93" + AT + b"\x91\x87\xa4type\xabBlockStored\xacblock_hashes\x91\t\xb1parent_block_hash\xfb"
        b"\xa9token_ids\x92\x92\x01\x02\x92\x02\x03\xaablock_size\x02\xa7lora_id\xc0\xaacache_salt\xa1s\x00",
        Batch(1.5, (stored((9,), tokens(1, 2), parent=-5),), 0, 0),
    ),
    "an event of a kind that is not known": (
        b"\x93" + AT + b"\x92\x81\xa4type\xabBlocksMoved\x91\xb0AllBlocksCleared\x00",
        Batch(1.5, (CacheCleared(),), 0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_as_it_is_on_the_wire(name: str) -> None:
    payload, batch = MESSAGES[name]
    assert decode(payload) == batch


def a_store(**changes: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": 9,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
    } | changes
    return {name: value for name, value in event.items() if value is not ...}


BAD_EVENTS: dict[str, Any] = {
    "its own parent": a_store(parent_block_hash=2),
    "a block twice": a_store(block_hashes=[1, 1]),
    "no blocks": a_store(block_hashes=[], token_ids=[]),
    "no parent named": a_store(parent_block_hash=...),
    "a token too many": a_store(token_ids=[1, 2, 3, 4, 5]),
    "a token too few": a_store(token_ids=[1, 2, 3]),
    "no tokens": a_store(token_ids=[], block_size=0),
    "a block size below 1": a_store(block_size=-2),
    "a token below 0": a_store(token_ids=[1, 2, 3, -4]),
    "a token beyond 32 bits": a_store(token_ids=[1, 2, 3, 2**32]),
    "a token that is text": a_store(token_ids=[1, 2, 3, "4"]),
    "a token that is a fraction": a_store(token_ids=[1, 2, 3, 4.0]),
    "a token that is a truth": a_store(token_ids=[1, 2, 3, True]),
    "triples of tokens": a_store(token_ids=[[1, 2, 3]] * 4),
    "tokens of two kinds": a_store(token_ids=[1, 2, 3, [4, 5]]),
    "tokens as bytes": a_store(token_ids=b"1234"),
    "hashes of a kind that cannot be looked up": a_store(block_hashes=[[1], {}]),
    "a hash that is text": a_store(block_hashes=["a", "b"]),
    "a hash of 65 bytes": a_store(block_hashes=[b"a" * 65, 1]),
    "a hash that is one number": a_store(block_hashes=1),
    "a parent that is a list": a_store(parent_block_hash=[9]),
    "extra keys of one block": a_store(extra_keys=[None]),
    "extra keys of three blocks, one with one": a_store(extra_keys=[None, ["x"], None]),
    "extra keys that are a number": a_store(extra_keys=7),
    "extra keys of which one is a number": a_store(extra_keys=[None, 7]),
    "a group below 0": a_store(group_idx=-1),
    "a group that is text": a_store(group_idx="0"),
    "a kind that is a number": a_store(kv_cache_spec_kind=1),
    "a medium that is a list": a_store(medium=["GPU"]),
    "an adapter's name of 5,000 letters": a_store(lora_name="a" * 5_000),
    "a salt that is a number": a_store(cache_salt=1),
    "a removal of nothing": {"type": "BlockRemoved", "block_hashes": []},
    "a removal without hashes": {"type": "BlockRemoved"},
    "a type that is a number": {"type": 1},
    "no type": {},
    "an empty array": [],
    "an array that is cut": ["BlockStored", [1]],
    "a number": 3,
    "nothing": None,
    "a time": msgspec.msgpack.Ext(5, b"x"),
    "nested": [[[[[["BlockStored"]]]]]],
}


@pytest.mark.parametrize("name", BAD_EVENTS)
def test_an_event_that_is_impossible_is_skipped_and_its_neighbours_are_not(name: str) -> None:
    clear = {"type": "AllBlocksCleared"}
    batch = decode(msgspec.msgpack.encode([1.5, [clear, BAD_EVENTS[name], a_store()], 0]))
    assert batch == Batch(1.5, (CacheCleared(), stored((1, 2), tokens(1, 2, 3, 4), parent=9)), 0, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x91" + AT,
        b"\x92" + AT + b"\xc0",
        b"\x92\xa1x\x90",
        b"\x92\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x90",  # not a number
        b"\x92\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00\x90",  # infinity
        b"\x92" + AT + b"\x90 ",
        b"\x92" + AT + b"\xdd\xff\xff\xff\xff",
        b"\x92" + AT + b"\x91" * 100_000 + b"\xc0",
        b"\x92" + AT + b"\xdd\x00\x01\x86\xa1" + b"\xc0" * 100_001,
        b"\x98\xa8LoadStat\x01\x02\x03\x04\x05\x06\x07",
        b"\x81\xa2ts\x01",
        b"\x92" + AT + b"\x91\xc6\x04\x00\x00\x00" + b"\x00" * (64 << 20),
    ],
    ids=range(15),
)
def test_what_is_not_a_batch_says_so(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(payload)


def test_a_rank_that_is_none_is_no_reason_to_lose_a_batch() -> None:
    for rank in ("0", -1, True, [0], 2**40):
        assert decode(msgspec.msgpack.encode([1.5, [], rank])) == Batch(1.5, (), None, 0)
    assert decode(msgspec.msgpack.encode({"ts": 1.5, "events": [], "attn_dp_rank": 4})).rank == 4


def test_a_message_has_no_more_than_a_million_tokens() -> None:
    half = a_store(block_hashes=[1], token_ids=[7] * 500_000, block_size=500_000)
    one_more = a_store(block_hashes=[1], token_ids=[7], block_size=1)
    batch = decode(msgspec.msgpack.encode([1.5, [half, {}, half, one_more, one_more], 0]))
    assert (len(batch.events), batch.skipped) == (2, 3)
    too_long = a_store(block_hashes=[1], token_ids=[7] * 1_000_001, block_size=1_000_001)
    assert decode(msgspec.msgpack.encode([1.5, [too_long, one_more], 0])).skipped == 1


def test_what_a_block_depends_on_beside_the_salt_is_opaque_in_that_block() -> None:
    def opaque(keys: list[Any], **changes: Any) -> tuple[str | None, tuple[bytes, ...]]:
        batch = decode(msgspec.msgpack.encode([1.5, [a_store(extra_keys=keys, **changes)], 0]))
        (event,) = batch.events
        assert isinstance(event, BlocksStored)
        return event.salt, event.opaque

    image = xxh3_64_digest(msgspec.msgpack.encode(["img", 3]))
    assert opaque([["s"], None], parent_block_hash=None) == ("s", (b"", b""))
    assert opaque([[["img", 3], "s"], None], parent_block_hash=None) == ("s", (image, b""))
    assert opaque([["ad", "ad"], ["ad"]], parent_block_hash=None, lora_name="ad") == ("ad", (b"", b""))
    assert opaque([["ad"], ["ad", ["img", 3]]], lora_name="ad") == (None, (b"", image))
    assert opaque([[], None]) == (None, (b"", b""))
    salt, (first, second) = opaque([["s"], [b"embeds"]])
    assert salt is None, "of a block that follows another no string is a salt"
    assert first
    assert second != first


@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        ({}, True),
        ({"kv_cache_spec_kind": None}, True),
        ({"kv_cache_spec_kind": "full_attention"}, True),
        ({"kv_cache_spec_kind": "mla_attention"}, True),
        ({"kv_cache_spec_kind": "unknown"}, True),
        ({"kv_cache_spec_kind": "sliding_window"}, False),
        ({"kv_cache_spec_kind": "mamba"}, False),
        ({"kv_cache_spec_kind": "unknown", "kv_cache_spec_sliding_window": 64}, False),
    ],
)
def test_a_group_that_looks_back_over_a_window_only_is_no_prefix(fields: dict[str, Any], whole: bool) -> None:
    (event,) = decode(msgspec.msgpack.encode([1.5, [a_store(**fields)], 0])).events
    assert isinstance(event, BlocksStored)
    assert event.whole is whole


# ---- frames ----


def test_frames_of_every_release() -> None:
    seq = (7).to_bytes(8, "big")
    assert frames([b"topic", seq, b"payload"]) == Frame(b"topic", 7, b"payload")
    assert frames([b"", seq, b"payload"]) == Frame(b"", 7, b"payload")
    assert frames([b"", b"topic", seq, b"payload"]) == Frame(b"topic", 7, b"payload")
    for end in ([b"", b"\xff" * 8, b""], [b"", b"", b"\xff" * 8, b""]):
        assert frames(end).seq == END_OF_REPLAY


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_other_frames_are_bad(parts: list[bytes]) -> None:
    if 3 <= len(parts) <= 4 and len(parts[-2]) == 8:
        assert frames(parts).payload == parts[-1]
    else:
        with pytest.raises(BadMessage):
            frames(parts)


# ---- anything ----


def consistent(batch: Batch) -> None:
    """What the core relies on."""
    for event in batch.events:
        if isinstance(event, BlocksStored):
            assert event.hashes
            assert event.block_tokens > 0
            assert len(event.token_ids) == 4 * event.block_tokens * len(event.hashes)
            assert len(event.opaque) == len(event.hashes)
            assert event.parent not in event.hashes
            assert event.salt is None or event.parent is None
        elif isinstance(event, BlocksRemoved):
            assert event.hashes
    assert batch.skipped >= 0
    assert batch.rank is None or batch.rank >= 0


_leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
_anything = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=6),
    max_leaves=20,
)
_fields = {
    "block_hashes": st.lists(st.integers(-3, 3) | st.binary(max_size=2), max_size=4),
    "parent_block_hash": st.none() | st.integers(-3, 3),
    "token_ids": st.lists(st.integers(0, 2**32), max_size=8)
    | st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))),
    "block_size": st.integers(0, 3),
    "lora_id": st.none() | st.integers(0, 2),
    "medium": st.none() | st.sampled_from(["GPU", "CPU", "x"]),
    "lora_name": st.none() | st.sampled_from(["ad", ""]),
    "extra_keys": st.none() | st.lists(st.none() | st.lists(_leaves, max_size=3), max_size=4),
    "group_idx": st.none() | st.integers(-1, 3),
}
_events = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]) | _leaves}
    | {name: values | _anything for name, values in _fields.items()}
)
_positional = _events.map(lambda event: list(event.values()))
_batches = st.tuples(
    st.floats(allow_nan=True), st.lists(_events | _positional | _anything, max_size=4), st.integers(0, 2)
)


@settings(max_examples=300)
@given(_batches | _anything)
def test_any_object_is_a_batch_that_is_consistent_or_is_bad(message: Any) -> None:
    with suppress(BadMessage):
        consistent(decode(msgspec.msgpack.encode(message)))


@settings(max_examples=1_000)
@given(st.sampled_from(sorted(MESSAGES)), st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=4)), max_size=4))
def test_any_bytes_are_a_batch_that_is_consistent_or_are_bad(name: str, edits: list[tuple[int, bytes]]) -> None:
    payload = MESSAGES[name][0]
    for at, with_ in edits:
        at %= len(payload) + 1
        payload = payload[:at] + with_ + payload[at + len(with_) // 2 :]
    with suppress(BadMessage):
        consistent(decode(payload))


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 5))
def test_pieces_are_the_same_events_in_the_same_order(sizes: list[int], max_blocks: int) -> None:
    events: list[CacheEvent] = []
    for number, size in enumerate(sizes):
        hashes = tuple(range(100 * number, 100 * number + size))
        if not size:
            events.append(CacheCleared())
        elif number % 2:
            events.append(BlocksRemoved(hashes, "gpu", number))
        else:
            ids = tokens(*range(2 * size))
            opaque = tuple(bytes([one % 100]) for one in hashes)
            events.append(stored(hashes, ids, parent=-1, salt="s", opaque=opaque, group=number))

    def single(event: CacheEvent) -> list[CacheEvent]:
        """A block at a time."""
        if isinstance(event, CacheCleared):
            return [event]
        if isinstance(event, BlocksRemoved):
            return [event._replace(hashes=(one,)) for one in event.hashes]
        return [
            event._replace(
                hashes=(one,),
                parent=event.hashes[at - 1] if at else event.parent,
                token_ids=event.token_ids[8 * at : 8 * at + 8],
                salt=None if at else event.salt,
                opaque=(event.opaque[at],),
            )
            for at, one in enumerate(event.hashes)
        ]

    found: list[CacheEvent] = []
    for piece, blocks in pieces(events, max_blocks=max_blocks):
        assert blocks == sum(len(getattr(event, "hashes", ())) for event in piece) <= max_blocks
        found += piece
    assert [one for event in found for one in single(event)] == [one for event in events for one in single(event)]


# ---- the captures ----


def test_every_captured_message_decodes() -> None:
    """Of four real servers, a restart and a data-parallel pair, and what other releases' own classes encode."""
    decoded = 0
    for path in sorted(CAPTURES.glob("*kv_events*.jsonl")) if CAPTURES.exists() else ():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "payload_hex" not in record:
                continue
            batch = decode(bytes.fromhex(record["payload_hex"]))
            assert batch.skipped == 0, record
            assert batch.rank in (0, 1)
            consistent(batch)
            told = msgspec.msgpack.decode(bytes.fromhex(record["payload_hex"]))[1]
            assert len(batch.events) == len(told)
            for event, raw in zip(batch.events, told, strict=True):
                hashes = raw[1:2] if isinstance(raw, list) else [raw["block_hashes"]] if "block_hashes" in raw else []
                assert [list(getattr(event, "hashes", ()))] == hashes if hashes else isinstance(event, CacheCleared)
            decoded += 1
    assert decoded in (0, 203)
