"""A prefix that many share is on as many nodes as its share of the traffic needs, and on no more."""

from __future__ import annotations

import pytest

from extproc.core.blocks import TOKEN_BYTES, block_hashes
from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits
from extproc.core.hot import HotPrefixes, nodes_needed
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.types import End, InferenceRequest, Node, Outcome, Ticket
from extproc.policies.least_ttft import LeastTtft

SIZE = 16
NODES = 8


@pytest.mark.parametrize(
    ("share", "nodes", "needed"), [(0.05, 8, 1), (0.5, 8, 4), (0.51, 8, 5), (1.0, 8, 8), (0.3, 2, 1), (0.0, 8, 0)]
)
def test_each_node_gets_no_more_of_a_prefix_than_its_share(share: float, nodes: int, needed: int) -> None:
    assert nodes_needed(share, nodes) == needed


def test_the_share_is_that_of_the_last_requests() -> None:
    hot = HotPrefixes(requests=20.0)
    assert hot.used(None) == 0.0
    for _ in range(200):
        steady = hot.used(1)
        other = hot.used(2)
    assert [steady, other] == pytest.approx([0.5, 0.5], abs=0.05)
    for _ in range(100):
        hot.used(2)
    assert hot.used(1) < 0.1


def test_however_many_prefixes_there_are_and_however_long_it_runs_it_stays_small_and_right() -> None:
    hot = HotPrefixes(requests=5.0)
    share = 0.0
    for number in range(20_000):  # sums are brought back to size on the way
        share = hot.used(-1)
        hot.used(number)
    assert share == pytest.approx(0.55, abs=0.1)
    assert len(hot._sums) == 1024


def spread(*, share: float, requests: int = 400) -> tuple[int, float]:
    """On how many nodes a prefix of 2,000 tokens is, and the busiest node's requests over the mean."""
    fleet = Fleet(PrefillRate(10_000.0), limits=LoadLimits(), price_weight=2.0)
    fleet.thrift = 1.0  # as dear as can be: only what is hot is replicated
    pool = Pool(fleet, LeastTtft(), SIZE, 1_000_000, exact=True)
    pool.replace([Node(f"n{i}", f"10.0.0.{i}:80", f"n{i}") for i in range(NODES)])
    router = Router({"m": pool}, ticket_ttl_s=600.0, ticket_prefix="t")
    shared = "s" * 2000
    counts: dict[str, int] = {}
    open_tickets: list[Ticket] = []
    for number in range(requests):
        now = number * 0.02
        own = f"{number:05}" * 40
        hot = (number * 0.618) % 1.0 < share
        data = "".join(letter * TOKEN_BYTES for letter in (shared + own if hot else own * 11)).encode()
        chain = block_hashes(data, block_tokens=SIZE, salt=1)
        ticket = router.route(InferenceRequest("m", len(data) // TOKEN_BYTES, {SIZE: chain}, exact=True), now=now)
        assert isinstance(ticket, Ticket)
        node = ticket.decision.node
        counts[node.id] = counts.get(node.id, 0) + (number >= requests // 2)
        open_tickets.append(ticket)
        if len(open_tickets) > 40:
            done = open_tickets.pop(0)
            router.settle(done.id, Outcome(End.SERVED, done.decision.node.address, True, 0.2), now=now)
    data = "".join(letter * TOKEN_BYTES for letter in shared).encode()
    holders = pool.holders({SIZE: block_hashes(data, block_tokens=SIZE, salt=1)})
    return sum(tokens >= 2000 // SIZE * SIZE for tokens in holders.values()), max(counts.values()) * NODES / sum(
        counts.values()
    )


@pytest.mark.parametrize(("share", "least", "most"), [(0.8, 6, 8), (0.4, 3, 5)])
def test_a_hot_prefix_is_on_as_many_nodes_as_its_share_needs(share: float, least: int, most: int) -> None:
    nodes, busiest = spread(share=share)
    assert least <= nodes <= most
    assert busiest < 1.3
