"""What baselines keep of a node: against plain models of it."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.lab.replay.baselines_memory import ActiveBlocks, RecentBlocks, RecentWork, hashes_of

# chains of a small tree: a block's number is the path to it, so that equal numbers have equal prefixes
_paths = st.lists(st.integers(0, 2), max_size=6)


def chain(path: list[int]) -> list[int]:
    number, blocks = 1, []
    for step in path:
        number = number * 4 + step + 1
        blocks.append(number)
    return blocks


def test_a_chain_has_one_number_for_each_block() -> None:
    assert hashes_of(array("Q", [3, 2**64 - 1, 5]).tobytes()) == [3, 2**64 - 1, 5]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), _paths), max_size=30), st.integers(1, 8), st.sampled_from([10.0, 1e9]))
def test_an_index_matches_what_a_walk_finds_and_keeps_its_bound(
    stores: list[tuple[float, list[int]]], capacity: int, ttl_s: float
) -> None:
    index, now = RecentBlocks(capacity, ttl_s), 0.0
    order: list[int] = []
    used: dict[int, float] = {}
    for pause, path in stores:
        now += pause
        blocks = chain(path)
        fresh = [block in order and used[block] >= now - ttl_s for block in blocks]
        assert index.match(blocks, now) == (fresh.index(False) if False in fresh else len(fresh))
        index.store(blocks, now)
        order = [*(each for each in order if each not in blocks), *reversed(blocks)][-capacity:]
        used.update(dict.fromkeys(blocks, now))
        order = [each for each in order if used[each] >= now - ttl_s]
        assert len(index) == len(order) <= capacity


def test_a_tail_is_dropped_before_its_head() -> None:
    index = RecentBlocks(4)
    index.store([1, 2, 3, 4], 0.0)
    index.store([1, 2, 9], 1.0)
    assert index.match([1, 2, 3, 4], 1.0) == 3
    index.clear()
    assert index.match([1], 1.0) == 0


def test_a_block_counts_until_its_time_is_up() -> None:
    index = RecentBlocks(9, ttl_s=120.0)
    index.store([1, 2], 0.0)
    index.store([3], 120.0)
    assert (index.match([1, 2], 120.0), len(index)) == (2, 3)
    assert index.match([1, 2], 120.1) == 0
    index.store([3], 120.1)
    assert len(index) == 1


def test_victims_are_those_that_were_in_use() -> None:
    index = RecentBlocks(4)
    index.store([1, 2], 0.0)
    index.store([3], 10.0)
    assert index.victims(1, 5.0) == 0  # there is room
    assert index.victims(3, 5.0) == 0  # the two oldest go
    assert index.victims(4, 5.0) == 1
    assert index.victims(3, 0.0) == 2


@settings(deadline=None)
@given(st.lists(_paths, max_size=12), _paths)
def test_active_blocks_count_once_and_go_with_their_last_user(paths: list[list[int]], path: list[int]) -> None:
    active = ActiveBlocks()
    for each in paths:
        active.add(chain(each))
    there = {block for each in paths for block in chain(each)}
    assert len(active) == len(there)
    assert active.match(chain(path)) == sum(block in there for block in chain(path))
    for at, each in enumerate(paths):
        active.remove(chain(each))
        assert len(active) == len({block for rest in paths[at + 1 :] for block in chain(rest)})


def test_work_is_forgotten_after_the_window() -> None:
    work = RecentWork(180.0)
    work.add(2.0, 0.0)
    work.add(3.0, 100.0)
    assert [work.total_s(now) for now in (100.0, 180.0, 181.0, 281.0)] == [5.0, 5.0, 3.0, 0.0]
