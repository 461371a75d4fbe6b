"""One real engine with two data-parallel ranks: each request goes to the rank that holds its prefix."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import corpus
import pytest
import servers
from corpus import MODEL
from report import REPORT
from routing import Talk, figures, name_of, routing, within, worst
from servers import BLOCK_TOKENS, Fleet

from extproc.core.types import Reason, Rung

RANKS = 2
CONVERSATIONS, AT_ONCE = 24, 4
TALK = Talk(turns=3, systems=CONVERSATIONS, system_words=120, question_words=(15, 40), answer_tokens=(64, 128))
"""Nothing is shared, so that one rank alone can hold what a turn continues."""
BLOCKS = 1024
"""More than all of it needs: nothing is evicted."""
LEAST_SHARE = 0.25
REQUIRED_THERE, REQUIRED = 0.9, 0.95
"""A few may go where there is less to wait for."""
SERVED = "parts"


@pytest.fixture(scope="module")
def fleet(directories: dict[str, Path], folder: Path) -> Iterator[Fleet]:
    with servers.serving(directories[SERVED], folder, ("node-1",), blocks=BLOCKS, ranks=RANKS) as fleet:
        for engine in fleet.engines.values():
            engine.give_way(10)
        yield fleet


async def test_each_turn_goes_to_the_rank_that_holds_the_turn_before(fleet: Fleet, tmp_path: Path) -> None:
    async with routing(fleet, tmp_path, events=True, haste=False) as router:
        began_s = time.monotonic()
        numbers, left = iter(range(CONVERSATIONS)), iter(range(CONVERSATIONS * TALK.turns))
        await asyncio.gather(*(TALK.hold(router, numbers, left) for _ in range(AT_ONCE)))
        await router.settled()
        rungs = [router.rung(node) for node in fleet.nodes]
    served = router.served()
    by_name = {name: each for name, each in router.routed.items() if each in served}
    names = ((name_of(i, turn - 1), name_of(i, turn)) for i in range(CONVERSATIONS) for turn in range(1, TALK.turns))
    pairs = [(by_name[before], by_name[name]) for before, name in names if before in by_name and name in by_name]
    there = [after for before, after in pairs if after.node == before.node]
    # by the engine's own word: every whole block of the prompt before
    held = [after.cached is not None and after.cached > before.prompt_tokens - BLOCK_TOKENS for before, after in pairs]
    reasons = Counter(after.ticket.decision.reason for _, after in pairs)
    by_rank = Counter(each.node for each in served)
    REPORT.figures += [
        figures("two ranks", router, 1, began_s),
        f"  {dict(by_rank)}; {len(there)} of {len(pairs)} later turns went to the rank of the turn before, and "
        f"{sum(held)} found its prompt there; {within([after for _, after in pairs], 1):.1%} within one block; "
        f"{ {reason.value: number for reason, number in reasons.items()} }",
        *(f"  {each}" for each in worst(served)[:4]),
    ]
    assert not router.failed
    assert len(pairs) >= REQUIRED * CONVERSATIONS * (TALK.turns - 1)
    assert rungs == [Rung.EVENTS] * RANKS
    assert [by_rank[node] >= LEAST_SHARE * len(served) for node in fleet.nodes] == [True] * RANKS
    assert len(there) >= REQUIRED_THERE * len(pairs)
    assert reasons[Reason.LOCALITY] >= REQUIRED_THERE * len(pairs)
    assert sum(held) >= REQUIRED_THERE * len(pairs)
    assert within([after for _, after in pairs], 1) >= REQUIRED


async def test_the_header_names_the_rank_whose_cache_is_used(fleet: Fleet) -> None:
    """Nobody but the engine takes part: what the test above rests on."""
    (engine,) = fleet.engines.values()
    async with aiohttp.ClientSession() as http:

        async def cached(prompt: str, rank: int) -> int:
            body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
            headers = {"x-data-parallel-rank": str(rank), "content-type": "application/json"}
            url = f"http://127.0.0.1:{engine.port}{corpus.CHAT}"
            async with http.post(url, data=json.dumps(body), headers=headers) as answer:
                page = await answer.json()
                assert answer.status == 200, page
            return int(page["usage"]["prompt_tokens_details"]["cached_tokens"])

        for home in range(RANKS):
            prompt = corpus.prose(random.Random(f"rank {home}"), 200)
            found = [await cached(prompt, rank) for rank in (home, home, home, 1 - home, 1 - home)]
            REPORT.figures.append(f"  asked of rank {home} three times, and of the other twice: {found} tokens cached")
            cold, warm, again, elsewhere, warm_elsewhere = found
            assert warm == again == warm_elsewhere >= 10 * BLOCK_TOKENS
            assert max(cold, elsewhere) < BLOCK_TOKENS
