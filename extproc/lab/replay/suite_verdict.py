"""What the suite's runs say: ours against the baselines and the oracle, paired by seed, and held against bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from extproc.lab.replay.baselines import BASELINES
from extproc.lab.replay.report import Summary
from extproc.lab.replay.suite_cells import Cell

Runs = Mapping[str, Sequence[Summary]]
"""Of one cell: by policy, in the order of the seeds."""
Metric = Callable[[Summary], float]

FULL = 1.0
"""Load above which queues grow without end: TTFT then says how long the trace was."""
HITS_UP_TO = 0.8
BEST_SHARE, BEHIND, BEHIND_P99, AGAINST_SINGLE = 0.85, 1.03, 1.05, 0.92
BEHIND_GOODPUT, HITS, LOSS = 0.97, 0.95, 1.03

_T_95: Sequence[float] = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for a two-sided 95 %, by degrees of freedom."""


def ttft_mean(summary: Summary) -> float:
    """Seconds; infinity where nothing was answered."""
    return math.inf if summary.ttft_mean_s is None else summary.ttft_mean_s


def ttft_p99(summary: Summary) -> float:
    """As `ttft_mean`."""
    return math.inf if summary.ttft_p99_s is None else summary.ttft_p99_s


def goodput(summary: Summary) -> float:
    """Calls per second."""
    return summary.goodput


def hit_rate(summary: Summary) -> float:
    """The mean share of a prompt that was found."""
    return summary.hit_rate


def lost(summary: Summary) -> float:
    """Calls without an answer."""
    return summary.sheds + summary.errors


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two policies' figures: their geometric mean over seeds, with its 95 % interval; of one seed, as it is."""

    value: float
    low: float
    high: float


def ratio(one: Sequence[Summary], other: Sequence[Summary], metric: Metric) -> Ratio:
    """`one` over `other`, paired: both have the same seeds in the same order."""
    logs = []
    for mine, theirs in zip(one, other, strict=True):
        above, below = metric(mine), metric(theirs)
        if above == below:
            logs.append(0.0)
        elif 0.0 < above < math.inf and 0.0 < below < math.inf:
            logs.append(math.log(above / below))
        else:
            value = math.inf if above > below else 0.0
            return Ratio(value, value, value)
    mean = fmean(logs)
    spread = 0.0
    if len(logs) > 1:
        spread = _T_95[min(len(logs) - 1, len(_T_95) - 1)] * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - spread), math.exp(min(mean + spread, 700.0)))


def mean(summaries: Sequence[Summary], metric: Metric) -> float:
    """Over the seeds."""
    return fmean(metric(each) for each in summaries)


def best_baseline(runs: Runs, metric: Metric, *, most: bool = False) -> str:
    """The one with the least (or the most) of it, by the mean over seeds; the first of equals."""
    names = [name for name in runs if name in BASELINES]
    if not names:
        raise ValueError("no baseline was run")
    return (max if most else min)(names, key=lambda name: mean(runs[name], metric))


@dataclass(frozen=True, slots=True)
class Line:
    """One cell in short."""

    cell: Cell
    ttft_s: float
    best: str
    """The baseline with the least mean TTFT."""
    best_s: float
    ttft: Ratio
    best_p99: str
    p99: Ratio
    best_goodput: str
    goodput: Ratio
    lost: float
    """Per run, of ours."""
    best_lost: float
    """Per run, of the baseline with the best goodput."""
    hits: float | None
    """Hit rate over the oracle's; None where nothing is to be found."""
    loss: Ratio | None
    """Mean TTFT over the oracle's."""

    @property
    def full(self) -> bool:
        """Is it judged by goodput?"""
        return self.cell.load > FULL


def line(cell: Cell, runs: Runs, ours: str) -> Line:
    """`ours`: as what it was run."""
    mine = runs[ours]
    best, best_p99 = best_baseline(runs, ttft_mean), best_baseline(runs, ttft_p99)
    best_goodput = best_baseline(runs, goodput, most=True)
    oracle = runs.get("oracle")
    found = 0.0 if oracle is None else mean(oracle, hit_rate)
    return Line(
        cell,
        mean(mine, ttft_mean),
        best,
        mean(runs[best], ttft_mean),
        ratio(mine, runs[best], ttft_mean),
        best_p99,
        ratio(mine, runs[best_p99], ttft_p99),
        best_goodput,
        ratio(mine, runs[best_goodput], goodput),
        mean(mine, lost),
        mean(runs[best_goodput], lost),
        None if not found else mean(mine, hit_rate) / found,
        None if oracle is None else ratio(mine, oracle, ttft_mean),
    )


def against_singles(cells: Sequence[Cell], runs: Mapping[str, Runs], ours: str) -> dict[str, float]:
    """For each baseline, the mean over the cells of our mean TTFT relative to its; the hardest to beat first."""
    judged = [runs[cell.name] for cell in cells if cell.load <= FULL]
    names = [name for name in BASELINES if judged and all(name in each for each in judged)]
    found = {name: fmean(ratio(each[ours], each[name], ttft_mean).value for each in judged) for name in names}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


@dataclass(frozen=True, slots=True)
class Bound:
    """What is asked for, what is so, and whether that is enough; None where nothing was run that could tell."""

    asked: str
    found: str
    met: bool | None


def bounds(lines: Sequence[Line], singles: Mapping[str, float]) -> list[Bound]:
    """Those of the issue; cells above full load count only for goodput."""
    usual, full = [each for each in lines if not each.full], [each for each in lines if each.full]
    won = [each for each in usual if each.ttft.value <= 1.0]
    tied = [each for each in usual if each.ttft.value > 1.0 >= each.ttft.low]
    behind = [each for each in usual if each.ttft.low > BEHIND]
    behind_p99 = [each for each in usual if each.p99.low > BEHIND_P99]
    worse = [each for each in full if each.goodput.high < BEHIND_GOODPUT or each.lost > each.best_lost]
    hits = [(each.hits, each.cell.name) for each in usual if each.cell.load <= HITS_UP_TO and each.hits is not None]
    losses = [each.loss.value for each in usual if each.loss is not None]
    single = next(iter(singles.items()), None)
    return [
        Bound(
            f"best mean TTFT in at least {BEST_SHARE:.0%} of the cells",
            f"{len(won)} of {len(usual)}, and {len(tied)} more within the interval",
            len(won) >= BEST_SHARE * len(usual) if usual else None,
        ),
        Bound(
            f"mean TTFT nowhere more than {BEHIND - 1:.0%} behind the best baseline, beyond the interval",
            _places(behind, lambda each: each.ttft),
            not behind if usual else None,
        ),
        Bound(
            f"p99 of TTFT nowhere more than {BEHIND_P99 - 1:.0%} behind the best baseline, beyond the interval",
            _places(behind_p99, lambda each: each.p99),
            not behind_p99 if usual else None,
        ),
        Bound(
            f"mean over the cells of TTFT relative to the best single baseline at most {AGAINST_SINGLE}",
            f"{single[1]:.3f} ({single[0]})" if single else "-",
            single[1] <= AGAINST_SINGLE if single else None,
        ),
        Bound(
            f"above full load: goodput at most {1 - BEHIND_GOODPUT:.0%} below the best baseline's beyond the interval, "
            "and no more calls without an answer",
            _places(worse, lambda each: each.goodput),
            not worse if full else None,
        ),
        Bound(
            f"hit rate at least {HITS:.0%} of the oracle's at a load of at most {HITS_UP_TO:.0%}",
            "{:.1%} at the least ({})".format(*min(hits)) if hits else "-",
            min(hits)[0] >= HITS if hits else None,
        ),
        Bound(
            f"mean TTFT at most {LOSS - 1:.0%} above that of the same rule with exact caches and queues",
            f"{fmean(losses) - 1:+.1%} in the mean over the cells" if losses else "-",
            fmean(losses) <= LOSS if losses else None,
        ),
    ]


def _places(lines: Sequence[Line], which: Callable[[Line], Ratio]) -> str:
    return ", ".join(f"{each.cell.name} ({which(each).value:.2f})" for each in lines) or "nowhere"
