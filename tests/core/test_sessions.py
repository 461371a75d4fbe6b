"""Where sessions were last: what is found, what is too old or void, and that it is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.sessions import Sessions


def test_a_session_is_found_where_it_was_noted_last() -> None:
    sessions = Sessions()
    sessions.note(1, "a", 100, now=1.0)
    sessions.note(2, "b", 50, now=1.0)
    sessions.note(1, "b", 120, now=2.0)
    assert [sessions.find(each, now=3.0) for each in (1, 2, 3)] == [("b", 120), ("b", 50), None]


@pytest.mark.parametrize(("now", "found"), [(1.0, True), (3601.0, True), (3601.1, False)])
def test_what_was_noted_too_long_ago_does_not_count(now: float, found: bool) -> None:
    sessions = Sessions()
    sessions.note(1, "a", 100, now=1.0)
    assert (sessions.find(1, now=now) is not None) is found


@pytest.mark.parametrize(("failed_at", "left"), [("a", None), ("b", ("a", 100))])
def test_a_failure_is_forgotten_only_where_the_session_is(failed_at: str, left: tuple[str, int] | None) -> None:
    sessions = Sessions()
    sessions.note(1, "a", 100, now=1.0)
    sessions.forget(1, failed_at)
    sessions.forget(2, "a")
    assert sessions.find(1, now=1.0) == left


@pytest.mark.parametrize(("home", "found"), [("a", ("b", 70)), ("c", ("c", 100)), (None, ("b", 70))])
def test_an_answer_from_another_node_does_not_undo_what_a_later_request_said(
    home: str | None, found: tuple[str, int]
) -> None:
    sessions = Sessions()
    if home is not None:
        sessions.note(1, home, 100, now=1.0)
    sessions.move(1, "a", "b", 70, now=2.0)
    assert sessions.find(1, now=2.0) == found


def test_what_was_noted_of_a_node_before_it_lost_all_is_void_and_what_comes_after_is_not() -> None:
    sessions = Sessions()
    for session, node in ((1, "a"), (2, "b"), (3, "a")):
        sessions.note(session, node, 10, now=1.0)
    sessions.void("a")
    sessions.note(3, "a", 10, now=2.0)
    assert [sessions.find(each, now=2.0) for each in (1, 2, 3)] == [None, ("b", 10), ("a", 10)]


def test_nodes_that_come_and_go_leave_nothing_behind() -> None:
    sessions = Sessions(ttl_s=10.0)
    for i in range(1000):
        sessions.note(1, f"n{i}", 10, now=float(i))
        sessions.void(f"n{i}")
    assert len(sessions._void) <= 11


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("ab"), st.floats(0, 5)), max_size=60))
def test_the_youngest_are_kept_and_never_more_than_the_bound(notes: list[tuple[int, str, float]]) -> None:
    sessions = Sessions(max_sessions=5, ttl_s=10.0)
    now, known = 0.0, {}
    for session, node, later_s in notes:
        now += later_s
        sessions.note(session, node, 1, now=now)
        known.pop(session, None)
        known[session] = (node, now)
        assert len(sessions) <= 5
    for session in range(21):
        node, at_s = known.get(session, ("", -100.0))
        youngest = session in list(known)[-5:]
        assert sessions.find(session, now=now) == ((node, 1) if youngest and now - at_s <= 10.0 else None)


def test_what_is_too_old_goes_as_others_come() -> None:
    sessions = Sessions(ttl_s=10.0)
    for session in range(100):
        sessions.note(session, "a", 1, now=0.0)
    for session in range(100, 150):
        sessions.note(session, "a", 1, now=20.0)
    assert len(sessions) == 50
