"""`kvaffinity bench`: what the server adds to a request, what the core costs, and whether that is what was promised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from extproc.lab import bench_core, bench_path, bench_tokens
from extproc.lab.bench_core import Memory, Timing
from extproc.lab.bench_path import Plan, Run
from extproc.lab.bench_report import report

SIZES = "4KB,64KB,400KB,1MB"


def parse_sizes(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """`4KB,1MB` as bytes, in powers of ten."""
    units = {"KB": 1000, "MB": 1_000_000}
    try:
        return tuple(int(each[:-2]) * units[each[-2:].upper()] for each in value.split(","))
    except (KeyError, ValueError):
        raise click.BadParameter(f"{value!r} is not like {SIZES}") from None


@click.command()
@click.option("--quick", is_flag=True, help="About a minute in all: short rounds, no fleet of 1,000 nodes.")
@click.option("--sizes", default=SIZES, show_default=True, callback=parse_sizes, help="Sizes of the request bodies.")
@click.option("--only", type=click.Choice(["path", "core", "tokens"]), help="Measure only one of these.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory with tokenizer.json and a chat template; one of 16,000 tokens is made when left out.",
)
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write every figure there.")
@click.pass_context
def bench(
    context: click.Context,
    quick: bool,
    sizes: tuple[int, ...],
    only: str | None,
    tokenizer: Path | None,
    file: Path | None,
) -> None:
    """Measure the bare route, a trivial ext_proc server and this one on the same Envoy; then the core alone; then the
    way from bytes to the blocks of an engine's tokens.

    Exits with 1 when a request failed or fell open: then the figures are not those of decisions.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    plan = Plan(sizes, 2, 0.1, 0.45) if quick else Plan(sizes, 5, 0.3, 2.0)
    jobs = bench_core.plan(quick=quick) if only in (None, "core") else []
    runs: list[Run] = []
    others_cores = 0.0
    timings: list[Timing] = []
    memories: list[Memory] = []
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # refreshed between measurements only: a thread that draws would be measured too
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        total = len(jobs) + (len(plan) if only in (None, "path") else 0) + (only in (None, "tokens"))
        task = progress.add_task("starting", total=total, completed=-1)

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1, refresh=True)

        if only in (None, "path"):
            runs, others_cores = bench_path.run(plan, step)
        for job in jobs:
            step("core: " + " ".join(job))
            for found in bench_core.run_job(job):
                if isinstance(found, Timing):
                    timings.append(found)
                else:
                    memories.append(found)
        if only in (None, "tokens"):
            step("tokens")
            timings += bench_tokens.run(tokenizer, quick=quick)
    if file is not None:
        figures: dict[str, Sequence[Any]] = {"runs": runs, "timings": timings, "memories": memories}
        file.write_text(json.dumps({name: [asdict(each) for each in found] for name, found in figures.items()}))
    report(console, runs, timings, memories, others_cores=others_cores)
    if not all(run.clean for run in runs):
        context.exit(1)


if __name__ == "__main__":
    bench()
