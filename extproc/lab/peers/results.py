"""The runs of a comparison as a table and as JSON: medians, each with the least and the most."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from extproc.lab.peers.measure import Measured

FIGURES = ("hit_ratio", "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "skew", "requests_per_s")


@dataclass(frozen=True, slots=True)
class Spread:
    """What the runs gave."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None


@dataclass(slots=True)
class Row:
    """One router: why it was not measured (again), and what was measured before."""

    fault: str | None = None
    added_latency_s: list[float] = field(default_factory=list)
    runs: dict[str, list[Measured]] = field(default_factory=dict)
    """By workload."""

    def figures(self, workload: str) -> dict[str, Spread | None]:
        runs = self.runs.get(workload, [])
        return {name: Spread.of([getattr(run, name) for run in runs]) for name in FIGURES}

    def as_json(self) -> dict[str, Any]:
        added = Spread.of(self.added_latency_s)
        workloads = {
            name: {
                "requests": sum(run.requests for run in runs),
                "errors": sum(sum(run.errors.values()) for run in runs),
                **{figure: spread and asdict(spread) for figure, spread in self.figures(name).items()},
                "runs": [asdict(run) for run in runs],
            }
            for name, runs in self.runs.items()
        }
        added_json = added and {**asdict(added), "runs": self.added_latency_s}
        return {"fault": self.fault, "added_latency_s": added_json, "workloads": workloads}


def table(title: str, workload: str, rows: Mapping[str, Row]) -> Table:
    """Routers from top to bottom; each cell is the median over the runs, with the least and the most below it."""

    def percent(value: float) -> str:
        return f"{value:.1%}"

    def milliseconds(value: float) -> str:
        return f"{value * 1000:,.0f}"

    shown: dict[str, tuple[str, Callable[[float], str]]] = {
        "hit_ratio": ("hit rate", percent),
        "ttft_mean_s": ("TTFT mean ms", milliseconds),
        "ttft_p50_s": ("p50", milliseconds),
        "ttft_p95_s": ("p95", milliseconds),
        "ttft_p99_s": ("p99", milliseconds),
        "skew": ("skew", "{:.2f}".format),
        "requests_per_s": ("requests/s", "{:.1f}".format),
    }
    others = Spread.of([run.others_cores for row in rows.values() for run in row.runs.get(workload, [])])
    caption = ""
    if others is not None:
        caption = f"Other programs used {others.median:.1f} cores meanwhile ({others.least:.1f} to {others.most:.1f})."
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left", show_lines=True)
    made.add_column("")
    for heading in (*(heading for heading, _ in shown.values()), "errors", "added ms"):
        made.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        label = name if row.fault is None else f"{name}: {row.fault}"
        if not (runs := row.runs.get(workload)):
            made.add_row(label)
            continue
        figures = row.figures(workload)
        cells = [cell(figures[figure], text) for figure, (_, text) in shown.items()]
        errors = sum(sum(run.errors.values()) for run in runs)
        added = cell(Spread.of(row.added_latency_s), lambda value: f"{value * 1000:.2f}")
        made.add_row(label, *cells, f"{errors:,}", added)
    return made


def cell(spread: Spread | None, text: Callable[[float], str]) -> str:
    if spread is None:
        return "-"
    if spread.least == spread.most:
        return text(spread.median)
    return f"{text(spread.median)}\n{text(spread.least)}-{text(spread.most)}"
