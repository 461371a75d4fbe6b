"""Promised and counted: when a node is believed less, when more, and what is no evidence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.trust import RUNGS, Trust
from extproc.core.types import LoadSample, Rung

EVENTS, PREDICTED, HASH, LOAD = range(4)


class Node:
    """An engine that counts, and a trust that is told of what it was sent; windows of five seconds, 10,000 tokens."""

    def __init__(self) -> None:
        self.trust, self.now, self.queries, self.hits = Trust(), 0.0, 0.0, 0.0
        self.sees(EVENTS)

    def sees(self, best: int) -> bool:
        sample = LoadSample(self.now, prefix_queries=self.queries, prefix_hits=self.hits, prompt_tokens=self.queries)
        return self.trust.observe(sample, best=best, block_tokens=16)

    def window(
        self, promised: float, actual: float, *, best: int = EVENTS, tokens: int = 10_000, others: float = 0.0
    ) -> bool:
        self.trust.sent(int(promised * tokens), tokens)
        self.now += 5.0
        self.queries += tokens + others
        self.hits += actual * tokens
        return self.sees(best)


def test_what_is_as_promised_is_believed() -> None:
    node = Node()
    for _ in range(100):
        assert node.window(0.6, 0.58)
    assert (node.trust.depth, node.trust.value, node.trust.capacity) == (0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("promised", "actual", "windows", "depth"),
    [
        (0.9, 0.3, 1, EVENTS),
        (0.9, 0.3, 2, PREDICTED),  # over half, twice
        (0.7, 0.3, 4, EVENTS),
        (0.7, 0.3, 5, PREDICTED),  # over a quarter, five windows
        (0.3, 0.7, 5, PREDICTED),  # too little is wrong as well
        (0.5, 0.3, 50, EVENTS),
    ],
)
def test_a_rung_is_lost_by_a_large_error_or_by_a_steep_one(
    promised: float, actual: float, windows: int, depth: int
) -> None:
    node = Node()
    for _ in range(windows):
        node.window(promised, actual)
    assert node.trust.depth == depth


def test_one_bad_window_among_good_ones_loses_nothing() -> None:
    node = Node()
    for i in range(100):
        node.window(0.9 if i % 7 == 0 else 0.5, 0.3 if i % 7 == 0 else 0.5)
    assert node.trust.depth == EVENTS


def test_what_goes_on_being_wrong_falls_to_hashing_and_where_that_is_no_use_to_load() -> None:
    for actual, last in ((0.05, Rung.LOAD), (0.3, Rung.HASH)):
        node, seen = Node(), [Rung.EVENTS]
        for _ in range(60):
            node.window(0.95, actual)
            if RUNGS[node.trust.depth] is not seen[-1]:
                seen.append(RUNGS[node.trust.depth])
        assert seen == list(RUNGS[: RUNGS.index(last) + 1])


def test_a_rung_comes_back_after_half_a_minute_and_later_each_time_that_it_is_lost_again() -> None:
    node, waits = Node(), []
    for _ in range(6):
        while node.trust.depth == EVENTS:
            node.window(0.9, 0.2)
        begin_s = node.now
        while node.trust.depth != EVENTS:
            node.window(0.5, 0.5)
        waits.append(node.now - begin_s)
    assert waits == [35.0, 65.0, 125.0, 245.0, 485.0, 605.0]
    for _ in range(130):
        node.window(0.5, 0.5)
    while node.trust.depth == EVENTS:
        node.window(0.9, 0.2)
    begin_s = node.now
    while node.trust.depth != EVENTS:
        node.window(0.5, 0.5)
    assert node.now - begin_s == 35.0  # ten good minutes are forgiveness


def test_no_better_rung_is_tried_than_there_is_data_for() -> None:
    node = Node()
    for _ in range(5):
        node.window(0.7, 0.3, best=PREDICTED)
    assert node.trust.depth == HASH
    for _ in range(40):
        node.window(0.5, 0.5, best=PREDICTED)
    assert node.trust.depth == PREDICTED


def test_what_is_promised_is_worth_less_the_more_of_it_was_not_there() -> None:
    values = []
    for over in (0.0, 0.05, 0.15, 0.2):
        node = Node()
        for _ in range(30):
            node.window(0.4 + over, 0.4)
        values.append(node.trust.value)
    assert values[:2] == [1.0, 1.0]
    assert values[2:] == [pytest.approx(0.78, abs=0.01), pytest.approx(0.67, abs=0.01)]


def test_a_map_that_promises_too_much_is_taken_to_be_smaller_within_a_minute_and_grows_back_slowly() -> None:
    node = Node()
    for _ in range(12):
        node.window(0.4, 0.1, best=PREDICTED)
    assert node.trust.capacity == 0.1
    windows = 0
    while node.trust.capacity < 1.0:
        node.window(0.3, 0.3, best=PREDICTED)
        windows += 1
    assert 40 <= windows <= 60


@pytest.mark.parametrize(
    "why", ["others", "few tokens", "too soon", "restart", "says nothing", "counts less than we sent"]
)
def test_what_is_no_evidence_changes_nothing(why: str) -> None:
    node = Node()
    for _ in range(20):
        if why == "others":
            judged = node.window(0.9, 0.1, others=5_000)
        elif why == "few tokens":
            judged = node.window(0.9, 0.1, tokens=90)
        elif why == "too soon":
            node.trust.sent(450, 500)  # four windows' tokens in a fifth of the time
            node.now += 0.2
            judged = node.sees(EVENTS)
        elif why == "restart":
            node.queries = node.hits = 0.0
            node.sees(EVENTS)
            node.queries, node.hits = 1.0, 0.0
            judged = False
        elif why == "says nothing":
            node.trust.sent(9_000, 10_000)
            node.now += 5.0
            judged = node.trust.observe(LoadSample(node.now), best=EVENTS, block_tokens=16)
        else:
            node.trust.sent(9_000, 10_000)
            judged = node.window(0.9, 0.1)
        assert not judged
    assert (node.trust.depth, node.trust.error) == (EVENTS, 0.0)


def test_a_window_is_judged_when_its_edges_matter_little() -> None:
    node = Node()
    node.trust.begun(5_000)
    assert not node.window(0.9, 0.1)  # ours: 10,000 tokens
    assert node.window(0.9, 0.1)
    node.trust.ended(5_000)
    assert node.window(0.9, 0.1)


def test_the_map_is_not_made_smaller_for_what_events_promised() -> None:
    node = Node()
    for _ in range(4):
        node.window(0.5, 0.2)
    assert node.trust.capacity == 1.0


def test_a_window_with_a_restart_in_it_is_not_judged() -> None:
    node = Node()
    node.trust.sent(9_000, 10_000)
    node.now, node.queries, node.hits = 5.0, 0.0, 0.0
    node.sees(EVENTS)
    node.queries, node.hits = 50_000.0, 9_000.0
    node.now = 10.0
    node.sees(EVENTS)
    node.window(0.9, 0.9)
    node.trust.sent(9_000, 10_000)
    node.now, node.queries, node.hits = 20.0, 70_000.0, 5_000.0  # restarted, and ahead of where it was
    assert not node.sees(EVENTS)
    assert node.window(0.9, 0.9)
    assert node.trust.error == pytest.approx(0.0)


def test_what_is_known_from_the_start_again_has_nothing_against_it() -> None:
    node = Node()
    for _ in range(20):
        node.window(0.95, 0.3)
    assert node.trust.depth
    node.trust.anew()
    assert (node.trust.depth, node.trust.value) == (EVENTS, 1.0)


numbers = st.one_of(st.none(), st.floats(0, 1e12))


@given(st.lists(st.tuples(st.floats(0, 600), numbers, numbers, numbers, st.integers(0, 10**6), st.integers(0, 10**6))))
def test_whatever_is_counted_the_values_stay_in_their_ranges(
    script: list[tuple[float, float | None, float | None, float | None, int, int]],
) -> None:
    trust, now = Trust(), 0.0
    for step_s, queries, hits, tokens, promised, sent in script:
        now += step_s
        trust.sent(promised, sent)
        sample = LoadSample(now, prefix_queries=queries, prefix_hits=hits, prompt_tokens=tokens)
        trust.observe(sample, best=PREDICTED, block_tokens=16)
        assert 0.0 <= trust.value <= 1.0
        assert 0.1 <= trust.capacity <= 1.0
        assert 0 <= trust.depth <= LOAD


def test_predictions_that_promise_too_little_are_as_good_as_they_get() -> None:
    node = Node()
    for _ in range(100):
        node.window(0.55, 0.9, best=PREDICTED)  # answers, which only events tell
    assert (node.trust.depth, node.trust.value) == (EVENTS, 1.0)


def test_an_old_verdict_is_none_where_nothing_can_be_judged_any_more() -> None:
    node = Node()
    for _ in range(12):
        node.window(0.9, 0.1, best=PREDICTED)
    lost = node.trust.depth
    assert lost > PREDICTED
    for _ in range(130):  # eleven minutes in which others send as much
        node.window(0.9, 0.9, best=PREDICTED, others=10_000)
    assert node.trust.depth == lost - 1
    for _ in range(400):
        node.window(0.9, 0.9, best=PREDICTED, others=10_000)
    assert node.trust.depth <= PREDICTED
