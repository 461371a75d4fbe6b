"""Mooncake's traces and those with lengths only."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import HASH_BYTES
from extproc.lab.replay import traces
from extproc.lab.replay.trace_files import lengths, mooncake
from extproc.lab.replay.types import Trace
from tests.lab.replay.trace_checks import blocks, check


def request(at_ms: float, ids: Sequence[int], *, more: int = 0, answer: int = 10, **changes: Any) -> dict[str, Any]:
    """A prompt of whole blocks of ten tokens and `more`."""
    made = {"timestamp": at_ms, "input_length": 10 * len(ids) + more, "output_length": answer, "hash_ids": list(ids)}
    return made | changes


def mooncaked(*requests: dict[str, Any], seed: int = 1) -> Trace:
    lines = ((number, json.dumps(each).encode()) for number, each in enumerate(requests, 1))
    return mooncake("m", lines, seed, block_tokens=10)


def csv(text: str, **options: Any) -> Trace:
    return lengths("c", enumerate(text.encode().splitlines(keepends=True), 1), 1, **options)


# ---- Mooncake ----


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=30),
    st.lists(st.integers(0, 25), min_size=30, max_size=30),
    st.integers(1, 4),
)
def test_equal_hash_is_equal_prefix_whatever_the_ids(paths: list[list[int]], answers: list[int], crowd: int) -> None:
    """Ids 0 to 3 stand for nothing but themselves here: as content hashes, not chained ones."""
    trace = mooncaked(
        *(request(3000 * (number // crowd), path, answer=answers[number]) for number, path in enumerate(paths))
    )
    check(trace)
    kept = [blocks(call.chain) for call in trace.calls]
    for i, one in enumerate(paths):
        for j, other in enumerate(paths):
            for depth in range(min(len(one), len(other))):
                assert (kept[i][depth] == kept[j][depth]) == (one[: depth + 1] == other[: depth + 1])


def test_a_block_that_is_not_full_is_not_in_the_chain() -> None:
    (call,) = mooncaked(request(0, [1, 2, 3], input_length=29)).calls
    assert (call.blocks, call.prompt_tokens) == (2, 29)


def test_arrivals_are_spread_over_their_bin_in_the_order_of_the_file() -> None:
    trace = mooncaked(*(request(bin_ms, [bin_ms, n]) for bin_ms in (0, 3000, 6000, 30_000) for n in range(50)))
    times = [call.at_s for call in trace.calls]
    assert times == sorted(times)
    assert len(set(times)) == 200
    assert 2.5 < times[49] - times[0] < 3.0
    start_s = times[50] // 3 * 3
    assert all(start_s - 0.5 < at_s < start_s + 3.5 for at_s in times[50:100])
    assert times[149] - times[100] < 3.0  # a bin is no wider because the next one is far
    assert times[199] - times[150] < 3.0
    lone = [blocks(call.chain)[1] for call in trace.calls]
    expected = mooncaked(*(request(bin_ms, [bin_ms, n]) for bin_ms in (0, 3000, 6000, 30_000) for n in range(50)))
    assert lone == [blocks(call.chain)[1] for call in expected.calls]
    assert trace != mooncaked(
        *(request(bin_ms, [bin_ms, n]) for bin_ms in (0, 3000, 6000, 30_000) for n in range(50)), seed=2
    )


def test_times_that_are_no_bins_are_left_alone() -> None:
    trace = mooncaked(*(request(at_ms, [at_ms]) for at_ms in (700, 100, 100, 400)))
    assert [call.at_s for call in trace.calls] == pytest.approx([0.0, 0.0, 0.3, 0.6])


@pytest.mark.parametrize(
    ("following", "kept"),
    [
        (request(9000, [1, 2, 3, 4, 5]), 2),  # the answer of 20 tokens is two blocks, and one is new
        (request(9000, [1, 2, 3]), 0),  # shorter than prompt and answer
        (request(9000, [1, 9, 3, 4, 5]), 0),
    ],
)
def test_an_answer_is_what_the_next_turn_has_in_its_place(following: dict[str, Any], kept: int) -> None:
    trace = mooncaked(request(0, [1, 7]), request(3000, [1, 2], answer=20), following)
    answer = trace.calls[1].answer
    assert len(answer) == 2 * HASH_BYTES
    shared = [one == other for one, other in zip(blocks(answer), blocks(trace.calls[2].chain)[2:], strict=False)]
    assert sum(shared) == kept


def test_an_empty_answer_has_one_token() -> None:
    assert mooncaked(request(0, [1], answer=0)).calls[0].answer_tokens == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input_length": "12"}, "line 2: Expected `int`, got `str` - at `$.input_length`"),
        ({"timestamp": -1}, "line 2: Expected `float` >= 0"),
        ({"input_length": 0}, "$.input_length"),
        ({"hash_ids": [1, -2]}, "$.hash_ids[1]"),
        ({"hash_ids": [1]}, "line 2: hash_ids has 1 blocks, and input_length 20 makes 2 of 10 tokens"),
        ({"output_length": None}, "$.output_length"),
    ],
)
def test_a_broken_line_and_its_field_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(traces.TraceError, match=re.escape(said)):
        mooncaked(request(0, [1]), request(0, [1, 2], **changes))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 2}\n')
    with pytest.raises(traces.TraceError, match=r"t\.jsonl: line 1: .*`hash_ids`"):
        traces.load(str(path), seed=1)


# ---- CSV ----

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_lengths_alone_share_nothing() -> None:
    trace = csv(AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9805900,640,0\n")
    check(trace)
    assert [(round(call.at_s, 3), call.prompt_tokens, call.answer_tokens) for call in trace.calls] == [
        (0.0, 374, 44),
        (4.3, 640, 1),
    ]
    assert [call.blocks for call in trace.calls] == [5, 10]
    assert traces.ideal_hit_ratio(trace) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n45.5,ChatGPT,1087,230\n",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,472,18\n40.5,1087,230\n",
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2024-05-10 00:00:00.009930+00:00,472,18\r\n\r\n2024-05-10 00:00:40.509930+00:00,1087,230\r\n",
    ],
)
def test_columns_of_other_names_are_known(text: str) -> None:
    calls = csv(text).calls
    assert [(round(call.at_s, 3), call.prompt_tokens, call.answer_tokens) for call in calls] == [
        (0.0, 472, 18),
        (40.5, 1087, 230),
    ]


@given(st.lists(st.integers(1, 2000), min_size=2, max_size=40), st.floats(0, 1), st.integers(1, 3))
def test_a_share_of_each_prompt_may_be_shared(prompts: list[int], share: float, prefixes: int) -> None:
    rows = "".join(f"{number},{tokens},5\n" for number, tokens in enumerate(prompts))
    trace = csv(AZURE + rows, share=share, prefixes=prefixes)
    check(trace)
    assert traces.ideal_hit_ratio(trace) <= share
    heads = {call.chain[:HASH_BYTES] for call in trace.calls if int(share * call.prompt_tokens) >= 64}
    assert len(heads) <= prefixes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "line 1: no column timestamp or arrived_at or time; there are: a, b"),
        ("timestamp,b\n1,2\n", "line 1: no column contexttokens or"),
        (AZURE + "1,2,3\n2,x,3\n", "line 3: prompt 'x' is not a number of tokens"),
        (AZURE + "1,2,-3\n", "line 2: answer '-3' is not"),
        (AZURE + "1,2\n", "line 2: answer is missing"),
        (AZURE + "soon,2,3\n", "line 2: time 'soon' is neither"),
        (AZURE + "1,2,3\n2,99999999999999,3\n", "line 3: prompt"),
    ],
)
def test_a_broken_row_and_its_column_are_named(text: str, said: str) -> None:
    with pytest.raises(traces.TraceError, match=re.escape(said)):
        csv(text)


@pytest.mark.parametrize("options", [{"share": 1.5}, {"prefixes": 0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(traces.TraceError, match="share is between"):
        csv(AZURE + "1,2,3\n", **options)
