"""The prefix map against a model that keeps plain sets of blocks, and its bounds under any sequence of writes."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from extproc.core.blocks import block_hashes, chain_blocks
from extproc.core.prefix_map import PrefixMap
from extproc.core.types import HASH_BYTES, Stored

NODES = ("a", "b", "c")


def chain_of(path: str) -> bytes:
    """One block per letter; equal prefixes of the text are equal prefixes of the chain."""
    return block_hashes("".join(letter * 4 for letter in path).encode(), block_tokens=1, salt=1)


paths = st.text(alphabet="xyz", min_size=1, max_size=12)
"""Three letters: chains meet and part all the time."""


def held(prefix_map: PrefixMap, node: str, seen: set[str]) -> set[bytes]:
    """Every block that `match` can find on `node`."""
    found: set[bytes] = set()
    for path in seen:
        chain = chain_of(path)
        blocks = prefix_map.match(chain).get(node, 0)
        found |= {chain[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(blocks)}
    return found


@given(st.lists(st.tuples(st.sampled_from(NODES), paths), max_size=30), paths)
def test_a_map_that_is_large_enough_remembers_every_prefix(stores: list[tuple[str, str]], probe: str) -> None:
    prefix_map = PrefixMap()
    for node in NODES:
        prefix_map.add_node(node, 10_000)
    known: dict[str, set[str]] = {node: set() for node in NODES}
    for now, (node, path) in enumerate(stores):
        prefix_map.store(node, chain_of(path), now=float(now))
        known[node] |= {path[: i + 1] for i in range(len(path))}
    matched = prefix_map.match(chain_of(probe))
    for node in NODES:
        expected = next((i for i in range(len(probe)) if probe[: i + 1] not in known[node]), len(probe))
        assert matched.get(node, 0) == expected
        assert (node in matched) == bool(expected)
        assert prefix_map.blocks(node) == len(known[node])


class BoundedMap(RuleBasedStateMachine):
    """Whatever is written, in whatever order, the bounds hold and what is counted can be found."""

    @initialize(capacities=st.lists(st.integers(1, 20), min_size=3, max_size=3))
    def start(self, capacities: list[int]) -> None:
        self.map = PrefixMap()
        self.capacity = dict(zip(NODES, capacities, strict=True))
        for node, capacity in self.capacity.items():
            self.map.add_node(node, capacity)
        self.now = 0.0
        self.seen: set[str] = set()
        self.stored: list[tuple[str, Stored]] = []

    @rule(node=st.sampled_from(NODES), path=paths)
    def store(self, node: str, path: str) -> None:
        self.now += 1.0
        self.seen.add(path)
        chain = chain_of(path)
        before = self.map.match(chain).get(node, 0)
        stored = self.map.store(node, chain, now=self.now)
        assert stored.from_block == before
        # what was just used is what is kept
        assert self.map.match(chain).get(node, 0) == min(len(path), self.capacity[node])
        self.stored = [*self.stored[-5:], (node, stored)]

    @rule(which=st.integers(0, 5))
    def take_back(self, which: int) -> None:
        if self.stored:
            node, stored = self.stored[which % len(self.stored)]
            self.map.take_back(node, stored)
            self.stored.remove((node, stored))

    @rule(which=st.integers(0, 5), blocks=st.integers(0, 8))
    def trim(self, which: int, blocks: int) -> None:
        if self.stored:
            node, stored = self.stored[which % len(self.stored)]
            path = next(each for each in self.seen if chain_of(each) == stored.chain)
            if any(each[:1] == path[:1] and each != path for each in self.seen):
                return
            held = self.map.match(stored.chain).get(node, 0)
            self.map.trim(node, stored.chain, blocks)
            assert self.map.match(stored.chain).get(node, 0) == min(held, blocks)

    @rule(which=st.integers(0, 5), more=paths)
    def extend(self, which: int, more: str) -> None:
        if self.stored:
            self.now += 1.0
            node, stored = self.stored.pop(which % len(self.stored))
            path = next(each for each in self.seen if chain_of(each) == stored.chain) + more
            self.seen.add(path)
            self.stored.append((node, self.map.extend(node, stored, chain_of(path), now=self.now)))
            assert self.map.match(chain_of(path)).get(node, 0) == min(len(path), self.capacity[node])

    @rule(node=st.sampled_from(NODES), capacity=st.integers(1, 20))
    def resize(self, node: str, capacity: int) -> None:
        self.map.add_node(node, capacity)
        self.capacity[node] = capacity

    @rule(node=st.sampled_from(NODES))
    def restart(self, node: str) -> None:
        self.map.clear(node)
        assert self.map.blocks(node) == 0

    @rule(node=st.sampled_from(NODES))
    def leave_and_return(self, node: str) -> None:
        self.map.remove_node(node)
        self.map.add_node(node, self.capacity[node])
        assert self.map.blocks(node) == 0

    @invariant()
    def bounds_hold_and_no_tail_is_kept_without_its_head(self) -> None:
        for node in NODES:
            assert self.map.blocks(node) <= self.capacity[node]
            # match stops at the first miss: a block that is counted and not found would be a tail without its head
            assert len(held(self.map, node, self.seen)) == self.map.blocks(node)
        if not any(self.map.blocks(node) for node in NODES):
            assert self.map.segments() == 0


TestBoundedMap = BoundedMap.TestCase
TestBoundedMap.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_what_is_least_recently_used_goes_first() -> None:
    prefix_map = PrefixMap()
    prefix_map.add_node("a", 9)
    for now, path in enumerate(("xxx", "yyy", "zzz", "xxx")):
        prefix_map.store("a", chain_of(path), now=float(now))
    prefix_map.store("a", chain_of("wwww"), now=9.0)
    left = {path: prefix_map.match(chain_of(path)).get("a", 0) for path in ("xxx", "yyy", "zzz", "wwww")}
    assert left == {"xxx": 3, "yyy": 0, "zzz": 2, "wwww": 4}


def test_a_failed_request_takes_back_what_it_added_and_nothing_else() -> None:
    prefix_map = PrefixMap()
    prefix_map.add_node("a", 100)
    prefix_map.store("a", chain_of("sys"), now=1.0)
    failed = prefix_map.store("a", chain_of("sysone"), now=2.0)
    prefix_map.take_back("a", failed)
    assert prefix_map.match(chain_of("sysone")) == {"a": 3}


def test_what_another_request_has_used_since_is_not_taken_back() -> None:
    prefix_map = PrefixMap()
    prefix_map.add_node("a", 100)
    failed = prefix_map.store("a", chain_of("abcdef"), now=1.0)
    prefix_map.store("a", chain_of("abc"), now=1.0)
    prefix_map.take_back("a", failed)
    assert prefix_map.match(chain_of("abcdef")) == {"a": 3}


@given(st.lists(paths, max_size=6), st.lists(paths, max_size=6), st.lists(paths, max_size=6), paths, paths)
@example(["xx"], [], [], "x", "x")  # all of it was there already
def test_what_was_extended_is_taken_back_whole_but_for_what_others_hold(
    before: list[str], between: list[str], after: list[str], path: str, more: str
) -> None:
    prefix_map = PrefixMap()
    prefix_map.add_node("a", 10_000)
    for other in before:
        prefix_map.store("a", chain_of(other), now=1.0)
    stored = prefix_map.store("a", chain_of(path), now=1.0)
    for other in between:
        prefix_map.store("a", chain_of(other), now=1.0)
    stored = prefix_map.extend("a", stored, chain_of(path + more), now=1.0)
    assert prefix_map.match(chain_of(path + more)) == {"a": len(path + more)}
    for other in after:
        prefix_map.store("a", chain_of(other), now=1.0)
    prefix_map.take_back("a", stored)
    others = {other[: i + 1] for other in (*before, *between, *after) for i in range(len(other))}
    assert prefix_map.blocks("a") == len(others)
    assert all(prefix_map.match(chain_of(other)) == {"a": len(other)} for other in others)


def test_what_was_there_of_a_trimmed_segment_stays_when_its_extension_is_taken_back() -> None:
    prefix_map = PrefixMap()
    prefix_map.add_node("a", 4)
    prefix_map.store("a", chain_of("xyzw"), now=1.0)
    prefix_map.store("a", chain_of("q"), now=2.0)
    prefix_map.add_node("a", 100)
    stored = prefix_map.store("a", chain_of("xyzw"), now=3.0)
    prefix_map.take_back("a", prefix_map.extend("a", stored, chain_of("xyzwvv"), now=4.0))
    assert prefix_map.match(chain_of("xyzwvv")) == {"a": 3}


def test_taking_back_from_a_node_that_returned_as_another_takes_nothing() -> None:
    prefix_map = PrefixMap()
    prefix_map.add_node("a", 100)
    failed = prefix_map.store("a", chain_of("abc"), now=1.0)
    prefix_map.remove_node("a")
    prefix_map.add_node("a", 100)
    prefix_map.store("a", chain_of("abc"), now=1.0)
    prefix_map.take_back("a", failed)
    assert prefix_map.match(chain_of("abc")) == {"a": 3}


def test_a_head_that_another_node_parted_from_its_tail_does_not_outlive_what_is_before_it() -> None:
    prefix_map = PrefixMap()
    prefix_map.add_node("a", 100)
    prefix_map.add_node("b", 6)
    prefix_map.store("b", chain_of("xy"), now=1.0)
    prefix_map.store("b", chain_of("xyzzz"), now=2.0)
    prefix_map.store("a", chain_of("xyzw"), now=3.0)  # parts "z" from "zz", on b as well
    for now, size in enumerate((2, 3, 4, 5, 6), start=4):
        prefix_map.store("b", chain_of("w" * size), now=float(now))
        left = prefix_map.match(chain_of("xyzzz")).get("b", 0)
        assert left + size == prefix_map.blocks("b") == 6


def test_scattered_short_prompts_are_bounded_by_segments_as_well() -> None:
    prefix_map = PrefixMap()
    prefix_map.add_node("a", 16_000)
    rng = random.Random(1)
    for now in range(5000):
        prefix_map.store("a", block_hashes(rng.randbytes(4), block_tokens=1, salt=1), now=float(now))
    assert prefix_map.segments() <= 2000
    assert prefix_map.blocks("a") <= 2000


@pytest.mark.parametrize("writes", [1, 10, 300])
def test_reading_changes_nothing(writes: int) -> None:
    rng = random.Random(writes)
    prefix_map = PrefixMap()
    prefix_map.add_node("a", 50)
    chains = [chain_of("".join(rng.choices("xyz", k=rng.randint(1, 10)))) for _ in range(writes)]
    for now, chain in enumerate(chains):
        prefix_map.store("a", chain, now=float(now))
    first = [prefix_map.match(chain) for chain in chains]
    assert [prefix_map.match(chain) for chain in reversed(chains)] == first[::-1]
    assert all(blocks <= chain_blocks(chain) for m, chain in zip(first, chains, strict=True) for blocks in m.values())
