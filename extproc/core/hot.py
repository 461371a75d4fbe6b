"""How much of the traffic shares a prefix: which ones are too hot for as few nodes as hold them."""

from __future__ import annotations

import math
from collections import OrderedDict

from extproc.core.cost import Fading

_KEYS = 1024
"""Prefixes whose use is counted; the one that was used longest ago is forgotten first."""
_LARGE = 1e100


class HotPrefixes:
    """Shares of about the last `requests` requests, by the hash at which their match ended."""

    def __init__(self, requests: float = 64.0) -> None:
        self._fading = Fading(requests)
        self._sums: OrderedDict[int, float] = OrderedDict()
        self._total = 0.0
        self._count = 0

    def used(self, key: int | None) -> float:
        """Count one more request, which ended there (None: nowhere); that prefix' share of all, in [0, 1]. 1 us."""
        self._count += 1
        scale = self._fading.scale(now=self._count)
        if scale > _LARGE:
            factor = self._fading.restart(now=self._count)
            self._total *= factor
            for each in self._sums:
                self._sums[each] *= factor
            scale = 1.0
        self._total += scale
        if key is None:
            return 0.0
        found = self._sums.pop(key, 0.0) + scale
        self._sums[key] = found
        if len(self._sums) > _KEYS:
            self._sums.popitem(last=False)
        return found / self._total


def nodes_needed(share: float, nodes: int) -> int:
    """On how many of `nodes` a prefix has to be, for each to have no more of it than its share of all requests."""
    return min(math.ceil(share * nodes), nodes)
