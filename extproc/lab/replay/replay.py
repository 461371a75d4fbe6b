"""`kvaffinity replay`: a trace through ours, the peers' rules and an oracle, on a simulated fleet."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from extproc.lab.replay import plots, policies, traces
from extproc.lab.replay.capacity import capacity
from extproc.lab.replay.generators import GENERATORS
from extproc.lab.replay.report import Run, as_json, summarise, table
from extproc.lab.replay.simulation import Incident, Joining, Outage, run, trace_rate
from extproc.lab.replay.types import Machine, Result, Trace

_UNITS = {"k": 1e3, "M": 1e6}


class _Numbers(click.ParamType[tuple[float, ...]]):
    """`0.5,0.8` or `500k,2M`, all above 0."""

    name = "numbers"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """At least one."""
        try:
            found = tuple(float(each.rstrip("kM")) * _UNITS.get(each[-1:], 1.0) for each in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers like 0.5,0.8 or 500k,2M", param, ctx)
        if not all(0.0 < each < math.inf for each in found):
            self.fail(f"{value!r}: every number has to be above 0", param, ctx)
        return found


class _Outages(click.ParamType[Outage]):
    """`NODE@AT` or `NODE@AT-UNTIL`."""

    name = "NODE@AT[-UNTIL]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Outage:
        """Seconds."""
        node, _, times = value.rpartition("@")
        at, _, until = times.partition("-")
        try:
            outage = Outage(node, float(at), float(until or math.inf))
        except ValueError:
            self.fail(f"{value!r} is not like node-1@600 or node-1@600-900", param, ctx)
        if not node or not 0.0 <= outage.at_s < outage.until_s:
            self.fail(f"{value!r}: a node, and times of which the second is later", param, ctx)
        return outage


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(traces.catalogue())
        ctx.exit()


@click.command()
@click.option(
    "--trace",
    "source",
    required=True,
    metavar="NAME|FILE",
    help="A file (Mooncake's JSONL, agent sessions, CSV with lengths, a recording; .zst, .gz as well) or a generator, "
    f"{', '.join(GENERATORS)}; options go behind a colon: chat:conversations=500. --list-traces describes them.",
)
@click.option(
    "--list-traces",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="Describe the generators and their options, and exit.",
)
@click.option(
    "--policy",
    "specs",
    default="ours,least-request,gie,llm-d,oracle",
    show_default=True,
    help=f"Who routes, each in a run of its own: {', '.join(policies.NAMES)}. What [policy] of the configuration has "
    "can be tried: ours:price_weight=1.5:margin_s=0.01; ours also takes access_log_delay_s and weights=true (it knows "
    "how fast nodes are), the oracle caches=false or queues=false (then it knows only the other).",
)
@click.option("--nodes", default=8, show_default=True, type=click.IntRange(1, 1024), help="How many, called node-0 on.")
@click.option(
    "--load",
    "loads",
    type=_Numbers(),
    help="Share of what this fleet can serve of this trace, measured with exact knowledge and never an idle node: "
    "0.5,0.8 are two runs for each policy. Left out: the trace's own rate.",
)
@click.option("--rate", "rates", type=_Numbers(), help="Calls per second, in place of --load.")
@click.option("--seed", default=1, show_default=True, help="Of the trace's chances and the policies'.")
@click.option(
    "--speeds",
    default="1",
    show_default=True,
    type=_Numbers(),
    help="Factors on all that nodes do, repeated over the fleet: 1,1,0.5 slows every third one.",
)
@click.option(
    "--cache-tokens",
    "caches",
    default="1M",
    show_default=True,
    type=_Numbers(),
    help="KV cache of a node; 500k,2M runs both, for a plot of the hit rate.",
)
@click.option(
    "--prefill-rate", default=10_000.0, show_default=True, type=click.FloatRange(1.0), help="Tokens per second."
)
@click.option("--step-tokens", default=8192, show_default=True, type=click.IntRange(16), help="Token budget of a step.")
@click.option("--max-running", default=256, show_default=True, type=click.IntRange(1), help="Requests in a batch.")
@click.option("--scrape", default=0.2, show_default=True, type=click.FloatRange(0.001), help="Seconds between scrapes.")
@click.option("--down", "outages", multiple=True, type=_Outages(), help="A node that dies, and comes back empty.")
@click.option("--join", "joins", multiple=True, type=click.FloatRange(0.0), help="One more node, that many seconds in.")
@click.option("--limit", type=click.FloatRange(0.0), help="Stop at that many seconds; what is not answered failed.")
@click.option("--slo-ttft", default=2.0, show_default=True, type=click.FloatRange(0.0), help="Seconds; for goodput.")
@click.option(
    "--warm-up",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0.0, 0.9),
    help="This share of the calls comes first and is not counted: caches are empty then.",
)
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write every figure there.")
@click.option(
    "--plots", "directory", type=click.Path(path_type=Path, file_okay=False), help="Draw into this directory."
)
def replay(
    source: str,
    specs: str,
    nodes: int,
    loads: tuple[float, ...] | None,
    rates: tuple[float, ...] | None,
    seed: int,
    speeds: tuple[float, ...],
    caches: tuple[float, ...],
    prefill_rate: float,
    step_tokens: int,
    max_running: int,
    scrape: float,
    outages: tuple[Outage, ...],
    joins: tuple[float, ...],
    limit: float | None,
    slo_ttft: float,
    warm_up: float,
    file: Path | None,
    directory: Path | None,
) -> None:
    """Replay a trace on a simulated fleet, through the router itself and through the rules of its peers.

    Everything happens in virtual time: an hour of traffic takes seconds. The same seed gives the same figures. Nodes
    are modelled after vLLM: chunked prefill under a token budget, continuous batching, one LRU cache of blocks.
    """
    try:
        if loads is not None and rates is not None:
            raise ValueError("--load and --rate say the same in two ways: give one")
        if directory is not None:
            plots.ready()
        trace = traces.load(source, seed=seed)
        machines = [
            Machine(f"node-{i}", prefill_rate, int(caches[0]), speeds[i % len(speeds)], max_running, step_tokens)
            for i in range(nodes + len(joins))
        ]
        plan = Plan(
            trace,
            specs.split(","),
            machines,
            [int(cache) for cache in caches],
            outages,
            joins,
            [(load, None) for load in loads] if loads else [(None, rate) for rate in rates or (None,)],
            seed,
            scrape,
            math.inf if limit is None else limit,
            slo_ttft,
            warm_up,
        )
        runs, last = execute(plan)
        console = Console()
        if not console.is_terminal:
            console = Console(width=170)
        console.print(table(runs, slo_ttft_s=slo_ttft))
        if file is not None:
            file.write_text(as_json(runs, machines), encoding="utf-8")
        if directory is not None:
            for path in plots.draw(directory, runs, last, machines):
                console.print(f"drawn: {path}")
    except (ValueError, OSError, plots.PlotError) as error:
        raise click.ClickException(str(error)) from error


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run: every policy at every load, with every cache size."""

    trace: Trace
    specs: Sequence[str]
    machines: Sequence[Machine]
    """Those that join last."""
    caches: Sequence[int]
    outages: Sequence[Outage]
    joins_s: Sequence[float]
    rates: Sequence[tuple[float | None, float | None]]
    """Load, or calls per second; neither: the trace's own."""
    seed: int
    scrape_s: float
    limit_s: float
    slo_ttft_s: float
    warm_up: float


def execute(plan: Plan) -> tuple[list[Run], dict[str, list[Result]]]:
    """All runs, with a progress bar on stderr; and by policy the results of the last load and cache size."""
    trace, size = plan.trace, plan.trace.block_tokens
    there = len(plan.machines) - len(plan.joins_s)
    runs: list[Run] = []
    last: dict[str, list[Result]] = {}
    columns = (
        TextColumn("{task.description:44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    for spec in plan.specs:  # what is wrong with a policy is said before anything is run
        policies.make(spec, seed=plan.seed, machines=plan.machines, block_tokens=size)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = len(plan.caches) * len(plan.rates) * len(plan.specs) * len(trace.calls)
        task = progress.add_task("starting", total=total)
        for cache in plan.caches:
            machines = [replace(machine, cache_tokens=cache) for machine in plan.machines]
            fleet, joining = machines[:there], machines[there:]
            incidents: list[Incident] = [
                *plan.outages,
                *(Joining(machine, at_s) for machine, at_s in zip(joining, plan.joins_s, strict=True)),
            ]
            for load, given in plan.rates:
                rate = given
                if load is not None:
                    progress.update(task, description="what the fleet can serve")
                    rate = load * capacity(trace, fleet)
                for spec in plan.specs:
                    progress.update(task, description=spec if load is None else f"{spec} at {load:.0%}")
                    balancer = policies.make(spec, seed=plan.seed, machines=machines, block_tokens=size)
                    began = time.perf_counter()
                    results = run(
                        trace,
                        fleet,
                        balancer,
                        rate=rate,
                        scrape_s=plan.scrape_s,
                        incidents=incidents,
                        limit_s=plan.limit_s,
                        progress=lambda calls: progress.advance(task, calls),
                    )
                    wall_s = time.perf_counter() - began
                    summary = summarise(results, machines, slo_ttft_s=plan.slo_ttft_s, warm_up=plan.warm_up)
                    own = trace_rate(trace) if rate is None else rate
                    runs.append(Run(trace.name, spec, there, cache, load, own, plan.seed, wall_s, summary))
                    last[spec] = results
    return runs, last
