"""`kvaffinity suite`: the policy, its peers' rules and the oracle in a listed set of cells, and a verdict."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

import click

from extproc.lab.replay import plots, policies, suite_report, suite_runs
from extproc.lab.replay.baselines import BASELINES
from extproc.lab.replay.scenarios import figures
from extproc.lab.replay.suite_cells import CELLS, ORIGINS, QUICK, REASONS

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvaffinity" / "suite.jsonl"


@click.command()
@click.option("--quick", is_flag=True, help="Short traces, in under 5 minutes: they show that all is there.")
@click.option("--scenarios", is_flag=True, help="The scenarios instead: a table of figures.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help=f"Directory of public traces ({', '.join(ORIGINS)}, each may be .zst or .gz); cells whose file is not there "
    "are left out.",
)
@click.option("--cells", "wanted", default="*", show_default=True, help="Only those whose names match, as in a shell.")
@click.option(
    "--policies",
    "specs",
    default=",".join(BASELINES),
    show_default="all baselines",
    help="The baselines; ours and the oracle are always there.",
)
@click.option("--ours", default="ours", show_default=True, help="What ours is: ours:price_weight=1.5 tries something.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1, 10))
@click.option("--processes", default=2, show_default=True, type=click.IntRange(1))
@click.option(
    "--runs",
    "file",
    default=_CACHE,
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Keeps what was run; only what the sources changed is run again.  [default: {_CACHE}]",
)
@click.option(
    "--out",
    default=Path("RESULTS.md"),
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The report.",
)
@click.option(
    "--plots",
    "directory",
    default=Path("dashboards/results"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where plots and all figures (JSON) go.",
)
def suite(
    quick: bool,
    scenarios: bool,
    data: Path | None,
    wanted: str,
    specs: str,
    ours: str,
    seeds: int,
    processes: int,
    file: Path,
    out: Path,
    directory: Path,
) -> None:
    """Run every policy in every cell (traffic, load, fleet), and write what that says.

    It can be stopped and called again: what was run is kept.
    """
    try:
        if scenarios:
            for text in figures():
                click.echo(text)
            return
        plots.ready()
        chosen = [ours, *filter(None, specs.split(",")), "oracle"]
        for spec in chosen:  # what is wrong is said before anything is run
            policies.make(spec, seed=1, machines=CELLS[0].machines(), block_tokens=64)
        cells, left_out = [], []
        for cell in QUICK if quick else CELLS:
            if not fnmatch(cell.name, wanted):
                continue
            if suite_runs.source(cell, data) is None:
                why = "no --data given" if data is None else f"no {cell.data}* in {data}"
                left_out.append(f"{cell.name}: {why} (from {ORIGINS[cell.data]})")
                click.echo(f"left out: {left_out[-1]}", err=True)
            else:
                cells.append(cell)
        if not cells:
            raise ValueError(f"no cell is left: {wanted} matches {len(left_out)}, all left out")
        numbers = range(1, seeds + 1)
        done = suite_runs.execute(cells, chosen, numbers, file=file, data=data, processes=processes)
        found = suite_report.Suite(
            cells,
            left_out,
            done,
            ours,
            numbers,
            f"{datetime.now(UTC):%Y-%m-%d}",
            shlex.join(["kvaffinity", *sys.argv[1:]]),
            os.cpu_count() or 1,
            REASONS,
        )
        directory.mkdir(parents=True, exist_ok=True)
        drawn = [os.path.relpath(each, out.parent) for each in suite_report.draw(found, directory)]
        (directory / "suite.json").write_text(suite_report.as_json(found), encoding="utf-8")
        out.write_text(suite_report.as_markdown(found, drawn), encoding="utf-8")
        click.echo(f"written: {out}, {', '.join(drawn)}, {directory / 'suite.json'}")
    except (ValueError, OSError, plots.PlotError) as error:
        raise click.ClickException(str(error)) from error
