"""The default policy's rule, as tables of fleets and what must be chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import Candidate, InferenceRequest, Node, Reason
from extproc.policies.least_ttft import LeastTtft

PROMPT = InferenceRequest("m", 1000, {16: b"12345678"})


def node(
    name: str,
    *,
    matched: int = 0,
    wait_s: float = 0.0,
    in_flight: int = 0,
    recent: float = 0.0,
    usage: float = 0.0,
    age: float = 0.1,
    saturated: bool = False,
    suspect: bool = False,
    session: bool = False,
    estimate: int = 0,
) -> Candidate:
    """A node of 1,000 tokens/s for a prompt of 1,000 tokens."""
    uncached = 1000 - matched
    prefill_s = (1000 - max(matched, estimate)) / 1000.0
    where = Node(name, f"{name}:80", name)
    return Candidate(
        where,
        matched,
        uncached,
        wait_s,
        prefill_s,
        in_flight,
        recent,
        usage,
        age,
        saturated,
        suspect,
        session or estimate > 0,
        estimate,
    )


CASES = {
    "the longer prefix wins on an idle fleet": ([node("a", matched=500), node("b", matched=900)], 1.0, "b", "locality"),
    "a short wait does not outweigh a long prefix": (
        [node("a"), node("b", matched=900, wait_s=0.3)],
        1.0,
        "b",
        "locality",
    ),
    "a wait longer than the prefill it saves does": (
        [node("a"), node("b", matched=200, wait_s=0.4)],
        1.0,
        "a",
        "headroom",
    ),
    "on a busy fleet saved work is worth more": ([node("a"), node("b", matched=200, wait_s=0.4)], 3.0, "b", "locality"),
    "outside the load envelope no prefix helps": (
        [node("a"), node("b", matched=999, wait_s=8.0), node("c")],
        9.0,
        "a",
        "headroom",
    ),
    "the best cached node inside the envelope comes before the least loaded": (
        [node("a"), node("b", matched=999, wait_s=8.0), node("c", matched=800, wait_s=0.2)],
        1.0,
        "c",
        "headroom",
    ),
    "a saturated node is left out while another is not": (
        [node("a", wait_s=0.4), node("b", matched=999, saturated=True)],
        1.0,
        "a",
        "headroom",
    ),
    "when all are saturated the least bad is taken": (
        [node("a", saturated=True), node("b", matched=900, saturated=True)],
        1.0,
        "b",
        "locality",
    ),
    "a suspect node is left out while another is not, saturated or not": (
        [node("a", saturated=True), node("b", matched=999, suspect=True)],
        1.0,
        "a",
        "headroom",
    ),
    "when all are suspect the best is taken": (
        [node("a", suspect=True), node("b", matched=900, suspect=True)],
        1.0,
        "b",
        "locality",
    ),
    "a node may keep waiting whom it saves much": (
        [node("a"), node("b", matched=999, wait_s=5.0), node("c")],
        9.0,
        "b",
        "locality",
    ),
    "work costs more where running requests fill the KV cache": (
        [node("a", matched=500), node("b", matched=600, usage=0.9)],
        1.0,
        "a",
        "headroom",
    ),
    "a crowd costs more than the wait tells": (
        [node("a", matched=500, in_flight=2), node("b", matched=600, in_flight=20)],
        1.0,
        "a",
        "headroom",
    ),
    "no prefix anywhere: the least predicted wait": ([node("a", wait_s=0.2), node("b", wait_s=0.1)], 1.0, "b", "cold"),
    "close on locality: fewer in flight": (
        [node("a", matched=900, in_flight=3), node("b", matched=896, in_flight=1)],
        1.0,
        "b",
        "headroom",
    ),
    "close, equally busy: less recent work": ([node("a", recent=3.0), node("b", recent=1.0)], 1.0, "b", "cold"),
    "close, equally worked: lower KV usage": ([node("a", usage=0.5), node("b", usage=0.2)], 1.0, "b", "cold"),
    "close in everything: the fresher sample": ([node("a", age=3.0), node("b", age=0.2)], 1.0, "b", "cold"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule(case: str) -> None:
    candidates, price, expected, reason = CASES[case]
    decision = LeastTtft()(PROMPT, candidates, price=price)
    assert (decision.node.id, decision.reason) == (expected, reason)


def test_where_all_are_suspect_or_saturated_the_envelope_still_holds() -> None:
    for state in ({"suspect": True}, {"saturated": True}):
        fleet = [node("a", matched=999, wait_s=8.0, **state), node("b", **state), node("c", **state)]  # type: ignore[arg-type]
        assert LeastTtft()(PROMPT, fleet, price=10.0).node.id == "b"


def test_a_long_prompt_goes_where_few_are_served_and_a_short_one_where_it_is_quick() -> None:
    fleet = [node("long", wait_s=1.0, in_flight=1), node("quick", wait_s=0.1, in_flight=40)]
    for factor, expected in ((0.1, "quick"), (10.0, "long")):
        scaled = [each._replace(prefill_s=factor * each.prefill_s) for each in fleet]
        assert LeastTtft()(PROMPT, scaled, price=1.0).node.id == expected


def test_the_costs_are_those_of_the_ranked() -> None:
    decision = LeastTtft()(PROMPT, [node("a", wait_s=0.5), node("b", matched=900), node("c")], price=1.0)
    assert [each.node.id for each in decision.ranked] == ["b", "c", "a"]
    assert decision.costs == pytest.approx((0.1, 1.0, 1.5))


def test_an_adapter_that_has_to_be_loaded_is_paid_for() -> None:
    there, not_there = node("b", matched=200), node("a", matched=400)._replace(lora_s=0.5)
    assert LeastTtft()(PROMPT, [not_there, there], price=1.0).node.id == "b"
    assert LeastTtft()(PROMPT, [not_there, there], price=5.0).node.id == "a"


def test_with_nothing_to_match_the_reason_is_fallback() -> None:
    request = InferenceRequest("m", 0)
    decision = LeastTtft()(request, [node("a", wait_s=1.0), node("b")], price=1.0)
    assert (decision.node.id, decision.reason) == ("b", Reason.FALLBACK)


SESSION_CASES = {
    "close: the session's node comes before headroom": (
        [node("a"), node("b", recent=2.0, age=3.0, session=True)],
        "b",
        "cold",
    ),
    "close, and as much matched": (
        [node("a", matched=400), node("b", matched=400, recent=2.0, session=True)],
        "b",
        "locality",
    ),
    "close, as little in flight": (
        [node("a", in_flight=2), node("b", in_flight=2, recent=1.0, session=True)],
        "b",
        "cold",
    ),
    "but not with more in flight": ([node("a"), node("b", in_flight=1, session=True)], "a", "cold"),
    "nor with less matched": (
        [node("a", matched=400), node("b", matched=399, wait_s=0.001, session=True)],
        "a",
        "locality",
    ),
    "nor with more matched, by headroom": (
        [node("a", matched=398), node("b", matched=399, recent=1.0, session=True)],
        "a",
        "headroom",
    ),
    "nor where it costs more than the margin": ([node("a"), node("b", wait_s=0.1, session=True)], "a", "cold"),
    "nor saturated": ([node("a"), node("b", saturated=True, session=True)], "a", "cold"),
    "nor suspect": ([node("a"), node("b", suspect=True, session=True)], "a", "cold"),
    "an estimate decides by what it saves": ([node("a"), node("b", wait_s=0.4, estimate=500)], "b", "session"),
    "and not by more": ([node("a"), node("b", wait_s=0.6, estimate=500)], "a", "cold"),
    "a longer match comes before an estimate": ([node("a", matched=600), node("b", estimate=500)], "a", "locality"),
    "the load envelope holds for an estimate": (
        [node("a"), node("b", wait_s=4.0, estimate=999), node("c")],
        "a",
        "cold",
    ),
}


@pytest.mark.parametrize("case", SESSION_CASES)
def test_the_rule_with_a_session(case: str) -> None:
    candidates, expected, reason = SESSION_CASES[case]
    request = replace(PROMPT, session=7)
    decision = LeastTtft()(request, candidates, price=1.0)
    assert (decision.node.id, decision.reason) == (expected, reason)
    assert decision.best_matched_tokens == max(each.matched_tokens for each in candidates)


def test_without_a_key_an_estimate_is_a_session_and_none_is_a_fallback() -> None:
    request = InferenceRequest("m", 1000, session=7)
    assert LeastTtft()(request, [node("a"), node("b", estimate=900)], price=1.0).reason is Reason.SESSION
    assert LeastTtft()(request, [node("a"), node("b", session=True)], price=1.0).reason is Reason.FALLBACK


@pytest.mark.parametrize("chains", [{}, {16: b""}, {16: b"", 32: b""}])
def test_chains_without_a_block_are_nothing_to_match(chains: dict[int, bytes]) -> None:
    for request in (InferenceRequest("m", 9, chains), InferenceRequest("m", 9, {}, chains)):
        assert LeastTtft()(request, [node("a")], price=1.0).reason is Reason.FALLBACK
    full = {**chains, 64: b"12345678"}
    for request in (InferenceRequest("m", 9, full), InferenceRequest("m", 9, {}, full)):
        assert LeastTtft()(request, [node("a")], price=1.0).reason is Reason.COLD


def test_retries_go_to_the_next_best_cached_node() -> None:
    candidates = [node("a"), node("b", matched=900), node("c", matched=800), node("d", matched=100)]
    decision = LeastTtft(fallbacks=2)(PROMPT, candidates, price=1.0)
    assert [each.node.id for each in decision.ranked] == ["b", "c", "d"]


def test_nodes_outside_the_envelope_are_the_last_resort_of_a_retry() -> None:
    candidates = [node("a", matched=900), node("b", saturated=True, wait_s=0.2), node("c", saturated=True)]
    decision = LeastTtft(fallbacks=2)(PROMPT, candidates, price=1.0)
    assert [each.node.id for each in decision.ranked] == ["a", "c", "b"]


candidates_of_any_kind = st.lists(
    st.builds(
        node,
        st.uuids().map(str),
        matched=st.integers(0, 999),
        wait_s=st.floats(0, 100),
        in_flight=st.integers(0, 99),
        saturated=st.booleans(),
        suspect=st.booleans(),
        age=st.floats(0, 1e9) | st.just(float("inf")),
    ),
    min_size=1,
    max_size=12,
)


@given(candidates_of_any_kind, st.floats(1, 40), st.integers(0, 5))
def test_any_fleet_gets_a_choice_and_different_nodes_to_fall_back_to(
    candidates: list[Candidate], price: float, fallbacks: int
) -> None:
    decision = LeastTtft(fallbacks=fallbacks)(PROMPT, candidates, price=price)
    assert (
        len({each.node.id for each in decision.ranked}) == len(decision.ranked) == min(len(candidates), fallbacks + 1)
    )
    assert set(decision.ranked) <= set(candidates)
    assert decision.best_matched_tokens == max(each.matched_tokens for each in candidates)
    if any(not each.suspect for each in candidates):
        assert not decision.chosen.suspect
    if any(not each.suspect and not each.saturated for each in candidates):
        assert not decision.chosen.saturated
