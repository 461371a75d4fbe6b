"""The suite's report: RESULTS.md, every figure as JSON, and plots."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from extproc.lab.replay import plots
from extproc.lab.replay.report import Summary
from extproc.lab.replay.suite_cells import Cell, Part
from extproc.lab.replay.suite_load import FIRST_TOKEN_S, PREFILLED_PER_S, TOKEN_S
from extproc.lab.replay.suite_runs import WARM_UP, Done
from extproc.lab.replay.suite_verdict import FULL, Line, Ratio, Runs, against_singles, bounds, line, ttft_mean

_PARTS: Mapping[Part, str] = {
    Part.TUNED: "tuned on",
    Part.KIN: "tuned on its trace, at another load or fleet",
    Part.UNSEEN: "not tuned on",
}


@dataclass(frozen=True, slots=True)
class Suite:
    """What was run, and where."""

    cells: Sequence[Cell]
    left_out: Sequence[str]
    """One line for each cell that was not run."""
    done: Sequence[Done]
    ours: str
    """As what ours was run."""
    seeds: Sequence[int]
    date: str
    command: str
    cores: int
    reasons: Mapping[str, str]
    """By cell: why a baseline wins there."""

    def runs(self) -> dict[str, Runs]:
        """By cell."""
        found: dict[str, defaultdict[str, list[Summary]]] = {cell.name: defaultdict(list) for cell in self.cells}
        for done in sorted(self.done, key=lambda each: each.seed):
            found[done.cell][done.policy].append(done.summary)
        return {cell: dict(runs) for cell, runs in found.items()}


def lines_of(suite: Suite) -> list[Line]:
    """Every cell in short."""
    runs = suite.runs()
    return [line(cell, runs[cell.name], suite.ours) for cell in suite.cells]


def as_markdown(suite: Suite, drawn: Sequence[str]) -> str:
    """The whole report. `drawn`: the plots, relative to where it will be."""
    runs, lines = suite.runs(), lines_of(suite)
    singles = against_singles(suite.cells, runs, suite.ours)
    parts = [
        "# Results of the policy suite",
        f"{suite.date}, `{suite.command}`, {suite.cores} cores, {len(suite.done)} runs "
        f"({sum(each.wall_s for each in suite.done) / 60:.0f} minutes of one core), seeds "
        f"{', '.join(map(str, suite.seeds))}; ours is `{suite.ours}`.",
        _HOW.format(warm_up=f"{WARM_UP:.0%}", first_s=FIRST_TOKEN_S, per_s=PREFILLED_PER_S, token_s=TOKEN_S),
        *(f"- Left out: {each}" for each in suite.left_out),
        "## Verdict",
        _table(
            ("asked", "found", "met"),
            [(each.asked, each.found, _YES[each.met]) for each in bounds(lines, singles)],
        ),
        "## Cells",
        _cells(lines),
        _won(lines, suite.reasons),
        "## Against each baseline",
        "Mean over the cells up to full load of our mean TTFT relative to theirs; the first is the best single one.",
        _table(("baseline", "ours relative to it"), [(name, f"{value:.3f}") for name, value in singles.items()]),
        *(f"![{name}]({name})" for name in drawn),
        "## Every policy in every cell",
        "Means over the seeds; ± is the standard deviation of the mean TTFT over them. TTFT in seconds.",
    ]
    for cell in suite.cells:
        came = fmean(each.load for each in suite.done if each.cell == cell.name)
        parts += [f"### {cell.name}", _about(cell, came), _policies(runs[cell.name], suite.ours)]
    return "\n\n".join(each for each in parts if each).replace("\n\n- Left", "\n- Left") + "\n"


_HOW = (
    "Each cell is one trace at one load on one simulated fleet, through every policy. A load of 100 % is what the "
    "fleet serves when a rule with exact knowledge keeps it busy all the time. The first {warm_up} of the calls fill "
    "the caches and are not counted. No call waits for an answer: policies that are slow would thin out their own "
    "traffic, and their TTFTs would be those of a lower load. The next call of a conversation comes its pause after a "
    "nominal end of the one before ({first_s:g} s, {per_s:,.0f} tokens/s for what is new in the prompt, {token_s:g} s "
    "for each token of the answer), at the same time for every policy. "
    "Seeds change generated traces, where arrivals lie within the bins of recorded ones, and the policies' own "
    "chances. Ratios are ours over theirs, geometric means over the seeds, with the 95 % interval of Student's t on "
    "the logarithm, paired by seed; the baseline is the best of all in that cell and for that figure. gie and smg "
    "scrape every 50 ms, all others every 200 ms. Cells marked `tuned` were looked at when defaults were chosen; "
    "`kin` are other loads and fleets of their traces; `unseen` are all others."
)
_YES: Mapping[bool | None, str] = {True: "yes", False: "**no**", None: "-"}


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---"] + ["---:"] * (len(headings) - 1) if len(headings) > 3 else ["---"] * len(headings)
    return "\n".join(f"| {' | '.join(each)} |" for each in (headings, marks, *rows))


def _cells(lines: Sequence[Line]) -> str:
    headings = (
        "cell", "part", "TTFT mean", "best baseline", "its mean", "ours / its",
        "p99: best", "ours / its", "hit rate / oracle's", "TTFT / oracle's",
    )  # fmt: skip
    usual = [
        (
            each.cell.name,
            each.cell.part,
            _seconds(each.ttft_s),
            each.best,
            _seconds(each.best_s),
            _ratio(each.ttft),
            each.best_p99,
            _ratio(each.p99),
            "-" if each.hits is None else f"{each.hits:.1%}",
            "-" if each.loss is None else _ratio(each.loss),
        )
        for each in lines
        if not each.full
    ]
    full = [
        (
            each.cell.name,
            each.cell.part,
            each.best_goodput,
            _ratio(each.goodput),
            f"{each.lost:.0f}",
            f"{each.best_lost:.0f}",
            _ratio(each.ttft),
        )
        for each in lines
        if each.full
    ]
    text = _table(headings, usual) if usual else ""
    if full:
        text += "\n\nAbove full load, where queues grow as long as the trace lasts, goodput is what counts:\n\n"
        text += _table(
            ("cell", "part", "most goodput", "ours / its", "not answered", "of its", "TTFT: ours / best"), full
        )
    return text


def _won(lines: Sequence[Line], reasons: Mapping[str, str]) -> str:
    """Where a baseline is better than ours in the mean."""
    rows = []
    for each in lines:
        if each.full:
            if each.goodput.value < 1.0:
                rows.append((each, each.best_goodput, "goodput", each.goodput))
            continue
        if each.ttft.value > 1.0:
            rows.append((each, each.best, "TTFT mean", each.ttft))
        if each.p99.value > 1.0:
            rows.append((each, each.best_p99, "TTFT p99", each.p99))
    if not rows:
        return "No baseline is better anywhere."
    return "Where a baseline is better:\n\n" + _table(
        ("cell", "who", "in what", "ours / its", "why"),
        [(each.cell.name, who, what, _ratio(by), reasons.get(each.cell.name, "")) for each, who, what, by in rows],
    )


def _about(cell: Cell, came: float) -> str:
    trace = ": ".join(filter(None, [cell.data, cell.trace]))
    speeds = "" if cell.speeds == (1.0,) else f" of speeds {', '.join(f'{each:g}' for each in cell.speeds)}, repeated"
    return (
        f"`{trace}` at {came:.0%} (asked for: {cell.load:.0%}), {cell.nodes} nodes{speeds}, caches of "
        f"{cell.cache_tokens / 1e6:g}M tokens, goodput within {cell.slo_ttft_s:g} s; {_PARTS[cell.part]}."
    )


_FIGURES: Mapping[str, tuple[Callable[[Summary], float | None], Callable[[float], str]]] = {
    "hit rate": (lambda each: each.hit_rate, lambda value: f"{value:.1%}"),
    "avoided": (lambda each: each.prefill_avoided, lambda value: f"{value:.1%}"),
    "TTFT mean": (lambda each: each.ttft_mean_s, lambda value: f"{value:.3f}"),
    "±": (lambda each: each.ttft_mean_s, lambda value: f"{value:.3f}"),
    "p50": (lambda each: each.ttft_p50_s, lambda value: f"{value:.3f}"),
    "p90": (lambda each: each.ttft_p90_s, lambda value: f"{value:.3f}"),
    "p95": (lambda each: each.ttft_p95_s, lambda value: f"{value:.3f}"),
    "p99": (lambda each: each.ttft_p99_s, lambda value: f"{value:.3f}"),
    "TPOT ms": (lambda each: each.tpot_mean_s, lambda value: f"{value * 1e3:.1f}"),
    "goodput/s": (lambda each: each.goodput, lambda value: f"{value:.2f}"),
    "skew": (lambda each: each.skew, lambda value: f"{value:.2f}"),
    "sheds": (lambda each: each.sheds, lambda value: f"{value:.0f}"),
    "errors": (lambda each: each.errors, lambda value: f"{value:.0f}"),
}


def _policies(runs: Runs, ours: str) -> str:
    rows = []
    for policy in sorted(runs, key=lambda name: fmean(ttft_mean(each) for each in runs[name])):
        shown = []
        for heading, (get, text) in _FIGURES.items():
            values = [value for each in runs[policy] if (value := get(each)) is not None]
            over_seeds, least = (stdev, 2) if heading == "±" else (fmean, 1)
            shown.append(text(over_seeds(values)) if len(values) >= least else "-")
        rows.append((f"**{policy}**" if policy == ours else policy, *shown))
    return _table(("policy", *_FIGURES), rows)


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _ratio(found: Ratio) -> str:
    interval = f" ({found.low:.3f} to {found.high:.3f})" if found.low < found.high else ""
    return f"{found.value:.3f}{interval}"


def as_json(suite: Suite) -> str:
    """Every figure of every run, and the cells."""
    figures = {
        "date": suite.date,
        "command": suite.command,
        "cores": suite.cores,
        "ours": suite.ours,
        "cells": [asdict(cell) for cell in suite.cells],
        "left_out": list(suite.left_out),
        "runs": [
            {
                "cell": each.cell,
                "policy": each.policy,
                "seed": each.seed,
                "load": each.load,
                "wall_s": each.wall_s,
                **asdict(each.summary),
            }
            for each in suite.done
        ],
    }
    return json.dumps(figures, indent=1) + "\n"


def draw(suite: Suite, directory: Path) -> list[Path]:
    """Ours against the best baseline in every cell, and TTFT against load where a trace has three loads or more."""
    plots.ready()
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    usual = [each for each in lines_of(suite) if not each.full]
    written = []
    if usual:
        figure = Figure(figsize=(9.0, 1.2 + 0.32 * len(usual)), layout="constrained")
        axes = figure.add_subplot()
        ratios = {"TTFT mean": [each.ttft for each in usual], "TTFT p99": [each.p99 for each in usual]}
        for at, (title, found) in enumerate(ratios.items()):
            spans = [
                [each.value - each.low for each in found],
                [each.high - each.value for each in found],
            ]
            places = [i + 0.2 * (2 * at - 1) for i in range(len(usual))]
            axes.errorbar([each.value for each in found], places, xerr=spans, fmt="o", capsize=2, label=title)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yticks(range(len(usual)), [f"{each.cell.name} ({each.best})" for each in usual])
        axes.invert_yaxis()
        axes.set_xlabel("ours relative to the best baseline of the cell, 95 % interval")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        written.append(directory / "against-the-best.png")
        figure.savefig(written[-1], dpi=110)
    written += _against_load(suite, directory)
    return written


def _against_load(suite: Suite, directory: Path) -> list[Path]:
    from matplotlib.figure import Figure

    families: defaultdict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in suite.cells:
        families[cell.data, cell.trace, cell.nodes, cell.speeds, cell.cache_tokens].append(cell)
    runs, written = suite.runs(), []
    for cells in families.values():
        cells = sorted(cells, key=lambda cell: cell.load)
        if len(cells) < 3:
            continue
        figure = Figure(figsize=(8.0, 5.0), layout="constrained")
        axes = figure.add_subplot()
        for policy in runs[cells[0].name]:
            values = [fmean(ttft_mean(each) for each in runs[cell.name][policy]) for cell in cells]
            mine = policy in (suite.ours, "oracle")
            axes.plot([cell.load for cell in cells], values, marker="o", linewidth=2.5 if mine else 1.0, label=policy)
        axes.set_yscale("log")
        axes.set_xlabel("load, share of what the fleet can serve")
        axes.set_ylabel("TTFT mean, s")
        axes.axvline(FULL, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", ncols=2)
        name = cells[0].name.split("-")[0]
        written.append(directory / f"ttft-{name}-{cells[0].nodes}.png")
        figure.savefig(written[-1], dpi=110)
    return written
