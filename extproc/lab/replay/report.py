"""What a replay says: one run in numbers, all runs as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from rich.table import Table

from extproc.lab.replay.types import Machine, Result


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Times in seconds, of answered calls; None where there were none."""

    requests: int
    rate: float
    """Calls per second that came. Less than was asked for where calls wait for answers, and these take long."""
    sheds: int
    errors: int
    """Failed, or not answered when time was up."""
    hit_rate: float
    """The mean share of a prompt that was found cached; every answered call counts alike."""
    prefill_avoided: float
    """The share of all prompt tokens that was found cached."""
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    tpot_mean_s: float | None
    """Time per token after the first, the mean over answers of more than one."""
    goodput: float
    """Calls per second answered with a TTFT within the objective; sheds and errors are none."""
    good_ratio: float
    """Their share of all calls."""
    skew: float | None
    """Uncached work of the busiest node over the mean, in seconds of each node's own speed; 1.0 is even."""
    retried: int


@dataclass(frozen=True, slots=True)
class Run:
    """What was run, and what came of it."""

    trace: str
    policy: str
    nodes: int
    cache_tokens: int
    """Of each node."""
    load: float | None
    """None: at the trace's own rate, or one that was given."""
    rate: float
    """Calls per second that were asked for."""
    seed: int
    wall_s: float
    summary: Summary


def after_warm_up(results: Sequence[Result], warm_up: float) -> list[Result]:
    """Without the first `warm_up` (a share, in [0, 1)) of the calls, in the order of their arrival."""
    ordered = sorted(results, key=lambda result: (result.arrived_s, result.number))
    return ordered[int(len(ordered) * warm_up) :]


def summarise(
    results: Sequence[Result], machines: Sequence[Machine], *, slo_ttft_s: float, warm_up: float = 0.0
) -> Summary:
    """A run in numbers, without its warm-up. `machines`: the whole fleet; nodes without a call count for the skew."""
    counted = after_warm_up(results, warm_up)
    answered = [each for each in counted if each.done_s < math.inf and each.ttft_s < math.inf]
    sheds = sum(not each.node for each in counted)
    ttfts = sorted(each.ttft_s for each in answered)
    tpots = [
        (each.done_s - each.arrived_s - each.ttft_s) / (each.answer_tokens - 1)
        for each in answered
        if each.answer_tokens > 1
    ]
    good = sum(each.ttft_s <= slo_ttft_s for each in answered)
    span_s = counted[-1].arrived_s - counted[0].arrived_s if counted else 0.0
    prompts = sum(each.prompt_tokens for each in answered)
    return Summary(
        requests=len(counted),
        rate=len(counted) / span_s if span_s else 0.0,
        sheds=sheds,
        errors=len(counted) - len(answered) - sheds,
        hit_rate=sum(each.cached_tokens / each.prompt_tokens for each in answered) / max(len(answered), 1),
        prefill_avoided=sum(each.cached_tokens for each in answered) / max(prompts, 1),
        ttft_mean_s=_mean(ttfts),
        ttft_p50_s=percentile(ttfts, 0.50),
        ttft_p90_s=percentile(ttfts, 0.90),
        ttft_p95_s=percentile(ttfts, 0.95),
        ttft_p99_s=percentile(ttfts, 0.99),
        tpot_mean_s=_mean(tpots),
        goodput=good / span_s if span_s else 0.0,
        good_ratio=good / max(len(counted), 1),
        skew=_skew(answered, machines),
        retried=sum(each.attempts > 1 for each in counted),
    )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The least of `ordered` values that `share` of them do not exceed; None where there are none."""
    return ordered[max(math.ceil(len(ordered) * share) - 1, 0)] if ordered else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _skew(answered: Sequence[Result], machines: Sequence[Machine]) -> float | None:
    work_s = {machine.name: 0.0 for machine in machines}
    speeds = {machine.name: machine.prefill_tokens_per_s * machine.speed for machine in machines}
    for each in answered:
        work_s[each.node] += (each.prompt_tokens - each.cached_tokens) / speeds[each.node]
    total_s = sum(work_s.values())
    return max(work_s.values()) * len(work_s) / total_s if total_s else None


_COLUMNS: Mapping[str, Callable[[Run], str]] = {
    "calls": lambda run: f"{run.summary.requests}",
    "calls/s": lambda run: f"{run.summary.rate:.2f}",
    "hit": lambda run: f"{run.summary.hit_rate:.1%}",
    "avoided": lambda run: f"{run.summary.prefill_avoided:.1%}",
    "TTFT mean": lambda run: _seconds(run.summary.ttft_mean_s),
    "p50": lambda run: _seconds(run.summary.ttft_p50_s),
    "p90": lambda run: _seconds(run.summary.ttft_p90_s),
    "p95": lambda run: _seconds(run.summary.ttft_p95_s),
    "p99": lambda run: _seconds(run.summary.ttft_p99_s),
    "TPOT ms": lambda run: "-" if run.summary.tpot_mean_s is None else f"{run.summary.tpot_mean_s * 1e3:.1f}",
    "goodput/s": lambda run: f"{run.summary.goodput:.2f}",
    "skew": lambda run: "-" if run.summary.skew is None else f"{run.summary.skew:.2f}",
    "shed": lambda run: f"{run.summary.sheds}",
    "errors": lambda run: f"{run.summary.errors}",
    "wall s": lambda run: f"{run.wall_s:.1f}",
}


def table(runs: Sequence[Run], *, slo_ttft_s: float) -> Table:
    """One line for each run; the best mean TTFT of each load and cache size is bold."""
    shown = Table(
        title=f"{runs[0].trace}: {runs[0].nodes} nodes, seed {runs[0].seed}",
        caption=f"hit: mean share of a prompt that was cached; avoided: share of all prompt tokens; TTFT in s; "
        f"goodput: answers within {slo_ttft_s:g} s; skew: busiest node's uncached work over the mean",
    )
    for heading in ("load", "cache", "policy"):
        shown.add_column(heading, overflow="fold", min_width=len(heading))
    for heading in _COLUMNS:
        shown.add_column(heading, justify="right")
    best: dict[tuple[float, int], float] = {}
    for run in runs:
        cell, mean_s = (run.rate, run.cache_tokens), run.summary.ttft_mean_s
        if mean_s is not None:
            best[cell] = min(best.get(cell, math.inf), mean_s)
    for run, following in zip_longest(runs, runs[1:]):
        cell = (run.rate, run.cache_tokens)
        load = f"{run.rate:.2f}/s" if run.load is None else f"{run.load:.0%}"
        cache = f"{run.cache_tokens / 1e6:g}M"
        shown.add_row(
            load,
            cache,
            run.policy,
            *(text(run) for text in _COLUMNS.values()),
            style="bold" if run.summary.ttft_mean_s == best.get(cell, math.nan) else None,
            end_section=following is not None and cell != (following.rate, following.cache_tokens),
        )
    return shown


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def as_json(runs: Sequence[Run], machines: Sequence[Machine]) -> str:
    """Every figure; `machines` as they are with the first run's cache."""
    figures = {"machines": [asdict(each) for each in machines], "runs": [asdict(run) for run in runs]}
    return json.dumps(figures, indent=1)
