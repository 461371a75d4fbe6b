"""Reads the metrics page of each address again and again, one task an address."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from extproc.core.pool import Pool
from extproc.core.types import LoadSample, Node
from extproc.sources import engines
from extproc.sources.pages import Cause, Meter, PageError, PageReader

log = logging.getLogger(__name__)

_MAX_BACK_OFF_S = 5.0
_JITTER = 0.1
_FRESH = 2.5
"""Scrapes that a sample is believed for, at the least: one may be missed."""
_MOST_OF_A_CORE = 0.4
_PACE_S = 1.0
"""How often the interval is looked at."""
_WHOLE_S = 60.0
"""How often a whole page is asked for: there may be new lines on it."""
_OVERHEAD_S = 80e-6
"""What a scrape takes that is not metered: the loop, its timers and its system calls (`python -m
extproc.lab.bench_scrape` shows it)."""


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """How often, how long, and where."""

    interval_s: float
    timeout_s: float
    path: str
    stale_after_s: float = 5.0
    """What bounds the interval where there are many nodes."""


@dataclass(slots=True)
class ScrapeCounts:
    """Since the start."""

    scrapes: int = 0
    """Those that gave a page."""
    unknown_pages: int = 0
    """Of no engine that we know: their samples are empty."""
    failures: Counter[Cause] = field(default_factory=Counter)
    restarts: int = 0


class Pace:
    """The interval: as configured, longer where that would take more than its share of a core."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._since_s: float | None = None
        self._before_s = 0.0

    def spent(self, total_s: float, settings: ScrapeSettings, *, now: float) -> None:
        """So much CPU time did all scrapes take."""
        if self._since_s is None:
            self._since_s, self._before_s = now, total_s
        passed_s = now - self._since_s
        if passed_s < _PACE_S:
            return
        share = (total_s - self._before_s) / passed_s
        self._since_s, self._before_s = now, total_s
        longest_s = max(settings.stale_after_s / _FRESH, settings.interval_s)
        # Aimed a little below, and back in small steps: what a window shows is not exact.
        factor = max(share / (0.9 * _MOST_OF_A_CORE), 0.8)
        if factor > 1.0 or share < 0.8 * _MOST_OF_A_CORE:
            self.interval_s *= factor
        self.interval_s = min(max(self.interval_s, settings.interval_s), longest_s)


@dataclass(slots=True)
class _Life:
    """What is known of the process behind one rank of an address."""

    told_at_s: float | None = None
    counters: dict[int, engines.Counter] = field(default_factory=dict)
    started_at_s: float | None = None

    def started(
        self, told_at_s: float | None, counters: tuple[engines.Counter, ...], *, away: bool, now: float
    ) -> float:
        """When it was started, by its own clock; where it does not say, when it was first seen (by ours). It is later
        by a second each time that its counters went back. `away`: it did not answer lately."""
        back = False
        for at, counter in enumerate(counters):
            before = self.counters.get(at)
            if before is not None and counter.value < before.value:
                # One line less is no restart, unless it is because nothing happened since one.
                if counter.lines < before.lines and not away:
                    continue
                back = True
            self.counters[at] = counter
        if told_at_s is not None and told_at_s != self.told_at_s:
            self.told_at_s = self.started_at_s = told_at_s
        elif self.started_at_s is None:
            self.started_at_s = now
        elif back:
            self.started_at_s += 1.0
        return self.started_at_s


@dataclass(slots=True)
class _Selection:
    """The lines that are asked for. vLLM's server makes no others then, which spares it milliseconds a scrape, and us a
    third of what one costs. It does so below `/metrics/` alone; elsewhere that is not found, or what was on the whole
    page is missing: such an address is asked for whole pages."""

    names: frozenset[bytes] = frozenset()
    query: str = ""
    """Empty: the whole page."""
    works: bool = True
    whole_at_s: float = 0.0
    """When the whole page came last."""

    def path(self, path: str) -> str:
        """With what is asked for."""
        return f"{path.rstrip('/')}/?{self.query}" if self.query and "?" not in path else path

    def failed(self, cause: Cause) -> bool:
        """There was no page, and the next is to be a whole one: who answers may be another server by then.

        True: that may be because some lines were asked for.
        """
        selected, self.query = bool(self.query), ""
        if cause is Cause.CONNECT:
            self.works = True
        elif cause is Cause.STATUS and selected:
            self.works = False
            return True
        return False

    def take(self, found: frozenset[bytes], *, now: float) -> bool:
        """False: the page lacks what was asked for, and tells nothing."""
        if not self.query:
            self.whole_at_s = now
            if self.works:
                self.names = found
                self.query = "&".join(f"name[]={name.decode()}" for name in sorted(found))
            return True
        if not self.names <= found:
            self.works, self.query = False, ""
            return False
        if now - self.whole_at_s > _WHOLE_S:
            self.query = ""
        return True


@dataclass(slots=True)
class _Address:
    reader: PageReader
    targets: tuple[tuple[Pool, Node], ...]
    """All nodes that share it: they differ in pool or in rank."""
    task: asyncio.Task[None] | None = None
    engine: engines.Engine | None = None
    lives: dict[int | None, _Life] = field(default_factory=dict)
    selection: _Selection = field(default_factory=_Selection)


class Scraper:
    """Owns the tasks and the connections. An address that does not answer is asked less often, to every 5 s."""

    def __init__(
        self,
        settings: ScrapeSettings,
        clock: Callable[[], float],
        rng: random.Random,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.settings = settings
        self.counts = ScrapeCounts()
        self._clock = clock
        self._rng = rng
        self._meter = Meter(cpu_clock)
        self._pace = Pace(settings.interval_s)
        self._attempts = 0
        self._addresses: dict[str, _Address] = {}

    @property
    def interval_s(self) -> float:
        """How often each address is asked just now."""
        return max(self._pace.interval_s, self.settings.interval_s)

    @property
    def metered_s(self) -> float:
        """CPU time that scraping took, as far as it is metered."""
        return self._meter.cpu_s

    def replace(self, pools: Mapping[str, Pool]) -> None:
        """Scrape the nodes of `pools` and no others. Call it on the loop."""
        wanted: dict[str, list[tuple[Pool, Node]]] = {}
        for pool in pools.values():
            for node in pool.fleet.nodes():
                wanted.setdefault(node.address, []).append((pool, node))
        for gone in self._addresses.keys() - wanted.keys():
            address = self._addresses.pop(gone)
            if address.task is not None:
                address.task.cancel()
        for name, targets in wanted.items():
            found = self._addresses.get(name)
            if found is not None:
                found.targets = tuple(targets)
                continue
            address = self._addresses[name] = _Address(PageReader(name, self._meter), tuple(targets))
            address.task = asyncio.create_task(self._scrape(address), name=f"scrape {name}")

    async def close(self) -> None:
        """Cancel and await every task."""
        tasks = [address.task for address in self._addresses.values() if address.task is not None]
        self._addresses.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for the connections to be closed

    async def _scrape(self, address: _Address) -> None:
        misses = 0
        try:
            await asyncio.sleep(self._rng.uniform(0.0, self.interval_s))
            while True:
                began_s = self._clock()
                try:
                    path = address.selection.path(self.settings.path)
                    page = await address.reader.get(path, timeout_s=self.settings.timeout_s)
                except PageError as error:
                    if not address.selection.failed(error.cause):
                        misses += 1
                        self.counts.failures[error.cause] += 1
                    if misses == 3:
                        log.warning("%s is not answering scrapes: %s", address.reader.address, error)
                else:
                    if misses >= 3:
                        log.info("%s answers scrapes again", address.reader.address)
                    try:
                        self._take(address, page, away=misses > 0)
                    except Exception:  # a bug of ours must not end the scraping of an address unseen
                        if not self.counts.failures[Cause.ERROR]:
                            log.exception("a page of %s was not read; this is logged once", address.reader.address)
                        self.counts.failures[Cause.ERROR] += 1
                    misses = 0
                now = self._clock()
                self._attempts += 1
                self._pace.spent(self._meter.cpu_s + self._attempts * _OVERHEAD_S, self.settings, now=now)
                wait_s = self.interval_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
                if misses:  # one may be chance
                    wait_s = max(min(wait_s * 2.0 ** min(misses - 1, 16), _MAX_BACK_OFF_S), wait_s)
                # A node that answers slowly gets a rest before it is asked again.
                await asyncio.sleep(max(wait_s - (now - began_s), wait_s / 2))
        finally:
            address.reader.close()

    def _take(self, address: _Address, page: bytes, *, away: bool) -> None:
        began_s = self._meter.cpu_clock()
        now = self._clock()
        self.counts.scrapes += 1
        picked = engines.Page(page, address.engine)
        if not address.selection.take(picked.names(), now=now):
            return
        if picked.engine is None:
            self.counts.unknown_pages += 1
        address.engine = picked.engine or address.engine
        samples: dict[int | None, LoadSample] = {}
        for pool, node in address.targets:
            rank = node.rank
            if rank not in samples:
                samples[rank] = self._sample(address, picked, rank, away=away, now=now)
            if pool.observe(node.id, samples[rank]):
                self.counts.restarts += 1
                log.info("%s at %s was restarted: its cache is void", node.id, node.address)
        self._meter.cpu_s += self._meter.cpu_clock() - began_s

    def _sample(self, address: _Address, page: engines.Page, rank: int | None, *, away: bool, now: float) -> LoadSample:
        sample = page.sample(at_s=now, rank=rank)
        life = address.lives.setdefault(rank, _Life())
        if page.engine is None:
            started_at_s = life.started_at_s
        else:
            started_at_s = life.started(sample.started_at_s, page.counters(rank=rank), away=away, now=now)
        return replace(sample, started_at_s=started_at_s)
