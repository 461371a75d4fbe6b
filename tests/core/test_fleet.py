"""The fleet: work put on nodes and taken off them, samples, and what candidates show of both."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits, Reservation
from extproc.core.types import Candidate, LoadSample, Node

A, B = Node("a", "10.0.0.1:8000", "a"), Node("b", "10.0.0.2:8000", "b", weight=2.0)


def fleet_of(*nodes: Node) -> Fleet:
    fleet = Fleet(PrefillRate(1000.0), limits=LoadLimits(), price_weight=2.0)
    fleet.replace(nodes)
    return fleet


def seen(fleet: Fleet, *, now: float, tokens: int = 100, **matched: int) -> dict[str, Candidate]:
    found = fleet.candidates(matched, prompt_tokens=tokens, now=now)
    return {each.node.id: each for each in found}


def test_work_is_waited_for_and_drains_at_the_nodes_own_rate() -> None:
    fleet = fleet_of(A, B)
    fleet.reserve("a", 2000, now=10.0)
    fleet.reserve("b", 2000, now=10.0)
    assert [each.wait_s for each in seen(fleet, now=10.0).values()] == [2.0, 1.0]
    assert [each.wait_s for each in seen(fleet, now=10.5).values()] == [1.5, 0.5]
    assert [each.wait_s for each in seen(fleet, now=99.0).values()] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "matched", "hit", "uncached"),
    [
        (100, 0, 0, 100),
        (100, 40, 40, 60),
        (100, 100, 99, 1),  # the engine computes the last token again
        (0, 0, 0, 0),
    ],
)
def test_matched_tokens_need_no_prefill_but_for_the_last(tokens: int, matched: int, hit: int, uncached: int) -> None:
    candidate = seen(fleet_of(A), now=0.0, tokens=tokens, a=matched)["a"]
    assert (candidate.matched_tokens, candidate.uncached_tokens) == (hit, uncached)
    assert candidate.prefill_s == uncached / 1000.0


def test_a_snapshot_does_not_show_what_came_later() -> None:
    fleet = fleet_of(A)
    before = fleet.candidates({}, prompt_tokens=100, now=0.0)
    fleet.reserve("a", 5000, now=0.0)
    assert before == (Candidate(A, 0, 100, 0.0, 0.1, 0, 0.0, 0.0, math.inf, False, False),)


def test_work_that_was_never_computed_no_longer_keeps_others_waiting() -> None:
    fleet = fleet_of(A)
    fleet.reserve("a", 1000, now=0.0)
    failed = fleet.reserve("a", 3000, now=0.0)
    failed.release(first_token_at_s=None, now=0.0)
    assert seen(fleet, now=0.0)["a"].wait_s == pytest.approx(1.0)


def test_work_that_has_drained_is_not_taken_off_what_came_after() -> None:
    fleet = fleet_of(A)
    lost = fleet.reserve("a", 10_000, now=0.0)
    fleet.reserve("a", 5_000, now=599.0)
    lost.release(first_token_at_s=None, now=600.0)
    assert seen(fleet, now=600.0)["a"].wait_s == pytest.approx(4.0)


def test_a_node_that_fails_is_suspect_for_longer_each_time_until_it_answers_or_restarts() -> None:
    fleet = fleet_of(A)
    now = 0.0
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        fleet.reserve("a", 100, now=now).failed(now=now)
        assert seen(fleet, now=now + seconds - 0.01)["a"].suspect
        assert not seen(fleet, now=now + seconds)["a"].suspect
        now += seconds
    reservation = fleet.reserve("a", 100, now=now)
    reservation.failed(now=now)
    reservation.answered()
    assert not seen(fleet, now=now)["a"].suspect
    fleet.observe("a", LoadSample(now, started_at_s=1.0))
    reservation.failed(now=now)
    assert seen(fleet, now=now)["a"].suspect
    fleet.observe("a", LoadSample(now, started_at_s=2.0))
    assert not seen(fleet, now=now)["a"].suspect


def test_a_node_that_stopped_answering_scrapes_is_suspect_and_one_that_never_did_is_not() -> None:
    fleet = fleet_of(A, B)
    fleet.observe("a", LoadSample(0.0))
    assert [each.suspect for each in seen(fleet, now=5.0).values()] == [False, False]
    assert [each.suspect for each in seen(fleet, now=5.1).values()] == [True, False]


@pytest.mark.parametrize(
    ("answered_at_s", "now", "suspect"),
    [
        (None, 5.1, True),
        (4.0, 6.0, True),  # that was before
        (5.5, 6.0, False),  # its metrics are gone, but it answers
        (None, 60.0, True),
        (None, 60.1, False),  # tried again: its failures will tell
    ],
)
def test_without_scrapes_a_node_is_judged_by_what_we_know_ourselves(
    answered_at_s: float | None, now: float, suspect: bool
) -> None:
    fleet = fleet_of(A)
    fleet.observe("a", LoadSample(0.0, waiting=100, kv_usage=0.99))
    if answered_at_s is not None:
        reservation = fleet.reserve("a", 0, now=1.0)
        reservation.release(first_token_at_s=answered_at_s, now=answered_at_s)
        reservation.answered(now=answered_at_s)
    fleet.reserve("a", 100_000, now=now)
    candidate = seen(fleet, now=now)["a"]
    assert (candidate.suspect, candidate.saturated, candidate.in_flight) == (suspect, False, 1)
    assert candidate.wait_s >= 100.0


def test_what_waited_when_a_node_was_last_scraped_fades_to_what_we_sent_there() -> None:
    fleet = fleet_of(A, B)
    fleet.reserve("b", 1000, now=0.0)
    fleet.observe("a", LoadSample(0.0, waiting=20))
    waits = [seen(fleet, now=float(now))["a"].wait_s for now in (0, 4, 6, 19, 21)]
    assert waits == pytest.approx([20.0, 16.0, 14.0, 1.0, 0.0])


def test_a_first_token_proves_that_all_before_it_is_done() -> None:
    fleet = fleet_of(A)
    first = fleet.reserve("a", 10_000, now=0.0)
    fleet.reserve("a", 2_000, now=0.5)
    first.release(first_token_at_s=1.0, now=1.0)  # nine seconds sooner than predicted
    assert seen(fleet, now=1.0)["a"].wait_s == pytest.approx(2.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5000), st.booleans()), max_size=30))
def test_in_flight_is_nothing_again_when_everything_is_released(work: list[tuple[str, int, bool]]) -> None:
    fleet = fleet_of(A, B)
    out: list[tuple[Reservation, bool]] = []
    for i, (node, tokens, computed) in enumerate(work):
        out.append((fleet.reserve(node, tokens, now=float(i)), computed))
    for i, (reservation, computed) in enumerate(reversed(out)):
        reservation.release(first_token_at_s=float(i) if computed else None, now=float(i))
        assert all(requests >= 0 and tokens >= 0 for requests, tokens in fleet.in_flight().values())
    assert fleet.in_flight() == {"a": (0, 0), "b": (0, 0)}


def test_a_node_that_flaps_under_load_starts_anew_and_never_goes_below_zero() -> None:
    fleet = fleet_of(A, B)
    for i in range(1000):
        reservation = fleet.reserve("a", 100, now=float(i))
        fleet.replace([B])
        fleet.replace([A, B])
        assert fleet.in_flight()["a"] == (0, 0)
        reservation.release(first_token_at_s=None, now=float(i))
        assert fleet.in_flight()["a"] == (0, 0)
        assert seen(fleet, now=float(i))["a"].wait_s == 0.0


def test_another_address_under_the_same_name_is_another_node() -> None:
    fleet = fleet_of(A)
    fleet.reserve("a", 100, now=0.0)
    moved = Node("a", "10.0.0.9:8000", "a")
    changes = fleet.replace([moved])
    assert changes == ((moved,), (A,))
    assert fleet.in_flight() == {"a": (0, 0)}


def test_another_weight_keeps_what_is_known_of_a_node() -> None:
    fleet = fleet_of(A)
    fleet.reserve("a", 100, now=0.0)
    changes = fleet.replace([Node("a", A.address, "a", weight=3.0)])
    assert changes == ((), ())
    assert fleet.in_flight() == {"a": (1, 100)}


def test_a_missing_sample_is_neither_idle_nor_saturated() -> None:
    candidate = seen(fleet_of(A), now=5.0)["a"]
    assert candidate.sample_age_s == math.inf
    assert not candidate.saturated


@pytest.mark.parametrize(
    ("sample", "now", "saturated"),
    [
        (LoadSample(0.0, waiting=8), 1.0, True),
        (LoadSample(0.0, waiting=7), 1.0, False),
        (LoadSample(0.0, kv_usage=0.95), 1.0, True),
        (LoadSample(0.0, kv_usage=0.94), 1.0, False),
        (LoadSample(0.0), 1.0, False),  # an engine that does not say
        (LoadSample(0.0, waiting=100, kv_usage=1.0), 5.1, False),  # stale: what it said is not believed any more
    ],
)
def test_saturation_is_what_a_fresh_sample_says(sample: LoadSample, now: float, saturated: bool) -> None:
    fleet = fleet_of(A, B)
    fleet.observe("a", sample)
    fleet.observe("b", LoadSample(0.0, waiting=0, kv_usage=0.0))
    assert seen(fleet, now=now)["a"].saturated is saturated


def test_where_all_are_full_none_is_saturated_but_one_that_is_fuller_by_far() -> None:
    fleet = fleet_of(A, B)
    for waiting, usage, full in ((20, 0.97, False), (45, 0.97, False), (100, 0.97, True)):
        fleet.observe("a", LoadSample(0.0, waiting=waiting, kv_usage=usage))
        fleet.observe("b", LoadSample(0.0, waiting=0 if full else 20, kv_usage=0.96))
        assert seen(fleet, now=0.0)["a"].saturated is full


def test_requests_that_wait_in_the_engine_are_work_that_others_sent() -> None:
    fleet = fleet_of(A, B)
    fleet.reserve("b", 1000, now=0.0)  # the mean request: one second on a node of weight 1
    fleet.observe("a", LoadSample(0.0, waiting=3))
    assert seen(fleet, now=0.0)["a"].wait_s == pytest.approx(3.0)
    assert seen(fleet, now=1.0)["a"].wait_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        (0, 2.0),  # what was sent after the scrape
        (1, 4.0),  # the third, and what was sent after the scrape; the second had time enough
        (2, 6.0),
        (5, 6.0 + 3.0 + 2 * 2.5),  # others sent two: what is sent takes 2.5 s in the mean
    ],
)
def test_what_is_waiting_is_what_was_sent_last(waiting: int, expected: float) -> None:
    fleet = fleet_of(A, B)
    for at_s, tokens in ((0.0, 3000), (0.0, 2000), (0.0, 3000), (9.0, 2000)):
        fleet.reserve("a", tokens, now=at_s)
    fleet.observe("a", LoadSample(8.0, waiting=waiting))
    assert seen(fleet, now=9.0)["a"].wait_s == pytest.approx(expected, rel=0.01)


def test_where_nothing_waits_no_more_is_left_than_of_the_request_that_began_last() -> None:
    fleet = fleet_of(A)
    for tokens in (9000, 2000):
        fleet.reserve("a", tokens, now=0.0)
    fleet.observe("a", LoadSample(1.0, waiting=0))
    assert seen(fleet, now=1.0)["a"].wait_s == pytest.approx(2.0)


def test_where_requests_wait_long_the_price_is_up_at_once() -> None:
    fleet = fleet_of(A)
    for _ in range(30):
        fleet.reserve("a", 1000, now=0.0)
    seen(fleet, now=0.0)
    averaged = 1.0 + 2.0 * 0.5 / 0.5  # 30 s of work in a minute
    assert averaged < fleet.price(now=0.0) == pytest.approx(1.0 + 2.0 * 0.75 / 0.25)
    seen(fleet, now=30.0)
    assert fleet.price(now=30.0) < averaged


def test_a_changed_start_time_is_a_restart_and_a_missing_one_is_not() -> None:
    fleet = fleet_of(A)
    scripts = [(None, False), (100.0, False), (100.0, False), (200.0, True), (None, False), (200.0, False)]
    for i, (started_at_s, restarted) in enumerate(scripts):
        assert fleet.observe("a", LoadSample(float(i), started_at_s=started_at_s)) is restarted


def test_a_sample_of_a_node_that_left_is_ignored() -> None:
    assert fleet_of(A).observe("b", LoadSample(0.0)) is False


def test_a_node_is_idle_only_when_neither_we_nor_its_sample_know_of_work() -> None:
    fleet = fleet_of(A)
    assert fleet.idle("a", now=0.0)
    fleet.observe("a", LoadSample(0.0, waiting=0, running=1))
    assert not fleet.idle("a", now=0.0)
    fleet.observe("a", LoadSample(1.0, waiting=0, running=0))
    reservation = fleet.reserve("a", 10, now=1.0)
    assert not fleet.idle("a", now=9.0)
    reservation.release(first_token_at_s=2.0, now=2.0)
    assert fleet.idle("a", now=9.0)


def test_recent_work_fades_over_a_minute_and_never_overflows() -> None:
    fleet = fleet_of(A, B)
    for day in range(30):  # e to the power of 1,440 a day
        fleet.reserve("a", 1000, now=day * 86_400.0)
        fleet.reserve("b", 1000, now=day * 86_400.0)
        assert fleet.work_s(now=day * 86_400.0) == pytest.approx({"a": 1.0, "b": 0.5})
        assert fleet.work_s(now=day * 86_400.0 + 60.0) == pytest.approx({"a": 1 / math.e, "b": 0.5 / math.e})
        assert fleet.price(now=day * 86_400.0) == pytest.approx(1.0 + 2.0 * (2 / 180) / (1 - 2 / 180))
