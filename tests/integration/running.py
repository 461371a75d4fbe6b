"""A running Envoy as the tests see it, and a poll with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from extproc.lab.envoy_config import Config
from extproc.lab.processes import Child

CONFIGURATIONS = Path(__file__).parents[2] / "envoy"
FILE_PORTS = (10000, 9901, 9002, 8001, 8002, 8003, 8004)
OPTIONS = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")


async def until(condition: Callable[[], bool | Awaitable[bool]], *, timeout_s: float = 10.0) -> None:
    """Poll `condition` every 20 ms; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Envoy:
    """One Envoy: where it listens, and its counters."""

    child: Child
    url: str
    admin: str
    ports: dict[int, int]  # the port in the file -> the port in this test
    http: aiohttp.ClientSession

    def address(self, node: int) -> str:
        """`ip:port` of the node that the file has on 8000 + `node`."""
        return f"127.0.0.1:{self.ports[8000 + node]}"

    async def stat(self, name: str) -> int:
        """The counter or gauge `name`; 0 when Envoy has none of that name yet."""
        async with self.http.get(f"{self.admin}/stats?filter=^{name}$") as answer:
            text = await answer.text()
        return int(text.rpartition(": ")[2]) if text else 0

    async def server_is_healthy(self) -> bool:
        return await self.stat("cluster.kvaffinity.membership_healthy") == 1


class StartEnvoy(Protocol):
    """Start Envoy with the file of this name, changed by `edit`, and wait until it takes requests."""

    async def __call__(self, name: str, edit: Callable[[Config], Config] = ...) -> Envoy: ...
