"""The comparison with other routers: its loads, its figures, and a short one through real processes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from click.testing import CliRunner
from rich.console import Console

from extproc.cli import main
from extproc.lab.load import Session, Turn
from extproc.lab.node import Node, NodeSettings
from extproc.lab.openai import ChatBody, Message
from extproc.lab.peers import routers
from extproc.lab.peers.dynamo_proxy import token_ids
from extproc.lab.peers.install import installed
from extproc.lab.peers.measure import Measured
from extproc.lab.peers.results import Row, Spread, table
from extproc.lab.peers.workloads import WORKLOADS, Workload, held, ideal_hit_ratio
from extproc.lab.processes import Processes

RUN = Measured(
    requests=100,
    errors={},
    hit_ratio=0.5,
    ttft_mean_s=0.2,
    ttft_p50_s=0.1,
    ttft_p95_s=0.5,
    ttft_p99_s=1.5,
    skew=1.25,
    requests_per_s=20.0,
    others_cores=0.25,
)


@contextmanager
def broken(_: Processes, __: Sequence[int], ___: Path) -> Iterator[str]:
    raise RuntimeError("broken exited with 1:\nits last words")
    yield ""


def test_a_short_comparison_measures_what_runs_and_names_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "requirements").write_text("smg==1.12.0")  # what an earlier version installed
    monkeypatch.setitem(routers.PEERS, "broken", routers.Peer(broken))
    asked = "--peers kvaffinity,broken,smg,envoy-least-request --workloads busy --runs 1 --seconds 0.5"
    out = tmp_path / "results" / "compare.json"
    result = CliRunner().invoke(main, ["compare", *asked.split(), "--venv", str(tmp_path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert (found["seed"], found["runs"], found["seconds"], found["nodes"]) == (1, 1, 0.5, 4)
    peers = found["peers"]
    assert list(peers) == ["kvaffinity", "broken", "smg", "envoy-least-request"]
    assert peers["broken"]["fault"] == "run 1, idle: broken exited with 1:"
    assert peers["smg"]["fault"] == "not installed: No matching distribution found for smg==1.13.0"
    assert peers["smg"]["workloads"] == peers["broken"]["workloads"] == {}
    ours, theirs = (peers[name] for name in ("kvaffinity", "envoy-least-request"))
    for each in (ours, theirs):
        assert each["fault"] is None
        assert -0.05 < each["added_latency_s"]["median"] < 0.05
        busy = each["workloads"]["busy"]
        assert busy["errors"] == 0
        assert 4 <= busy["requests"] <= 4 * len(WORKLOADS["busy"].sessions(0.5, 1))
        assert 0 < busy["ttft_p50_s"]["median"] <= busy["ttft_p95_s"]["median"] <= busy["ttft_p99_s"]["median"]
        assert 1 <= busy["skew"]["median"] <= 4
        assert busy["requests_per_s"]["median"] <= busy["requests"] / 0.5
    hits = [each["workloads"]["busy"]["hit_ratio"]["median"] for each in (theirs, ours)]
    assert 0 < hits[0] < hits[1] < 1
    assert "not installed: No matching distribution" in " ".join(result.output.split())


@pytest.mark.parametrize("asked", ["--peers kvaffinity,nginx", "--workloads chat,"])
def test_unknown_names_are_refused_with_those_that_exist(asked: str) -> None:
    result = CliRunner().invoke(main, ["compare", *asked.split()])
    assert result.exit_code == 2
    assert ("there are kvaffinity, smg," if "peers" in asked else "there are chat, hot, busy") in result.output


def test_an_environment_that_has_what_is_wanted_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "requirements").write_text("a==1\nb==2")
    assert installed(("a==1", "b==2"), tmp_path) == tmp_path / "bin" / "python"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_load_is_made_by_its_seed_and_ends_in_time(name: str) -> None:
    make = WORKLOADS[name].sessions
    sessions = make(10.0, 3)
    assert sessions == make(10.0, 3) != make(10.0, 4)
    starts_s = [session.start_s for session in sessions]
    assert starts_s == sorted(starts_s)
    assert 9.0 < starts_s[-1] < 10.0


@pytest.mark.parametrize(("seconds", "asked"), [(60.0, 5), (0.0, 2)])
async def test_users_begin_no_conversation_after_the_end(seconds: float, asked: int) -> None:
    node = Node(NodeSettings(name="n", host="127.0.0.1", port=0, model="tiny", prefill_tokens_per_s=1e9, decode_s=0.0))
    sessions = [Session(0.0, " abc", (Turn(f" {number:03}", 1, 0.0),)) for number in range(5)]
    async with TestServer(node.application()) as server:
        workload = Workload("", WORKLOADS["busy"].sessions, users=2)
        replies, in_time = await held(str(server.make_url("")), workload, sessions, seconds)
    assert [reply.error for reply in replies] == [None] * asked
    assert in_time == (asked if seconds else 0)


def test_four_of_five_requests_share_the_hot_prompt() -> None:
    systems = [session.system for session in WORKLOADS["hot"].sessions(100.0, 1)]
    assert systems.count(max(systems, key=len)) / len(systems) == pytest.approx(0.8, abs=0.03)


def test_the_ideal_finds_all_but_what_is_new_and_the_last_token() -> None:
    # each word is a token; 3 tokens name the system, 2 the user, 4 the assistant
    def session(word: str) -> Session:
        return Session(0.0, " sys" * 125, (Turn(f" {word}" * 42, 16, 0.0), Turn(" twq" * 10, 16, 0.0)))

    # The first prompt has 128 + 44 + 4 = 176 tokens, the second 16 of the answer + 12 + 4 more. Of those the second
    # finds the 11 full blocks of the first and of its answer.
    assert ideal_hit_ratio([session("one")]) == 176 / (176 + 208)
    # the same again: 10 of 11 blocks and 12 of 13; another question: the system prompt
    assert ideal_hit_ratio([session("one")] * 2) == (176 + 160 + 192) / (2 * (176 + 208))
    assert ideal_hit_ratio([session("one"), session("two")]) == (176 + 128 + 176) / (2 * (176 + 208))


def test_dynamo_gets_the_tokens_that_the_node_counts() -> None:
    messages = [Message("system", "né one two"), Message("user", "x"), Message("assistant", "")]
    body = {"messages": [{"role": each.role, "content": each.content} for each in messages]}
    assert token_ids(body) == memoryview(ChatBody(messages).prompt_text()).cast("I").tolist()


def test_a_spread_leaves_out_what_is_not_known() -> None:
    assert Spread.of([3.0, None, 1.0, 2.5]) == Spread(2.5, 1.0, 3.0)
    assert Spread.of([None]) is None


def test_the_table_has_medians_with_their_spread_and_a_row_for_what_was_not_measured() -> None:
    second = Measured(**{**{name: getattr(RUN, name) for name in RUN.__slots__}, "hit_ratio": 0.75, "errors": {"x": 2}})
    rows = {
        "ours": Row(added_latency_s=[0.0005, 0.001], runs={"chat": [RUN, second]}),
        "theirs": Row(fault="not installed: no network"),
    }
    console = Console(file=io.StringIO(), width=140)
    console.print(table("chat", "chat", rows))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[0] == "│"]
    assert lines == [
        ["ours", "62.5%", "200", "100", "500", "1,500", "1.25", "20.0", "2", "0.75"],
        ["", "50.0%-75.0%", "", "", "", "", "", "", "", "0.50-1.00"],
        ["theirs: not installed: no network", *[""] * 9],
    ]
    assert "Other programs used 0.2 cores meanwhile (0.2 to 0.2)." in text
