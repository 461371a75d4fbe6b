"""What the tests of discovery share: a source that runs, and what it said."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from extproc.core.types import Node
from extproc.sources.discovery.source import Common, Naming, Source
from tests.builders import until


def common(*, keep_s: float = 300.0, naming: Naming | None = None) -> Common:
    return Common(naming or Naming(), keep_s, time.monotonic, random.Random(1))


@dataclass(slots=True)
class Told:
    """Every list that a source published, in order."""

    source: Source
    lists: list[tuple[Node, ...]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.lists[-1] if self.lists else ()

    @property
    def error(self) -> str | None:
        return self.source.state().error

    async def until_nodes(self, *addresses: str) -> None:
        """The last list has these addresses, in any order."""
        await until(lambda: bool(self.lists) and sorted(node.address for node in self.nodes) == sorted(addresses))

    async def until_error(self, part: str | None) -> None:
        """Something is wrong, and said so with these words; None: nothing is."""
        await until(lambda: self.error is None if part is None else part in (self.error or ""))


@asynccontextmanager
async def following(source: Source) -> AsyncIterator[Told]:
    """The source runs; afterwards it was cancelled and has left no task behind."""
    before = asyncio.all_tasks()
    told = Told(source)
    task = told.task = asyncio.create_task(source.run(told.lists.append))
    try:
        yield told
    finally:
        assert not task.done(), "a source runs until it is cancelled"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # what a test's server does for a connection ends with the connection
        await until(lambda: asyncio.all_tasks() <= before)
