"""The simulated node: the same figures as a naive one, and vLLM's rules where they matter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.types import HASH_BYTES
from extproc.lab.replay.block_cache import BlockCache, Segment
from extproc.lab.replay.jobs import Job
from extproc.lab.replay.nodes import SimulatedNode
from extproc.lab.replay.types import Call, Machine
from tests.lab.replay.naive_node import NaiveCache, NaiveNode, call, chain

SIZE = 4


def run(node: SimulatedNode, calls: Sequence[Call]) -> tuple[list[Job], dict[int, float]]:
    """Submit each in its time; the jobs, and when each was done."""
    jobs, done = [], {}
    for number, each in enumerate(calls):
        while node.next_s <= each.at_s:
            now = node.next_s
            done.update((job.number, now) for job in node.step().ended)
        jobs.append(Job(number, each))
        node.submit(jobs[-1], each.at_s)
    while node.next_s < math.inf:
        now = node.next_s
        done.update((job.number, now) for job in node.step().ended)
    return jobs, done


# ---- the cache ----

_SYMBOLS = st.text("ab", min_size=1, max_size=7)


@given(st.lists(st.tuples(_SYMBOLS, st.integers(0, 7), st.booleans()), max_size=40), st.integers(7, 12))
def test_the_cache_finds_and_evicts_what_a_list_of_blocks_does(
    requests: list[tuple[str, int, bool]], capacity: int
) -> None:
    fast, naive = BlockCache(), NaiveCache()
    held: list[tuple[Segment, list[bytes]]] = []
    for symbols, most, keep in requests:
        whole = chain(symbols)
        hashes = [whole[i : i + HASH_BYTES] for i in range(0, len(whole), HASH_BYTES)]
        hit = naive.find(hashes[:most])
        assert fast.find(whole, most) == (hit, sum(not naive.pins[each] for each in hashes[:hit]))
        if naive.pinned + len(hashes) > capacity:  # as large as all that it needs, so that it needs no more
            continue
        segment = fast.pin(whole, most)
        segment = fast.extend(segment, whole, hit, len(hashes))
        for each in hashes:
            naive.hold(each)
        held.append((segment, hashes))
        if not keep:
            segment, hashes = held.pop(0)
            fast.release(segment)
            naive.release(hashes)
        beyond = max(len(naive.there) - capacity, 0)
        fast.evict(beyond)
        naive.evict(beyond)
        assert (fast.blocks, fast.pinned) == (len(naive.there), naive.pinned)
    for symbols, _, _ in requests:
        whole = chain(symbols)
        hashes = [whole[i : i + HASH_BYTES] for i in range(0, len(whole), HASH_BYTES)]
        assert fast.find(whole, 99)[0] == naive.find(hashes)


def test_a_conversation_that_goes_on_stays_one_segment() -> None:
    cache = BlockCache()
    for turn in range(1, 50):
        whole = chain("x" * turn)
        cache.release(cache.extend(cache.pin(whole, turn), whole, turn - 1, turn))
    (only,) = cache.root.children.values()
    assert only.blocks == 49
    assert not only.children


# ---- the node ----


@st.composite
def _calls(draw: st.DrawFn) -> list[Call]:
    made, at_s = [], 0.0
    for i in range(draw(st.integers(1, 14))):
        at_s += draw(st.sampled_from([0.0, 0.003, 0.02, 0.21])) + 1e-5 * i
        symbols = draw(st.text("ab", min_size=1, max_size=6))
        answer = draw(st.text("ab", min_size=12, max_size=12))
        made.append(
            call(
                symbols,
                answer,
                tail=draw(st.integers(0, SIZE - 1)),
                answer_tokens=draw(st.integers(1, 30)),
                at_s=at_s,
            )
        )
    return made


@settings(deadline=None, max_examples=150)
@given(_calls(), st.integers(16, 40), st.integers(1, 6), st.sampled_from([4, 10, 64]), st.sampled_from([0.5, 1.0]))
def test_it_does_what_a_naive_node_does_step_by_step(
    calls: list[Call], blocks: int, max_running: int, step_tokens: int, speed: float
) -> None:
    machine = Machine("n", 500.0, blocks * SIZE, speed, max_running, step_tokens + max_running)
    expected = NaiveNode(machine, SIZE).run(calls)
    node = SimulatedNode(machine, SIZE)
    jobs, done = run(node, calls)
    for job, naive in zip(jobs, expected, strict=True):
        assert job.cached_tokens == naive.cached
        assert job.first_token_s == pytest.approx(naive.first_s, abs=1e-9)
        assert done[job.number] == pytest.approx(naive.done_s, abs=1e-9)
    assert node.cache.pinned == 0
    assert node.scrape(1e9)[:3] == (0, 0, 0.0)


def test_the_naive_node_is_brought_to_where_requests_give_way() -> None:
    """So that the comparison above covers it."""
    calls = [call("abab"[i:], "ab" * 6, answer_tokens=30, at_s=i * 1e-3) for i in range(4)]
    naive = NaiveNode(Machine("n", 500.0, 16 * SIZE, 1.0, 4, 64), SIZE)
    naive.run(calls)
    assert naive.preempted > 0


def test_a_prompt_is_never_found_whole() -> None:
    node = SimulatedNode(Machine("n"), SIZE)
    jobs, _ = run(node, [call("abc", at_s=0.0), call("abc", at_s=1.0), call("abc", tail=1, at_s=2.0)])
    assert [job.cached_tokens for job in jobs] == [0, 2 * SIZE, 3 * SIZE]


def test_the_next_turn_finds_the_answer() -> None:
    first = call("ab", "cde", answer_tokens=9)
    assert len(first.answer) == 2 * HASH_BYTES
    jobs, _ = run(SimulatedNode(Machine("n"), SIZE), [first, call("abcdx", at_s=1.0)])
    assert jobs[1].cached_tokens == 4 * SIZE


def test_chunks_of_a_long_prompt_let_answers_go_on() -> None:
    machine = Machine("n", 1000.0, step_tokens=100)
    short, long = call("a", answer_tokens=50), call("b" * 100, at_s=0.03)
    jobs, done = run(SimulatedNode(machine, SIZE), [short, long])
    assert jobs[1].first_token_s is not None
    # 400 tokens in steps of 99, each of which gives the answer that runs a token
    assert jobs[1].first_token_s == pytest.approx(0.03 + 0.4 + 5 * 0.008, abs=0.01)
    assert done[0] < jobs[1].first_token_s + 50 * 0.0081


def test_what_it_says_of_itself_is_as_old_as_the_last_scrape() -> None:
    node = SimulatedNode(Machine("n", 1000.0), SIZE, scrape_s=0.2)
    node.submit(Job(0, call("a" * 100)), 0.25)
    node.submit(Job(1, call("b")), 0.26)
    assert node.scrape(0.39)[:2] == (0, 0)
    assert node.scrape(0.41)[:2] == (1, 1)
    while node.next_s < math.inf:
        node.step()
    assert node.scrape(9.0)[:2] == (0, 0)
    assert node.scrape(9.0).prefix_queries == 404


def test_backlog_and_hits_count_what_waits() -> None:
    node = SimulatedNode(Machine("n", 1000.0, max_running=1), SIZE)
    same = call("a" * 100)
    for number, each in enumerate((call("b" * 50), same, same, same)):
        node.submit(Job(number, each), 0.0)
    assert node.hit_tokens(same) == 396
    alone = node.prefill_s(same, 0)
    assert alone == pytest.approx(0.4, rel=0.01)
    # behind 200 other tokens the first computes it, the others find all but the last block
    assert node.backlog_s(0.0) == pytest.approx(0.2 + alone + 2 * node.prefill_s(same, 396), abs=0.01)
    while node.next_s < math.inf:
        node.step()
    assert node.backlog_s(node.next_s) == 0.0


def test_a_node_that_fails_loses_everything() -> None:
    node = SimulatedNode(Machine("n"), SIZE)
    run(node, [call("abc")])
    assert node.hit_tokens(call("abcd")) == 3 * SIZE
    node.submit(Job(1, call("abcd", answer_tokens=9)), 5.0)
    node.submit(Job(2, call("x")), 5.0)
    assert sorted(job.number for job in node.fail(5.001)) == [1, 2]
    assert node.next_s == math.inf
    node.come_back(6.0)
    assert node.hit_tokens(call("abcd")) == 0
    jobs, _ = run(node, [call("abcd", at_s=7.0)])
    assert jobs[0].cached_tokens == 0
