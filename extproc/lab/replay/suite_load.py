"""Traffic at an asked load, the same for every policy: all calls come at fixed times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from extproc.lab.replay.capacity import capacity
from extproc.lab.replay.types import Call, Machine, Trace

FIRST_TOKEN_S, PREFILLED_PER_S, TOKEN_S = 0.5, 10_000.0, 0.02
"""How long the answers take that calls wait for: what is seen at a load of about 80 %."""
RAMP = 0.2
"""Share of the time in which conversations become as many as they then stay."""
_MOST_SQUEEZED = 1.1


@dataclass(frozen=True, slots=True)
class Offered:
    """A trace without calls that wait for others, whose own clock makes the load."""

    trace: Trace
    capacity: float
    """Calls per second."""


def offered(trace: Trace, machines: Sequence[Machine], load: float, *, warm_up: float) -> Offered:
    """`trace` at `load` of what `machines` can serve, measured without its first `warm_up` (a share of the calls).

    Where calls wait for answers, a policy that is slow thins out its own traffic, and its TTFT is that of another load.
    So such a call comes at a fixed time as well: its pause after a nominal end of the call it waits for (FIRST_TOKEN_S,
    the prefill of what is new since the turn before, TOKEN_S for each token). Then the clock is set so that the load is
    reached. What comes in the first RAMP of the time, or after the last recorded or generated call would without
    answers' times, is left out: there are fewer conversations. The capacity is that for the calls in this order.

    ValueError where the clock would have to run so fast that answers came too late by their nominal times.
    """
    name, size = trace.name, trace.block_tokens
    waiting = any(call.after is not None for call in trace.calls)
    calls = _steady(_at_fixed_times(trace.calls)) if waiting else trace.calls
    served = capacity(Trace(name, size, calls), machines)
    rate = load * served
    factor = _rate(name, calls, warm_up) / rate
    if waiting and factor * _MOST_SQUEEZED < 1.0:
        raise ValueError(
            f"{name}: its conversations make {factor * rate:.2f} calls per second where {rate:.2f} are asked for: it "
            "needs more of them at once"
        )
    return Offered(Trace(name, size, [call._replace(at_s=call.at_s * factor) for call in calls]), served)


def _at_fixed_times(calls: Sequence[Call]) -> list[Call]:
    """In the order of time, up to the end of the trace's own clock."""
    times: list[float] = []
    end_s: list[float] = []
    for call in calls:
        new, at_s = call.prompt_tokens, call.at_s
        if call.after is not None:
            before = calls[call.after]
            at_s = end_s[call.after] + call.pause_s
            new = max(0, new - before.prompt_tokens - before.answer_tokens)
        times.append(at_s)
        end_s.append(at_s + FIRST_TOKEN_S + new / PREFILLED_PER_S + call.answer_tokens * TOKEN_S)
    fixed = [call._replace(at_s=at_s, after=None) for call, at_s in zip(calls, times, strict=True)]
    return sorted((call for call in fixed if call.at_s <= calls[-1].at_s), key=lambda call: call.at_s)


def _steady(calls: Sequence[Call]) -> list[Call]:
    """Without the ramp, from 0.0."""
    begin = bisect_left(calls, RAMP * calls[-1].at_s, key=lambda call: call.at_s)
    return [call._replace(at_s=call.at_s - calls[begin].at_s) for call in calls[begin:]]


def _rate(name: str, calls: Sequence[Call], warm_up: float) -> float:
    """Calls per second after the warm-up."""
    counted = calls[int(len(calls) * warm_up) :]
    span_s = counted[-1].at_s - counted[0].at_s
    if span_s <= 0.0:
        raise ValueError(f"{name}: {len(counted)} calls at one time are no load: a longer trace is needed")
    return len(counted) / span_s
