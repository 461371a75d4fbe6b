"""Traces by name: options, what is refused and how, and what is said of a trace."""

import gzip
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import HASH_BYTES
from extproc.lab.replay import traces
from extproc.lab.replay.generators import GENERATORS
from extproc.lab.replay.trace_parts import arrange, follow_ups
from extproc.lab.replay.types import Call, Trace

LINE = b'{"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]}\n'


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nosuch", "neither a file nor one of the generators: groups, chat, agents"),
        ("chat:x=1", "chat has no option 'x'; there are: conversations=1000, per_s=1.0"),
        ("chat:turns", "neither a file"),
        ("chat:turns=2,x", "'x' is not of the form option=value"),
        ("chat:conversations=many", "option conversations: 'many' is no int"),
        ("chat:conversations=-1", "option conversations: '-1' is out of range"),
        ("chat:turns=nan", "option turns: 'nan' is out of range"),
        ("chat:conversations=0", "there is no call in it"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(name: str, said: str) -> None:
    with pytest.raises(traces.TraceError, match=re.escape(said)):
        traces.load(name, seed=1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b"hello\n", "line 1 is neither JSON nor CSV"),
        (b"{,}\n", "line 1: JSON is malformed"),
        (b'{"a": 1, "b": 2}\n', "line 1: no trace that is known has the fields a, b"),
        (b"\x28\xb5\x2f\xfdbroken", "decompress"),
        (b"\x1f\x8b", "ended"),
        (gzip.compress(LINE * 99)[:40] + b"x" * 40, "Error -3|invalid"),
        (b"timestamp,contexttokens,generatedtokens\n1," + b"2" * 200_000, "field larger"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(traces.TraceError, match=said) as refused:
        traces.load(str(path), seed=1)
    assert str(path) in str(refused.value)


def test_options_in_the_name_and_beside_it_are_the_same() -> None:
    named = traces.load("chat:conversations=9, turns=3", seed=1)
    assert named == traces.load("chat", seed=1, options={"conversations": 9, "turns": "3"})
    assert named != traces.load("chat:conversations=9", seed=1)


def test_any_trace_can_be_cut() -> None:
    whole, cut = traces.load("chat", seed=1), traces.load("chat:calls_at_most=100", seed=1)
    assert list(cut.calls) == list(whole.calls)[:100]


def test_the_catalogue_has_every_generator_and_option() -> None:
    listed = traces.catalogue()
    assert all(f"{name}: " in listed for name in GENERATORS)
    assert "crowd_tokens=16000" in listed


def test_a_path_may_have_a_colon_and_options(tmp_path: Path) -> None:
    path = tmp_path / "a:b.jsonl"
    path.write_bytes(LINE.replace(b"1100", b"600"))
    assert len(traces.load(f"{path}", seed=1).calls) == 1
    assert traces.load(f"{path}:block_tokens=256", seed=1).block_tokens == 256


@pytest.mark.parametrize("package", [True, False])
def test_compressed_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: bool) -> None:
    plain, packed, zipped = tmp_path / "t.jsonl", tmp_path / "t.jsonl.zst", tmp_path / "t.jsonl.gz"
    plain.write_bytes(LINE * 5000)
    zipped.write_bytes(gzip.compress(LINE * 5000))
    compress = pytest.importorskip("zstandard").ZstdCompressor().compress
    packed.write_bytes(compress(LINE * 5000))
    if not package:
        if shutil.which("zstd") is None:
            pytest.skip("needs zstd")
        monkeypatch.setitem(sys.modules, "zstandard", None)
    expected = traces.load(str(plain), seed=1)
    assert len(expected.calls) == 5000
    for path in (packed, zipped):
        assert traces.load(str(path), seed=1).calls == expected.calls


def test_without_a_way_to_decompress_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.zst"
    path.write_bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(LINE))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(traces.TraceError, match="install"):
        traces.load(str(path), seed=1)


# ---- what is said of a trace ----


def call(*blocks: int, at_s: float = 0.0, tokens: int = 0, answer: tuple[int, ...] = ()) -> Call:
    """Blocks of 10 tokens by their numbers."""
    chain, after = (b"".join(each.to_bytes(HASH_BYTES, "little") for each in row) for row in (blocks, answer))
    return Call(at_s, tokens or 10 * len(blocks), max(10 * len(answer), 1), chain, after)


def trace_of(*calls: Call) -> Trace:
    return Trace("t", 10, calls)


@pytest.mark.parametrize(
    ("calls", "ratio"),
    [
        ([call(1, 2)], 0.0),
        ([call(1, 2), call(1, 2)], 0.5),
        ([call(1, 2), call(1, 3)], 0.25),
        ([call(1, answer=(2, 3)), call(1, 2, 3)], 0.75),
        ([call(1), call(1, tokens=19)], 10 / 29),
    ],
)
def test_the_ideal_hit_ratio_is_what_calls_before_have_left(calls: list[Call], ratio: float) -> None:
    assert traces.ideal_hit_ratio(trace_of(*calls)) == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([call(1), call(2)], (0.0, 0)),
        ([call(1, 2, 3), call(1, 2, 4), call(5)], (2 / 3, 20)),
        ([call(1, 2)] * 9 + [call(1, 3)], (1.0, 20)),
        ([call(1, 2)] * 8 + [call(1, 3)] * 2, (1.0, 10)),
        ([call(1, 2)] * 8 + [call(1)] * 2, (1.0, 10)),
        ([call(tokens=5)], (0.0, 0)),
    ],
)
def test_the_largest_prefix_is_what_nine_tenths_of_those_have(calls: list[Call], expected: tuple[float, int]) -> None:
    assert traces.largest_prefix(trace_of(*calls)) == pytest.approx(expected)


def test_a_trace_is_described() -> None:
    said = traces.describe(trace_of(call(1, 2, answer=(9,)), call(1, 2, at_s=60.0)._replace(after=0, pause_s=60.0)))
    for part in ("2 calls in 60 s", "50% of them wait", "20 prompt", "50.0% of the prompt", "same 20 tokens"):
        assert part in said
    assert traces.describe(trace_of()) == "t: no calls"


# ---- parts ----


@given(
    st.lists(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 8)), min_size=1, max_size=6), min_size=1, max_size=6)
)
def test_arranged_calls_wait_for_the_same_as_before(drawn: list[list[tuple[float, int]]]) -> None:
    groups = []
    for number, times in enumerate(drawn):
        row: list[Call] = []
        for place, (at_s, after) in enumerate(sorted(times)):
            waits = after if after < place else None
            row.append(Call(at_s, 1 + place, 1, b"", b"", number, 0, waits))
        groups.append(row)
    trace = arrange("t", 10, groups)
    least = min(row[0].at_s for row in groups)
    assert len(trace.calls) == sum(map(len, groups))
    for number, each in enumerate(trace.calls):
        assert each.session is not None
        original = groups[each.session][each.prompt_tokens - 1]
        assert each.at_s == original.at_s - least
        assert (each.after is None) == (original.after is None)
        if each.after is not None:
            assert original.after is not None
            waited = trace.calls[each.after]
            assert (waited.session, waited.prompt_tokens) == (each.session, original.after + 1)
            assert each.after < number


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([call(1, 2), call(1, 2, 3)], {0: 1}),
        ([call(1, 2), call(1, 2, tokens=25)], {0: 1}),
        ([call(1, 2), call(1, 3)], {}),
        ([call(1, 2), call(1, 3), call(1, 2, 4), call(1, 3, 5), call(1, 2, 4, 6)], {0: 2, 1: 3, 2: 4}),
        ([call(1, 2), call(1), call(1, 5)], {}),  # 1 is what many begin with
        ([call(1, 2), call(1, 2), call(1, 2, 3)], {1: 2}),  # sent again: the last answer counts
        ([call(1), call(1, 2), call(1, 3)], {0: 1}),  # the first that follows
        ([call(tokens=5), call(1)], {}),
    ],
)
def test_what_follows_what_is_told_by_blocks_that_were_new(calls: list[Call], expected: dict[int, int]) -> None:
    assert follow_ups(calls) == expected


def test_zstd_is_only_started_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that looks like an option is none."""
    if shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    monkeypatch.chdir(tmp_path)
    Path("-t.jsonl").write_bytes(LINE)
    subprocess.run(["zstd", "-q", "--", "-t.jsonl"], check=True)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert len(traces.load("-t.jsonl.zst", seed=1).calls) == 1
