"""Runs the sources of every pool, and makes one list of what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

from extproc.core.types import Node
from extproc.sources.discovery.source import Source, SourceState

Apply: TypeAlias = Callable[[str, tuple[Node, ...]], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where the nodes of one pool come from."""

    static: tuple[Node, ...] = ()
    sources: Mapping[Hashable, Callable[[], Source]] = field(default_factory=dict)
    """In order of precedence, after `static`. Where the key is the same as before, the source that runs is kept."""


@dataclass(slots=True, eq=False)
class _Running:
    source: Source
    task: asyncio.Task[None] | None = None
    nodes: tuple[Node, ...] | None = None
    """None: it has not said any yet."""


@dataclass(slots=True)
class _Pool:
    static: tuple[Node, ...] = ()
    running: dict[Hashable, _Running] = field(default_factory=dict)
    departed: tuple[Node, ...] = ()
    """Of sources that were taken away: they stay until the new ones have spoken, lest caches be forgotten between."""

    def merged(self) -> tuple[Node, ...]:
        if all(each.nodes is not None for each in self.running.values()):
            self.departed = ()
        return merge([self.static, *(each.nodes or () for each in self.running.values()), self.departed])


class Discovery:
    """Owns a task for each source; calls `apply` with a pool's complete list whenever it changed."""

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._pools: dict[str, _Pool] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def replace(self, pools: Mapping[str, Wanted]) -> None:
        """Run these sources and no others, and apply to each of `pools` what is known by now. Call it on the loop."""
        for name in self._pools.keys() - pools.keys():
            for running in self._pools.pop(name).running.values():
                self._end(running)
        for name, wanted in pools.items():
            pool = self._pools.setdefault(name, _Pool())
            pool.static = wanted.static
            before = pool.running
            pool.running = {
                key: before.pop(key) if key in before else _Running(make()) for key, make in wanted.sources.items()
            }
            for running in before.values():
                pool.departed += running.nodes or ()
                self._end(running)
            for running in pool.running.values():
                if running.task is None:
                    running.task = asyncio.create_task(
                        running.source.run(self._publisher(name, pool, running)), name=f"discovery of {name}"
                    )
            self._apply(name, pool.merged())

    def state(self) -> dict[str, tuple[SourceState, ...]]:
        """How the sources of each pool are."""
        return {
            name: tuple(each.source.state() for each in pool.running.values()) for name, pool in self._pools.items()
        }

    async def close(self) -> None:
        """Cancel and await every task; what was applied stays."""
        for pool in self._pools.values():
            for running in pool.running.values():
                self._end(running)
        self._pools.clear()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _publisher(self, name: str, pool: _Pool, running: _Running) -> Callable[[tuple[Node, ...]], None]:
        def publish(nodes: tuple[Node, ...]) -> None:
            running.nodes = nodes
            if self._pools.get(name) is pool and running in pool.running.values():
                self._apply(name, pool.merged())

        return publish

    def _end(self, running: _Running) -> None:
        if running.task is not None:
            running.task.cancel()
            self._ending.add(running.task)
            running.task.add_done_callback(self._ending.discard)


def merge(groups: Iterable[Iterable[Node]]) -> tuple[Node, ...]:
    """One node for each address and rank, the first that is named; an id that is taken gets the address added."""
    caches: dict[tuple[str, int | None], Node] = {}
    for node in chain.from_iterable(groups):
        caches.setdefault((node.address, node.rank), node)
    taken: set[str] = set()
    merged = []
    for node in caches.values():
        node_id = node.id
        while node_id in taken:
            node_id = f"{node_id}@{node.address}"
        taken.add(node_id)
        merged.append(node if node_id == node.id else replace(node, id=node_id))
    return tuple(merged)
