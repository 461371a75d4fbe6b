"""Quantiles of a stream, each within a percent of its value, of which the old counts less and less."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from extproc.core.cost import Fading

_LARGE = 1e100
"""Counts are brought back to size long before they overflow."""


class Sketch:
    """Counts in buckets that grow geometrically (DDSketch: Masson et al., 2019), which forget exponentially.

    A quantile is within a factor of 1 +- `error` of the value of that rank, where that is between `least` and `most`;
    what lies beyond counts as the one or the other.
    """

    __slots__ = ("_counts", "_fading", "_growth", "_least", "_log", "_total")

    def __init__(self, window_s: float, *, error: float = 0.01, least: float = 1e-4, most: float = 1e4) -> None:
        self._fading = Fading(window_s)
        self._growth = (1.0 + error) / (1.0 - error)
        self._log = 1.0 / math.log(self._growth)
        self._least = least
        self._counts = array("d", bytes(8 * (math.ceil(math.log(most / least) * self._log) + 1)))
        self._total = 0.0

    def add(self, value: float, *, now: float) -> None:
        """One more."""
        scale = self._fading.scale(now=now)
        if scale > _LARGE:
            factor, scale = self._fading.restart(now=now), 1.0
            self._counts = array("d", [each * factor for each in self._counts])
            self._total *= factor
        bucket = math.ceil(math.log(value / self._least) * self._log) if value > self._least else 0
        self._counts[min(bucket, len(self._counts) - 1)] += scale
        self._total += scale

    def count(self, *, now: float) -> float:
        """How many there were, of the old ones parts."""
        return self._total / self._fading.scale(now=now)

    def quantiles(self, shares: Sequence[float]) -> tuple[float, ...]:
        """For each, in (0, 1], the value that such a share of what was added does not exceed; 0.0 where nothing was."""
        if not self._total:
            return (0.0,) * len(shares)
        below = list(accumulate(self._counts))
        return tuple(self._middle(bisect_left(below, share * below[-1])) for share in shares)

    def _middle(self, bucket: int) -> float:
        """As far, by factor, from the least value of the bucket as from the largest."""
        return self._least * self._growth**bucket * 2.0 / (1.0 + self._growth) if bucket else self._least
