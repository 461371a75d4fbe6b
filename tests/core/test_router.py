"""One decision and its settlement: what is reserved, recorded, released and taken back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.blocks import block_hashes
from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits
from extproc.core.pool import Pool
from extproc.core.router import Router
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


def router_of(
    count: int, *, ttl_s: float = 60.0, cache_tokens: int = 100_000, exact: bool = False, **bounds: int
) -> Router:
    fleet = Fleet(PrefillRate(1000.0), limits=LoadLimits(), price_weight=2.0)
    pool = Pool(fleet, LeastTtft(), BLOCK, cache_tokens, exact)
    pool.replace(nodes(count))
    return Router({"m": pool}, ticket_ttl_s=ttl_s, ticket_prefix="t", **bounds)


def prompt(text: str, *, cut: bool = False, salt: int = 1, session: int | None = None) -> InferenceRequest:
    """One token a letter."""
    data = "".join(letter * 4 for letter in text).encode()
    chains = {BLOCK: block_hashes(data, block_tokens=BLOCK, salt=salt)}
    apart = {BLOCK: block_hashes(data, block_tokens=BLOCK, salt=-salt % 2**64)} if cut else None
    return InferenceRequest("m", len(text), chains, apart, session=session)


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
    candidates = router.pools["m"].fleet.candidates({}, prompt_tokens=1, now=10.0)
    assert not any(each.suspect for each in candidates)


def test_tickets_are_bounded_by_the_bytes_of_their_blocks_as_well() -> None:
    router = router_of(2, ttl_s=600.0, max_chain_bytes=1000)
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
    (candidate,) = router.pools["m"].fleet.candidates({}, prompt_tokens=1, now=2.6)
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
    exact = router.pools["m"].holders(prompt("a" * 40 + "b" * 40).chains)
    assert exact == {whole.decision.node.id: 40}
    # ... but another cut head of the same conversation finds it
    again = routed(router, prompt("a" * 40 + "b" * 40 + "c" * 8, cut=True), now=3.0)
    assert again.decision.chosen.matched_tokens == 80


def held(router: Router, text: str, *, cut: bool = False) -> dict[str, int]:
    request = prompt(text, cut=cut)
    return router.pools["m"].holders(request.cut_chains if request.cut_chains is not None else request.chains)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("shown", [0, 40])
def test_what_was_hashed_after_the_decision_is_known_of_the_node_and_taken_back_with_the_rest(
    cut: bool, shown: int
) -> None:
    router, text = router_of(2), "abcdefghij" * 8
    ticket = routed(router, prompt(text[:shown], cut=cut), now=1.0)
    node, work = ticket.decision.node.id, router.pools["m"].fleet.in_flight()
    assert router.extend(ticket.id, prompt(text, cut=cut), now=1.1)
    assert held(router, text, cut=cut) == {node: 80}
    assert router.pools["m"].fleet.in_flight() == work
    settled = router.settle(ticket.id, Outcome(End.FAILED), now=1.2)
    assert settled is not None
    assert settled.ticket.request == prompt(text, cut=cut)
    assert router.pools["m"].segments() == 0


def test_a_failure_takes_back_nothing_of_an_extended_prompt_that_another_request_uses() -> None:
    router = router_of(1)
    first = routed(router, prompt("a" * 40), now=1.0)
    routed(router, prompt("a" * 20 + "b" * 20), now=1.1)
    assert router.extend(first.id, prompt("a" * 80), now=1.2)
    router.settle(first.id, Outcome(End.FAILED), now=1.3)
    assert held(router, "a" * 80) == {"n0": 20}


def test_who_answers_in_place_of_the_node_holds_what_was_hashed_later_as_well() -> None:
    router = router_of(2)
    ticket = routed(router, prompt("a" * 40), now=1.0)
    router.extend(ticket.id, prompt("a" * 80), now=1.1)
    other = next(node for node in nodes(2) if node.id != ticket.decision.node.id)
    router.settle(ticket.id, Outcome(End.SERVED, other.address, True, 0.1, attempts=2), now=1.5)
    assert held(router, "a" * 80) == {other.id: 80}


def test_what_was_served_stays_with_all_that_was_hashed_later() -> None:
    router = router_of(2)
    ticket = routed(router, prompt("a" * 40), now=1.0)
    router.extend(ticket.id, prompt("a" * 80), now=1.1)
    router.settle(ticket.id, served(ticket), now=1.5)
    assert held(router, "a" * 80) == {ticket.decision.node.id: 80}


@pytest.mark.parametrize("gone", ["ticket", "node", "pool"])
def test_hashing_on_for_what_is_gone_changes_nothing(gone: str) -> None:
    router = router_of(1)
    ticket = routed(router, prompt("a" * 40), now=1.0)
    if gone == "ticket":
        router.settle(ticket.id, served(ticket), now=1.1)
    elif gone == "node":
        router.pools["m"].replace([])
    else:
        del router.pools["m"]
    assert router.extend(ticket.id, prompt("a" * 80), now=1.2) is (gone != "ticket")
    if "m" in router.pools:
        assert held(router, "a" * 80) == ({"n0": 40} if gone == "ticket" else {})
    assert (router.settle(ticket.id, Outcome(End.FAILED), now=1.3) is None) is (gone == "ticket")
    assert not router.extend(ticket.id, prompt("a" * 80), now=1.4)


def test_blocks_that_came_later_count_as_bytes_of_tickets_and_leave_with_them() -> None:
    router = router_of(2, max_chain_bytes=1000)
    for i in range(10):
        ticket = routed(router, prompt("a" * 40, salt=i + 1), now=float(i))  # ten blocks: 80 bytes
        router.extend(ticket.id, prompt("a" * 80, salt=i + 1), now=float(i))
    router.expire(now=10.0)
    assert len(router) == 6
    for i in range(50):
        ticket = routed(router, prompt("a" * 40, salt=i + 1), now=11.0)
        router.extend(ticket.id, prompt("a" * 80, salt=i + 1), now=11.0)
        router.settle(ticket.id, served(ticket), now=11.0)
    router.expire(now=12.0)
    assert len(router) == 6


def test_all_sizes_and_both_keys_of_a_request_count_as_bytes_of_its_ticket() -> None:
    router = router_of(2, max_chain_bytes=1000)
    for i in range(10):
        cut = prompt("a" * 40, cut=True)
        request = InferenceRequest("m", 40, {**cut.chains, 8: bytes(40)}, cut.cut_chains)  # 80 + 40 + 80
        routed(router, request, now=float(i))
    router.expire(now=10.0)
    assert len(router) == 5


def test_an_answer_from_a_node_of_another_size_is_stored_in_blocks_of_that_size() -> None:
    router = router_of(2, exact=True)
    router.pools["m"].observe("n1", LoadSample(0.0, block_tokens=8))
    assert router.pools["m"].block_sizes() == (4, 8)
    data = "".join(letter * 4 for letter in "abcdefghij" * 4).encode()
    chains = {size: block_hashes(data, block_tokens=size, salt=1) for size in (4, 8)}
    request = InferenceRequest("m", 40, chains, exact=True)
    ticket = routed(router, request, now=1.0)
    other = next(node for node in nodes(2) if node.id != ticket.decision.node.id)
    router.settle(ticket.id, Outcome(End.SERVED, other.address, True, 0.1, attempts=2), now=1.5)
    assert router.pools["m"].holders(chains) == {other.id: 40}
    assert router.pools["m"].blocks(other.id) == {"n0": 10, "n1": 5}[other.id]


def unkeyed(tokens: int, session: int | None) -> InferenceRequest:
    return InferenceRequest("m", tokens, session=session)


@pytest.mark.parametrize("kind", ["unkeyed", "cut"])
def test_a_conversation_that_cannot_be_matched_stays_where_its_session_is(kind: str) -> None:
    router, chosen = router_of(8), []
    for turn in range(10):
        text = f"{turn}" * (500 + 100 * turn)  # no turn begins as another: their heads say nothing
        request = unkeyed(len(text), 7) if kind == "unkeyed" else prompt(text, cut=True, session=7)
        ticket = routed(router, request, now=10.0 * turn)
        router.settle(ticket.id, served(ticket), now=10.0 * turn + 1)
        chosen.append((ticket.decision.node.id, ticket.decision.reason))
        assert ticket.decision.chosen.matched_tokens == ticket.locality == ticket.decision.best_matched_tokens == 0
    assert len({node for node, _ in chosen}) == 1
    assert {reason for _, reason in chosen[1:]} == {Reason.SESSION}


def test_conversations_that_cannot_be_matched_mostly_stay_on_a_busy_fleet() -> None:
    router, rng = router_of(4), random.Random(1)
    homes: dict[int, str] = {}
    stayed = 0
    for i in range(600):  # 24 conversations, 12 turns a minute in all, half of what the fleet could compute afresh
        ticket = routed(router, unkeyed(10_000, session := rng.randrange(24)), now=5.0 * i)
        stayed += homes.get(session) == ticket.decision.node.id
        homes[session] = ticket.decision.node.id
        router.settle(ticket.id, served(ticket), now=5.0 * i + 4.9)
    assert stayed >= 0.85 * (600 - 24)


def test_a_session_does_not_outweigh_what_another_node_holds() -> None:
    router = router_of(3)
    home = routed(router, unkeyed(400, 7), now=1.0)
    router.settle(home.id, served(home), now=1.5)
    for _ in range(20):
        known = routed(router, prompt("a" * 400), now=2.0)
        if known.decision.node != home.decision.node:
            break
        router.settle(known.id, Outcome(End.FAILED), now=2.0)
    router.settle(known.id, served(known), now=3.0)
    again = routed(router, prompt("a" * 400 + "b" * 8, session=7), now=60.0)
    assert home.decision.node != known.decision.node
    assert (again.decision.node, again.decision.reason) == (known.decision.node, Reason.LOCALITY)


@pytest.mark.parametrize(
    ("outcome", "stays"),
    [
        (Outcome(End.SERVED, "own", True, 0.1), "own"),
        (Outcome(End.CUT), "own"),
        (Outcome(End.FAILED), None),
        (Outcome(End.SERVED, "other", True, 0.1, attempts=2), "other"),
        (Outcome(End.SERVED, "10.9.9.9:80", True, 0.1, attempts=2), "own"),  # nobody we know
    ],
)
def test_a_session_is_where_its_request_was_answered(outcome: Outcome, stays: str | None) -> None:
    router = router_of(2)
    ticket = routed(router, unkeyed(400, 7), now=1.0)
    own = ticket.decision.node
    where = {"own": own, "other": next(node for node in nodes(2) if node.id != own.id)}
    if outcome.served_by in where:
        outcome = replace(outcome, served_by=where[outcome.served_by].address)
    router.settle(ticket.id, outcome, now=1.5)
    expected = None if stays is None else (where[stays].id, 400)
    assert router.pools["m"].sessions.find(7, now=2.0) == expected


def test_what_a_session_let_expect_teaches_no_prefill_rate() -> None:
    router = router_of(1)
    for i in range(40):
        ticket = routed(router, unkeyed(1000, 7), now=20.0 * i)
        router.settle(ticket.id, served(ticket, engine_ttft_s=0.001), now=20.0 * i + 1)
    assert router.pools["m"].fleet.rate.tokens_per_s == 1000.0


@given(
    st.integers(2, 8),
    st.sampled_from(["nothing to match", "a cut head", "a new prompt", "a prefix that all hold", "a short prompt"]),
    st.integers(0, 4),
    st.floats(0.0, 0.5),
)
@settings(max_examples=60, deadline=None)
def test_a_session_that_everyone_shares_draws_no_more_than_a_share(
    count: int, kind: str, concurrent: int, gap_s: float
) -> None:
    router, out = router_of(count, cache_tokens=10_000_000), []
    if kind == "a prefix that all hold":
        for node in router.pools["m"].fleet.nodes():
            router.pools["m"].store(node.id, prompt("s" * 400), now=0.0)
    total = 40 * count
    chosen = []
    for i in range(total):
        now, text = 1.0 + gap_s * i, f"{i:04}" * 50
        request = {
            "nothing to match": unkeyed(400, 7),
            "a cut head": prompt(text, cut=True, session=7),
            "a new prompt": prompt(text, session=7),
            "a prefix that all hold": prompt("s" * 400 + text, session=7),
            "a short prompt": prompt(text[:8], session=7),
        }[kind]
        ticket = routed(router, request, now=now)
        chosen.append(ticket.decision.node.id)
        out.append(ticket)
        if len(out) > concurrent:
            done = out.pop(0)
            router.settle(done.id, served(done), now=now)
    # a quarter more than the mean and eight requests, each time that what was done a minute ago is forgotten
    minutes = 1 + gap_s * total / 60
    assert max(map(chosen.count, chosen)) <= 1.25 * total / count + 9 * minutes


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
    assert router.pools["m"].blocks("n0") == 10


def test_a_changed_cache_size_holds_for_nodes_that_do_not_say_theirs() -> None:
    router = router_of(2)
    pool = router.pools["m"]
    pool.observe("n1", LoadSample(0.0, cache_tokens=4000))
    for i in range(4):
        routed(router, prompt("a" * 2000, salt=i + 1), now=10.0 * i)
    pool.cache_tokens = 400
    pool.replace(nodes(2))
    assert pool.blocks("n0") == 100
    assert pool.blocks("n1") > 100


def test_a_sample_of_a_stranger_changes_nothing() -> None:
    router = router_of(1)
    assert router.pools["m"].observe("gone", LoadSample(0.0, cache_tokens=40)) is False
    with pytest.raises(KeyError):
        router.pools["m"].blocks("gone")


def test_a_node_that_left_and_its_tickets_leave_nothing_behind() -> None:
    router = router_of(2)
    tickets = [routed(router, prompt("abcd" * 10, salt=i + 1), now=1.0) for i in range(4)]
    router.pools["m"].replace(nodes(2)[:1])
    for ticket in tickets:
        router.settle(ticket.id, Outcome(End.FAILED), now=2.0)
    assert router.pools["m"].fleet.in_flight() == {"n0": (0, 0)}
    assert router.pools["m"].segments() == 0


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


def test_what_was_known_and_turned_out_to_be_wrong_is_taken_back() -> None:
    router = router_of(1)
    ticket = routed(router, prompt("a" * 400), now=1.0)
    right = prompt("b" * 400)
    assert router.extend(ticket.id, right, now=1.1)
    pool = router.pools["m"]
    assert not pool.holders(prompt("a" * 400).chains)
    assert pool.holders(right.chains)
    router.settle(ticket.id, Outcome(End.FAILED), now=2.0)
    assert not pool.holders(right.chains)
