"""A fleet's nodes as pools, scraper and feeds get them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from extproc.app import apply_pools
from extproc.config import Config, ConfigError, EventsConfig, parse
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.types import BlocksStored, FeedState, InferenceRequest, LoadSample, Node, Rung
from extproc.fleets import Fleets, check, each_rank, endpoint
from extproc.sources.kv_events import KvFeed
from extproc.sources.scraper import Scraper, ScrapeSettings

TWO = """
[scrape]
enabled = false
[[models]]
name = "a"
tokenizer = "t"
[models.events]
[[models.nodes]]
name = "n"
address = "127.0.0.1:1"
[[models]]
name = "b"
[[models.nodes]]
name = "n"
address = "127.0.0.1:2"
"""


def fleets_of(config: Config) -> tuple[Fleets, dict[str, Pool], KvFeed]:
    pools: dict[str, Pool] = {}
    apply_pools(pools, config)
    pools["a"].seed = lambda lora, salt: 7
    router = Router(pools, ticket_ttl_s=600.0, ticket_prefix="t-")
    feeds = KvFeed(router, time.monotonic)
    scraper = Scraper(ScrapeSettings(0.2, 1.0, "/metrics", 5.0), time.monotonic, random.Random(1))
    return Fleets(router, scraper, feeds, config, time.monotonic), pools, feeds


def stored(tokens: int) -> BlocksStored:
    return BlocksStored((1,), None, bytes(4 * tokens), tokens, None, None, (b"",), "gpu", 0)


async def test_what_events_told_survives_changes_elsewhere_and_not_a_restart_that_a_scrape_saw() -> None:
    config = parse(TWO)
    fleets, pools, feeds = fleets_of(config)
    try:
        fleets.follow(config)
        pool = pools["a"]
        (before,) = feeds.statuses()
        pool.feed("n", FeedState.LIVE, now=1.0)
        pool.observe("n", LoadSample(1.0, block_tokens=16, started_at_s=5.0))
        pool.feed("n", FeedState.LIVE, now=1.0)
        pool.cache_events("n", (stored(16),), now=1.0)
        assert (pool.rung("n"), pool.blocks("n")) == (Rung.EVENTS, 1)
        fleets._apply("b", (Node("other", "127.0.0.1:3", "other"),))
        assert list(feeds.statuses()) == [before]
        assert (pool.rung("n"), pool.blocks("n")) == (Rung.EVENTS, 1)
        fleets.reread()
        assert list(feeds.statuses()) == [before]
        pool.observe("n", LoadSample(2.0, block_tokens=16, started_at_s=9.0))
        fleets.reread()
        (after,) = feeds.statuses()
        assert after != before  # a new feed, which reads from the start
        assert pool.rung("n") is Rung.PREDICTED
    finally:
        await fleets.close()


async def test_a_pool_whose_events_say_nothing_any_more_is_taken_from_predictions() -> None:
    config = parse(TWO)
    fleets, pools, feeds = fleets_of(config)
    try:
        fleets.follow(config)
        pool = pools["a"]
        pool.feed("n", FeedState.LIVE, now=1.0)
        pool.cache_events("n", (stored(64),), now=1.0)
        pool.feed("n", FeedState.LIVE, now=1.0)
        assert pool.rung("n") is Rung.EVENTS
        request = InferenceRequest("a", 64, {64: b"12345678"}, exact=True)
        pool.store("n", request, now=1.0)
        pool.seed = None
        fleets.follow(config)
        assert not feeds.statuses()
        assert pool.rung("n") is Rung.PREDICTED
        assert pool.holders(request.chains) == {"n": 64}
    finally:
        await fleets.close()


def test_each_rank_is_a_node_and_no_cache_is_one_twice() -> None:
    nodes = [Node("a", "10.0.0.1:1", "a"), Node("x", "10.0.0.1:1", "x", rank=1), Node("b/0", "10.0.0.2:1", "b", rank=5)]
    found = each_rank([*nodes, Node("b", "10.0.0.3:1", "b")], 2)
    assert [(node.id, node.address, node.rank) for node in found] == [
        ("a/0", "10.0.0.1:1", 0),
        ("a/1", "10.0.0.1:1", 1),
        ("b/0", "10.0.0.2:1", 5),
        ("b/1", "10.0.0.3:1", 1),
    ]
    assert each_rank(nodes[:1], 1) == nodes[:1]


@pytest.mark.parametrize(
    ("address", "rank", "events", "expected"),
    [
        ("10.0.0.1:8000", None, {}, ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")),
        ("10.0.0.1:8000", 2, {}, ("tcp://10.0.0.1:5559", "tcp://10.0.0.1:5560")),
        ("[fd00::1]:8000", None, {"replay": ""}, ("tcp://[fd00::1]:5557", None)),
        ("10.0.0.1:8000", None, {"endpoint": "ipc:///run/events"}, ("ipc:///run/events", "tcp://10.0.0.1:5558")),
    ],
)
def test_where_the_events_of_a_node_come_from(
    address: str, rank: int | None, events: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    found = endpoint("m", Node("n", address, "c", rank=rank), None, EventsConfig(**events), generation=1)
    assert (found.events, found.replay) == expected


WRONG = {
    "a rank without a port": ("ranks = 2\n[models.events]\nendpoint = 'ipc:///run/e'\n", "rank 1 has no port"),
    "a resolver that is none": (
        '[[models.sources]]\nfrom = "dns"\nname = "a"\nresolvers = ["non sense"]\n',
        "non sense",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "says"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_followed_is_refused_before_anything_is_changed(text: str, says: str) -> None:
    config = parse(
        f'[[models]]\nname = "m"\ntokenizer = "t"\n{text}[[models.nodes]]\nname = "n"\naddress = "10.0.0.1:1"\n'
    )
    with pytest.raises(ConfigError, match=says) as refused:
        check(config)
    assert "$.models[0]" in str(refused.value)
