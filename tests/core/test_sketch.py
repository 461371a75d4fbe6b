from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.sketch import Sketch

SHARES = st.floats(min_value=0.01, max_value=1.0)
VALUES = st.lists(st.floats(min_value=1e-4, max_value=1e4), min_size=1, max_size=200)


def of_rank(values: list[float], share: float) -> float:
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


@given(VALUES, SHARES)
def test_every_quantile_is_within_the_error_of_the_value_of_that_rank(values: list[float], share: float) -> None:
    sketch = Sketch(3600.0, error=0.01)
    for value in values:
        sketch.add(value, now=0.0)
    exact = {of_rank(values, share * (1.0 + nudge)) for nudge in (-1e-9, 0.0)}  # of 0.07 * 100 or 7, whichever it is
    assert any(sketch.quantiles([share])[0] == pytest.approx(each, rel=0.0101) for each in exact)
    assert sketch.count(now=0.0) == len(values)


def test_what_lies_beyond_counts_as_the_least_or_the_largest() -> None:
    sketch = Sketch(3600.0, least=0.1, most=10.0)
    for value in (0.0, 1e-9, 1e9):
        sketch.add(value, now=0.0)
    assert sketch.quantiles([0.5])[0] == 0.1
    assert sketch.quantiles([1.0])[0] == pytest.approx(10.0, rel=0.03)


def test_nothing_has_no_quantile() -> None:
    assert Sketch(1.0).quantiles([0.5, 0.9]) == (0.0, 0.0)
    assert Sketch(1.0).count(now=5.0) == 0.0


def test_what_is_old_counts_less_and_less() -> None:
    sketch = Sketch(100.0)
    for _ in range(100):
        sketch.add(1.0, now=0.0)
    for _ in range(100):
        sketch.add(5.0, now=200.0)  # the others now count e**-2 of themselves
    assert sketch.count(now=200.0) == pytest.approx(100.0 * (1.0 + math.exp(-2.0)))
    assert sketch.quantiles([0.1])[0] == pytest.approx(1.0, rel=0.01)
    assert sketch.quantiles([0.2])[0] == pytest.approx(5.0, rel=0.01)


def test_years_do_not_overflow() -> None:
    sketch, rng = Sketch(10.0), Random(1)
    for day in range(2000):
        for _ in range(20):
            sketch.add(rng.uniform(1.0, 2.0), now=86_400.0 * day)
    assert sketch.count(now=86_400.0 * 1999) == pytest.approx(20.0)
    assert 1.0 <= sketch.quantiles([0.5])[0] <= 2.02
