from __future__ import annotations

import pytest

from extproc.core.shadow import Shadow
from extproc.policies.least_ttft import LeastTtft
from extproc.policies.second import Tightened, most_matched
from tests.policies.test_least_ttft import PROMPT, node


def test_what_a_second_policy_would_have_saved_and_cost_is_counted() -> None:
    ours, shadow = LeastTtft(), Shadow("locality", most_matched)
    fleets = [
        [node("a", matched=500), node("b")],  # both a
        [node("a", matched=500, wait_s=8.0), node("b")],  # ours b: 1.0 s, theirs a: 8.5 s
        [node("a", matched=100), node("b", matched=200, wait_s=3.0), node("c", matched=150)],
    ]
    for candidates in fleets:
        shadow.see(ours(PROMPT, candidates, price=1.0), PROMPT, candidates, price=1.0)
    assert (shadow.requests, shadow.disagreements, shadow.regret_seconds) == (3, 2, 0.0)
    assert shadow.gain_seconds == pytest.approx((8.5 - 1.0) + (3.8 - 0.85))
    assert shadow.lost_tokens == 500 + 50


def test_regret_is_what_waits_longer_than_it_had_to() -> None:
    shadow = Shadow("latency", Tightened(LeastTtft(), 1.0))
    candidates = [node("a", matched=300, wait_s=0.9), node("b")]
    decision = LeastTtft()(PROMPT, candidates, price=8.0)
    shadow.see(decision, PROMPT, candidates, price=8.0)
    assert decision.node.id == "a"
    assert shadow.regret_seconds == pytest.approx(0.9 + 0.7 - 1.0)
    assert (shadow.gain_seconds, shadow.lost_tokens) == (0.0, 0)
