"""The policy suite: traffic at the load that is asked for, runs that are kept, statistics, bounds, and the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from extproc.cli import main
from extproc.lab.replay import suite, suite_runs, traces
from extproc.lab.replay.report import Summary
from extproc.lab.replay.suite_cells import CELLS, MOONCAKE, QUICK, Cell, Part
from extproc.lab.replay.suite_load import FIRST_TOKEN_S, TOKEN_S, offered
from extproc.lab.replay.suite_verdict import (
    Bound,
    against_singles,
    bounds,
    goodput,
    line,
    ratio,
    ttft_mean,
)
from extproc.lab.replay.types import Machine

FLEET = [Machine(f"node-{i}", cache_tokens=300_000) for i in range(2)]
CHAT = "chat:conversations=900,per_s=9,think_s=4,turns=4"


def summary(ttft_s: float | None, p99_s: float | None = None, *, good: float = 10.0, hits: float = 0.5) -> Summary:
    """Of 100 calls."""
    p99_s = ttft_s if p99_s is None else p99_s
    return Summary(100, 10.0, 0, 0, hits, hits, ttft_s, ttft_s, ttft_s, p99_s, p99_s, 0.01, good, 1.0, 1.0, 0)


# ---- traffic ----


@pytest.mark.parametrize(("spec", "load"), [(CHAT, 0.5), (CHAT, 0.8), ("hot:calls=1500", 1.1)])
def test_the_load_is_what_was_asked_for(spec: str, load: float) -> None:
    found = offered(traces.load(spec, seed=1), FLEET, load, warm_up=0.2)
    calls = found.trace.calls
    counted = calls[len(calls) // 5 :]
    rate = len(counted) / (counted[-1].at_s - counted[0].at_s)
    assert rate == pytest.approx(load * found.capacity)
    assert all(call.after is None for call in calls)
    assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)


def test_a_turn_comes_its_pause_after_the_nominal_end_of_the_one_before() -> None:
    trace = traces.load(CHAT, seed=1)
    slow = offered(trace, FLEET, 0.2, warm_up=0.2).trace
    first: dict[int | None, float] = {}
    gaps = []
    for call in slow.calls:
        if call.session in first:
            gaps.append(call.at_s - first[call.session])
        first[call.session] = call.at_s + FIRST_TOKEN_S + call.answer_tokens * TOKEN_S
    # at this load the clock runs slower than recorded
    assert len(gaps) > 500
    assert min(gaps) > 1.0


def test_open_arrivals_are_only_stretched() -> None:
    trace = traces.load("hot:calls=500", seed=1)
    found = offered(trace, FLEET, 0.5, warm_up=0.2).trace
    factor = found.calls[-1].at_s / trace.calls[-1].at_s
    assert [call.chain for call in found.calls] == [call.chain for call in trace.calls]
    assert [call.at_s for call in found.calls] == pytest.approx([call.at_s * factor for call in trace.calls])


def test_too_few_conversations_are_said_to_be_too_few() -> None:
    trace = traces.load("chat:conversations=100,per_s=0.2", seed=1)
    with pytest.raises(ValueError, match="needs more of them at once"):
        offered(trace, FLEET, 0.8, warm_up=0.2)


# ---- statistics ----


def of(*ttfts: float) -> Sequence[Summary]:
    return [summary(each) for each in ttfts]


def test_a_ratio_is_paired_by_seed() -> None:
    """Seeds differ tenfold, and ours is a tenth better with each: there is no doubt about that."""
    found = ratio(of(0.9, 9.0, 90.0), of(1.0, 10.0, 100.0), ttft_mean)
    assert (found.value, found.low, found.high) == pytest.approx((0.9, 0.9, 0.9))


def test_the_interval_is_students() -> None:
    """Logarithms -0.1, 0.0 and 0.1: deviation 0.1, and t of 2 degrees of freedom is 4.303."""
    found = ratio(of(math.exp(-0.1), 1.0, math.exp(0.1)), of(1.0, 1.0, 1.0), ttft_mean)
    half = 4.303 * 0.1 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, math.exp(-half), math.exp(half)))


def test_one_seed_has_no_interval() -> None:
    found = ratio(of(0.5), of(1.0), ttft_mean)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_nothing_answered_is_infinitely_worse() -> None:
    assert ratio([summary(None)], of(1.0), ttft_mean).value == math.inf
    assert ratio(of(1.0), [summary(None)], ttft_mean).value == 0.0
    assert ratio([summary(1.0, good=0.0)], [summary(1.0, good=0.0)], goodput).value == 1.0


# ---- bounds ----

CELL = Cell("usual", "hot", 0.8, Part.TUNED)
FULL = replace(CELL, name="full", load=1.1)


def judged(
    mine: Sequence[Summary], best: Sequence[Summary], oracle: Sequence[Summary], cell: Cell = CELL
) -> list[Bound]:
    """With one baseline that is good and one that is not."""
    runs = {"ours": mine, "gie": best, "random": of(*[9.0] * len(best)), "oracle": oracle}
    return bounds([line(cell, runs, "ours")], against_singles([cell], {cell.name: runs}, "ours"))


ALL = (True, True, True, True, None, True, True)


@pytest.mark.parametrize(
    ("mine", "best", "oracle", "met"),
    [
        pytest.param(of(0.9, 0.91), of(1.0, 1.0), of(0.9, 0.9), ALL, id="all is well"),
        pytest.param(of(0.93, 0.93), of(1.0, 1.0), of(0.93, 0.93), (*ALL[:3], False, *ALL[4:]), id="too little gain"),
        pytest.param(
            of(1.02, 1.02), of(1.0, 1.0), of(1.02, 1.02), (False, True, True, False, *ALL[4:]), id="just behind"
        ),
        pytest.param(
            of(1.1, 1.1), of(1.0, 1.0), of(1.1, 1.1), (False, False, False, False, *ALL[4:]), id="surely behind"
        ),
        pytest.param(
            of(0.8, 1.5),
            of(1.0, 1.0),
            of(1.1, 1.1),
            (False, True, True, False, *ALL[4:]),
            id="behind, by chance perhaps",
        ),
        pytest.param(
            [summary(0.9, 1.1)] * 2, of(1.0, 1.0), of(0.9, 0.9), (True, True, False, *ALL[3:]), id="only the tail"
        ),
        pytest.param(
            [summary(0.9, hits=0.47)] * 2, of(1.0, 1.0), of(0.9, 0.9), (*ALL[:5], False, True), id="hits are missed"
        ),
        pytest.param(of(0.9, 0.9), of(1.0, 1.0), of(0.87, 0.87), (*ALL[:6], False), id="knowledge would help"),
    ],
)
def test_bounds(
    mine: Sequence[Summary], best: Sequence[Summary], oracle: Sequence[Summary], met: tuple[bool | None, ...]
) -> None:
    assert tuple(each.met for each in judged(mine, best, oracle)) == met


def test_hits_are_not_judged_where_there_are_none() -> None:
    nothing = [summary(0.9, hits=0.0)] * 2
    assert judged(nothing, of(1.0, 1.0), nothing)[5].met is None


def test_above_full_load_goodput_counts_and_nothing_else() -> None:
    behind = judged([summary(0.5, good=9.0)] * 2, [summary(1.0, good=10.0)] * 2, of(1.0, 1.0), FULL)
    close = judged([summary(5.0, good=9.9)] * 2, [summary(1.0, good=10.0)] * 2, of(1.0, 1.0), FULL)
    assert [each.met for each in behind] == [None, None, None, None, False, None, None]
    assert [each.met for each in close] == [None, None, None, None, True, None, None]


def test_the_best_single_baseline_is_the_one_that_is_hardest_to_beat() -> None:
    runs = {
        "a": {"ours": of(1.0), "gie": of(2.0), "smg": of(1.25)},
        "b": {"ours": of(1.0), "gie": of(4.0), "smg": of(1.25)},
        "full": {"ours": of(1.0), "gie": of(0.1), "smg": of(1.0)},
    }
    cells = [replace(CELL, name="a"), replace(CELL, name="b"), FULL]
    assert against_singles(cells, runs, "ours") == pytest.approx({"smg": 0.8, "gie": 0.375})
    assert next(iter(against_singles(cells, runs, "ours"))) == "smg"


# ---- cells and runs ----

TINY = Cell("tiny", "hot:calls=200", 0.5, Part.TUNED, nodes=2, cache_tokens=200_000)


def test_every_cell_has_its_name_and_the_loads_that_are_asked_for() -> None:
    names = [cell.name for cell in (*CELLS, *QUICK)]
    assert len(set(names)) == len(names)
    assert {0.5, 0.8, 0.95, 1.1} <= {cell.load for cell in CELLS}
    assert {4, 8, 32} <= {cell.nodes for cell in CELLS}
    assert {cell.part for cell in CELLS} == set(Part)
    tuned = {(cell.data, cell.trace) for cell in CELLS if cell.part is Part.TUNED}
    assert all((cell.data, cell.trace) not in tuned for cell in CELLS if cell.part is Part.UNSEEN)
    assert all((cell.data, cell.trace) in tuned for cell in CELLS if cell.part is Part.KIN)


def test_only_what_changed_is_another_run() -> None:
    known = suite_runs.key(TINY, "gie", 1)
    assert suite_runs.key(replace(TINY, name="other", part=Part.KIN), "gie", 1) == known
    others = [
        (replace(TINY, load=0.6), "gie", 1),
        (replace(TINY, nodes=3), "gie", 1),
        (TINY, "smg", 1),
        (TINY, "gie", 2),
    ]
    assert known not in [suite_runs.key(*each) for each in others]


def test_a_change_of_the_core_concerns_ours_alone() -> None:
    for policy in ("ours", "ours:margin_s=0.1", "oracle"):
        assert "core/**/*.py" in suite_runs.sources(policy)
    assert "core/**/*.py" not in suite_runs.sources("gie")
    root = Path(suite_runs.__file__).parents[2]
    assert all(any(root.glob(pattern)) for pattern in suite_runs.sources("ours"))


def test_a_public_file_is_found_compressed(tmp_path: Path) -> None:
    cell = replace(TINY, data=MOONCAKE, trace="calls_at_most=5")
    assert suite_runs.source(cell, tmp_path) is None
    (tmp_path / MOONCAKE).parent.mkdir()
    (tmp_path / f"{MOONCAKE}.zst").touch()
    assert suite_runs.source(cell, tmp_path) == f"{tmp_path / MOONCAKE}.zst:calls_at_most=5"
    assert suite_runs.source(TINY, None) == TINY.trace


def test_the_command_writes_a_report_and_runs_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "CELLS", [TINY, replace(TINY, name="public", data=MOONCAKE)])
    runs = tmp_path / "cache" / "runs.jsonl"
    arguments = ["suite", "--policies", "gie,random", "--seeds", "2", "--runs", str(runs), "--plots", str(tmp_path)]
    arguments += ["--out", str(tmp_path / "RESULTS.md")]
    first = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    assert "left out: public: no --data given" in first.output
    lines = capfd.readouterr().err.splitlines()  # processes of their own write there
    assert sorted(line.partition("] ")[2].partition(": TTFT")[0] for line in lines if line.startswith("[")) == sorted(
        f"tiny, seed {seed}, {policy}" for seed in (1, 2) for policy in ("ours", "gie", "random", "oracle")
    )

    text = (tmp_path / "RESULTS.md").read_text()
    assert "public: no --data given" in text
    assert "## Verdict" in text
    assert text.count("| **ours** |") == 1
    figures = json.loads((tmp_path / "suite.json").read_text())
    assert {(run["policy"], run["seed"]) for run in figures["runs"]} == {
        (policy, seed) for policy in ("ours", "gie", "random", "oracle") for seed in (1, 2)
    }
    assert (tmp_path / "against-the-best.png").stat().st_size > 1000

    # stopped in the middle of a line: that run is made again, and only that
    kept = runs.read_bytes().splitlines(keepends=True)
    runs.write_bytes(b"".join(kept[:-1]) + kept[-1][:40])
    again = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert "7 of 8 runs are known, 1 to go" in again.output
    assert (
        json.loads((tmp_path / "suite.json").read_text())["runs"][0]["ttft_mean_s"] == figures["runs"][0]["ttft_mean_s"]
    )
    assert "8 of 8 runs are known" in CliRunner().invoke(main, arguments, catch_exceptions=False).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cells", "nothing*"], "no cell is left"),
        (["--policies", "nobody"], "there is no policy 'nobody'"),
        (["--ours", "ours:nothing=1"], "nothing"),
    ],
)
def test_what_is_wrong_is_said_at_once(arguments: list[str], message: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["suite", *arguments, "--runs", str(tmp_path / "runs")])
    assert found.exit_code == 1
    assert message in found.output
