"""The demo: a short comparison on real processes, what it says about it, and what is left when it is stopped."""

from __future__ import annotations

import dataclasses
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from extproc.lab.demo import (
    ENVOY_CONFIG,
    compare,
    progress_bar,
    round_robin_config,
    stopped_at_the_end,
    table,
    verdict,
)
from extproc.lab.envoy_config import write_config
from extproc.lab.load import Shape, Summary, conversations
from extproc.lab.processes import Processes, envoy_binary

THEIRS = Summary(
    requests=240,
    errors=0,
    prompt_tokens=1000,
    cached_tokens=500,
    ttft_p50_s=0.25,
    ttft_p95_s=1.5,
    ttft_p99_s=2.0,
    node_skew=1.125,
)
OURS = dataclasses.replace(THEIRS, cached_tokens=900, ttft_p50_s=0.025, ttft_p95_s=0.5)


def test_the_verdict_says_what_fell() -> None:
    assert verdict(THEIRS, OURS) == (
        "With kvaffinity 90% of the prompt tokens came from a cache, with round robin 50%; the median time to first "
        "token fell from 250 ms to 25 ms, the 95th percentile fell from 1,500 ms to 500 ms."
    )


def test_the_verdict_says_what_rose_or_stayed() -> None:
    worse = dataclasses.replace(OURS, ttft_p50_s=0.5, ttft_p95_s=1.5)
    assert "rose from 250 ms to 500 ms, the 95th percentile stayed at 1,500 ms" in verdict(THEIRS, worse)


def test_errors_are_the_verdict() -> None:
    failed = dataclasses.replace(OURS, errors=3)
    assert verdict(THEIRS, failed).endswith("0 of 240 requests failed with round robin and 3 of 240 with kvaffinity.")


def test_the_table_shows_both_runs() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(table(THEIRS, dataclasses.replace(OURS, node_skew=None, ttft_p99_s=None)))
    assert isinstance(console.file, io.StringIO)
    rows = [line.strip("│").split("│") for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["requests", "240", "240"],
        ["cache hit rate", "50.0%", "90.0%"],
        ["prefill tokens avoided", "500 of 1,000", "900 of 1,000"],
        ["TTFT p50", "250 ms", "25 ms"],
        ["TTFT p95", "1,500 ms", "500 ms"],
        ["TTFT p99", "2,000 ms", "-"],
        ["node skew (max/mean)", "1.12", "-"],
        ["errors", "0", "0"],
    ]


def test_envoy_accepts_the_round_robin_configuration(tmp_path: Path) -> None:
    path = write_config(round_robin_config(10000, 9901, [8001, 8002]), tmp_path / "envoy.yaml")
    command = [envoy_binary(), "--mode", "validate", "-c", str(path), "--disable-hot-restart"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr


def test_a_short_comparison_serves_everything_on_both_sides_and_finds_more_in_the_caches(tmp_path: Path) -> None:
    shape = Shape(groups=2, sessions_per_group=4, turns=2, between_starts_s=0.1, think_s=0.1)
    sessions = conversations(shape, seed=1)
    with (
        stopped_at_the_end(tmp_path) as processes,
        progress_bar(Console(file=io.StringIO())) as progress,
    ):
        theirs, ours = compare(processes, ENVOY_CONFIG, sessions, progress)
    assert (theirs.requests, theirs.errors, ours.requests, ours.errors) == (16, 0, 16, 0)
    assert theirs.prompt_tokens == ours.prompt_tokens  # the same load, down to the answers
    assert ours.hit_ratio > theirs.hit_ratio
    assert [task.completed for task in progress.tasks] == [16, 16]


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see a process's children")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_demo_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        work = {"TMPDIR": str(tmp_path / "work")}
        (tmp_path / "work").mkdir()
        child = processes.start("demo", [sys.executable, "-m", "extproc.lab.demo"], env=work)

        def children() -> list[Path]:
            pid = child.process.pid
            return [Path("/proc") / each for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

        processes.wait_until(child, lambda: len(children()) == 5)  # four nodes and Envoy
        started = children()
        child.signal(number)
        assert child.process.wait(20.0) == 1
        assert "Aborted!" in child.tail()
    assert [each for each in started if each.exists()] == []
    assert list((tmp_path / "work").iterdir()) == []
