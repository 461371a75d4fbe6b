"""Seconds: how fast the pool prefills, and what extra work costs the requests that come after."""

from __future__ import annotations

import math
import statistics
from collections import deque


class Decayed:
    """A sum that forgets exponentially: after `window_s` a contribution counts 1/e of itself."""

    __slots__ = ("_at_s", "_sum", "window_s")

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._sum = 0.0
        self._at_s = 0.0

    def add(self, amount: float, *, now: float) -> None:
        self._sum = self.value(now=now) + amount
        self._at_s = now

    def value(self, *, now: float) -> float:
        """Never negative; 0.0 before anything was added."""
        if self._sum <= 0.0:
            return 0.0
        return self._sum * math.exp((self._at_s - now) / self.window_s)


UTILISATION_CEILING = 0.95
"""Above it the queueing term would say nothing more than "everything is full": 2 * 0.95 / 0.05 = 38 times own work."""


def price(work_s: float, *, window_s: float, capacity: float, weight: float) -> float:
    """The factor on own prefill that pays for the waiting it causes: `1 + weight * rho / (1 - rho)`.

    `work_s`: decayed sum of uncached work sent to the fleet, in seconds of one node of weight 1; `capacity`: the
    fleet's summed weights. rho is the share of the fleet's prefill capacity in use. The form is that of the mean wait
    in a single-server queue; `weight` about 2 led or nearly led every workload it was simulated on.
    """
    rho = min(work_s / window_s / capacity, UTILISATION_CEILING) if capacity > 0 else UTILISATION_CEILING
    return 1.0 + weight * rho / (1.0 - rho)


class PrefillRate:
    """Uncached prompt tokens per second of a node of weight 1, learnt from the pool's own answers.

    Pooled over the nodes and taken only from requests that found their node idle: an estimate per node from all
    requests feeds back into who gets traffic, and skews it. The median of the last 64 samples, within a factor of
    `bound` of the configured rate.
    """

    _MIN_TOKENS = 512  # shorter prompts measure the engine's fixed cost, not its rate
    _MIN_SAMPLES = 8

    def __init__(self, configured: float, *, bound: float = 16.0) -> None:
        self.configured = configured
        self._bound = bound
        self._samples: deque[float] = deque(maxlen=64)
        self.tokens_per_s = configured

    def observe(self, uncached_tokens: int, engine_ttft_s: float) -> None:
        """One answer of an idle node of weight 1."""
        if uncached_tokens < self._MIN_TOKENS or engine_ttft_s <= 0.0:
            return
        self._samples.append(uncached_tokens / engine_ttft_s)
        if len(self._samples) >= self._MIN_SAMPLES:
            median = statistics.median(self._samples)
            self.tokens_per_s = min(max(median, self.configured / self._bound), self.configured * self._bound)
