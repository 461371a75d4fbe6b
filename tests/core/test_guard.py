"""The guard sees two groups of answers, and has to tell harm from chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest

from extproc.core.guard import ALPHA, Guard
from extproc.core.types import (
    Candidate,
    Decision,
    End,
    InferenceRequest,
    Node,
    Outcome,
    Reason,
    Stored,
    Ticket,
)

NODE = Node("a", "10.0.0.1:8000", "a")
PREFILL_S = 0.2
DAY_S = 86_400.0
STEPS = 4


def decision(reason: Reason, *, matched: int = 0, best: int = 0, uncached: int = 1000) -> Decision:
    chosen = Candidate(NODE, matched, uncached, 0.0, PREFILL_S, 0, 0.0, 0.0, 0.0, False, False)
    return Decision((chosen,), reason, best, 1.0)


def ticket(reason: Reason, *, matched: int = 0, best: int = 0, uncached: int = 1000) -> Ticket:
    """Of a request that was routed after the last change, whenever that was."""
    decided = decision(reason, matched=matched, best=best, uncached=uncached)
    return Ticket("", InferenceRequest("m", 1000), decided, Stored(b"", 0, 0.0), math.inf, math.inf, False)


class Least:
    """A policy that remembers which one was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0

    def __call__(self, request: InferenceRequest, candidates: Sequence[Candidate], *, price: float) -> Decision:
        self.asked += 1
        return decision(Reason.COLD)


def guard(share: float = 0.01, *, salt: int = 0) -> Guard:
    return Guard(share, [Least(f"step {step}") for step in range(1, STEPS + 1)], salt=salt)


class Traffic:
    """Requests at a steady pace, whose TTFT is lognormal: `harm` says what locality's is multiplied by."""

    def __init__(
        self,
        subject: Guard,
        seed: int,
        *,
        per_s: float = 10.0,
        harm: Callable[[float, int], float] = lambda now, level: 1.0,
        load: Callable[[float], float] = lambda now: 1.0,
    ) -> None:
        self.guard, self.harm, self.load = subject, harm, load
        self.rng = Random(seed)
        self.gap_s = 1.0 / per_s
        self.count = 0
        self.now = 0.0
        self.levels: list[tuple[float, int]] = []
        self.tickets = {control: ticket(Reason.CONTROL if control else Reason.LOCALITY) for control in (True, False)}

    def run(self, until_s: float, *, until_level: int = STEPS + 1) -> None:
        while self.now < until_s and self.guard.level < until_level:
            self.now += self.gap_s
            self.count += 1
            control = self.guard.control(f"{self.count}")
            ttft_s = 0.5 * self.load(self.now) * math.exp(self.rng.gauss(0.0, 1.0))
            if not control:
                ttft_s *= self.harm(self.now, self.guard.level)
            outcome = Outcome(End.SERVED, answered=True, client_ttft_s=ttft_s)
            self.guard.settled(self.tickets[control], outcome, prefill_s=PREFILL_S, now=self.now)
            if not self.levels or self.levels[-1][1] != self.guard.level:
                self.levels.append((self.now, self.guard.level))


def test_the_group_is_a_share_of_the_names_and_always_the_same_ones() -> None:
    one, other = guard(0.1), guard(0.1, salt=7)
    names = [f"request-{number}" for number in range(20_000)]
    drawn = {name for name in names if one.control(name)}
    assert len(drawn) == pytest.approx(2000, abs=200)
    assert drawn == {name for name in names if one.control(name)}
    again = {name for name in names if other.control(name)}
    assert len(drawn & again) == pytest.approx(200, abs=60)  # another salt, another group


def test_the_control_group_is_routed_by_the_last_step_and_the_others_by_the_level() -> None:
    subject, usual = guard(0.5), Least("usual")
    reasons = [subject.decide(f"{n}", usual, InferenceRequest("m", 1), (), price=1.0).reason for n in range(1000)]
    control = reasons.count(Reason.CONTROL)
    assert control == pytest.approx(500, abs=80)
    assert [each.asked for each in subject.tightened] == [0, 0, 0, control]
    assert usual.asked == 1000 - control
    assert subject.requests == control
    subject.level = 2
    subject.decide(
        next(f"{n}" for n in range(9) if reasons[n] is Reason.COLD), usual, InferenceRequest("m", 1), (), price=1.0
    )
    assert [each.asked for each in subject.tightened] == [0, 1, 0, control]


def test_equal_groups_alarm_less_often_than_stated() -> None:
    """1,000 days of equal groups, each with a load that varies tenfold, of 500 requests within four minutes; as many as
    can be are control, so that each bet is as risky as it gets."""
    traffic = Traffic(guard(0.5), 1, load=lambda now: math.exp(1.15 * math.sin(2 * math.pi * now / 240.0)))
    for day in range(1000):
        traffic.now = day * DAY_S
        traffic.gap_s = 240.0 / 500
        traffic.run(day * DAY_S + 240.0)
    alarms = sum(after > before for (_, before), (_, after) in pairwise(traffic.levels))
    assert alarms <= 1000 * ALPHA


@pytest.mark.parametrize(("harm", "within_s"), [(1.3, 4 * 3600.0), (2.0, 3600.0), (4.0, 1800.0)])
def test_harm_is_found(harm: float, within_s: float) -> None:
    for seed in range(3):
        traffic = Traffic(guard(), seed, per_s=20.0, harm=lambda now, level: harm)
        traffic.run(within_s, until_level=1)
        assert traffic.guard.level, seed


def test_locality_that_helps_is_left_alone() -> None:
    traffic = Traffic(guard(), 1, per_s=20.0, harm=lambda now, level: 0.7)
    traffic.run(2 * 3600.0)
    assert traffic.levels == [(traffic.levels[0][0], 0)]
    assert traffic.guard.ratios()[1] == pytest.approx(0.7, rel=0.25)


def test_it_tightens_as_far_as_it_has_to_and_relaxes_when_the_harm_is_over() -> None:
    traffic = Traffic(
        guard(), 3, per_s=20.0, harm=lambda now, level: 2.5 - 0.5 * level if now < 7200.0 and level < 3 else 1.0
    )
    traffic.run(7200.0)
    assert max(level for _, level in traffic.levels) >= 3
    traffic.run(30_000.0)
    assert traffic.guard.level == 0
    levels = [level for _, level in traffic.levels]
    assert all(abs(after - before) == 1 for before, after in pairwise(levels))
    assert set(levels) <= set(range(STEPS + 1))
    assert [(each.before, each.after) for each in traffic.guard.changes()] == list(pairwise(levels))
    assert traffic.guard.changes() == []


def test_lasting_harm_is_tried_again_more_and_more_rarely() -> None:
    traffic = Traffic(guard(), 5, per_s=10.0, harm=lambda now, level: 3.0 if level < STEPS else 1.0)
    traffic.run(8 * 3600.0)
    tries = [at_s for (_, before), (at_s, after) in pairwise(traffic.levels) if (before, after) == (STEPS, STEPS - 1)]
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert len(tries) >= 3
    assert all(later > 1.5 * earlier for earlier, later in pairwise(gaps))


def test_no_step_without_a_minimum_of_samples() -> None:
    traffic = Traffic(guard(0.1), 1, per_s=1.0, harm=lambda now, level: 100.0)
    traffic.run(900.0)  # about 90 of the control group
    assert traffic.guard.level == 0
    traffic.run(3600.0)
    assert traffic.guard.level > 0


def test_who_gave_up_has_waited_so_long_at_least_and_failures_say_nothing() -> None:
    subject = guard()
    for end, counted in ((End.CUT, True), (End.FAILED, False), (End.LOST, False)):
        before = sum(subject.counts(now=1.0))
        subject.settled(ticket(Reason.COLD), Outcome(end, total_s=9.0), prefill_s=PREFILL_S, now=1.0)
        assert (sum(subject.counts(now=1.0)) > before) is counted


@pytest.mark.parametrize(
    ("best", "uncached", "least", "most"),
    [
        (0, 1000, 0.1, 0.1),  # the control group costs nothing: thin traffic gets a large one
        (200, 800, 0.015, 0.03),
        (900, 100, 0.001, 0.0015),  # it computes ten times as much as the others
    ],
)
def test_the_group_is_as_large_as_it_can_be_afforded(best: int, uncached: int, least: float, most: float) -> None:
    traffic = Traffic(guard(0.01), 1, per_s=1.0, harm=lambda now, level: 0.9)
    traffic.tickets[False] = ticket(Reason.LOCALITY, matched=best, best=best, uncached=uncached)
    traffic.tickets[True] = ticket(Reason.CONTROL, best=best)
    traffic.run(7200.0)
    assert least <= traffic.guard.share <= most
