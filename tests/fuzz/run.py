"""Fuzzes the way from bytes to blocks: `python -m tests.fuzz.run --bodies 200000 --seed 1`."""

from __future__ import annotations

import base64
import time
from itertools import islice

import click
from rich.console import Console
from rich.progress import Progress

from tests.fuzz.bodies import Bodies, Case
from tests.fuzz.harness import explain, fuzz, load
from tests.fuzz.measuring import LIMIT_S, Findings, Slow, as_the_app

_QUOTED_BYTES = 300


@click.command()
@click.option("--bodies", default=200_000, show_default=True, help="How many.")
@click.option("--seed", default=1, show_default=True, help="Equal seeds, equal bodies.")
@click.option("--beside", default=16, show_default=True, help="How many are in flight at once.")
@click.option("--explain", "explained", default=6, show_default=True, help="So many of the worst steps are profiled.")
@click.option("--strict/--lenient", default=True, show_default=True, help="Do long steps count as faults?")
def main(bodies: int, seed: int, beside: int, explained: int, strict: bool) -> None:
    """Fail when an exception escapes, a byte changes, something is left behind, or the loop is blocked."""
    console, encoders, started = Console(width=160), load(), time.monotonic()
    with as_the_app(), Progress(console=console) as progress:
        task = progress.add_task(f"{bodies:,} bodies", total=bodies)

        def told(findings: Findings) -> None:
            progress.advance(task)

        found = fuzz(islice(Bodies(seed), bodies), encoders, beside=beside, told=told)
    console.print(
        f"{bodies:,} bodies of seed {seed} in {time.monotonic() - started:.0f} s, {found.steps:,} steps of the loop"
    )
    for outcome, number in sorted(found.outcomes.items()):
        console.print(f"{number:>9,}  {outcome}")
    worst = sorted(found.worst_steps, reverse=True)
    _tell(console, f"longest steps of the loop, CPU (over {LIMIT_S * 1e3:.0f} ms: {found.slow_steps.total():,})", worst)
    for slow in [each for each in worst if each.seconds > LIMIT_S][:explained]:
        if slow.case is not None:
            console.print(f"  {slow.case.kind}: {explain(slow.case, encoders)}", markup=False)
    _tell(
        console,
        f"longest times a thread kept the loop from going on (over {LIMIT_S * 1e3:.0f} ms: {found.held_up.total():,})",
        sorted(found.worst_waits, reverse=True),
    )
    console.print(f"longest step by the clock: {found.longest_wall_s * 1e3:.1f} ms")
    for kind, number in (found.slow_steps + found.held_up).most_common():
        console.print(f"{number:>9,}  over the limit: {kind}", markup=False)
    console.print(f"{found.fault_count.total():,} faults", style="bold")
    for what, number in found.fault_count.most_common():
        console.print(f"{number:>9,}  {what}", markup=False)
    for what, case in found.faults:
        console.print(f"- {what}: {'' if case is None else _quoted(case)}", markup=False)
    if found.fault_count or (strict and found.slow_steps):
        raise SystemExit(1)


def _tell(console: Console, title: str, worst: list[Slow]) -> None:
    console.print(title, style="bold")
    for slow in worst:
        console.print(f"{slow.seconds * 1e3:>9.1f} ms  {slow.case}{'; ' * bool(slow.note)}{slow.note}", markup=False)


def _quoted(case: Case) -> str:
    """The case so that it can be sent again."""
    start = case.body[:_QUOTED_BYTES]
    text = repr(start) if start.isascii() else f"base64 {base64.b64encode(start).decode()}"
    return f"{case}, cut at {case.cuts}\n    {text}{'...' * (len(case.body) > len(start))}"


if __name__ == "__main__":
    main()
