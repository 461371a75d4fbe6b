"""Whatever comes: no exception escapes, no byte changes, nothing is left behind, and the loop goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from extproc.reader import Reader
from extproc.tokens.encoder import Encoder
from extproc.tokens.memo import Memo
from extproc.wire import messages
from extproc.wire.envoy_pb2 import ProcessingResponse
from extproc.wire.exchange import BodyMode, Exchange
from extproc.wire.requests import APIS, api_of
from tests.builders import chat, prose
from tests.fuzz.apis import FAST, PATHS
from tests.fuzz.bodies import Bodies, Case, cases
from tests.fuzz.harness import fuzz, load
from tests.fuzz.measuring import LIMIT_S, Findings, as_the_app

CHAT = "/v1/chat/completions"
ROOM = 2
"""A step may take so many times the limit here: the machine may be slow, and `tests.fuzz.run` is strict."""


@pytest.fixture(scope="module")
def encoders() -> dict[str, Encoder]:
    return load()


@pytest.fixture(scope="module", autouse=True)
def settled(encoders: dict[str, Encoder]) -> Iterator[None]:
    with as_the_app():
        yield


def test_whatever_comes_nothing_escapes_or_changes_or_stays_and_the_loop_goes_on(encoders: dict[str, Encoder]) -> None:
    found = fuzz(islice(Bodies(1, most_bytes=200_000), 5000), encoders)
    assert found.fault_count == {}, "\n".join(f"{what}: {case}" for what, case in found.faults)
    slow = [f"{each.seconds * 1e3:.1f} ms: {each.case}" for each in found.worst_steps if each.seconds > ROOM * LIMIT_S]
    assert slow == []
    outcomes = found.outcomes
    assert outcomes["routed by exact tokens"] > 500
    assert outcomes["routed by approximate tokens"] > 200
    assert {"cut: head_bytes", "cut: collection_deadline", "unkeyed: option", "unkeyed: template"} <= outcomes.keys()
    assert {
        "passed: invalid_body",
        "passed: empty_body",
        "passed: client_gone",
        "aborted: CANCELLED",
    } <= outcomes.keys()


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_any_request_is_answered_and_goes_on_as_it_came(encoders: dict[str, Encoder], case: Case) -> None:
    found = fuzz([case], encoders)
    assert found.fault_count == {}, f"{case}\n{case.body!r}"


def test_equal_seeds_make_equal_bodies() -> None:
    one, again, other = (list(islice(Bodies(seed, most_bytes=20_000), 300)) for seed in (1, 1, 2))
    assert one == again != other


def test_every_api_is_among_the_requests() -> None:
    assert {id(api_of(path)) for path in PATHS} == {id(api) for api in APIS.values()}


# ---- the harness itself notices ----


class _Tokenizer:
    """A tokenizer that does something else before it encodes."""

    def __init__(self, real: Any, before: Callable[[], object]) -> None:
        self._real, self._before = real, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def encode(self, piece: str) -> bytes:
        self._before()
        return bytes(self._real.encode(piece))


def with_tokenizer(encoders: dict[str, Encoder], before: Callable[[], object]) -> dict[str, Encoder]:
    real = encoders[FAST]
    tokenizer: Any = _Tokenizer(real.tokenizer, before)
    return {FAST: Encoder(tokenizer, real.growth, Memo(1 << 20))}


def _raise() -> None:
    raise RuntimeError("planted")


def _spin() -> None:
    until = time.thread_time() + 3 * LIMIT_S
    while time.thread_time() < until:
        pass


def _keep_the_interpreter() -> None:
    sum(range(3_000_000))  # one call in C


def case_of(text: str, mode: BodyMode = BodyMode.HEAD) -> Case:
    return Case("planted", CHAT, chat(text, model=FAST), mode=mode)


def test_a_mistake_in_reading_is_seen(encoders: dict[str, Encoder]) -> None:
    found = fuzz([case_of("a")], with_tokenizer(encoders, _raise))
    assert found.outcomes == {"passed: error": 1}
    assert any(what.startswith("error: RuntimeError at test_fuzz.py") for what in found.fault_count)
    assert any(what.startswith("log: request passed on: RuntimeError") for what in found.fault_count)


def test_a_mistake_in_a_thread_is_seen(encoders: dict[str, Encoder]) -> None:
    found = fuzz([case_of(prose(20_000))], with_tokenizer(encoders, _raise))
    assert any(what.startswith("in a thread: RuntimeError at test_fuzz.py") for what in found.fault_count)


def test_a_slow_step_is_seen(encoders: dict[str, Encoder]) -> None:
    found = fuzz([case_of("a")], with_tokenizer(encoders, _spin))
    assert found.slow_steps == {"planted": 1}
    assert max(found.worst_steps).seconds > LIMIT_S
    assert found.fault_count == {}


def test_a_thread_that_keeps_the_interpreter_is_seen_and_is_no_step_of_the_loop(encoders: dict[str, Encoder]) -> None:
    found = fuzz([case_of(prose(20_000))], with_tokenizer(encoders, _keep_the_interpreter))
    assert found.held_up["planted"] > 0
    assert found.slow_steps == {}


def _change_a_byte(patch: pytest.MonkeyPatch) -> None:
    real = messages.echo_collected
    patch.setattr(messages, "echo_collected", lambda chunks, *more: real([chunks[0][:-1] + b"!", *chunks[1:]], *more))


def _lose_the_end(patch: pytest.MonkeyPatch) -> None:
    real = messages.echo_body
    patch.setattr(messages, "echo_body", lambda body, end: real(body, end=False))


def _change_the_body(patch: pytest.MonkeyPatch) -> None:
    change = ProcessingResponse(request_body={"response": {"body_mutation": {"body": b"a"}}}).SerializeToString()
    real = messages.mutate
    patch.setattr(messages, "mutate", lambda *all: real(*all) + change)


def _keep_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "take_body", lambda exchange: exchange._chunks)


def _keep_waiting(patch: pytest.MonkeyPatch) -> None:
    real = Reader.begin

    async def begin(self: Reader, *all: Any) -> Any:
        self.waiting_bytes -= 1
        return await real(self, *all)

    patch.setattr(Reader, "begin", begin)


def _escape(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "receive", lambda *_: _raise())


PLANTED: dict[str, tuple[BodyMode, Callable[[pytest.MonkeyPatch], None], str]] = {
    "a byte": (BodyMode.DUPLEX, _change_a_byte, "the body came back changed"),
    "the end": (BodyMode.DUPLEX, _lose_the_end, "the end came back changed"),
    "a body where none belongs": (BodyMode.BUFFERED, _change_the_body, "a reply changes the body"),
    "bytes that stay": (BodyMode.DUPLEX, _keep_bytes, "held_bytes is "),
    "bytes that wait": (BodyMode.HEAD, _keep_waiting, "waiting_bytes is -1"),
    "an exception": (BodyMode.HEAD, _escape, "escaped: RuntimeError at test_fuzz.py"),
}


@pytest.mark.parametrize(("mode", "plant", "expected"), PLANTED.values(), ids=PLANTED)
def test_what_is_wrong_is_seen(
    mode: BodyMode,
    plant: Callable[[pytest.MonkeyPatch], None],
    expected: str,
    encoders: dict[str, Encoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of(prose(Random(1).randrange(100, 200)), mode)
    assert fuzz([case], encoders).fault_count == {}
    plant(monkeypatch)
    found: Findings = fuzz([case], encoders)
    assert any(what.startswith(expected) for what in found.fault_count)
