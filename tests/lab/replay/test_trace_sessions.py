"""Recorded agent sessions: ids local to each, what sessions share, turns that wait."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import HASH_BYTES
from extproc.lab.replay import traces
from extproc.lab.replay.trace_sessions import sessions
from extproc.lab.replay.types import Trace
from tests.lab.replay.trace_checks import blocks, check


def turn(
    t: float, rle: list[int], *, answer: int = 10, model: str = "m", kind: str = "n", **more: Any
) -> dict[str, Any]:
    """A prompt of whole blocks of ten tokens."""
    tokens = 10 * sum(rle[1::2])
    return {"t": t, "type": kind, "model": model, "in": tokens, "out": answer, "hash_rle": rle, **more}


def session(*requests: dict[str, Any], tools: int = 20, system: int = 10, **more: Any) -> dict[str, Any]:
    return {"block_size": 10, "tool_tokens": tools, "system_tokens": system, "requests": list(requests), **more}


def subagent(t: float, *requests: dict[str, Any], tools: int = 0, system: int = 0) -> dict[str, Any]:
    return {"type": "subagent", "t": t, "tool_tokens": tools, "system_tokens": system, "requests": list(requests)}


def loaded(*those: dict[str, Any], **options: Any) -> Trace:
    lines = ((number, json.dumps(each).encode()) for number, each in enumerate(those, 1))
    return sessions("s", lines, 1, **{"block_tokens": 10, "start_s": 0.0, "end_s": 0.0} | options)


def common(trace: Trace, one: int, other: int) -> int:
    """Blocks that two calls have in common."""
    pairs = zip(blocks(trace.calls[one].chain), blocks(trace.calls[other].chain), strict=False)
    return sum(a == b for a, b in pairs)


def test_turns_wait_for_the_one_before_as_long_as_they_did() -> None:
    trace = loaded(
        session(
            turn(0.0, [1, 4], api_time=5.0),
            turn(12.0, [1, 6], api_time=2.0, think_time=7.5, kind="s", ttft=1.0),
            turn(30.0, [1, 9]),
            turn(4000.0, [1, 10], think_time=3000.0),
        ),
        most_pause_s=100.0,
    )
    check(trace)
    assert [(call.after, call.pause_s) for call in trace.calls] == [(None, 0.0), (0, 7.5), (1, 16.0), (2, 100.0)]
    assert {call.session for call in trace.calls} == {0}


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        ({}, 3),
        ({"tools": 20, "system": 30}, 2),  # the same tools, another system prompt
        ({"tools": 10, "system": 20}, 0),
        ({"model": "another"}, 0),
    ],
)
def test_sessions_share_tools_and_system_prompt_by_length_and_model(other: dict[str, Any], shared: int) -> None:
    model = other.pop("model", "m")
    trace = loaded(session(turn(0.0, [1, 8])), session(turn(0.0, [1, 8], model=model), **other))
    check(trace)
    assert common(trace, 0, 1) == shared


def test_turns_share_what_they_have_the_same_ids_for() -> None:
    trace = loaded(session(turn(0, [1, 5]), turn(1, [1, 4, 6, 3]), turn(2, [1, 2, 9, 9]), turn(3, [30, 5])))
    check(trace)
    assert [common(trace, 0, other) for other in (1, 2, 3)] == [4, 2, 0]


def test_an_answer_is_in_the_next_prompt_if_that_extends_this_one_by_as_much() -> None:
    trace = loaded(session(turn(0, [1, 4], answer=25), turn(1, [1, 7], answer=25), turn(2, [1, 8])))
    first, second, third = trace.calls
    assert second.chain.startswith(first.chain + first.answer)
    assert len(first.answer) == 2 * HASH_BYTES
    assert not set(blocks(second.answer)) & set(blocks(third.chain))


def test_a_subagent_begins_at_the_call_before_it() -> None:
    helper = subagent(20.0, turn(0.0, [50, 4], api_time=3.0), turn(5.0, [50, 6], think_time=2.0), tools=20, system=10)
    trace = loaded(
        session(turn(0.0, [1, 5], api_time=8.0), helper, turn(100.0, [1, 7], think_time=92.0)),
        session(turn(0.0, [1, 5])),
    )
    check(trace)
    calls = [call for call in trace.calls if call.session == 0]
    by_tokens = {call.prompt_tokens: call for call in calls}
    main, own, own_next, last = (by_tokens[tokens] for tokens in (50, 40, 60, 70))
    assert (own.after, own.pause_s) == (trace.calls.index(main), 12.0)
    assert (own_next.after, own_next.pause_s) == (trace.calls.index(own), 2.0)
    assert (last.after, last.pause_s) == (trace.calls.index(main), 92.0)
    assert len(set(blocks(own.chain)) & set(blocks(main.chain))) == 3  # the same model, tools and system prompt


def test_a_subagent_that_begins_as_the_session_does_shares_what_that_shares() -> None:
    helper = subagent(20.0, turn(0.0, [1, 6], answer=20), tools=10, system=0)
    trace = loaded(session(turn(0.0, [1, 5]), helper), session(turn(30.0, [1, 5])))
    check(trace)
    main, own, other = (next(n for n, call in enumerate(trace.calls) if (call.prompt_tokens, call.session) == those)
                        for those in ((50, 0), (60, 0), (50, 1)))  # fmt: skip
    assert (common(trace, main, own), common(trace, main, other), common(trace, own, other)) == (5, 3, 3)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=8),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([10, 20, 40]),
    st.integers(0, 60),
)
def test_blocks_taken_together_are_chains_too(
    drawn: list[list[tuple[int, int, int]]], block_tokens: int, tools: int
) -> None:
    """Each prompt keeps some blocks of the one before, and has new ones behind them."""
    made, paths = [], []
    for those in drawn:
        path: list[int] = []
        last, turns = 0, []
        for kept, new, answer in those:
            path = path[:kept] + list(range(last + 1, last + 1 + new))
            last += new
            paths.append(path)
            turns.append(turn(len(turns), [part for each in path for part in (each, 1)], answer=answer))
        made.append(session(*turns, tools=tools, system=0))
    trace = loaded(*made, block_tokens=block_tokens)
    check(trace)
    step = block_tokens // 10
    by_session = sorted(trace.calls, key=lambda call: (call.session, call.at_s))
    for call, path in zip(by_session, paths, strict=True):
        assert call.blocks == len(path) // step
    for number, call in enumerate(by_session[1:], 1):
        if call.session == by_session[number - 1].session:
            one, other = paths[number - 1], paths[number]
            depth = next(
                (d for d, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
            )
            pairs = zip(blocks(by_session[number - 1].chain), blocks(call.chain), strict=False)
            assert sum(a == b for a, b in pairs) == depth // step


def test_sessions_begin_at_random_and_end_together() -> None:
    those = [session(*(turn(n, [1, 3 + n], think_time=10.0) for n in range(60))) for _ in range(20)]
    trace = loaded(*those, start_s=500.0, end_s=300.0)
    check(trace)
    assert 250.0 < trace.calls[-1].at_s <= 300.0
    starts = [call.at_s for call in trace.calls if call.after is None]
    assert len({round(at_s) for at_s in starts}) > 5
    assert len({call.session for call in loaded(*those, sessions=3).calls}) == 3


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (session(turn(0, [1, 3], answer=-1)), "line 2: Expected `int` >= 0"),
        (session({"type": "n", "t": 0}), "line 2: Object missing required field `model` - at `$.requests[0]`"),
        (session(turn(0, [1, 3]) | {"in": 40}), "line 2: hash_rle of the request at t 0.0 is not pairs for all"),
        (session(turn(0, [1, 3, 5])), "line 2: hash_rle"),
        (session(turn(0, [1 << 30, 3])), "line 2: hash_rle has ids up to"),
        (session(turn(0, [1, 3]), block_size=7), "line 2: blocks of 7 tokens cannot be taken together to 10"),
        (session({"type": "x"}), "line 2: Invalid value 'x' - at `$.requests[0].type`"),
    ],
)
def test_a_broken_session_is_named(broken: dict[str, Any], said: str) -> None:
    with pytest.raises(traces.TraceError, match=re.escape(said)):
        loaded(session(turn(0, [1, 3])), broken)
