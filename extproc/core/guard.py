"""The tail guard: a small share of the requests is routed for latency alone, and where these wait less in the tail,
locality gives way step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from extproc.core.cost import Fading
from extproc.core.sketch import Sketch
from extproc.core.types import Candidate, Decision, End, InferenceRequest, Outcome, Policy, Reason, Ticket

QUANTILES = (0.5, 0.95, 0.99)
ALPHA = 0.05
"""False alarms per day, on average, where locality harms nobody: at most."""
MARGIN = 0.03
"""Locality is allowed to be that much slower."""

_DAY_S = 86_400.0
_HOUR_S = 3_600.0
_WINDOW_S = 6 * _HOUR_S
"""Of the answers that are compared: after that time one counts 1/e of itself."""
_JUDGED = 1
"""From there on in QUANTILES it is judged by; what is before makes it suspicious only."""
_RATIOS = (0.3, 0.7)
"""What is held against "the control group is among the slow ones as often as its share says": that it is so much more
rarely."""
_CREDIT = _HOUR_S / _DAY_S
"""What evidence begins with: as if it had been gathered for an hour already."""
_AFTER_ALARM = 1.0
"""And what after an alarm, or when a level is left after one: where there was harm there may well be more."""
_ALARM = 1.0 / ALPHA + 2.0 * _AFTER_ALARM
"""Each false alarm costs so much capital: what it brings for the next one, and for a relaxation, is paid with it."""
_MIN_CONTROL = 100
"""Answers of the control group since the last change, before which none is made."""
_MIN_SLOW = 20
"""A quantile is judged by where as many answers were above it."""
_ENOUGH = 2_000
"""Answers of the control group in a window: then 1 in 20 is 100, and 1 in 100 is 20."""
_MOST = 0.1
"""Of the traffic goes to the control group at most."""
_BUDGET = 0.005
"""Of all prefill may be what the control group computes that was cached elsewhere: else, where a prompt costs it many
times what it costs the others, the group is made smaller."""
_LEAST = 0.1
"""Down to that part of what is configured."""
_STEP = 1.5
"""It is changed by that factor at least."""
_REFRESH_S = 5.0
_HOLD_S, _MAX_HOLD_S = 1_800.0, 4 * _HOUR_S
"""A level is held for so long after the last alarm; twice as long with each relaxation that led to another one."""
_CALM = 2.0 * _AFTER_ALARM
"""Where evidence is on its way to an alarm, the level is held."""
_MAX_CHANGES = 64
_LEAST_S = 1e-3
"""Less than a mean prefill takes is none."""
_LARGE = 1e100
"""Sums are brought back to size long before they overflow."""


class GuardChange(NamedTuple):
    """Locality gives way by one step more, or less, than before."""

    before: int
    after: int
    evidence: float
    """Of harm: it alarms at a good 1 / ALPHA."""
    ratios: tuple[float, ...]
    """Of locality's normalised TTFT to the control group's, at QUANTILES; 0.0 where that is not known."""
    answers: tuple[float, float]
    """That this is known from, in the last hours: locality's, and the control group's."""

    def __str__(self) -> str:
        ratios = ", ".join(f"p{100 * at:.0f} {each:.2f}" for at, each in zip(QUANTILES, self.ratios, strict=True))
        return (
            f"locality gives way at level {self.after}, no longer {self.before}: its TTFT over the control group's is "
            f"{ratios} ({self.answers[0]:.0f} and {self.answers[1]:.0f} answers)"
        )


class Guard:
    """Compares the TTFT of both groups, and says how far locality has to give way.

    TTFT is divided by what the prompt's prefill takes where nothing is cached plus the mean of that over all prompts:
    so a second of waiting counts alike for all prompts below the mean, and the tail is neither that of the shortest
    (as it would be by their own prefill alone) nor of the longest prompts (as it would be in seconds).

    The test: which requests are control is drawn by a hash, independently of everything else. If locality harms nobody,
    each answer above a quantile of all answers (the recent p95, or p99, known before it came) is therefore one of the
    control group with the probability that is its share: whatever load, bursts and time of day do to both groups. The
    likelihood ratio of "`ratio` times as often" to that is then a martingale. What gets new capital all the time,
    one unit a day, reaches 1 / ALPHA at most ALPHA times a day on average, however often it is looked at (Ville; the
    sum of such bets is Shiryaev and Roberts'). Answers of locality count as `MARGIN` faster than they were.
    """

    def __init__(self, share: float, tightened: Sequence[Policy], *, salt: int = 0) -> None:
        """`share`: the control group's of all requests, in (0, 1), unless there is reason for more, up to a tenth, or
        less. `tightened`: the policy at each level above 0; the last one is the control group's."""
        self.usual_share = share
        self.tightened = tightened
        self.salt = salt
        self.level = 0
        self.requests = 0
        """Of the control group, ever."""
        self._share = share
        self._since_s = -math.inf
        """Requests that were routed before were routed otherwise: another share, or another level."""
        self._window = _windows()
        """By whether it is the control group: the last hours, of this level."""
        self._limits = [math.inf] * len(QUANTILES)
        self._fading = Fading(_WINDOW_S)
        self._sums = [0.0] * 5
        """That fade: prefill (seconds, of whole prompts) and requests; uncached tokens; tokens that the control group
        computed and others held, and its requests."""
        self._capital = _CREDIT
        """What evidence is made of."""
        self._evidence = _spread(_CREDIT)
        self._credited_s: float | None = None
        self._refreshed_s = -math.inf
        self._judged = 0
        self._held_since_s = -math.inf
        self._hold_s = _HOLD_S
        self._relaxed_s = -math.inf
        self._changes: list[GuardChange] = []

    @property
    def tightness(self) -> float:
        """0.0: locality as the policy has it; 1.0: latency alone."""
        return self.level / len(self.tightened)

    @property
    def share(self) -> float:
        """The control group's, now."""
        return self._share

    @property
    def evidence(self) -> float:
        """Of harm; it alarms at a good 1 / ALPHA."""
        return sum(map(sum, self._evidence[_JUDGED:]))

    @property
    def suspicion(self) -> float:
        """By what factor evidence has grown, or what the median tells of harm."""
        median = sum(map(sum, self._evidence[:_JUDGED])) * (len(QUANTILES) - _JUDGED) / _JUDGED
        return max(self.evidence, median) / self._capital

    def control(self, name: str) -> bool:
        """Is the request of that name one of the control group?"""
        return xxh3_64_intdigest(name.encode(), self.salt) < self._share * 2.0**64

    def decide(
        self,
        name: str,
        policy: Policy,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        *,
        price: float,
    ) -> Decision:
        """As `policy` does, at this level; or as the control group's does."""
        if self.control(name):
            self.requests += 1
            return replace(self.tightened[-1](request, candidates, price=price), reason=Reason.CONTROL)
        chosen = self.tightened[self.level - 1] if self.level else policy
        return chosen(request, candidates, price=price)

    def counts(self, *, now: float) -> tuple[float, float]:
        """Answers in the last hours (decayed) at this level: locality's, and the control group's."""
        return self._window[False].count(now=now), self._window[True].count(now=now)

    def ratios(self) -> tuple[float, ...]:
        """Of locality's normalised TTFT in the last hours to the control group's, at QUANTILES; above 1.0 locality is
        slower. 0.0 where one of them is not known."""
        pairs = zip(self._window[False].quantiles(QUANTILES), self._window[True].quantiles(QUANTILES), strict=True)
        return tuple(ours / theirs if theirs else 0.0 for ours, theirs in pairs)

    def changes(self) -> list[GuardChange]:
        """Since this was asked last."""
        found, self._changes = self._changes, []
        return found

    def settled(self, ticket: Ticket, outcome: Outcome, *, prefill_s: float, now: float) -> None:
        """`prefill_s`: what the prompt's prefill takes on a node of weight 1 where nothing is cached."""
        ttft_s = outcome.client_ttft_s
        if outcome.end is End.CUT and not outcome.answered:
            ttft_s = outcome.total_s  # who gave up has waited so long at least
        elif outcome.end is not End.SERVED:
            return
        if ttft_s is None or ticket.routed_at_s < self._since_s:
            return
        control = ticket.decision.reason is Reason.CONTROL
        if now - self._refreshed_s >= _REFRESH_S:
            self._refresh(now)
        value = ttft_s / (self._mean_s(ticket.decision, prefill_s, now) + prefill_s)
        self._window[control].add(value, now=now)
        self._judged += control
        value = value if control else value / (1.0 + MARGIN)
        slow = [value > limit for limit in self._limits]
        if any(slow):
            self._bet(slow, control, now)

    def _mean_s(self, decision: Decision, prefill_s: float, now: float) -> float:
        """The mean prefill, with this one."""
        scale = self._fading.scale(now=now)
        if scale > _LARGE:
            factor, scale = self._fading.restart(now=now), 1.0
            self._sums = [each * factor for each in self._sums]
        sums, chosen = self._sums, decision.chosen
        sums[0] += scale * prefill_s
        sums[1] += scale
        sums[2] += scale * chosen.uncached_tokens
        if decision.reason is Reason.CONTROL:
            sums[3] += scale * max(decision.best_matched_tokens - chosen.matched_tokens, 0)
            sums[4] += scale
        return max(sums[0] / sums[1], _LEAST_S)

    def _bet(self, slow: list[bool], control: bool, now: float) -> None:
        """One of the slow answers, and whose it is."""
        for which, each in enumerate(slow):
            if not each:
                continue
            bets = self._evidence[which]
            for i, ratio in enumerate(_RATIOS):
                bets[i] *= (ratio if control else 1.0) / (1.0 - self._share * (1.0 - ratio))
        if self.level < len(self.tightened) and self.evidence >= _ALARM and self._judged >= _MIN_CONTROL:
            if self._relaxed_s >= self._held_since_s:  # it was relaxed too early
                self._hold_s = min(2.0 * self._hold_s, _MAX_HOLD_S)
            self._turn(self.level + 1, now)

    def _refresh(self, now: float) -> None:
        """What needs no look at every answer."""
        self._refreshed_s = now
        if self._credited_s is not None:
            more = (now - self._credited_s) / _DAY_S
            self._capital += more
            for bets, each in zip(self._evidence, _spread(more), strict=True):
                bets[:] = map(add, bets, each)
        self._credited_s = now
        ours, theirs = self.counts(now=now)
        usual = self._window[False].quantiles(QUANTILES)
        for which, share in enumerate(QUANTILES):
            enough = ours * (1.0 - share) >= _MIN_SLOW
            self._limits[which] = usual[which] / (1.0 + MARGIN) if enough else math.inf
        if self.level and now - self._held_since_s >= self._hold_s and self.evidence < _CALM:
            self._relaxed_s = now
            self._turn(self.level - 1, now)
        elif now - self._held_since_s >= _MAX_HOLD_S:
            self._hold_s = _HOLD_S
        self._resize(ours + theirs, now)

    def _resize(self, answers: float, now: float) -> None:
        """More than usual where the traffic is thin, but never more than can be afforded; and so many times more, up to
        `_MOST`, as it is suspicious."""
        usual = self.usual_share
        most = max(_MOST, usual)
        _, requests, uncached, lost, compared = self._sums
        affordable = _BUDGET * (uncached / requests) / (lost / compared) if lost else most if compared else usual
        wanted = min(max(_ENOUGH / max(answers, 1.0), usual), most)
        share = min(wanted, max(affordable, _LEAST * usual))
        share = most if self.level else min(share * max(self.suspicion, 1.0), most)
        # each change costs the answers that are under way
        if not self._share / _STEP < share < self._share * _STEP:
            self._share, self._since_s = share, now

    def _turn(self, level: int, now: float) -> None:
        change = GuardChange(self.level, level, self.evidence, self.ratios(), self.counts(now=now))
        self._changes = [*self._changes[1 - _MAX_CHANGES :], change]
        self.level = level
        self._since_s = self._held_since_s = now
        self._capital = _AFTER_ALARM
        self._evidence = _spread(_AFTER_ALARM)
        self._judged = 0
        self._window = _windows()
        self._limits = [math.inf] * len(QUANTILES)


def _spread(capital: float) -> list[list[float]]:
    """Evenly over all bets that are judged, and as much on each of the others."""
    each = capital / ((len(QUANTILES) - _JUDGED) * len(_RATIOS))
    return [[each] * len(_RATIOS) for _ in QUANTILES]


def _windows() -> dict[bool, Sketch]:
    return {control: Sketch(_WINDOW_S) for control in (False, True)}
