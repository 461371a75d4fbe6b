"""What the default policy is held against: itself with less and less locality, and locality alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import Candidate, Reason
from extproc.policies.least_ttft import LeastTtft
from extproc.policies.second import SHADOWS, Tightened, most_matched, tightened
from tests.policies.test_least_ttft import PROMPT, node

FLEETS = st.lists(
    st.builds(
        lambda matched, wait_s, in_flight: (matched, wait_s, in_flight),
        st.integers(0, 999),
        st.floats(0.0, 5.0),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=6,
)


def fleet(rows: list[tuple[int, float, int]]) -> list[Candidate]:
    return [node(f"n{i}", matched=m, wait_s=wait_s, in_flight=n) for i, (m, wait_s, n) in enumerate(rows)]


@given(FLEETS, st.floats(1.0, 20.0))
def test_at_full_tightness_it_makes_no_difference_what_is_cached(
    rows: list[tuple[int, float, int]], price: float
) -> None:
    blind = Tightened(LeastTtft(), 1.0)
    without = fleet([(0, wait_s, in_flight) for _, wait_s, in_flight in rows])
    # one that holds nothing, so that the whole prefill is known
    here, there = ([*found, node("z", wait_s=9.0)] for found in (fleet(rows), without))
    assert blind(PROMPT, here, price=price).node == blind(PROMPT, there, price=price).node


@given(FLEETS, st.floats(1.0, 20.0))
def test_without_tightness_it_is_the_policy_itself(rows: list[tuple[int, float, int]], price: float) -> None:
    policy = LeastTtft()
    assert (
        Tightened(policy, 0.0)(PROMPT, fleet(rows), price=price).node == policy(PROMPT, fleet(rows), price=price).node
    )


def test_each_step_takes_a_shorter_wait_for_what_is_cached() -> None:
    def longest(policy: LeastTtft | Tightened) -> float:
        """How long a wait the node that holds 900 of 1,000 tokens is still worth."""
        waits = [step / 50 for step in range(400)]
        fleets = ([node("a"), node("b", matched=900, wait_s=wait_s)] for wait_s in waits)
        taken = [policy(PROMPT, found, price=2.0).node.id == "b" for found in fleets]
        return waits[taken.index(False)]

    worth = [longest(each) for each in (LeastTtft(), *tightened(LeastTtft()))]  # type: ignore[arg-type]
    assert worth == sorted(worth, reverse=True)
    assert len(set(worth)) == len(worth)
    assert worth[-1] <= 0.04


def test_the_work_it_puts_on_a_node_is_what_it_believes() -> None:
    chosen = Tightened(LeastTtft(), 0.5)(PROMPT, [node("a", matched=600)], price=1.0).chosen
    assert (chosen.matched_tokens, chosen.uncached_tokens) == (600, 700)


def test_a_faster_node_is_still_a_faster_node() -> None:
    slow, fast = node("a"), node("b")
    fast = fast._replace(node=replace(fast.node, weight=4.0), prefill_s=0.25)
    assert Tightened(LeastTtft(), 1.0)(PROMPT, [slow, fast], price=1.0).node.id == "b"
    late = fast._replace(wait_s=0.8)
    assert Tightened(LeastTtft(), 1.0)(PROMPT, [slow, late], price=1.0).node.id == "a"


@pytest.mark.parametrize(
    ("candidates", "node_id", "reason"),
    [
        ([node("a", matched=500), node("b", matched=600, wait_s=99.0)], "b", Reason.LOCALITY),
        ([node("a", matched=500), node("b", matched=600, suspect=True)], "a", Reason.LOCALITY),
        ([node("a", wait_s=1.0), node("b")], "b", Reason.COLD),
    ],
)
def test_locality_alone(candidates: list[Candidate], node_id: str, reason: Reason) -> None:
    found = most_matched(PROMPT, candidates, price=1.0)
    assert (found.node.id, found.reason) == (node_id, reason)


def test_second_policies_are_there_by_name() -> None:
    candidates = [node("a"), node("b", matched=900, wait_s=0.3)]
    chosen = {name: make(LeastTtft())(PROMPT, candidates, price=1.0).node.id for name, make in SHADOWS.items()}
    assert chosen == {"latency": "a", "locality": "b"}
