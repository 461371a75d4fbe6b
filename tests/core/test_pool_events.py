"""Two sources, one answer: events where they are complete, else what was sent; nodes that leave; and trust."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from xxhash import xxh3_64_intdigest

from extproc.core.blocks import block_hashes
from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    End,
    FeedState,
    InferenceRequest,
    LoadSample,
    Node,
    Outcome,
    Reason,
    Rung,
    RungChange,
    Ticket,
)
from extproc.policies.least_ttft import LeastTtft

BLOCK = 4
LIVE, LOST, DOWN = FeedState.LIVE, FeedState.LOST, FeedState.DOWN


def seed(lora: str | None, salt: str | None) -> int:
    return xxh3_64_intdigest(f"{lora}\0{salt}".encode())


def ids(text: str) -> bytes:
    return b"".join(ord(letter).to_bytes(4, "little") for letter in text)


def nodes(count: int) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}:80", f"n{i}") for i in range(count)]


def router_of(*fleet: Node, cache_tokens: int = 100_000, exact: bool = True, block_tokens: int = BLOCK) -> Router:
    pool = Pool(
        Fleet(PrefillRate(1000.0), limits=LoadLimits(), price_weight=2.0),
        LeastTtft(),
        block_tokens,
        cache_tokens,
        exact,
    )
    pool.seed = seed
    pool.replace(fleet or nodes(2))
    return Router({"m": pool}, ticket_ttl_s=60.0, ticket_prefix="t")


def prompt(text: str, *, adapter: str | None = None, exact: bool = True, size: int = BLOCK) -> InferenceRequest:
    """One token a letter."""
    chain = block_hashes(ids(text), block_tokens=size, salt=seed(adapter, None))
    return InferenceRequest("m", len(text), {size: chain}, exact=exact, adapter=adapter)


def blocks_of(text: str, *, size: int = BLOCK) -> list[CacheEvent]:
    """What an engine says when it has computed a prompt: its hashes are whatever it likes."""
    count = len(text) // size
    names = tuple(hash(("engine", text[: size * (i + 1)])) for i in range(count))
    return [BlocksStored(names, None, ids(text[: count * size]), size, None, None, (b"",) * count, "gpu", 0)]


def removal(text: str, *ends: int) -> list[CacheEvent]:
    return [BlocksRemoved(tuple(hash(("engine", text[:end])) for end in ends), "gpu", 0)]


def routed(router: Router, request: InferenceRequest, now: float) -> Ticket:
    ticket = router.route(request, now=now)
    assert isinstance(ticket, Ticket)
    return ticket


def served(ticket: Ticket) -> Outcome:
    return Outcome(End.SERVED, ticket.decision.node.address, answered=True, client_ttft_s=0.1)


def rungs(router: Router) -> list[Rung]:
    pool = router.pools["m"]
    return [pool.rung(node.id) for node in pool.fleet.nodes()]


TEXT = "system prompt of some length, and a question"  # 11 blocks


def test_what_events_tell_is_matched_and_what_they_take_away_is_not() -> None:
    router = router_of()
    pool = router.pools["m"]
    router.feed("m", "n1", LIVE, now=0.0)
    router.cache_events("m", "n1", blocks_of(TEXT), now=0.0)
    assert pool.matched(prompt(TEXT + " more")) == {"n1": 44}
    assert pool.matched(prompt(TEXT)) == {"n1": 40}  # the block of the last token is computed again
    assert routed(router, prompt(TEXT), 1.0).decision.node.id == "n1"
    router.cache_events("m", "n1", removal(TEXT, 44, 40), now=0.0)
    assert pool.blocks("n1") == 9


def test_events_are_believed_instead_of_what_was_sent() -> None:
    router = router_of(nodes(1)[0])
    pool = router.pools["m"]
    router.feed("m", "n0", LIVE, now=0.0)
    ticket = routed(router, prompt(TEXT), 1.0)
    assert pool.matched(prompt(TEXT + TEXT)) == {"n0": 44}  # in flight
    router.settle(ticket.id, served(ticket), now=2.0)
    assert pool.matched(prompt(TEXT + TEXT)) == {}  # settled, and no event came
    router.cache_events("m", "n0", blocks_of(TEXT[:20]), now=2.0)
    assert pool.matched(prompt(TEXT + TEXT)) == {"n0": 20}


@pytest.mark.parametrize("state", [LOST, DOWN])
def test_without_complete_events_a_node_is_believed_to_hold_what_was_sent_there(state: FeedState) -> None:
    router = router_of(nodes(1)[0])
    pool = router.pools["m"]
    router.feed("m", "n0", LIVE, now=0.0)
    ticket = routed(router, prompt(TEXT), 1.0)
    router.settle(ticket.id, served(ticket), now=2.0)
    router.cache_events("m", "n0", blocks_of(TEXT[:20]), now=2.0)
    router.feed("m", "n0", state, now=3.0)
    assert pool.matched(prompt(TEXT + TEXT)) == {"n0": 44}
    router.feed("m", "n0", LIVE, now=4.0)
    assert pool.matched(prompt(TEXT + TEXT)) == ({} if state is LOST else {"n0": 20})
    assert pool.changes() == [
        RungChange("n0", Rung.PREDICTED, Rung.EVENTS),
        RungChange("n0", Rung.EVENTS, Rung.PREDICTED),
        RungChange("n0", Rung.PREDICTED, Rung.EVENTS),
    ]
    assert pool.changes() == []


def test_brothers_of_a_prompt_find_it_although_no_event_has_come_yet() -> None:
    router = router_of(*nodes(4))
    pool = router.pools["m"]
    for node in nodes(4):
        router.feed("m", node.id, LIVE, now=0.0)
    first = routed(router, prompt(TEXT + "question 1"), 1.0)
    home = first.decision.node.id
    assert pool.matched(prompt(TEXT + "question 2")) == {home: 52}
    second = routed(router, prompt(TEXT + "question 2"), 1.5)
    assert (second.decision.node.id, second.decision.reason) == (home, Reason.LOCALITY)
    router.settle(first.id, Outcome(End.FAILED), now=2.0)
    router.settle(second.id, Outcome(End.FAILED), now=2.0)
    assert pool.matched(prompt(TEXT + "question 1")) == {}


def test_a_prompt_that_was_hashed_on_counts_as_in_flight_with_all_of_it_until_it_is_settled() -> None:
    for right in (TEXT * 2, "not at all what was known " * 3):
        router = router_of(nodes(1)[0])
        pool = router.pools["m"]
        router.feed("m", "n0", LIVE, now=0.0)
        router.cache_events("m", "n0", blocks_of(TEXT[:8]), now=0.0)
        ticket = routed(router, prompt(TEXT), 1.0)
        router.extend(ticket.id, prompt(right), now=1.1)
        assert pool.matched(prompt(right + "more")) == {"n0": len(right) // 4 * 4}
        router.settle(ticket.id, served(ticket), now=2.0)
        assert pool.matched(prompt(TEXT * 2)) == {"n0": 8}


def test_what_is_not_exact_is_found_by_what_was_sent_whatever_events_say() -> None:
    router = router_of(nodes(1)[0])
    pool = router.pools["m"]
    router.feed("m", "n0", LIVE, now=0.0)
    router.settle(routed(router, prompt(TEXT, exact=False), 1.0).id, Outcome(End.CUT, answered=True), now=2.0)
    assert pool.matched(prompt(TEXT, exact=False)) == {"n0": 44}


@pytest.mark.parametrize("why", ["no salts", "not exact", "stranger", "no pool"])
def test_events_that_say_nothing_change_nothing(why: str) -> None:
    router = router_of(nodes(1)[0], exact=why != "not exact")
    pool = router.pools["m"]
    if why == "no salts":
        pool.seed = None
    name, node = ("other" if why == "no pool" else "m"), ("n7" if why == "stranger" else "n0")
    router.feed(name, node, LIVE, now=0.0)
    router.cache_events(name, node, blocks_of(TEXT), now=0.0)
    router.feed(name, node, LOST, now=0.0)
    assert (pool.blocks("n0"), rungs(router)) == (0, [Rung.PREDICTED])


def test_the_block_size_of_events_counts_where_scrapes_do_not_say() -> None:
    router = router_of(*nodes(2), block_tokens=16)
    pool = router.pools["m"]
    pool.observe("n1", LoadSample(0.0, block_tokens=8))
    for node in ("n0", "n1"):
        router.feed("m", node, LIVE, now=0.0)
        router.cache_events("m", node, blocks_of(TEXT), now=0.0)
    assert pool.block_sizes() == (4, 8)
    assert pool.matched(prompt(TEXT + "more")) == {"n0": 44}
    # what is told in blocks that are not the node's cannot be used: its feed is no better than none
    assert rungs(router) == [Rung.EVENTS, Rung.PREDICTED]
    router.cache_events("m", "n1", blocks_of(TEXT, size=8), now=0.0)
    assert rungs(router) == [Rung.EVENTS, Rung.EVENTS]


def test_a_restart_that_the_scrape_sees_voids_events_unless_the_feed_saw_it_first() -> None:
    for feed_first in (False, True):
        router = router_of(nodes(1)[0])
        pool = router.pools["m"]
        pool.observe("n0", LoadSample(0.0, started_at_s=1.0))
        router.feed("m", "n0", LIVE, now=0.1)
        router.cache_events("m", "n0", blocks_of(TEXT), now=0.1)
        ticket = routed(router, prompt(TEXT + TEXT), 0.2)
        pool.observe("n0", LoadSample(1.0, started_at_s=1.0))
        if feed_first:
            router.cache_events("m", "n0", [CacheCleared(), *blocks_of(TEXT[:8])], now=1.1)
        assert pool.observe("n0", LoadSample(1.2, started_at_s=2.0))
        assert pool.matched(prompt(TEXT + TEXT)) == ({"n0": 8} if feed_first else {})
        router.settle(ticket.id, served(ticket), now=2.0)


def test_blocks_from_before_the_feed_are_known_once_a_prompt_shows_them() -> None:
    router = router_of(nodes(1)[0])
    pool = router.pools["m"]
    router.feed("m", "n0", LIVE, now=0.0)
    ticket = routed(router, prompt(TEXT), 1.0)
    last = hash(("engine", TEXT[:40]))
    router.cache_events("m", "n0", [BlocksStored((5,), last, ids(TEXT[40:]), 4, None, None, (), "gpu", 0)], now=1.1)
    router.settle(ticket.id, served(ticket), now=1.2)
    assert pool.matched(prompt(TEXT + "more")) == {"n0": 44}


# ---- nodes that come and go ----


def test_a_node_that_flaps_a_thousand_times_under_load_leaves_nothing_behind() -> None:
    router, rng = router_of(*nodes(3)), random.Random(1)
    pool, out = router.pools["m"], []
    pool.replace(nodes(2))
    before = pool.segments()
    for i in range(1000):
        now = float(i)
        pool.replace(nodes(3))
        router.feed("m", "n2", LIVE, now=now)
        router.cache_events("m", "n2", blocks_of(f"{i:04}" * 8), now=now)
        pool.observe("n2", LoadSample(now, started_at_s=now))
        out.extend(routed(router, prompt(f"{i:02}{j:02}" * 8), now) for j in range(3))
        pool.replace(nodes(2) if i % 2 else [*nodes(2), replace(nodes(3)[2], address=f"10.0.1.{i % 250}:80")])
        assert pool.fleet.in_flight().get("n2", (0, 0)) == (0, 0)
        while len(out) > 20:
            ticket = out.pop(rng.randrange(len(out)))
            router.settle(ticket.id, rng.choice([served(ticket), Outcome(End.FAILED), Outcome(End.CUT)]), now=now)
    assert sum(pool.fleet.draining().values()) <= 20
    for ticket in out:
        router.settle(ticket.id, Outcome(End.CUT), now=1000.0)
    assert pool.fleet.in_flight() == {"n0": (0, 0), "n1": (0, 0)}
    assert pool.fleet.draining() == {}
    pool.replace([])
    assert pool.segments() == before == 0


@pytest.mark.parametrize("how", ["came back", "moved", "another rank", "restarted", "pool made anew"])
def test_a_ticket_does_not_touch_the_next_generation_of_its_node(how: str) -> None:
    home = nodes(1)[0]
    router = router_of(home)
    pool = router.pools["m"]
    pool.observe("n0", LoadSample(0.0, started_at_s=1.0))
    router.feed("m", "n0", LIVE, now=0.0)
    ticket, other = routed(router, prompt(TEXT), 1.0), routed(router, prompt(TEXT[:20]), 1.0)
    if how == "came back":
        pool.replace([])
        pool.replace([home])
    elif how == "moved":
        pool.replace([replace(home, address="10.0.0.9:80")])
    elif how == "another rank":
        pool.replace([replace(home, rank=1)])
    elif how == "restarted":
        pool.observe("n0", LoadSample(2.0, started_at_s=2.0))
    else:
        router.pools["m"] = pool = router_of(home).pools["m"]
    router.feed("m", "n0", LIVE, now=2.0)
    assert pool.matched(prompt(TEXT + TEXT)) == {}
    assert router.extend(other.id, prompt(TEXT * 2), now=2.0)
    assert pool.blocks("n0") == pool.segments() == 0
    new = routed(router, prompt(TEXT), 3.0)
    router.settle(ticket.id, Outcome(End.FAILED), now=4.0)
    router.settle(other.id, served(other), now=4.0)
    assert pool.matched(prompt(TEXT + TEXT)) == {"n0": 44}  # in flight, to the new one
    assert pool.holders(prompt(TEXT).chains) == {"n0": 44}
    router.settle(new.id, served(new), now=5.0)
    assert pool.fleet.in_flight() == {"n0": (0, 0)}


def test_requests_to_a_node_that_left_are_counted_until_they_are_settled() -> None:
    router = router_of(nodes(1)[0])
    tickets = [routed(router, prompt(TEXT), 1.0) for _ in range(2)]
    router.pools["m"].replace([])
    assert router.pools["m"].fleet.draining() == {"n0": 2}
    for ticket in tickets:
        router.settle(ticket.id, served(ticket), now=2.0)
    assert router.pools["m"].fleet.draining() == {}


# ---- ranks ----

RANKS = [Node(f"{host}-{rank}", f"10.0.0.{host}:80", "c", rank=rank) for host in (1, 2) for rank in (0, 1)]


def test_ranks_of_one_address_each_have_their_cache_and_answer_what_they_were_sent() -> None:
    router = router_of(*RANKS)
    pool = router.pools["m"]
    for node in RANKS:
        router.feed("m", node.id, LIVE, now=0.0)
    router.cache_events("m", "1-1", blocks_of(TEXT), now=0.0)
    ticket = routed(router, prompt(TEXT + "more"), 1.0)
    assert ticket.decision.node == RANKS[1]
    settled = router.settle(ticket.id, served(ticket), now=2.0)
    assert settled is not None
    assert not settled.retried_elsewhere
    assert pool.holders(prompt(TEXT).chains) == {"1-1": 44}


@pytest.mark.parametrize("ranked", [True, False])
def test_a_repeated_request_is_answered_by_the_same_rank_of_another_address(ranked: bool) -> None:
    fleet = RANKS if ranked else [replace(node, rank=None) for node in RANKS]
    router = router_of(*fleet)
    ticket = routed(router, prompt(TEXT), 1.0)
    other = "10.0.0.2:80" if ticket.decision.node.address == "10.0.0.1:80" else "10.0.0.1:80"
    settled = router.settle(ticket.id, Outcome(End.SERVED, other, True, 0.1, attempts=2), now=2.0)
    assert settled is not None
    assert settled.retried_elsewhere
    there = {f"{other[7]}-{ticket.decision.node.rank}": 44} if ranked else {}  # which one it was nobody knows
    assert router.pools["m"].holders(prompt(TEXT).chains) == there


# ---- adapters ----


@pytest.mark.parametrize(
    ("loras", "adapter", "seconds"),
    [
        (None, "sql", 0.0),  # the engine does not say
        ((), "sql", 0.5),
        (("sql",), "sql", 0.0),
        (("chat",), "sql", 0.5),
        ((), None, 0.0),
    ],
)
def test_a_node_that_has_to_load_an_adapter_costs_that(
    loras: tuple[str, ...] | None, adapter: str | None, seconds: float
) -> None:
    router = router_of(nodes(1)[0])
    router.pools["m"].observe("n0", LoadSample(1.0, loras=loras))
    ticket = routed(router, prompt(TEXT, adapter=adapter), 1.1)
    assert ticket.decision.chosen.lora_s == seconds


def test_requests_for_an_adapter_go_where_it_is_loaded_or_being_loaded() -> None:
    router = router_of(*nodes(4))
    for node in nodes(4):
        router.pools["m"].observe(node.id, LoadSample(1.0, loras=()))
    chosen = [routed(router, prompt(f"{i}" * 40, adapter="sql"), 1.1).decision.node.id for i in range(6)]
    assert len(set(chosen)) == 1
    router.pools["m"].observe("n2", LoadSample(2.0, loras=("chat",)))
    assert routed(router, prompt("x" * 40, adapter="chat"), 2.1).decision.node.id == "n2"


# ---- how far it is believed ----


def drive(router: Router, minutes: float, hit: dict[str, float], *, begin_s: float = 0.0) -> dict[str, float]:
    """Conversations of which the engines find `hit` cached, whatever we think; how many requests each node had."""
    pool, now = router.pools["m"], begin_s
    counted = {node.id: [1000.0 * begin_s, 0.0] for node in pool.fleet.nodes()}
    had = dict.fromkeys(counted, 0.0)
    number = 0
    while now < begin_s + 60 * minutes:
        for _ in range(2):
            number += 1
            ticket = routed(router, prompt(f"{number % 7}{TEXT}" * 20 + f"{begin_s}{number}" * 8), now)
            node = ticket.decision.node.id
            had[node] += 1
            counted[node][0] += ticket.request.prompt_tokens
            counted[node][1] += hit[node] * ticket.request.prompt_tokens
            router.settle(ticket.id, served(ticket), now=now + 0.1)
        now += 0.5
        for node, (queries, hits) in counted.items():
            pool.observe(node, LoadSample(now, prefix_queries=queries, prefix_hits=hits, prompt_tokens=queries))
    return had


def test_a_node_that_never_finds_what_it_should_hold_is_believed_less_within_a_minute() -> None:
    router = router_of(*nodes(2))
    pool = router.pools["m"]
    had = drive(router, 1.0, {"n0": 0.0, "n1": 0.9})
    assert pool.rung("n1") is Rung.PREDICTED
    assert pool.rung("n0") in (Rung.HASH, Rung.LOAD)
    assert pool.changes()[0] == RungChange("n0", Rung.PREDICTED, Rung.HASH)
    later = drive(router, 1.0, {"n0": 0.0, "n1": 0.9}, begin_s=60.0)
    assert had["n0"] > 0
    assert pool.trust("n1") == pytest.approx(1.0, abs=0.2)
    assert not any(
        each.matched_tokens for each in pool.candidates(prompt("0" + TEXT * 20), now=200.0) if each.node.id == "n0"
    )
    assert later["n1"] > later["n0"]


def test_the_events_of_a_node_that_finds_nothing_are_not_believed_either() -> None:
    router = router_of(nodes(1)[0])
    pool = router.pools["m"]
    router.feed("m", "n0", LIVE, now=0.0)
    for i in range(7):
        router.cache_events("m", "n0", blocks_of(f"{i}{TEXT}" * 20), now=0.0)
    drive(router, 0.5, {"n0": 0.1})
    assert [(each.before, each.after) for each in pool.changes()][:2] == [
        (Rung.PREDICTED, Rung.EVENTS),
        (Rung.EVENTS, Rung.PREDICTED),
    ]
    router.feed("m", "n0", LOST, now=31.0)
    router.feed("m", "n0", LIVE, now=32.0)  # known from the start again
    assert pool.rung("n0") is Rung.EVENTS


def hoped(router: Router, request: InferenceRequest) -> list[str]:
    """The nodes of which more is expected than to compute all of it."""
    found = router.pools["m"].candidates(request, now=500.0)
    return [each.node.id for each in found if each.uncached_tokens < request.prompt_tokens]


def test_hashing_sends_prompts_that_begin_alike_to_one_node_while_it_has_room() -> None:
    router = router_of(*nodes(4))
    pool = router.pools["m"]
    for node in pool.fleet.nodes():
        known = pool._known[node.id]
        known.trust.depth, known.trust.hits = 2, 0.8
        pool._note(node.id, Rung.PREDICTED)
    homes = set()
    for i in range(12):
        ticket = routed(router, prompt("one family of prompts" * 10 + f"{i}" * 8), 10.0 * i)
        homes.add(ticket.decision.node.id)
        assert ticket.decision.chosen.matched_tokens == 0
        router.settle(ticket.id, served(ticket), now=10.0 * i + 1)
    assert len(homes) == 1
    home = homes.pop()
    request = prompt("one family of prompts" * 10)
    for _ in range(2):
        assert hoped(router, request) == [home]
        pool.fleet.reserve(home, 0, now=500.0)
    assert hoped(router, request) not in ([], [home])  # more in flight than the mean: the next one's turn


def test_hashes_of_prompts_are_read_as_they_are_written() -> None:
    request = prompt(TEXT)
    assert array("Q", request.chains[BLOCK])[0] == xxh3_64_intdigest(ids(TEXT[:4]), seed(None, None))
