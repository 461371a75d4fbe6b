"""Our own recordings as traces, from the recorder to the calls."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.router import Router
from extproc.core.types import HASH_BYTES, Answered, Chain, End, InferenceRequest, Outcome, Settled, Ticket
from extproc.lab.replay import traces
from extproc.lab.replay.types import Trace
from extproc.recording import Recorder
from tests.builders import pool_of
from tests.lab.replay.trace_checks import blocks, check


def chain(path: Sequence[int]) -> Chain:
    """A block's hash stands for the path to it."""
    return b"".join((hash(tuple(path[:end])) & (1 << 63) - 1).to_bytes(8, "little") for end in range(1, len(path) + 1))


def ended(
    *path: int,
    at_s: float = 0.0,
    model: str = "m",
    size: int = 64,
    ttft_s: float = 0.5,
    total_s: float = 1.5,
    **of: Any,
) -> Settled:
    """A request with a prompt of whole blocks, which took so long."""
    router = Router({model: pool_of("n1", block_tokens=size)}, ticket_ttl_s=600.0, ticket_prefix="t-")
    chains = {size: chain(path)} if path else {}
    request = InferenceRequest(model, of.pop("tokens", size * len(path)), chains, **of)
    ticket = router.route(request, now=at_s)
    assert isinstance(ticket, Ticket)
    settled = router.settle(ticket.id, Outcome(End.SERVED, None, True, ttft_s, None, total_s), now=at_s + total_s)
    assert settled is not None
    return settled


def recorded(path: Path, *those: Settled, **at: float) -> Path:
    made = Recorder(path, **{"started_at_s": 1.7e9, "now": 0.0} | at)
    for each in those:
        made.settled(each, tenant=each.ticket.request.session)
    made.close()
    assert made.counts.written == len(those)
    return path


def loaded(path: Path, **options: Any) -> Trace:
    trace = traces.load(str(path), seed=1, options=options)
    check(trace)
    return trace


def test_calls_come_in_the_order_of_time_not_of_their_end(tmp_path: Path) -> None:
    late, early = ended(1, 2, 3, at_s=7.0, session=4), ended(1, 2, at_s=5.0, session=9)
    trace = loaded(recorded(tmp_path / "r", late, early))
    assert [(call.at_s, call.prompt_tokens) for call in trace.calls] == [(0.0, 128), (2.0, 192)]
    assert trace.block_tokens == 64
    first, second = trace.calls
    assert second.chain.startswith(first.chain)
    assert None not in (first.session, second.session)
    assert first.session != second.session
    assert first.tenant != second.tenant


@given(paths=st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=25))
def test_what_prompts_share_is_as_it_was(tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("r") / "r"
    those = [ended(*each, at_s=float(number), tokens=max(64 * len(each), 1)) for number, each in enumerate(paths)]
    if not any(paths):
        return
    calls = loaded(recorded(path, *those)).calls
    for one, call in zip(paths, calls, strict=True):
        for other, another in zip(paths, calls, strict=True):
            same = [a == b for a, b in zip(blocks(call.chain), blocks(another.chain), strict=False)]
            assert same == [one[: end + 1] == other[: end + 1] for end in range(min(len(one), len(other)))]


def test_a_file_that_is_cut_anywhere_gives_what_came_before(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", *(ended(1, 2, number, at_s=float(number)) for number in range(4)))
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(ends[1], len(whole)):
        os.truncate(path, size)
        expected = sum(end <= size + 1 for end in ends[1:])  # but for its line break the last line is whole
        assert len(loaded(path).calls) == expected
        path.write_bytes(whole)


def test_what_restarts_append_goes_on_in_time(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", ended(1, 2, at_s=100.0), ended(1, 3, at_s=101.0))
    os.truncate(path, path.stat().st_size - 9)
    recorded(path, ended(1, 2, at_s=5000.0), started_at_s=1.7e9 + 3600.0, now=4990.0)
    trace = loaded(path)
    assert [call.at_s for call in trace.calls] == [0.0, 3510.0]


def test_a_line_broken_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", *(ended(1, 2, number) for number in range(3)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join((*lines[:2], lines[2][:30] + b"\n", lines[3])))
    with pytest.raises(traces.TraceError, match="line 3: "):
        loaded(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((b'"back":1', b'"back":2'), "line 3: back 2 is before the header"),
        ((b'"kept":2', b'"kept":9'), "line 3: kept or new does not fit"),
        ((b'"recording":1', b'"recording":2'), "line 1: Expected `int` <= 1"),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path: Path, change: tuple[bytes, bytes], said: str) -> None:
    path = recorded(tmp_path / "r", ended(1, 2), ended(1, 2, 3))
    path.write_bytes(path.read_bytes().replace(*change))
    with pytest.raises(traces.TraceError, match=said):
        loaded(path)


# ---- answers ----


def test_answers_are_told_by_the_next_turn_or_estimated_by_their_time(tmp_path: Path) -> None:
    told = ended(1, 2, at_s=0.0, turn=7)
    teller = ended(1, 2, 3, 4, at_s=9.0, answered=Answered(7, 128, 128 + 77), turn=8)
    unmeasured = ended(5, at_s=20.0, total_s=0.5)  # a whole answer at once
    trace = loaded(recorded(tmp_path / "r", told, teller, unmeasured), answer_tokens_per_s=40)
    assert [call.answer_tokens for call in trace.calls] == [77, 40, 58]
    assert "the answers of 67% estimated at 40 tokens/s" in traces.describe(trace)
    assert trace.calls[1].chain.startswith(trace.calls[0].chain + trace.calls[0].answer)
    assert len(trace.calls[0].answer) == HASH_BYTES


def test_an_estimate_leaves_room_for_the_next_turn(tmp_path: Path) -> None:
    those = ended(1, 2, total_s=100.5), ended(1, 2, 3, at_s=200.0)
    first, second = loaded(recorded(tmp_path / "r", *reversed(those))).calls  # in the order of their ends
    assert first.answer_tokens == 64
    assert second.chain == first.chain + first.answer


def test_a_closed_loop_waits_as_people_did(tmp_path: Path) -> None:
    those = [
        ended(1, 2, at_s=10.0, total_s=4.0),
        ended(9, at_s=11.0),
        ended(1, 2, 3, at_s=20.0, total_s=2.0),
        ended(1, 2, 3, 4, at_s=21.0),  # before the answer was there: for that it did not wait
    ]
    path = recorded(tmp_path / "r", *those)
    assert [call.after for call in loaded(path).calls] == [None] * 4
    trace = loaded(path, closed=1)
    assert [(call.prompt_tokens, call.after, call.pause_s) for call in trace.calls] == [
        (128, None, 0.0),
        (64, None, 0.0),
        (192, 0, 6.0),
        (256, None, 0.0),
    ]
    assert [call.at_s for call in trace.calls] == [0.0, 1.0, 6.0, 11.0]


# ---- models, block sizes ----


def test_one_model_is_replayed_and_the_rest_is_named(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", ended(1), ended(2), ended(3, model="other"))
    assert len(loaded(path).calls) == 2
    assert "m, the answers of 100% estimated" in loaded(path).name
    assert "1 calls to other models left out" in loaded(path).name
    assert len(loaded(path, model="other").calls) == 1
    with pytest.raises(traces.TraceError, match="no call to 'x'; models are: m, other"):
        loaded(path, model="x")


def test_small_blocks_are_taken_together_and_those_of_another_size_left_out(tmp_path: Path) -> None:
    those = ended(*range(9), size=16), ended(*range(8), size=16, at_s=1.0), ended(1, size=100, at_s=2.0)
    trace = traces.load(str(recorded(tmp_path / "r", *those)), seed=1)
    assert trace.block_tokens == 64
    assert [call.blocks for call in trace.calls] == [2, 2, 0]
    assert trace.calls[0].chain == trace.calls[1].chain
    assert "1 prompts without blocks" in trace.name


def test_a_recording_without_calls_says_so(tmp_path: Path) -> None:
    with pytest.raises(traces.TraceError, match="models are: none"):
        loaded(recorded(tmp_path / "r"))
