"""Seconds: how fast the pool prefills, and what extra work costs the requests that come after."""

from __future__ import annotations

import math
import statistics
from collections import deque

_MAX_EXPONENT = 700.0
"""Just before a double overflows; what is older than that many windows is nothing either way."""


class Fading:
    """A clock for sums that forget exponentially: after `window_s` a contribution counts 1/e of itself.

    Instead of letting every sum fade, what is added grows with time, and a sum is worth `sum / scale`: one exponential
    for any number of sums. (Forward decay: Cormode et al., 2009.)
    """

    __slots__ = ("_since_s", "window_s")

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._since_s: float | None = None

    def scale(self, *, now: float) -> float:
        """What one unit added now adds to a sum; at least 1.0 where time does not run backwards."""
        if self._since_s is None:
            self._since_s = now
        return math.exp(min((now - self._since_s) / self.window_s, _MAX_EXPONENT))

    def restart(self, *, now: float) -> float:
        """Begin anew at a scale of 1.0; every sum has to be multiplied by what is returned."""
        factor = 1.0 / self.scale(now=now)
        self._since_s = now
        return factor


UTILISATION_CEILING = 0.95
"""Above it the queueing term would say nothing more than "everything is full": 2 * 0.95 / 0.05 = 38 times own work."""


def price(
    work_s: float, *, window_s: float, capacity: float, weight: float, busy: float = 0.0, thrift: float = 0.0
) -> float:
    """The factor on own prefill that pays for the waiting it causes: `1 + weight * rho / (1 - rho)`.

    `work_s`: decayed sum of uncached work sent to the fleet, in seconds of one node of weight 1; `capacity`: the
    fleet's summed weights; `busy`: what else tells how much of the fleet is in use, in [0, 1]. rho is the larger of the
    two. `thrift`, in [0, 1], moves rho from what it is to that of a full fleet: what is saved now is served later. The
    form is that of the mean wait in a single-server queue; `weight` about 2 led or nearly led every workload it was
    simulated on.
    """
    rho = work_s / window_s / capacity if capacity > 0 else UTILISATION_CEILING
    rho = min(max(rho, busy), UTILISATION_CEILING)
    rho += thrift * (UTILISATION_CEILING - rho)
    return 1.0 + weight * rho / (1.0 - rho)


class PrefillRate:
    """Uncached prompt tokens per second of a node of weight 1, learnt from the pool's own answers.

    Pooled over the nodes and taken only from requests that found their node idle: an estimate per node from all
    requests feeds back into who gets traffic, and skews it. The median of the last 64 samples, within a factor of
    `bound` of the configured rate.

    Attention makes a token cost more the more stands before it: twice as much behind `attention_tokens` of context.
    The rate is that of a token with nothing before it.
    """

    _MIN_TOKENS = 512  # shorter prompts measure the engine's fixed cost, not its rate
    _MIN_SAMPLES = 8

    def __init__(self, configured: float, *, attention_tokens: float = math.inf, bound: float = 16.0) -> None:
        self.configured = configured
        self.attention_tokens = attention_tokens
        self._bound = bound
        self._samples: deque[float] = deque(maxlen=64)
        self.tokens_per_s = configured

    def work(self, uncached_tokens: int, prompt_tokens: int) -> float:
        """The end of a prompt, as so many tokens with nothing before them."""
        return uncached_tokens * (1.0 + (prompt_tokens - 0.5 * uncached_tokens) / self.attention_tokens)

    def observe(self, uncached_tokens: int, engine_ttft_s: float, prompt_tokens: int = 0) -> None:
        """One answer of an idle node of weight 1."""
        if uncached_tokens < self._MIN_TOKENS or engine_ttft_s <= 0.0:
            return
        self._samples.append(self.work(uncached_tokens, max(prompt_tokens, uncached_tokens)) / engine_ttft_s)
        if len(self._samples) >= self._MIN_SAMPLES:
            median = statistics.median(self._samples)
            self.tokens_per_s = min(max(median, self.configured / self._bound), self.configured * self._bound)
