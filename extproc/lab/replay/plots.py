"""Plots of replays: TTFT against load, each node's load over time, hit rate against cache size."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.lab.replay.report import Run
from extproc.lab.replay.types import Machine, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BINS = 60


class PlotError(RuntimeError):
    """There is nothing to draw with."""


def ready() -> None:
    """PlotError where matplotlib is missing: to be asked before hours are replayed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise PlotError(f"{error.name} is missing: pip install 'kvaffinity[replay]' brings it") from error


def draw(
    directory: Path, runs: Sequence[Run], results: Mapping[str, Sequence[Result]], machines: Sequence[Machine]
) -> list[Path]:
    """Write what the runs have to show, as PNG; returns the files. `results`: by policy, of one load and cache size."""
    ready()
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    if len({run.rate for run in runs}) > 1:
        largest = max(run.cache_tokens for run in runs)
        written.append(_ttft(directory / "ttft.png", [run for run in runs if run.cache_tokens == largest]))
    if len({run.cache_tokens for run in runs}) > 1:
        written.append(_hits(directory / "hits.png", [run for run in runs if run.load == runs[-1].load]))
    for policy, each in results.items():
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in policy)
        written.append(_work(directory / f"work-{name}.png", policy, each, machines))
    return written


def _figure(title: str, count: int, x: str, *ys: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # draws without a display, and without pyplot's global state

    figure = Figure(figsize=(6.5 * count, 4.5), layout="constrained")
    axes = [figure.add_subplot(1, count, i + 1) for i in range(count)]
    figure.suptitle(title)
    for each, y in zip(axes, ys, strict=True):
        each.set_xlabel(x)
        each.set_ylabel(y)
        each.grid(alpha=0.3)
    return figure, axes


def _by_policy(runs: Iterable[Run]) -> dict[str, list[Run]]:
    found: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.policy].append(run)
    return found


def _ttft(path: Path, runs: Sequence[Run]) -> Path:
    shares = all(run.load is not None for run in runs)
    x = "load, share of what the fleet can serve" if shares else "calls per second"
    title = f"{runs[0].trace}, {runs[0].nodes} nodes"
    figure, (mean, tail) = _figure(title, 2, x, "TTFT mean, s", "TTFT p99, s")
    for policy, those in _by_policy(runs).items():
        those = sorted(those, key=lambda run: run.rate)
        at = [run.load if run.load is not None else run.rate for run in those]
        mean.plot(at, [_number(run.summary.ttft_mean_s) for run in those], marker="o", label=policy)
        tail.plot(at, [_number(run.summary.ttft_p99_s) for run in those], marker="o", label=policy)
    for axes in (mean, tail):
        axes.set_ylim(bottom=0.0)
    return _save(figure, tail, path)


def _hits(path: Path, runs: Sequence[Run]) -> Path:
    title = f"{runs[0].trace}, {runs[0].nodes} nodes"
    figure, (axes,) = _figure(title, 1, "cache of a node, million tokens", "share of prompt tokens found cached")
    for policy, those in _by_policy(runs).items():
        those = sorted(those, key=lambda run: run.cache_tokens)
        sizes = [run.cache_tokens / 1e6 for run in those]
        axes.plot(sizes, [run.summary.prefill_avoided for run in those], marker="o", label=policy)
    axes.set_xscale("log")
    return _save(figure, axes, path)


def _work(path: Path, policy: str, results: Sequence[Result], machines: Sequence[Machine]) -> Path:
    """Uncached work that each node was given, over time, as a share of what it can prefill."""
    figure, (axes,) = _figure(policy, 1, "s", "uncached work given to a node, share of its prefill speed")
    width_s = max(max((each.arrived_s for each in results), default=0.0) / _BINS, 1e-9)
    for machine in machines:
        work = [0.0] * (_BINS + 1)
        for each in results:
            if each.node == machine.name:
                work[int(each.arrived_s / width_s)] += each.prompt_tokens - each.cached_tokens
        full = width_s * machine.prefill_tokens_per_s * machine.speed
        times = [i * width_s for i in range(_BINS)]
        axes.plot(times, [tokens / full for tokens in work[:_BINS]], label=machine.name, linewidth=1.0)
    return _save(figure, axes, path)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _save(figure: Figure, axes: Axes, path: Path) -> Path:
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    return path
