"""Recordings: what is written, what is not, and that serving never waits for it."""

import base64
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import recording
from extproc.core.router import Router
from extproc.core.types import HASH_BYTES, Answered, Chain, End, InferenceRequest, Outcome, Settled, Ticket
from extproc.recording import Entry, Header, Keyed, Recorder, RecordingError
from tests.builders import pool_of, until

KEY = b"k" * 32


def chain(*blocks: int) -> Chain:
    return b"".join(each.to_bytes(HASH_BYTES, "little") for each in blocks)


def ended(*blocks: int, size: int = 64, at_s: float = 1000.0, outcome: Outcome | None = None, **of: Any) -> Settled:
    """A request that was routed and has ended."""
    chains = {size: chain(*blocks)} if blocks else {}
    request = InferenceRequest("m", size * len(blocks) + 5, chains, **of)
    router = Router({"m": pool_of("n1", "n2", block_tokens=size)}, ticket_ttl_s=600.0, ticket_prefix="t-")
    ticket = router.route(request, now=at_s + 0.01, received_at_s=at_s)
    assert isinstance(ticket, Ticket)
    settled = router.settle(ticket.id, outcome or Outcome(End.SERVED), now=at_s + 1.0)
    assert settled is not None
    return settled


def recorder(path: Path, **changes: Any) -> Recorder:
    return Recorder(path, **{"started_at_s": 1.7e9, "now": 1000.0, "flush_s": 0.01} | changes)


def entries(path: Path) -> list[Entry]:
    header, *rest = path.read_bytes().splitlines()
    msgspec.json.decode(header, type=Header)
    return [msgspec.json.decode(line, type=Entry) for line in rest]


def chains(those: Sequence[Entry]) -> list[Chain]:
    """As a reader puts them together."""
    made: list[Chain] = []
    for each in those:
        before = made[-each.back] if each.back else b""
        assert len(before) >= HASH_BYTES * each.kept
        made.append(before[: HASH_BYTES * each.kept] + each.new)
    return made


# ---- what is written ----


def test_a_line_has_what_was_predicted_and_what_was_observed() -> None:
    outcome = Outcome(End.SERVED, "10.0.0.9:1", True, 0.25, 0.2, 3.5, attempts=2)
    entry = Keyed(KEY, now=1000.0).entry(ended(1, 2, at_s=1002.5, outcome=outcome, exact=True), "acme")
    assert (entry.at_s, entry.model, entry.prompt_tokens, entry.block_tokens) == (2.5, "m", 133, 64)
    assert (entry.end, entry.reason, entry.exact, entry.cut) == ("served", "cold", True, False)
    assert (entry.ttft_s, entry.engine_ttft_s, entry.total_s, entry.attempts) == (0.25, 0.2, 3.5, 2)
    assert entry.node in ("n1", "n2")
    assert entry.elsewhere
    assert entry.matched_tokens == 0
    assert entry.prefill_s == pytest.approx(0.0133)
    assert len(entry.new) == 2 * HASH_BYTES


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=30),
    st.sampled_from([16, 24, 64, 100]),
)
def test_chains_lean_on_those_before_and_come_out_as_they_were(paths: list[list[int]], size: int) -> None:
    """A block's hash stands for the path to it."""
    keyed = Keyed(KEY, now=0.0)
    given_chains = [[hash((0, *path[: depth + 1])) & (1 << 63) - 1 for depth in range(len(path))] for path in paths]
    settled = [ended(*each, size=size) for each in given_chains]
    made = chains([keyed.entry(each) for each in settled])
    together = -(-64 // size)
    assert [len(each) // HASH_BYTES for each in made] == [len(path) // together for path in paths]
    for i, one in enumerate(paths):
        for j, other in enumerate(paths):
            for depth in range(min(len(made[i]), len(made[j])) // HASH_BYTES):
                begin, blocks = depth * HASH_BYTES, (depth + 1) * together
                same = made[i][begin : begin + HASH_BYTES] == made[j][begin : begin + HASH_BYTES]
                assert same == (one[:blocks] == other[:blocks])


def test_what_was_said_before_takes_no_room() -> None:
    keyed = Keyed(KEY, now=0.0)
    lines = [keyed.entry(ended(*range(1, 3 + turn))) for turn in range(5)]
    assert [(each.back, each.kept, len(each.new) // HASH_BYTES) for each in lines[1:]] == [
        (1, 2, 1),
        (1, 3, 1),
        (1, 4, 1),
        (1, 5, 1),
    ]
    other = keyed.entry(ended(1, 2, 99))
    assert (other.back, other.kept) == (1, 2)


def test_the_window_is_bounded_and_what_left_it_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_WINDOW", 3)
    monkeypatch.setattr(recording, "_WINDOW_BLOCKS", 10)
    keyed = Keyed(KEY, now=0.0)
    paths = [(1, 2, 3), (1, 2, 4), (7,), (8,), (1, 2, 5), tuple(range(20, 40)), (1, 2, 6), (20,)]
    lines = [keyed.entry(ended(*path)) for path in paths]
    assert [each.kept for each in lines] == [0, 2, 0, 0, 2, 0, 0, 0]
    assert len({each[: 2 * HASH_BYTES] for each in chains(lines) if len(each) == 3 * HASH_BYTES}) == 1
    assert len(keyed._last_of) <= 10
    by_number = Keyed(KEY, now=0.0)
    assert [by_number.entry(ended(*path)).kept for path in [(1, 2), (7,), (8,), (9,), (1, 3)]] == [0] * 5


def test_a_cut_head_is_recorded_by_what_was_seen_of_it() -> None:
    request = replace(ended(1).ticket.request, cut_chains={64: chain(5, 6)})
    settled = ended(1)
    entry = Keyed(KEY, now=0.0).entry(settled._replace(ticket=replace(settled.ticket, request=request)))
    assert entry.cut
    assert len(entry.new) == 2 * HASH_BYTES


def test_a_prompt_without_blocks_is_recorded_too() -> None:
    entry = Keyed(KEY, now=0.0).entry(ended())
    assert (entry.block_tokens, entry.new, entry.prompt_tokens) == (0, b"", 5)


def test_the_next_turn_says_how_long_the_answer_was() -> None:
    keyed = Keyed(KEY, now=0.0)
    first = keyed.entry(ended(1, 2, turn=77))
    second = keyed.entry(ended(1, 2, 3, turn=78, answered=Answered(77, 133, 180)))
    assert second.before == first.turn
    assert second.before != second.turn
    assert second.answered == 47


# ---- what is not ----


def test_nothing_in_the_file_is_what_it_was_before_it_was_keyed(tmp_path: Path) -> None:
    path = tmp_path / "r"
    settled = ended(1 << 40, 1 << 41, session=123456789, adapter="customer-adapter", turn=987654321)
    made = recorder(path)
    made.settled(settled, tenant="acme")
    made.close()
    text = path.read_text()
    for told in ("123456789", "987654321", "customer", "acme", base64.b64encode(chain(1 << 40, 1 << 41)).decode()[:10]):
        assert told not in text
    (line,) = entries(path)
    assert None not in (line.session, line.tenant, line.adapter, line.turn)
    for block in (1 << 40, 1 << 41):
        assert chain(block) not in line.new


def test_each_recording_has_a_key_of_its_own_and_keeps_equality(tmp_path: Path) -> None:
    lines = []
    for name in ("a", "b"):
        made = recorder(tmp_path / name)
        for session in (1, 1, 2):
            made.settled(ended(1, 2, session=session), tenant=session)
        made.close()
        lines.append(entries(tmp_path / name))
    for those in lines:
        assert those[0].session == those[1].session != those[2].session
        assert those[0].tenant == those[1].tenant != those[2].tenant
        assert those[0].tenant != those[0].session
    assert lines[0][0].new != lines[1][0].new
    assert lines[0][0].session != lines[1][0].session


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    made = recorder(tmp_path / "r")
    made.close()
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o600


# ---- the file ----


async def test_lines_are_there_while_it_records(tmp_path: Path) -> None:
    made = recorder(tmp_path / "r")
    try:
        made.settled(ended(1))
        await until(lambda: len(entries(tmp_path / "r")) == 1)
    finally:
        made.close()
    assert made.counts == recording.Counts(1, 0)


def test_closing_writes_what_waits_and_ends_the_thread(tmp_path: Path) -> None:
    made = recorder(tmp_path / "r", flush_s=600.0)
    for _ in range(10):
        made.settled(ended(1))
    made.close()
    made.settled(ended(1))
    made.close()
    assert len(entries(tmp_path / "r")) == made.counts.written == 10
    assert made.counts.dropped == 1
    assert "recording" not in [each.name for each in threading.enumerate()]


@pytest.mark.parametrize("cut", [0, 5])
def test_a_restart_goes_on_behind_what_is_there(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r"
    for number in range(2):
        made = recorder(path, started_at_s=1.7e9 + number)
        made.settled(ended(1))
        made.close()
        if not number and cut:
            os.truncate(path, path.stat().st_size - cut)
    lines = path.read_bytes().splitlines()
    assert len(lines) == 4
    assert msgspec.json.decode(lines[2], type=Header).started_at_s == 1.7e9 + 1
    assert msgspec.json.decode(lines[3], type=Entry).back == 0


@pytest.mark.parametrize("content", [b"precious\n", b'{"timestamp": 1}\n'])
def test_a_file_that_is_no_recording_is_not_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="no recording: give another path"):
        recorder(path)
    assert path.read_bytes() == content


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="is no file"):
        recorder(Path("/dev/null"))
    with pytest.raises(OSError, match="directory"):
        recorder(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        recorder(tmp_path / "missing" / "r")


async def test_it_stops_at_its_size_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r"
    made = recorder(path, max_bytes=2000)
    for number in range(50):
        made.settled(ended(number + 1))
        await until(lambda number=number: made.counts.written + made.counts.dropped == number + 1)
    made.close()
    assert 1700 < path.stat().st_size <= 2000
    assert made.stopped == "it has reached 2000 bytes"
    assert 5 < len(entries(path)) == made.counts.written
    assert [each.message for each in caplog.records] == [f"recording to {path} stops: it has reached 2000 bytes"]


@contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """The system refuses to write more, after writing what goes in: as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_it_at_a_whole_line_and_it_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r"
    made = recorder(path, flush_s=600.0)
    with no_file_over(1000):
        for number in range(50):
            made.settled(ended(number + 1))
        made.close()
    assert made.stopped is not None
    assert "too large" in made.stopped
    assert made.counts == recording.Counts(0, 50)
    assert path.read_bytes().endswith(b"\n")
    assert entries(path) == []
    assert len(caplog.records) == 1


# ---- the request path ----


def test_the_oldest_are_dropped_where_too_many_wait(tmp_path: Path) -> None:
    made = recorder(tmp_path / "r", flush_s=600.0)
    waiting = [ended(1), ended(2)]
    for number in range(recording._MAX_WAITING + 7):
        made.settled(waiting[number >= 7])
    made.close()
    assert made.counts == recording.Counts(recording._MAX_WAITING, 7)
    assert not any(each.back > recording._MAX_WAITING for each in entries(tmp_path / "r"))


def test_long_chains_that_wait_are_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MAX_WAITING_BYTES", 1000 * HASH_BYTES)
    made = recorder(tmp_path / "r", flush_s=600.0)
    settled = ended(*range(300))
    for _ in range(10):
        made.settled(settled)
    made.settled(ended(*range(2000)))  # one is always kept
    made.close()
    assert made.counts == recording.Counts(1, 10)


def test_a_disk_that_hangs_holds_up_neither_requests_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = recorder(tmp_path / "r")
    hangs, goes_on = threading.Event(), threading.Event()
    write = os.write

    def hanging(fd: int, data: bytes) -> int:
        hangs.set()
        goes_on.wait(20)
        return write(fd, data)

    monkeypatch.setattr(recording, "_CLOSE_S", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", hanging)
        made.settled(ended(1))
        assert hangs.wait(20)
        began_s = time.perf_counter()
        for _ in range(1000):
            made.settled(ended_before)
        assert time.perf_counter() - began_s < 1.0
        made.close()
        assert "the disk does not answer" in caplog.text
        goes_on.set()
        made._thread.join(20)
    assert made.counts.written == 1001


ended_before = ended(1, 2, 3)


def test_a_request_waits_for_less_than_20_microseconds(tmp_path: Path) -> None:
    made = recorder(tmp_path / "r", flush_s=600.0)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(1000):
            made.settled(ended_before)
        best_s = min(best_s, (time.perf_counter() - began_s) / 1000)
    made.close()
    assert best_s < 20e-6


def test_a_bug_stops_it_without_the_request_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = recorder(tmp_path / "r")
    broken: Any = replace(ended_before.ticket, decision="the secret")
    made.settled(ended_before._replace(ticket=broken))
    made._thread.join(20)
    assert made.stopped is not None
    assert made.stopped.startswith("AttributeError at")
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "secret" not in caplog.text
    made.close()
