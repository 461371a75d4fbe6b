"""What was answered and seen by nobody, until the next turn tells its tokens."""

from __future__ import annotations

import pytest

from extproc.core.answers import Answers
from extproc.core.blocks import TOKEN_BYTES, block_hashes
from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.types import Answered, End, InferenceRequest, LoadSample, Node, Outcome, Ticket
from extproc.policies.least_ttft import LeastTtft

SIZE = 16
FIRST = "a" * 40
ANSWER = "b" * 50
SECOND = FIRST + ANSWER + "c" * 30


def router_of(*, cache_blocks: int = 1000, answers: bool = True) -> Router:
    fleet = Fleet(PrefillRate(1000.0), limits=LoadLimits(), price_weight=2.0)
    pool = Pool(fleet, LeastTtft(), SIZE, cache_blocks * SIZE, exact=True)
    pool.replace([Node("n0", "10.0.0.1:80", "n0"), Node("n1", "10.0.0.2:80", "n1")])
    if not answers:
        pool.answers = None
    return Router({"m": pool}, ticket_ttl_s=60.0, ticket_prefix="t")


def asks(text: str, turn: int, answered: Answered | None = None) -> InferenceRequest:
    """One token a letter."""
    data = "".join(letter * TOKEN_BYTES for letter in text).encode()
    chains = {SIZE: block_hashes(data, block_tokens=SIZE, salt=1)}
    return InferenceRequest("m", len(text), chains, exact=True, turn=turn, answered=answered)


def goes_on() -> InferenceRequest:
    """The second turn: the engine has its prompt up to the answer's last token."""
    return asks(SECOND, 2, Answered(1, len(FIRST), len(FIRST + ANSWER) - 1))


def served(ticket: Ticket) -> Outcome:
    return Outcome(End.SERVED, ticket.decision.node.address, True, 0.1)


def matched(router: Router, request: InferenceRequest) -> dict[str, int]:
    return router.pools["m"].matched(request)


def ask(router: Router, request: InferenceRequest, *, now: float) -> Ticket:
    ticket = router.route(request, now=now)
    assert isinstance(ticket, Ticket)
    return ticket


def test_the_next_turn_finds_the_answer_where_it_was_given() -> None:
    router = router_of()
    ticket = ask(router, asks(FIRST, 1), now=1.0)
    router.settle(ticket.id, served(ticket), now=2.0)
    assert matched(router, goes_on()) == {ticket.decision.node.id: 89 // SIZE * SIZE}
    assert matched(router, asks(SECOND, 2)) == {ticket.decision.node.id: 32}  # who does not tell of it finds none


@pytest.mark.parametrize("why", ["failed", "elsewhere", "off", "restart", "another turn", "evicted"])
def test_it_is_not_found_where_it_is_not(why: str) -> None:
    router = router_of(answers=why != "off", cache_blocks=4 if why == "evicted" else 1000)
    pool = router.pools["m"]
    if why == "restart":
        pool.observe("n0", LoadSample(0.5, started_at_s=1.0))
    ticket = ask(router, asks(FIRST, 7 if why == "another turn" else 1), now=1.0)
    node = ticket.decision.node.id
    assert node == "n0"
    outcome = served(ticket)
    if why == "failed":
        outcome = Outcome(End.FAILED)
    elif why == "elsewhere":
        outcome = Outcome(End.SERVED, "10.0.0.2:80", True, 0.1, attempts=2)
    router.settle(ticket.id, outcome, now=2.0)
    if why == "restart":
        pool.observe("n0", LoadSample(3.0, started_at_s=2.9))
    if why == "evicted":
        pool.send("n0", asks("x" * 48, 9), now=3.0)
    found = matched(router, goes_on())
    assert found.get(node, 0) <= 32
    assert found.get("n1", 0) == (80 if why == "elsewhere" else 0)


def test_an_answer_takes_room_until_it_is_part_of_a_prompt_and_its_last_block_longer() -> None:
    router = router_of()
    pool = router.pools["m"]
    assert pool.answers is not None
    pool.answers.saw(100)
    ticket = ask(router, asks(FIRST, 1), now=1.0)
    node = ticket.decision.node.id
    assert pool.blocks(node) == 2 + 7  # two full blocks of the prompt, and what 8 + 100 tokens take
    router.settle(ticket.id, served(ticket), now=2.0)
    assert pool.blocks(node) == 2 + 7
    again = ask(router, goes_on(), now=3.0)
    assert again.decision.node.id == node
    assert pool.answers.mean_tokens == pytest.approx(99, abs=1)
    assert pool.blocks(node) == 7 + 1 + 7  # 120 tokens; the block that the first answer ended in; 8 + 99


def test_an_answer_that_failed_takes_no_room() -> None:
    router = router_of()
    ticket = ask(router, asks(FIRST, 1), now=1.0)
    router.settle(ticket.id, Outcome(End.FAILED), now=2.0)
    assert router.pools["m"].blocks(ticket.decision.node.id) == 0


def test_what_ended_last_is_kept_longest_whenever_it_began() -> None:
    router = router_of(cache_blocks=10)
    pool = router.pools["m"]
    pool.fleet.replace([Node("n0", "10.0.0.1:80", "n0")])
    early, late = (ask(router, asks(letter * 48, turn), now=float(turn)) for turn, letter in enumerate("xy", 1))
    for ticket, now in ((late, 3.0), (early, 4.0)):
        router.settle(ticket.id, served(ticket), now=now)
    pool.send("n0", asks("z" * 48, 3), now=5.0)
    assert matched(router, asks("x" * 48 + "?", 4)) == {"n0": 48}
    assert matched(router, asks("y" * 48 + "?", 4)) == {}


def test_the_length_of_answers_is_a_mean_of_the_last_ones() -> None:
    answers = Answers()
    for _ in range(300):
        answers.saw(1000)
    for _ in range(100):
        answers.saw(200)
    assert 200 < answers.mean_tokens < 400
