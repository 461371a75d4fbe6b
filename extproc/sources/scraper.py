"""Reads each node's metrics page, one task a node."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from extproc.core.pool import Pool
from extproc.core.types import Node
from extproc.sources.engines import vllm

log = logging.getLogger(__name__)

_MAX_PAGE_BYTES = 4 << 20
_MAX_BACK_OFF = 16


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """How often, how long, and where."""

    interval_s: float
    timeout_s: float
    path: str


class Scraper:
    """Owns the tasks and the HTTP session. A node that does not answer is asked less often (to 16 intervals)."""

    def __init__(self, settings: ScrapeSettings, clock: Callable[[], float], rng: random.Random) -> None:
        self.settings = settings
        self._clock = clock
        self._rng = rng
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[tuple[int, Node], asyncio.Task[None]] = {}
        """By the identity of the pool, which its task keeps alive: one made anew under the old name is another."""

    def replace(self, pools: Mapping[str, Pool]) -> None:
        """Scrape the nodes of `pools` and no others. Call it on the loop."""
        wanted = {(id(pool), node): pool for pool in pools.values() for node in pool.fleet.nodes()}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
        for key, pool in wanted.items():
            if key not in self._tasks:
                self._tasks[key] = asyncio.create_task(self._scrape(pool, key[1]), name=f"scrape {key[1].id}")

    async def close(self) -> None:
        """Cancel and await every task."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _scrape(self, pool: Pool, node: Node) -> None:
        misses = 0
        while True:
            try:
                sample = vllm(await self._fetch(node), at_s=self._clock())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                misses += 1
                if misses == 3:
                    log.warning("%s at %s is not answering scrapes: %s", node.id, node.address, type(error).__name__)
            else:
                if misses >= 3:
                    log.info("%s at %s answers scrapes again", node.id, node.address)
                misses = 0
                if pool.observe(node.id, sample):
                    log.info("%s at %s was restarted: its cache is void", node.id, node.address)
            back_off = min(2 ** max(misses - 2, 0), _MAX_BACK_OFF)
            await asyncio.sleep(self.settings.interval_s * back_off * self._rng.uniform(0.8, 1.2))

    async def _fetch(self, node: Node) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        timeout = aiohttp.ClientTimeout(total=self.settings.timeout_s)
        async with self._session.get(f"http://{node.address}{self.settings.path}", timeout=timeout) as answer:
            answer.raise_for_status()
            page = bytearray()
            async for piece in answer.content.iter_any():
                page += piece
                if len(page) > _MAX_PAGE_BYTES:
                    raise aiohttp.ClientPayloadError("the page is too large")
            return bytes(page)
