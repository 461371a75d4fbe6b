"""`kvaffinity compare`: the same load in real time through this router and through others, on equal nodes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import tempfile
import urllib.request
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from extproc.lab import demo
from extproc.lab.peers.install import NotInstalled, installed
from extproc.lab.peers.measure import added_latency_s, measured
from extproc.lab.peers.results import Row, table
from extproc.lab.peers.routers import PEERS, url
from extproc.lab.peers.workloads import WORKLOADS, ideal_hit_ratio
from extproc.lab.processes import free_ports, stopped_at_the_end

VENVS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvaffinity" / "peers"


def names_of(known: Collection[str]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """A comma-separated list of some of these, each once."""

    def parse(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise click.BadParameter(f"{', '.join(map(repr, unknown))}: there are {', '.join(known)}")
        return names

    return parse


@click.command()
@click.option(
    "--peers",
    default=",".join(PEERS),
    show_default=True,
    callback=names_of(PEERS),
    help="Which, and their order.",
)
@click.option("--workloads", default=",".join(WORKLOADS), show_default=True, callback=names_of(WORKLOADS))
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="Of each load.")
@click.option("--seed", default=1, show_default=True, help="Of the loads; run r has seed + r.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write every figure there, as JSON.")
@click.option(
    "--venv",
    type=click.Path(path_type=Path, file_okay=False),
    default=VENVS,
    show_default="~/.cache/kvaffinity/peers",
    help="Where the peers are installed, each in an environment of its own.",
)
@click.option("--keep-logs", is_flag=True, help="Keep the configurations and what the processes print; say where.")
def compare(
    peers: tuple[str, ...],
    workloads: tuple[str, ...],
    runs: int,
    seconds: float,
    seed: int,
    out: Path | None,
    venv: Path,
    keep_logs: bool,
) -> None:
    """Send the same conversations through this router and through others, each before four fresh simulated nodes.

    Every run measures what a router adds to a trivial request on the idle fleet, then each workload on empty caches
    with the router started anew. The order turns around with each run. What pip cannot install gets a row that says so.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    work_dir = Path(tempfile.mkdtemp(prefix="kvaffinity-compare-"))
    comparison = Comparison(peers, workloads, seconds, work_dir)
    made_by = {"seed": seed, "runs": runs, "seconds": seconds, "nodes": len(demo.NODES), "cores": os.cpu_count()}

    def save() -> None:
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(made_by | comparison.as_json(), indent=1) + "\n")

    # refreshed between measurements only: a thread that draws would be measured too
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with (
            Progress(*columns, console=console, auto_refresh=False, transient=True) as progress,
            stopped_at_the_end(work_dir) as processes,
        ):
            total = len(peers) + runs * len(peers) * (1 + len(workloads))
            task = progress.add_task("starting", total=total, completed=-1)

            def step(what: str) -> None:
                progress.update(task, description=what, advance=1, refresh=True)

            save()  # a place that cannot be written to is better known before
            comparison.install(venv, step)
            nodes = free_ports(len(demo.NODES))
            demo.start_nodes(processes, nodes)
            for run in range(runs):
                comparison.run(run, seed + run, nodes, step)
                save()
    except (RuntimeError, OSError) as fault:
        raise click.ClickException(str(fault)) from fault
    finally:
        if keep_logs:
            console.print(f"Logs and configurations: {work_dir}", soft_wrap=True)
        else:
            shutil.rmtree(work_dir)
    for name in workloads:
        console.print(table(f"{name}: {WORKLOADS[name].title}{comparison.ideal(name)}", name, comparison.rows))


class Comparison:
    """The routers, their nodes and what has been found so far."""

    def __init__(self, peers: Sequence[str], workloads: Sequence[str], seconds: float, log_dir: Path) -> None:
        self.rows = {name: Row() for name in peers}
        self._ideal: dict[str, list[float]] = {}
        self._workloads = workloads
        self._seconds = seconds
        self._log_dir = log_dir
        self._pythons: dict[str, Path] = {}

    def install(self, venv: Path, step: Callable[[str], None]) -> None:
        """All that are not part of the laboratory; the rows of those that cannot be installed say why."""
        for name, row in self.rows.items():
            step(f"installing {name}")
            try:
                requirements = PEERS[name].requirements
                self._pythons[name] = installed(requirements, venv / name) if requirements else Path()
            except NotInstalled as fault:
                row.fault = f"not installed: {fault}"

    def run(self, number: int, seed: int, nodes: Sequence[int], step: Callable[[str], None]) -> None:
        """Each router on the idle fleet and through each workload; every second time in the opposite order."""
        loads = {name: WORKLOADS[name].sessions(self._seconds, seed) for name in self._workloads}
        for name, sessions in loads.items():
            if WORKLOADS[name].users is None:  # else nobody knows beforehand how far it will get
                self._ideal.setdefault(name, []).append(ideal_hit_ratio(sessions))
        for name in reversed(self.rows) if number % 2 else self.rows:
            row = self.rows[name]
            for stage in (None, *loads):
                step(f"run {number + 1}: {name}, {stage or 'idle'}")
                if row.fault is not None:
                    continue
                restart(nodes)
                try:
                    with (
                        stopped_at_the_end(self._log_dir) as processes,
                        PEERS[name].start(processes, nodes, self._pythons[name]) as router,
                    ):
                        urls = list(map(url, nodes))
                        if stage is None:
                            row.added_latency_s.append(asyncio.run(added_latency_s(router, urls[0])))
                        else:
                            found = measured(router, urls, WORKLOADS[stage], loads[stage], self._seconds)
                            row.runs.setdefault(stage, []).append(found)
                except (RuntimeError, OSError, aiohttp.ClientError, ExceptionGroup) as fault:
                    row.fault = f"run {number + 1}, {stage or 'idle'}: {said(fault)}"

    def ideal(self, workload: str) -> str:
        found = self._ideal.get(workload)
        return f" (ideal hit rate {statistics.median(found):.1%})" if found else ""

    def as_json(self) -> dict[str, Any]:
        return {"ideal_hit_ratios": self._ideal, "peers": {name: row.as_json() for name, row in self.rows.items()}}


def restart(nodes: Sequence[int]) -> None:
    """As if they had just been started: empty caches, counters at zero."""
    for node in nodes:
        urllib.request.urlopen(f"{url(node)}/restart", data=b"", timeout=5.0).close()


def said(fault: Exception) -> str:
    """One line of it."""
    while isinstance(fault, ExceptionGroup):
        fault = fault.exceptions[0]
    return next(iter(str(fault).splitlines()), "") or type(fault).__name__


if __name__ == "__main__":
    compare()
