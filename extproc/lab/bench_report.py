"""The bench's tables: for people, as Markdown for the README, and each promise with what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import click
from rich.console import Console
from rich.table import Table

from extproc.lab.bench_core import Memory, Timing
from extproc.lab.bench_path import (
    CONCURRENCY,
    CONNECTIONS,
    RATE,
    VARIANTS,
    Kind,
    Run,
    Variant,
    compared,
    loop_delay_s,
    median,
)

NAMES: dict[Variant, str] = {"bare": "no ext_proc", "trivial": "trivial", "ours": "kvaffinity"}

QUIET_CORES = 0.2  # of other programs: more, and the latencies are those of waiting for a core

Rows = list[list[str]]


def report(
    console: Console,
    runs: Sequence[Run],
    timings: Sequence[Timing],
    memories: Sequence[Memory],
    *,
    others_cores: float,
) -> None:
    """Print all tables twice, as such and as Markdown, and what was not clean."""
    tables: list[tuple[str, list[str], Rows]] = []
    if runs:
        head = ["Prompt", "Route", "1 conn.", f"{RATE:.0f}/s", f"{CONNECTIONS} conn.", "req/s", "CPU", "Envoy"]
        title = "Request path: p50 / p99 in ms; CPU of the ext_proc server and of Envoy in ms a request"
        tables.append((title, head, path_rows(runs)))
    head = ["Call", "Tokens", "Nodes", "p50", "p99", "longest", "its CPU"]
    if core := [each for each in timings if not _is_reading(each)]:
        tables.append(("The core alone: ms a call, blocks of 16 tokens", head, timing_rows(core)))
    if reading := [each for each in timings if _is_reading(each)]:
        title = 'From bytes to the engine\'s blocks: ms; "whole" renders and tokenizes all of it each time (tokenizers)'
        tables.append((title, head, timing_rows(reading)))
    if memories:
        head = ["Nodes", "Filled with", "Blocks", "Segments", "MB", "longest store, CPU ms"]
        tables.append(("Prefix map: memory of full nodes of 31,250 blocks", head, memory_rows(memories)))
    promised = [[promise, shown, "yes" if kept else "NO"] for promise, shown, kept in promises(runs, timings, memories)]
    tables.append(("Promises", ["Promise", "Measured", "Kept"], promised))
    for title, head, rows in tables:
        table = Table(title=title, title_justify="left")
        for i, name in enumerate(head):
            table.add_column(name, justify="right" if i > 1 else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for title, head, rows in tables:
        click.echo(f"\n**{title}**\n\n{markdown(head, rows)}")
    if runs:
        click.echo(f"\n{notes(runs, others_cores=others_cores)}")
    if others_cores > QUIET_CORES:
        click.echo("THE MACHINE WAS NOT QUIET: other programs took part of it, so latencies and requests/s say little.")
    for run in runs:
        if not run.clean:
            click.echo(
                f"NOT CLEAN: {NAMES[run.variant]}, {run.kind}, {_size(run.size)}: {run.requests} answered, "
                f"{run.failed_open} of them failed open, errors {run.errors}"
            )


def path_rows(runs: Sequence[Run]) -> Rows:
    """One row for each size and variant, medians of the rounds."""
    return [_path_row(runs, size, variant) for size in _sizes(runs) for variant in VARIANTS]


def _path_row(runs: Sequence[Run], size: int, variant: Variant) -> list[str]:
    def of(kind: Kind, figure: Callable[[Run], float]) -> float:
        return median(runs, size, variant, kind, figure)

    def times(kind: Kind) -> str:
        return f"{_ms(of(kind, lambda run: run.p50_s))} / {_ms(of(kind, lambda run: run.p99_s))}"

    return [
        _size(size),
        NAMES[variant],
        times("one"),
        times("steady") if of("steady", lambda run: run.sustained) > 0.5 else "too much",
        times("saturated"),
        f"{of('saturated', lambda run: run.requests_per_s):,.0f}",
        "" if variant == "bare" else _ms(of("saturated", lambda run: run.server_cpu_s)),
        _ms(of("saturated", lambda run: run.envoy_cpu_s)),
    ]


def timing_rows(timings: Sequence[Timing]) -> Rows:
    """One row for each call, prompt size and number of nodes."""
    return [
        [
            each.call,
            f"{each.prompt_tokens:,}",
            "" if each.nodes is None else f"{each.nodes:,}",
            *(f"{1000 * value:.3f}" for value in (each.p50_s, each.p99_s, each.longest_s, each.longest_cpu_s)),
        ]
        for each in timings
    ]


def memory_rows(memories: Sequence[Memory]) -> Rows:
    """One row for each filled map."""
    return [
        [
            f"{each.nodes:,}",
            each.filled_with,
            f"{each.blocks:,}",
            f"{each.segments:,}",
            f"{each.grown_bytes / 1e6:,.0f}",
            f"{1000 * each.longest_store_cpu_s:.3f}",
        ]
        for each in memories
    ]


def promises(
    runs: Sequence[Run], timings: Sequence[Timing], memories: Sequence[Memory]
) -> Iterator[tuple[str, str, bool]]:
    """What was promised, what was measured, and whether that keeps it; what was not measured is left out."""
    sizes = _sizes(runs)
    if 4000 in sizes:
        ratio = compared(
            runs, 4000, "one", lambda run: run.p50_s, lambda bare, trivial, ours: (ours - bare) / (trivial - bare)
        )
        yield "4 KB, 1 connection: added p50 at most 1.25 times the trivial server's", f"{ratio:.2f}", ratio <= 1.25
        share = compared(
            runs, 4000, "saturated", lambda run: run.requests_per_s, lambda _, trivial, ours: ours / trivial
        )
        yield "4 KB, saturated: at least 75 % of its requests/s", f"{share:.0%}", share >= 0.75
        over = compared(runs, 4000, "steady", lambda run: run.p99_s, lambda bare, _, ours: ours - bare)
        yield "4 KB, 300 requests/s: p99 at most 5 ms over no ext_proc", f"{_ms(over)} ms", over <= 0.005
    if 400_000 in sizes:
        over = compared(runs, 400_000, "one", lambda run: run.p50_s, lambda _, trivial, ours: ours - trivial)
        yield "400 KB, 1 connection: p50 at most 1.5 ms over the trivial server", f"{_ms(over)} ms", over <= 0.0015
    if runs:
        delay_s = _loop_delay_s(runs)
        yield "the loop's delay at saturation: p99.9 at most 25 ms", f"{_ms(delay_s)} ms", delay_s <= 0.025
    limits_s = {2_048: 0.000_15, 32_768: 0.0015}
    for each in timings:
        if each.call == "route" and each.nodes == 64 and each.prompt_tokens in limits_s:
            limit_s = limits_s[each.prompt_tokens]
            promise = f"route, {each.prompt_tokens:,} tokens, 64 nodes: p50 at most {1000 * limit_s:g} ms"
            yield promise, f"{1000 * each.p50_s:.3f} ms", each.p50_s <= limit_s
    yield from reading_promises(timings)
    longest_s = [each.longest_cpu_s for each in timings if each.call.startswith("route")]
    longest_s += [each.longest_store_cpu_s for each in memories]
    if longest_s:
        yield "longest single route or store: at most 5 ms of CPU", f"{_ms(max(longest_s))} ms", max(longest_s) <= 0.005
    for nodes, limit_mb in ((64, 250), (1000, 3500)):
        if grown := [each.grown_bytes / 1e6 for each in memories if each.nodes == nodes]:
            promise = f"prefix map, {nodes:,} x 31,250 blocks: at most {limit_mb:,} MB"
            yield promise, f"{max(grown):,.0f} MB", max(grown) <= limit_mb


def reading_promises(timings: Sequence[Timing]) -> Iterator[tuple[str, str, bool]]:
    """The same for what a tokenizer costs."""
    limits_s = {
        "next turn of 60 messages, ours": ("32k tokens", 0.001),
        "next turn of 200 messages, ours": ("87k tokens", 0.003),
        "new prompt of 16 KB, ours": ("", 0.003),
        "new prompt of 400 KB, ours": ("of a thread", 0.060),
    }
    for each in timings:
        if each.call in limits_s:
            what, limit_s = limits_s[each.call]
            promise = f"{each.call.removesuffix(', ours')} {what}".strip() + f": p50 at most {1000 * limit_s:g} ms"
            yield promise, f"{_ms(each.p50_s)} ms", each.p50_s <= limit_s
        if each.call.startswith("the loop's delay while"):
            yield f"{each.call}: p99 at most 5 ms", f"{_ms(each.p99_s)} ms", each.p99_s <= 0.005


def _is_reading(timing: Timing) -> bool:
    return timing.call.startswith(("next turn", "new prompt", "the loop's delay while"))


def notes(runs: Sequence[Run], *, others_cores: float) -> str:
    """What the tables do not say: how the load was made, how much was matched, who else was there."""
    sizes = _sizes(runs)
    busy = [run.generator_cpu_share for run in runs]
    matched = ", ".join(f"{_size(size)} {_locality(runs, size):.0%}" for size in sizes)
    delays = ", ".join(f"{_size(size)} {_ms(_loop_delay_s(runs, size))} ms" for size in sizes)
    return (
        f"Medians of {len(runs) // (len(sizes) * 9)} rounds; Envoy with {CONCURRENCY} worker; "
        f"{sum(run.requests for run in runs):,} requests, {sum(sum(run.errors.values()) for run in runs)} errors, "
        f"{sum(run.failed_open for run in runs)} failed open. "
        f"The generator used {statistics.median(busy):.0%} of a core (at most {max(busy):.0%}), "
        f"programs that are not part of this {others_cores:.2f} cores. "
        f"Matched of a prompt (about 80 % is not new; four nodes hold 8 MB of text in all): {matched}. "
        f"The loop's delay at saturation, p99.9: {delays}."
    )


def markdown(head: Sequence[str], rows: Rows) -> str:
    """A Markdown table; from the third column on to the right."""
    lines = [head, ["---" if i < 2 else "---:" for i in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _loop_delay_s(runs: Sequence[Run], size: int | None = None) -> float:
    saturated = [run for run in runs if run.variant == "ours" and run.kind == "saturated"]
    return loop_delay_s([run for run in saturated if size in (None, run.size)], 0.999)


def _locality(runs: Sequence[Run], size: int) -> float:
    return statistics.median(run.locality for run in runs if run.variant == "ours" and run.size == size)


def _sizes(runs: Sequence[Run]) -> list[int]:
    return sorted({run.size for run in runs})


def _size(size: int) -> str:
    return f"{size // 1_000_000} MB" if size % 1_000_000 == 0 else f"{size // 1000} KB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"
