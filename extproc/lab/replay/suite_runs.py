"""The suite's runs, in several processes; what was run once is kept until its cell or its sources change."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import click
import msgspec

import extproc
from extproc.lab.replay import policies, traces
from extproc.lab.replay.report import Summary, summarise
from extproc.lab.replay.simulation import run
from extproc.lab.replay.suite_cells import Cell
from extproc.lab.replay.suite_load import offered

WARM_UP = 0.2
_SCRAPES_S: Mapping[str, float] = {"gie": 0.05, "smg": 0.05}
"""Seconds between scrapes, where a system has them more often in production."""
_SCRAPE_S = 0.2

_OURS = ("app.py", "config.py", "core/**/*.py", "policies/**/*.py", "lab/replay/ours.py", "lab/replay/oracle.py")
_SIMULATOR = (
    "lab/replay/baselines*.py",
    "lab/replay/block_cache.py",
    "lab/replay/capacity.py",
    "lab/replay/generators.py",
    "lab/replay/jobs.py",
    "lab/replay/nodes.py",
    "lab/replay/report.py",
    "lab/replay/simulation.py",
    "lab/replay/suite_load.py",
    "lab/replay/suite_runs.py",
    "lab/replay/trace*.py",
    "lab/replay/types.py",
)
"""What results of ours depend on, beside what all do."""


class Done(msgspec.Struct, frozen=True):
    """One run, as a line of the file."""

    key: str
    cell: str
    policy: str
    seed: int
    load: float
    """That came, as a share of what the fleet can serve, after the warm-up."""
    wall_s: float
    summary: Summary


@dataclass(frozen=True, slots=True)
class Group:
    """What shares its traffic: runs of one cell and seed."""

    cell: Cell
    source: str
    """The trace, for `traces.load`."""
    seed: int
    policies: Sequence[str]
    """Those that are not known yet."""


def source(cell: Cell, data: Path | None) -> str | None:
    """For `traces.load`; None where the cell's file is not there."""
    if not cell.data:
        return cell.trace
    found = sorted(data.glob(f"{cell.data}*")) if data is not None else []
    return ":".join([str(found[0]), *filter(None, [cell.trace])]) if found else None


def key(cell: Cell, policy: str, seed: int) -> str:
    """Equal where the result has to be: of what is run, and of the sources."""
    parts = {**asdict(cell), "name": "", "part": "", "policy": policy, "seed": seed}
    return hashlib.blake2b(msgspec.json.encode([parts, _digest(sources(policy))]), digest_size=12).hexdigest()


def sources(policy: str) -> tuple[str, ...]:
    """What its results depend on, as patterns below the package."""
    return (*_SIMULATOR, *_OURS) if policy.partition(":")[0] in ("ours", "oracle") else _SIMULATOR


_digests: dict[tuple[str, ...], str] = {}


def _digest(patterns: tuple[str, ...]) -> str:
    """Of the sources as they are when first asked for: what this process has imported."""
    if patterns not in _digests:
        root = Path(extproc.__file__).parent
        hashed = hashlib.blake2b(digest_size=12)
        for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
            hashed.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
        _digests[patterns] = hashed.hexdigest()
    return _digests[patterns]


def known(file: Path) -> dict[str, Done]:
    """By key. A line that was not written to its end is none."""
    found: dict[str, Done] = {}
    if file.exists():
        decoder = msgspec.json.Decoder(Done)
        for line in file.read_bytes().splitlines():
            try:
                done = decoder.decode(line)
            except msgspec.DecodeError:
                continue
            found[done.key] = done
    return found


def execute(
    cells: Sequence[Cell],
    specs: Sequence[str],
    seeds: Sequence[int],
    *,
    file: Path,
    data: Path | None,
    processes: int,
) -> list[Done]:
    """Every policy in every cell with every seed; what `file` does not have is run and added to it."""
    there = known(file)
    wanted = [(cell, spec, seed) for cell in cells for seed in seeds for spec in specs]
    groups = []
    for cell in cells:
        found = source(cell, data)
        if found is None:
            raise ValueError(f"{cell.name}: its file {cell.data} is not there")
        for seed in seeds:
            missing = [spec for spec in specs if key(cell, spec, seed) not in there]
            if missing:
                groups.append(Group(cell, found, seed, missing))
    total = sum(len(group.policies) for group in groups)
    click.echo(f"{len(wanted) - total} of {len(wanted)} runs are known, {total} to go", err=True)
    if groups:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.read_bytes().endswith(b"\n"):  # it was stopped in the middle of a line
            with file.open("ab") as out:
                out.write(b"\n")
        context = multiprocessing.get_context("spawn")
        counter = context.Value("i", 0)
        with context.Pool(min(processes, len(groups)), _begin, (file, counter, total, dict(_digests))) as pool:
            for _ in pool.imap_unordered(_run, groups):
                pass
        there = known(file)
    return [there[key(cell, spec, seed)] for cell, spec, seed in wanted]


_file: Path
_counter: Synchronized[int]
_total: int


def _begin(file: Path, counter: Synchronized[int], total: int, digests: Mapping[tuple[str, ...], str]) -> None:
    """In each process; a file that changes while the suite runs belongs to the next one."""
    global _file, _counter, _total
    _file, _counter, _total = file, counter, total
    _digests.update(digests)


def _run(group: Group) -> None:
    """All runs of a group, each written as soon as it is done."""
    cell, seed = group.cell, group.seed
    machines = cell.machines()
    traffic = offered(traces.load(group.source, seed=seed), machines, cell.load, warm_up=WARM_UP)
    size = traffic.trace.block_tokens
    for spec in group.policies:
        began = time.perf_counter()
        balancer = policies.make(spec, seed=seed, machines=machines, block_tokens=size)
        results = run(traffic.trace, machines, balancer, scrape_s=_SCRAPES_S.get(spec, _SCRAPE_S))
        wall_s = time.perf_counter() - began
        summary = summarise(results, machines, slo_ttft_s=cell.slo_ttft_s, warm_up=WARM_UP)
        load = summary.rate / traffic.capacity
        done = Done(key(cell, spec, seed), cell.name, spec, seed, load, wall_s, summary)
        with _counter.get_lock():
            with _file.open("ab") as out:
                out.write(msgspec.json.encode(done) + b"\n")
            _counter.value += 1
            click.echo(
                f"[{_counter.value:4d}/{_total}] {cell.name}, seed {seed}, {spec}: TTFT "
                f"{_seconds(summary.ttft_mean_s)} s, p99 {_seconds(summary.ttft_p99_s)} s, "
                f"hit rate {summary.hit_rate:.1%} ({wall_s:.1f} s)",
                err=True,
            )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
