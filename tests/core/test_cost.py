"""Seconds: the price of extra work, decayed sums, and the learnt prefill rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.cost import UTILISATION_CEILING, Fading, PrefillRate, price


@pytest.mark.parametrize(
    ("work_s", "capacity", "weight", "expected"),
    [
        (0.0, 4.0, 2.0, 1.0),  # an idle fleet: own work costs itself
        (120.0, 4.0, 2.0, 3.0),  # half used: rho / (1 - rho) is 1
        (192.0, 4.0, 2.0, 9.0),  # four fifths
        (120.0, 4.0, 0.0, 1.0),  # priced at nothing
        (1e9, 4.0, 2.0, 1.0 + 2.0 * UTILISATION_CEILING / (1 - UTILISATION_CEILING)),
        (1.0, 0.0, 2.0, 1.0 + 2.0 * UTILISATION_CEILING / (1 - UTILISATION_CEILING)),  # no capacity at all
    ],
)
def test_the_price_grows_with_utilisation_and_has_a_ceiling(
    work_s: float, capacity: float, weight: float, expected: float
) -> None:
    assert price(work_s, window_s=60.0, capacity=capacity, weight=weight) == pytest.approx(expected)


@pytest.mark.parametrize(("work_s", "busy", "expected"), [(120.0, 0.2, 3.0), (120.0, 0.8, 9.0), (0.0, 0.5, 3.0)])
def test_the_larger_share_in_use_sets_the_price(work_s: float, busy: float, expected: float) -> None:
    assert price(work_s, window_s=60.0, capacity=4.0, weight=2.0, busy=busy) == pytest.approx(expected)


@pytest.mark.parametrize(("thrift", "expected"), [(0.0, 3.0), (0.5, 6.27), (1.0, 39.0)])
def test_who_wants_throughput_pays_as_if_the_fleet_were_full(thrift: float, expected: float) -> None:
    paid = price(120.0, window_s=60.0, capacity=4.0, weight=2.0, thrift=thrift)
    assert paid == pytest.approx(expected, abs=0.01)


def test_a_token_far_into_a_prompt_is_more_work() -> None:
    rate = PrefillRate(1000.0, attention_tokens=10_000.0)
    assert rate.work(1000, 1000) == pytest.approx(1050.0)  # 500 tokens stand before the middle one
    assert rate.work(1000, 21_000) == pytest.approx(3050.0)
    for _ in range(8):
        rate.observe(1000, 3.05, 21_000)
    assert rate.tokens_per_s == pytest.approx(1000.0)


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 100.0), st.booleans()), max_size=20))
def test_a_fading_sum_is_the_sum_of_its_faded_parts(parts: list[tuple[float, float, bool]]) -> None:
    fading, total, now = Fading(60.0), 0.0, 5.0
    added = []
    for gap, amount, restart in parts:
        now += gap
        if restart:
            total *= fading.restart(now=now)
        total += amount * fading.scale(now=now)
        added.append((now, amount))
    expected = sum(amount * math.exp((at - now - 5.0) / 60.0) for at, amount in added)
    assert total / fading.scale(now=now + 5.0) == pytest.approx(expected)


def test_the_rate_is_the_configured_one_until_enough_was_seen() -> None:
    rate = PrefillRate(10_000.0)
    for _ in range(7):
        rate.observe(2_000, 0.1)
    assert rate.tokens_per_s == 10_000.0
    rate.observe(2_000, 0.1)
    assert rate.tokens_per_s == 20_000.0


@pytest.mark.parametrize(("ttft_s", "expected"), [(1e-6, 160_000.0), (1e6, 625.0)])
def test_the_rate_stays_within_a_factor_of_sixteen(ttft_s: float, expected: float) -> None:
    rate = PrefillRate(10_000.0)
    for _ in range(20):
        rate.observe(2_000, ttft_s)
    assert rate.tokens_per_s == expected


@pytest.mark.parametrize(("tokens", "ttft_s"), [(511, 0.1), (2_000, 0.0), (2_000, -1.0)])
def test_what_tells_nothing_about_the_rate_is_left_out(tokens: int, ttft_s: float) -> None:
    rate = PrefillRate(10_000.0)
    for _ in range(20):
        rate.observe(tokens, ttft_s)
    assert rate.tokens_per_s == 10_000.0
