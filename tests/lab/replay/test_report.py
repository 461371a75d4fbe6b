"""Results in numbers, as a table, as JSON and as plots; and the command that makes them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from extproc.cli import main
from extproc.lab.replay.report import Run, after_warm_up, as_json, percentile, summarise, table
from extproc.lab.replay.types import Machine, Result

FLEET = [Machine("a", 1000.0), Machine("b", 1000.0, speed=0.5), Machine("c", 500.0)]


def result(
    number: int, ttft_s: float = 1.0, *, node: str = "a", cached: int = 0, prompt: int = 100, answer: int = 11
) -> Result:
    """It arrives at its number; the answer takes 0.1 s a token."""
    done_s = number + ttft_s + (answer - 1) * 0.1
    return Result(number, node, float(number), ttft_s, done_s, cached, prompt, answer)


RESULTS = [
    result(3, 4.0, node="b", cached=50),
    result(0, 1.0, cached=100, prompt=400),
    result(1, 2.0),
    result(4, math.inf),
    result(2, math.inf, node=""),
]


def test_a_run_in_numbers() -> None:
    found = summarise(RESULTS, FLEET, slo_ttft_s=2.0)
    assert (found.requests, found.sheds, found.errors, found.retried) == (5, 1, 1, 0)
    assert found.hit_rate == pytest.approx((0.25 + 0.0 + 0.5) / 3)
    assert found.prefill_avoided == pytest.approx(150 / 600)
    assert found.ttft_mean_s == pytest.approx(7 / 3)
    assert (found.ttft_p50_s, found.ttft_p90_s, found.ttft_p99_s) == (2.0, 4.0, 4.0)
    assert found.tpot_mean_s == pytest.approx(0.1)
    assert (found.rate, found.goodput, found.good_ratio) == (5 / 4.0, 2 / 4.0, 2 / 5)
    # 400 tokens on a in 0.4 s, 50 on b in 0.1 s, none on c
    assert found.skew == pytest.approx(0.4 / (0.5 / 3))


def test_nothing_answered_has_no_times() -> None:
    found = summarise([result(0, math.inf, node="")], FLEET, slo_ttft_s=1.0)
    assert (found.sheds, found.errors, found.ttft_mean_s, found.ttft_p99_s, found.skew) == (1, 0, None, None, None)


def test_what_has_a_first_token_but_no_end_is_an_error() -> None:
    found = summarise([result(0)._replace(done_s=math.inf)], FLEET, slo_ttft_s=1.0)
    assert (found.errors, found.goodput) == (1, 0.0)


@pytest.mark.parametrize(("warm_up", "left"), [(0.0, [0, 1, 2, 3, 4]), (0.2, [1, 2, 3, 4]), (0.79, [3, 4])])
def test_the_first_to_arrive_warm_up(warm_up: float, left: list[int]) -> None:
    assert [each.number for each in after_warm_up(RESULTS, warm_up)] == left


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (1.0, 4.0)])
def test_percentiles_are_values_that_were_there(share: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == value
    assert percentile([], share) is None


def _run(policy: str, ttft_s: float, *, load: float | None = 0.5) -> Run:
    summary = summarise([result(0, ttft_s)], FLEET, slo_ttft_s=1.0)
    return Run("trace", policy, 3, 1_000_000, load, 2.0 if load is None else 4.0 * load, 1, 0.5, summary)


def test_the_table_has_a_line_for_each_run_and_the_best_is_bold() -> None:
    shown = table([_run("slow", 3.0), _run("fast", 2.0), _run("own-rate", 1.0, load=None)], slo_ttft_s=1.0)
    assert [str(row.style or "") for row in shown.rows] == ["", "", "bold"]  # one cell: 0.5 x 4 and 2.0 a second
    shown = table([_run("slow", 3.0), _run("fast", 2.0), _run("other", 3.0, load=0.8)], slo_ttft_s=1.0)
    assert [str(row.style or "") for row in shown.rows] == ["", "bold", "bold"]
    console = Console(width=170)
    with console.capture() as captured:
        console.print(shown)
    assert "80%" in captured.get()
    assert "3.000" in captured.get()


def test_json_has_every_figure() -> None:
    figures = json.loads(as_json([_run("ours", 3.0)], FLEET))
    assert figures["runs"][0]["summary"]["ttft_mean_s"] == 3.0
    assert [machine["speed"] for machine in figures["machines"]] == [1.0, 0.5, 1.0]


# ---- the command ----


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Four conversations of ten turns."""
    path = tmp_path / "trace.jsonl"
    lines = []
    for turn in range(10):
        for talk in range(4):
            blocks = [0, *range(1000 * talk + 1, 1000 * talk + 2 + turn)]
            fields = {
                "timestamp": turn * 20_000 + talk * 3000,
                "input_length": 512 * len(blocks),
                "output_length": 20,
                "hash_ids": blocks,
            }
            lines.append(json.dumps(fields))
    path.write_text("\n".join(lines))
    return path


def test_the_command_compares_policies_and_writes_what_it_found(mooncake: Path, tmp_path: Path) -> None:
    file, drawn = tmp_path / "out.json", tmp_path / "plots"
    arguments = [
        "replay",
        "--trace",
        str(mooncake),
        "--policy",
        "ours,round-robin",
        "--nodes",
        "2",
        "--load",
        "0.3,0.6",
    ]
    arguments += ["--cache-tokens", "50k,1M", "--warm-up", "0", "--json", str(file), "--plots", str(drawn)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "round-robin" in done.stdout
    runs = json.loads(file.read_text())["runs"]
    assert [(run["policy"], run["load"], run["cache_tokens"]) for run in runs[:3]] == [
        ("ours", 0.3, 50_000),
        ("round-robin", 0.3, 50_000),
        ("ours", 0.6, 50_000),
    ]
    assert len(runs) == 8
    assert all(run["summary"]["requests"] == 40 for run in runs)
    assert {path.name for path in drawn.iterdir()} == {"ttft.png", "hits.png", "work-ours.png", "work-round-robin.png"}


def test_nodes_come_and_go(mooncake: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ["replay", "--trace", str(mooncake), "--policy", "round-robin", "--nodes", "2", "--warm-up", "0"]
    arguments += ["--down", "node-0@50-90", "--join", "100", "--json", str(file)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    (only,) = json.loads(file.read_text())["runs"]
    assert only["nodes"] == 2
    assert only["summary"]["skew"] < 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--load", "0.5", "--rate", "1"], "give one"),
        (["--load", "half"], "no list of numbers"),
        (["--load", "0"], "above 0"),
        (["--policy", "best"], "there is no policy 'best'"),
        (["--down", "node-0"], "is not like"),
        (["--down", "node-7@1"], "no node is called node-7"),
        (["--cache-tokens", "1k"], "does not fit"),
    ],
)
def test_what_the_command_cannot_do_it_says(mooncake: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["replay", "--trace", str(mooncake), "--nodes", "2", *arguments])
    assert done.exit_code != 0
    assert message in done.output


def test_traces_that_are_made_are_listed() -> None:
    done = CliRunner().invoke(main, ["replay", "--list-traces"])
    assert done.exit_code == 0
    assert "options:" in done.output
