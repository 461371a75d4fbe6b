"""One decision and its settlement: what is reserved, recorded, released and taken back."""

from __future__ import annotations

import random

import pytest

from extproc.core.blocks import block_hashes
from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits
from extproc.core.prefix_map import PrefixMap
from extproc.core.router import Pool, Router
from extproc.core.types import (
    End,
    InferenceRequest,
    LoadSample,
    Node,
    Outcome,
    Reason,
    Refusal,
    Rejection,
    Ticket,
)
from extproc.policies.least_ttft import LeastTtft

BLOCK = 4


def nodes(count: int) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}:80", f"n{i}") for i in range(count)]


def router_of(count: int, *, ttl_s: float = 60.0, max_tickets: int = 1000, cache_tokens: int = 100_000) -> Router:
    fleet = Fleet(PrefillRate(1000.0), limits=LoadLimits(), price_weight=2.0)
    pool = Pool(fleet, PrefixMap(), LeastTtft(), BLOCK, cache_tokens)
    pool.replace(nodes(count))
    return Router({"m": pool}, ticket_ttl_s=ttl_s, ticket_prefix="t", max_tickets=max_tickets)


def prompt(text: str, *, cut: bool = False, salt: int = 1) -> InferenceRequest:
    """One token a letter."""
    data = "".join(letter * 4 for letter in text).encode()
    chain = block_hashes(data, block_tokens=BLOCK, salt=salt)
    return InferenceRequest(
        "m", len(text), chain, block_hashes(data, block_tokens=BLOCK, salt=-salt % 2**64) if cut else None
    )


def routed(router: Router, request: InferenceRequest, now: float) -> Ticket:
    ticket = router.route(request, now=now)
    assert isinstance(ticket, Ticket)
    return ticket


def served(ticket: Ticket, **more: float) -> Outcome:
    return Outcome(End.SERVED, ticket.decision.node.address, answered=True, client_ttft_s=0.1, **more)  # type: ignore[arg-type]


def in_flight(router: Router) -> int:
    return sum(requests for requests, _ in router.pools["m"].fleet.in_flight().values())


def test_the_turns_of_a_conversation_stay_on_the_node_that_holds_it() -> None:
    router = router_of(4)
    chosen, text = set(), "system prompt of some length, "
    for turn in range(6):
        text += f"and turn number {turn}, which adds to it. "
        ticket = routed(router, prompt(text), now=float(turn))
        chosen.add(ticket.decision.node.id)
        router.settle(ticket.id, served(ticket), now=turn + 0.5)
        assert ticket.decision.reason is (Reason.LOCALITY if turn else Reason.COLD)
    assert len(chosen) == 1


def test_a_burst_of_equal_arrivals_does_not_herd() -> None:
    router = router_of(4)
    cold = [routed(router, prompt("0123456789" * 20, salt=i + 1), now=1.0).decision.node.id for i in range(40)]
    assert {cold.count(node) for node in set(cold)} == {10}


def test_a_hot_prefix_does_not_pin_one_node() -> None:
    router = router_of(4)
    rng = random.Random(1)
    hot = "h" * 200
    counts: dict[str, int] = {}
    for i in range(400):
        text = hot + "".join(rng.choices("abcdef", k=400))  # two thirds of each prompt are new
        ticket = routed(router, prompt(text), now=i * 0.12)  # 85 % of what four nodes can prefill
        counts[ticket.decision.node.id] = counts.get(ticket.decision.node.id, 0) + 1
    assert max(counts.values()) <= 1.25 * sum(counts.values()) / 4


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(End.SERVED, "10.0.0.0:80", answered=True, client_ttft_s=0.1),
        Outcome(End.FAILED),
        Outcome(End.CUT),
        Outcome(End.SERVED, "10.0.0.1:80", answered=True, client_ttft_s=0.1, attempts=2),
    ],
)
def test_a_ticket_is_settled_exactly_once(outcome: Outcome) -> None:
    router = router_of(2)
    ticket = routed(router, prompt("a" * 40), now=1.0)
    assert in_flight(router) == 1
    assert router.settle(ticket.id, outcome, now=2.0) is not None
    assert in_flight(router) == 0
    assert router.settle(ticket.id, outcome, now=2.0) is None
    assert in_flight(router) == 0
    assert len(router) == 0


def test_what_a_failed_request_was_to_cache_is_forgotten() -> None:
    router = router_of(1)
    ticket = routed(router, prompt("a" * 40), now=1.0)
    router.settle(ticket.id, Outcome(End.FAILED), now=1.1)
    assert routed(router, prompt("a" * 40), now=2.0).decision.reason is Reason.COLD


def test_an_answer_from_another_node_moves_the_prefix_there() -> None:
    router = router_of(3)
    ticket = routed(router, prompt("a" * 40), now=1.0)
    other = next(node for node in nodes(3) if node.id != ticket.decision.node.id)
    settled = router.settle(ticket.id, Outcome(End.SERVED, other.address, True, 0.1, attempts=2), now=1.5)
    assert settled is not None
    assert settled.retried_elsewhere
    again = routed(router, prompt("a" * 40), now=2.0).decision
    assert (again.node.id, again.reason) == (other.id, Reason.LOCALITY)


@pytest.mark.parametrize("end", [End.SERVED, End.FAILED])
def test_a_decision_that_came_too_late_says_nothing_against_its_node(end: End) -> None:
    router = router_of(2)
    first = routed(router, prompt("a" * 400), now=1.0)
    home, other = first.decision.node, next(node for node in nodes(2) if node.id != first.decision.node.id)
    router.settle(first.id, Outcome(End.SERVED, home.address, True, 0.1), now=1.5)
    late = routed(router, prompt("a" * 400), now=2.0)
    settled = router.settle(late.id, Outcome(end, other.address, end is End.SERVED, 0.1, routed=False), now=2.5)
    assert settled is not None
    assert not settled.retried_elsewhere
    assert not any(each.suspect for each in routed(router, prompt("b" * 400), now=2.6).decision.ranked)


@pytest.mark.parametrize(
    ("address", "served_by", "attempts", "elsewhere"),
    [
        ("10.0.0.0:80", "10.0.0.0:80", 1, False),
        ("10.0.0.0:80", "10.0.0.1:80", 1, True),
        ("10.0.0.0:80", "10.9.9.9:80", 1, True),  # a node that only Envoy knows
        ("[fd00::1]:80", "[fd00::1]:80", 1, False),
        ("[fd00::1]:80", "[fd00::2]:80", 1, True),
        ("llm-0.llm:80", "10.9.9.9:80", 1, False),  # the access log has no names: its own address
        ("llm-0.llm:80", "10.0.0.1:80", 1, True),  # that is the other node's
        ("llm-0.llm:80", "10.9.9.9:80", 2, True),
    ],
)
def test_who_answered_is_told_by_address_and_by_exclusion(
    address: str, served_by: str, attempts: int, elsewhere: bool
) -> None:
    router = router_of(2)
    router.pools["m"].replace([Node("n0", address, "n0"), nodes(2)[1]])
    while (ticket := routed(router, prompt("a" * 40), now=1.0)).decision.node.id != "n0":
        pass
    settled = router.settle(ticket.id, Outcome(End.SERVED, served_by, True, 0.1, attempts=attempts), now=2.0)
    assert settled is not None
    assert settled.retried_elsewhere is elsewhere


def test_a_dead_node_is_no_magnet() -> None:
    router = router_of(4, cache_tokens=10_000_000)
    counts = dict.fromkeys(("n0", "n1", "n2", "n3"), 0)
    for i in range(1000):
        now = i * 0.04
        ticket = routed(router, prompt("0123456789" * 4, salt=i + 1), now=now)
        counts[ticket.decision.node.id] += 1
        if ticket.decision.node.id == "n0":  # refuses; the retry goes to the next choice
            other = ticket.decision.ranked[1].node.address
            router.settle(ticket.id, Outcome(End.SERVED, other, True, 0.1, attempts=2), now=now + 0.1)
        else:
            router.settle(ticket.id, served(ticket), now=now + 0.1)
    assert counts["n0"] <= 20
    assert min(counts["n1"], counts["n2"], counts["n3"]) >= 250


def test_a_client_that_leaves_makes_no_node_suspect() -> None:
    router = router_of(2)
    for i in range(10):
        ticket = routed(router, prompt("a" * 40), now=float(i))
        router.settle(ticket.id, Outcome(End.CUT), now=i + 0.1)
    candidates = router.pools["m"].fleet.candidates({}, block_tokens=BLOCK, prompt_tokens=1, now=10.0)
    assert not any(each.suspect for each in candidates)


def test_tickets_are_bounded_by_the_bytes_of_their_blocks_as_well() -> None:
    fleet = Fleet(PrefillRate(1000.0), limits=LoadLimits(), price_weight=2.0)
    pool = Pool(fleet, PrefixMap(), LeastTtft(), BLOCK, 100_000)
    pool.replace(nodes(2))
    router = Router({"m": pool}, ticket_ttl_s=600.0, ticket_prefix="t", max_chain_bytes=1000)
    for i in range(50):
        routed(router, prompt("a" * 40, salt=i + 1), now=float(i))  # ten blocks: 80 bytes
        router.expire(now=float(i))
    assert len(router) == 12


def test_the_time_to_first_token_is_counted_from_when_the_request_came() -> None:
    router = router_of(1)
    ticket = router.route(prompt("a" * 4000), now=2.0, received_at_s=1.0)
    assert isinstance(ticket, Ticket)
    router.route(prompt("b" * 1000), now=2.5)
    router.settle(ticket.id, served(ticket), now=2.6)  # its first token came at 1.1
    (candidate,) = router.pools["m"].fleet.candidates({}, block_tokens=BLOCK, prompt_tokens=1, now=2.6)
    assert candidate.wait_s == 0.0


def test_without_an_access_log_the_load_is_released_after_the_time_limit() -> None:
    router = router_of(2, ttl_s=60.0)
    for i in range(3):
        routed(router, prompt("a" * 40), now=float(i))
    assert router.expire(now=59.9) == []
    assert [settled.outcome.end for settled in router.expire(now=61.5)] == [End.LOST, End.LOST]
    assert in_flight(router) == 1
    # it went through as far as anyone knows: the prefix stays
    assert routed(router, prompt("a" * 40), now=70.0).decision.reason is Reason.LOCALITY


def test_tickets_are_bounded_and_the_oldest_is_given_up() -> None:
    router = router_of(2, max_tickets=10)
    for i in range(25):
        routed(router, prompt("a" * 40), now=float(i))
        router.expire(now=float(i))
        assert len(router) <= 10
    assert in_flight(router) == 10


def test_a_cut_head_matches_what_is_known_and_records_nothing_exact() -> None:
    router = router_of(3)
    whole = routed(router, prompt("a" * 40), now=1.0)
    router.settle(whole.id, served(whole), now=1.1)
    cut = routed(router, prompt("a" * 40 + "b" * 40, cut=True), now=2.0)
    router.settle(cut.id, served(cut), now=2.1)
    assert cut.decision.node == whole.decision.node
    assert cut.decision.chosen.matched_tokens == 40
    # the part behind the whole one is not known under the exact key ...
    exact = router.pools["m"].prefix_map.match(prompt("a" * 40 + "b" * 40).chain)
    assert exact == {whole.decision.node.id: 10}
    # ... but another cut head of the same conversation finds it
    again = routed(router, prompt("a" * 40 + "b" * 40 + "c" * 8, cut=True), now=3.0)
    assert again.decision.chosen.matched_tokens == 80


def test_no_node_and_no_pool_are_refusals_not_exceptions() -> None:
    router = router_of(0)
    assert router.route(prompt("a"), now=1.0) == Rejection(Refusal.NO_NODE)
    assert router.route(InferenceRequest("other", 1), now=1.0) == Rejection(Refusal.UNKNOWN_MODEL)


def test_a_restarted_engine_holds_nothing() -> None:
    router = router_of(1)
    pool = router.pools["m"]
    pool.observe("n0", LoadSample(0.0, started_at_s=100.0))
    routed(router, prompt("a" * 40), now=1.0)
    assert pool.observe("n0", LoadSample(2.0, started_at_s=200.0))
    assert routed(router, prompt("a" * 40), now=3.0).decision.reason is Reason.COLD


def test_the_map_follows_the_cache_size_that_the_engine_tells() -> None:
    router = router_of(1)
    routed(router, prompt("a" * 400), now=1.0)
    router.pools["m"].observe("n0", LoadSample(2.0, cache_tokens=40))
    assert router.pools["m"].prefix_map.blocks("n0") == 10


def test_a_changed_cache_size_holds_for_nodes_that_do_not_say_theirs() -> None:
    router = router_of(2)
    pool = router.pools["m"]
    pool.observe("n1", LoadSample(0.0, cache_tokens=4000))
    for i in range(4):
        routed(router, prompt("a" * 2000, salt=i + 1), now=10.0 * i)
    pool.cache_tokens = 400
    pool.replace(nodes(2))
    assert pool.prefix_map.blocks("n0") == 100
    assert pool.prefix_map.blocks("n1") > 100


def test_a_sample_of_a_stranger_changes_nothing() -> None:
    router = router_of(1)
    assert router.pools["m"].observe("gone", LoadSample(0.0, cache_tokens=40)) is False
    with pytest.raises(KeyError):
        router.pools["m"].prefix_map.blocks("gone")


def test_a_node_that_left_and_its_tickets_leave_nothing_behind() -> None:
    router = router_of(2)
    tickets = [routed(router, prompt("abcd" * 10, salt=i + 1), now=1.0) for i in range(4)]
    router.pools["m"].replace(nodes(2)[:1])
    for ticket in tickets:
        router.settle(ticket.id, Outcome(End.FAILED), now=2.0)
    assert router.pools["m"].fleet.in_flight() == {"n0": (0, 0)}
    assert router.pools["m"].prefix_map.segments() == 0


def test_a_ticket_of_a_model_that_was_taken_away_still_settles() -> None:
    router = router_of(1)
    ticket = routed(router, prompt("a" * 40), now=1.0)
    del router.pools["m"]
    assert router.settle(ticket.id, Outcome(End.CUT), now=2.0) is not None


def test_only_a_streamed_answer_of_an_idle_node_teaches_the_prefill_rate() -> None:
    router = router_of(1)
    fleet = router.pools["m"].fleet
    for i in range(20):
        first = routed(router, prompt("a" * 1000, salt=3 * i + 1), now=100.0 * i)
        second = routed(router, prompt("a" * 1000, salt=3 * i + 2), now=100.0 * i)  # waits behind the first
        router.settle(first.id, served(first, engine_ttft_s=0.5), now=100.0 * i + 50)
        router.settle(second.id, served(second, engine_ttft_s=50.0), now=100.0 * i + 60)
        third = routed(router, prompt("a" * 1000, salt=3 * i + 3), now=100.0 * i + 90)
        router.settle(third.id, served(third), now=100.0 * i + 95)  # not streamed: no engine TTFT
    assert fleet.rate.tokens_per_s == 2000.0
