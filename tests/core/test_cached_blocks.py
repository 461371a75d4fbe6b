"""What a node's events tell of its cache: sets per group and tier, gaps, orphans, bounds; and real engines' events."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from extproc.core.blocks import block_hashes
from extproc.core.cached_blocks import MAX_ORPHANS, CachedBlocks, InFlight
from extproc.core.types import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, EngineHash
from extproc.sources.kv_codec import decode

CAPTURES = Path(__file__).parents[3] / "shared" / "lab" / "captures"
BLOCK = 4


def seed(lora: str | None, salt: str | None) -> int:
    return xxh3_64_intdigest(f"{lora}\0{salt}".encode())


def ids(text: str) -> bytes:
    """One token a letter."""
    return b"".join(ord(letter).to_bytes(4, "little") for letter in text)


def prompt(text: str, *, lora: str | None = None, salt: str | None = None, size: int = BLOCK) -> Sequence[int]:
    return array("Q", block_hashes(ids(text), block_tokens=size, salt=seed(lora, salt)))


def cache(max_blocks: int = 1000) -> CachedBlocks:
    return CachedBlocks(BLOCK, seed, max_blocks)


def stored(hashes: Sequence[EngineHash], text: str, parent: EngineHash | None = None, **more: Any) -> BlocksStored:
    values = {
        "block_tokens": BLOCK,
        "lora": None,
        "salt": None,
        "opaque": (b"",) * len(hashes),
        "tier": "gpu",
        "group": 0,
    } | more
    return BlocksStored(tuple(hashes), parent, ids(text), **values)


def removed(*hashes: EngineHash, tier: str = "gpu", group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(hashes, tier, group)


THREE = stored([1, 2, 3], "aaaabbbbcccc")


@pytest.mark.parametrize(
    ("events", "text", "blocks"),
    [
        ([THREE], "aaaabbbbcccc", 3),
        ([THREE], "aaaabbbbccccdddd", 3),
        ([THREE], "aaaabbbbxxxx", 2),
        ([THREE], "aaa", 0),
        ([THREE], "xxxxbbbbcccc", 0),
        ([THREE, stored([4], "dddd", 3)], "aaaabbbbccccdddd", 4),
        ([THREE, stored([4], "dddd", 1)], "aaaadddd", 2),
        ([THREE, removed(3)], "aaaabbbbcccc", 2),
        ([THREE, THREE, removed(3)], "aaaabbbbcccc", 2),  # a set: one removal is enough
        ([THREE, removed(3), removed(3), removed(77)], "aaaabbbbcccc", 2),
        ([THREE, removed(2)], "aaaabbbbcccc", 1),  # a gap
        ([THREE, removed(1)], "aaaabbbbcccc", 0),
        ([THREE, removed(2), stored([2], "bbbb", 1)], "aaaabbbbcccc", 3),  # filled again
        ([THREE, removed(2), removed(3), stored([2], "bbbb", 1)], "aaaabbbbcccc", 2),
        ([THREE, CacheCleared()], "aaaabbbbcccc", 0),
        ([THREE, CacheCleared(), stored([4], "dddd", 3)], "aaaabbbbccccdddd", 0),
        ([stored([b"\0" * 31 + b"\1"], "aaaa"), stored([2], "bbbb", b"\1")], "aaaabbbb", 2),
        ([stored([-1], "aaaa"), removed(2**64 - 1)], "aaaa", 0),  # signed and not
        ([stored([1], "aaaa", 1)], "aaaa", 0),  # its own parent
        ([THREE, stored([2], "bbbb", 2)], "aaaabbbbcccc", 3),
        ([stored([1, 1], "aaaabbbb")], "aaaabbbb", 1),
        ([stored([1, 2], "aaaa")], "aaaabbbb", 0),  # tokens of one block for two
        ([stored([1], "aaaabbbb", block_tokens=8)], "aaaabbbb", 0),
        ([stored([], "")], "aaaa", 0),
        ([stored([1, 2], "aaaabbbb", opaque=(b"", b"image"))], "aaaabbbb", 1),
        ([stored([1, 2], "aaaabbbb", opaque=(b"image", b""))], "aaaabbbb", 0),
        ([stored([1, 2], "aaaabbbb", opaque=())], "aaaabbbb", 2),
        ([stored([1], "aaaa", lora="sql")], "aaaa", 0),
        ([stored([1], "aaaa", salt="tenant")], "aaaa", 0),
        # the name of a block passes to another: the first is gone
        ([stored([1], "aaaa"), stored([1], "bbbb")], "aaaa", 0),
        ([stored([1], "aaaa"), stored([1], "bbbb")], "bbbb", 1),
        # a block by another name: the first is forgotten
        ([stored([1], "aaaa"), stored([2], "aaaa"), removed(1)], "aaaa", 1),
        ([stored([1], "aaaa"), stored([2], "aaaa"), removed(2)], "aaaa", 0),
        ([stored([1, 2], "aaaabbbb"), stored([1], "bbbb", 1)], "aaaabbbb", 2),
        ([THREE, removed(2), stored([3], "bbbb", 1)], "aaaabbbbcccc", 2),  # a child's name passes to its parent
    ],
)
def test_events_change_what_a_prompt_finds(events: list[CacheEvent], text: str, blocks: int) -> None:
    node = cache()
    node.apply(events)
    assert node.match(prompt(text)) == blocks


@pytest.mark.parametrize("length", [2, 3, 10, 100])
@pytest.mark.parametrize("holes", [1, 2, 40])
def test_a_prefix_ends_at_its_first_gap_wherever_that_is(length: int, holes: int) -> None:
    text = "".join(f"{i:04}" for i in range(length))
    for first in range(length):
        node, gone = cache(), range(first, min(first + holes, length))
        node.apply([stored(range(length), text), stored([900, 901], "aaaabbbb"), removed(*gone)])
        node.apply([removed(900)])  # a gap of another prompt
        for guess in (0, 1, first, length, length + 9):
            assert node.match(prompt(text), guess) == first
        node.apply([stored([i], text[4 * i : 4 * i + 4], i - 1 if i else None) for i in gone])
        assert node.match(prompt(text)) == length


def test_a_gap_is_forgotten_with_the_last_block_behind_it() -> None:
    node = cache()
    for i in range(100):
        node.apply([stored([1, 2, 3], f"{i:04}bbbbcccc"), removed(1), removed(2), removed(3)])
        assert (len(node._gaps), len(node._slots), len(node._own)) == (0, 0, 3)
    node.apply([THREE._replace(group=1), THREE, removed(2), removed(3), removed(3, group=1)])
    assert not node._gaps


def test_prompts_of_an_adapter_and_of_a_salt_find_their_own() -> None:
    node = cache()
    node.apply([stored([1, 2], "aaaabbbb", lora="sql", salt="t"), stored([3], "cccc", 2, lora="sql")])
    assert node.match(prompt("aaaabbbbcccc", lora="sql", salt="t")) == 3
    assert node.match(prompt("aaaabbbbcccc", lora="sql")) == 0


@pytest.mark.parametrize(
    ("events", "blocks"),
    [
        ([stored([1], "aaaa", tier="cpu"), removed(1)], 1),
        ([THREE, stored([3], "cccc", 2, tier="cpu"), removed(3)], 3),
        ([THREE, stored([3], "cccc", 2, tier="cpu"), removed(3), removed(3, tier="cpu")], 2),
        ([THREE, removed(1, tier="disk")], 3),
        # a sliding window's group stores and removes the same blocks
        ([THREE, THREE._replace(group=1), removed(1, 2, group=1)], 3),
        ([THREE._replace(group=1), THREE, removed(1, 2, group=1)], 3),
        ([THREE._replace(group=0, whole=False), THREE._replace(group=1), removed(1, 2, group=0)], 3),
        ([THREE._replace(group=0, whole=False), THREE._replace(group=1), removed(2, group=1)], 1),
        ([THREE._replace(group=0, whole=False)], 0),
        ([THREE._replace(group=1), THREE, removed(2)], 1),  # the window still has it
        ([THREE._replace(group=1), THREE, removed(2), removed(2, group=1)], 1),
        ([THREE._replace(group=1), THREE, removed(3), removed(2), removed(1)], 0),
        ([THREE._replace(group=1), stored([1], "aaaa")], 1),
    ],
)
def test_a_block_is_held_while_any_tier_of_the_main_group_has_it(events: list[CacheEvent], blocks: int) -> None:
    node = cache()
    node.apply(events)
    assert node.match(prompt("aaaabbbbcccc")) == min(blocks, 3)


def test_groups_and_tiers_beyond_any_engines_are_ignored() -> None:
    node = cache()
    node.apply([stored([1], "aaaa", group=i) for i in range(1000)])
    assert node.ignored == 1000 - 16
    node.apply([THREE])
    assert node.match(prompt("aaaabbbb")) == 2


# ---- orphans ----


def test_orphans_find_their_place_when_their_parent_comes() -> None:
    node = cache()
    node.apply([stored([3, 4], "ccccdddd", 2), stored([5], "eeee", 4), stored([6], "ffff", 4), removed(6)])
    assert (node.match(prompt("aaaabbbbcccc")), node.orphans, node.blocks) == (0, 3, 0)
    node.apply([stored([1, 2], "aaaabbbb")])
    assert (node.orphans, node.blocks) == (0, 5)
    assert node.match(prompt("aaaabbbbccccddddeeee")) == 5
    assert node.match(prompt("aaaabbbbccccddddffff")) == 4
    node.apply([removed(5), removed(4)])
    assert node.match(prompt("aaaabbbbccccddddeeee")) == 3


@pytest.mark.parametrize("text", ["aaaabbbbcccc", "aaaabbbbccccdddd", "aaaabbbbccccddddeeee"])
def test_a_prompt_shows_where_orphans_belong(text: str) -> None:
    node = cache()
    node.apply([stored([3, 4], "ccccdddd", 2)])
    assert node.bind(prompt("xxxxbbbbeeee")) == 0
    assert node.bind(prompt(text)) == 1
    assert node.match(prompt("aaaabbbbccccddddeeee")) == 4
    assert (node.orphans, node.blocks) == (0, 4)


def test_what_was_before_an_orphan_is_held_as_long_as_something_that_follows_it() -> None:
    node = cache()
    node.apply([stored([3, 4], "ccccdddd", 2)])
    node.bind(prompt("aaaabbbbcccc"))
    node.apply([removed(4), removed(3)])
    assert node.match(prompt("aaaabbbbcccc")) == 2
    node.apply([removed(2)])
    assert (node.match(prompt("aaaabbbbcccc")), node.blocks) == (0, 0)


def test_a_block_that_was_removed_is_not_brought_back_by_a_prompt() -> None:
    node = cache()
    node.apply([THREE, removed(1), stored([9], "eeee", 8)])
    assert node.bind(prompt("aaaabbbbccccddddeeee")) == 1
    assert node.match(prompt("aaaabbbbcccc")) == 0
    assert node.blocks == 4


def test_orphans_and_what_looking_for_their_place_costs_are_bounded() -> None:
    node = cache()
    for i in range(3 * MAX_ORPHANS):
        node.apply([stored([2 * i], f"{i:04}"[:4], 2 * i + 1)])
    assert node.orphans == MAX_ORPHANS
    begun_s = time.process_time()
    assert node.bind(array("Q", range(8192))) == 0
    assert time.process_time() - begun_s < 0.5  # a millisecond; without a bound it would be 33 million hashes
    node.apply([CacheCleared()])
    assert node.orphans == 0


def test_circles_of_orphans_wait_for_ever_and_harm_nobody() -> None:
    node = cache()
    node.apply([stored([1], "aaaa", 2), stored([2], "bbbb", 1), stored([3], "cccc", 1), THREE])
    assert node.match(prompt("aaaabbbbcccc")) == 3
    assert node.blocks >= 3


# ---- bounds ----


@pytest.mark.parametrize("length", [1, 3, 50, 400])
def test_blocks_are_bounded_and_what_was_stored_last_stays(length: int) -> None:
    node, name = cache(64), 0
    texts = ["".join(f"{i:02}{j:02}" for j in range(length)) if length < 100 else f"{i:04}" * length for i in range(40)]
    for text in texts:
        names = range(name, name := name + length)
        node.apply([stored(names, text)])
        assert 0 < node.blocks <= 64
    if length <= 50:
        assert node.match(prompt(texts[-1])) == length
    node.apply([removed(*range(name))])
    assert node.blocks == 0


# ---- against a simple model, and against real engines ----

places = st.integers(0, 1), st.sampled_from(["gpu", "cpu"])
texts = st.text("ab", min_size=1, max_size=6)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), texts, st.integers(1, 6), *places),
        st.tuples(st.just("remove"), texts, st.just(1), *places),
        st.tuples(st.just("clear"), st.just(""), st.just(0), *places),
    ),
    max_size=40,
)


@given(steps)
@settings(max_examples=400, deadline=None)
def test_it_is_a_set_of_prefixes_per_group_and_tier(script: list[tuple[str, str, int, int, str]]) -> None:
    """Letters stand for blocks; an event stores the last `count` blocks of a prefix whose parent is known."""
    groups: set[int] = set()
    node = cache()
    model: dict[str, set[tuple[int, str]]] = {}
    for kind, text, count, group, tier in script:
        if kind == "clear":
            node.apply([CacheCleared()])
            model.clear()
            groups.clear()
        elif kind == "remove":
            node.apply([removed(hash(text), group=group, tier=tier)])
            model.get(text, set()).discard((group, tier))
        else:
            begin = max(len(text) - count, 0)
            if begin and not model.get(text[:begin]):
                continue
            groups.add(group)
            names = [hash(text[:end]) for end in range(begin + 1, len(text) + 1)]
            letters = "".join(letter * BLOCK for letter in text[begin:])
            node.apply([stored(names, letters, hash(text[:begin]) if begin else None, group=group, tier=tier)])
            for end in range(begin + 1, len(text) + 1):
                model.setdefault(text[:end], set()).add((group, tier))
        held = {prefix for prefix, where in model.items() if any(group == min(groups) for group, _ in where)}
        assert node.blocks == len(held)
        for probe in {text for _, text, *_ in script} | {"abab", "bbbb"}:
            ends = range(1, len(probe) + 1)
            blocks = next((end - 1 for end in ends if probe[:end] not in held), len(probe))
            for guess in range(9):
                assert node.match(prompt("".join(letter * BLOCK for letter in probe)), guess) == blocks


def captured() -> Iterator[list[dict[str, Any]]]:
    """What each of the recorded servers said and was asked, by its own clock; nothing where there are no recordings."""
    path = CAPTURES / "vllm_kv_events.jsonl"
    if not path.exists():
        return
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for pod in dict.fromkeys(line["pod"] for line in lines):
        mine = [line for line in lines if line["pod"] == pod]
        timed = [line for line in mine if line["type"] in ("kv_event", "request")]
        timed.sort(key=lambda line: line["decoded"][0] if line["type"] == "kv_event" else line["sent_ts"])
        yield [next(line for line in mine if line["type"] == "meta"), *timed]


def test_what_recorded_requests_found_cached_is_what_the_recorded_events_told() -> None:
    exact = 0
    for meta, *lines in captured():
        size = meta["note"]["block_size"]
        node = CachedBlocks(size, seed, 2 * meta["note"]["num_gpu_blocks"])
        for line in lines:
            if line["type"] == "kv_event":
                node.apply(decode(bytes.fromhex(line["payload_hex"])).events)
                continue
            asked, body, usage = line["prompt_token_ids"], line["body"], line["usage"]
            if line["label"].startswith(("burst", "n_2")):  # they overlap each other, and so the events
                continue
            data = b"".join(each.to_bytes(4, "little") for each in asked)
            lora = None if body["model"] == "tiny" else body["model"]
            salt = seed(lora, body.get("cache_salt"))
            blocks = node.match(array("Q", block_hashes(data, block_tokens=size, salt=salt)))
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert min(blocks, (len(asked) - 1) // size) * size == cached, (meta["pod"], line["label"])
            exact += 1
        assert node.ignored == node.orphans == 0
    assert exact in (0, 93)


# ---- prompts in flight ----


def test_what_is_in_flight_goes_on_from_what_is_held_and_leaves_with_the_last_that_has_it() -> None:
    ahead, first, second = InFlight(), prompt("aaaabbbbccccdddd"), prompt("aaaabbbbcccceeee")
    ahead.add(first[1:])  # the node held one block of it
    ahead.add(second[1:])
    assert [ahead.match(first, begin) for begin in (0, 1, 2, 4)] == [0, 4, 4, 4]
    assert ahead.match(prompt("aaaabbbbxxxx"), 1) == 2
    ahead.remove(first[1:])
    assert (ahead.match(first, 1), ahead.match(second, 1)) == (3, 4)
    ahead.remove(first[3:])  # not there: nothing
    ahead.remove(second[1:])
    assert (ahead.match(second, 1), len(ahead)) == (1, 0)
