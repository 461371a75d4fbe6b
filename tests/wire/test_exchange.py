"""One stream as a script of messages: what the exchange asks for after each, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.wire.envoy_pb2 import ProcessingRequest, ProtocolConfiguration
from extproc.wire.exchange import BodyMode, Exchange, ProtocolError, Step
from tests.builders import body, headers, trailers

READ, CONTINUE, DECIDE, ECHO = Step.READ, Step.CONTINUE, Step.DECIDE, Step.ECHO
HEAD, BUFFERED, DUPLEX = BodyMode.HEAD, BodyMode.BUFFERED, BodyMode.DUPLEX

Script = list[tuple[ProcessingRequest, Step]]


def start(mode: BodyMode, *extra: tuple[str, str], end: bool = False) -> ProcessingRequest:
    return headers(*extra, mode=mode, end=end)


def play(script: Script, *, head_bytes: int = 8) -> Exchange:
    exchange = Exchange(head_bytes=head_bytes)
    for i, (message, step) in enumerate(script):
        assert exchange.receive(message) is step, f"message {i}"
    return exchange


@pytest.mark.parametrize(
    ("script", "head", "complete", "cut_short"),
    [
        pytest.param([(start(HEAD, end=True), DECIDE)], b"", True, False, id="head: no body"),
        pytest.param(
            [(start(HEAD), READ), (body(b"ab"), READ), (body(b"cd", end=True), DECIDE)],
            b"abcd", True, False, id="head: to the end",
        ),
        pytest.param(
            [(start(HEAD), READ), (body(b"ab"), READ), (body(b"", end=True), DECIDE)],
            b"ab", True, False, id="head: the end comes by itself",
        ),
        pytest.param([(start(HEAD), READ), (body(b"", end=True), DECIDE)], b"", True, False, id="head: empty body"),
        pytest.param(
            [(start(HEAD), READ), (body(b"abcd"), READ), (body(b"efgh"), DECIDE)],
            b"abcdefgh", False, True, id="head: exactly head_bytes, end not seen",
        ),
        pytest.param(
            [(start(HEAD), READ), (body(b"abcdefgh", end=True), DECIDE)],
            b"abcdefgh", True, False, id="head: exactly head_bytes and the end",
        ),
        pytest.param(
            [(start(HEAD), READ), (body(b"abcdefg"), READ), (body(b"hij"), DECIDE)],
            b"abcdefgh", False, True, id="head: beyond head_bytes",
        ),
        pytest.param(
            [(start(HEAD), READ), (body(b"abcdefghij", end=True), DECIDE)],
            b"abcdefgh", True, True, id="head: beyond head_bytes and the end",
        ),
        pytest.param(
            [(start(HEAD), READ), (body(b"ab"), READ), (trailers(), DECIDE)], b"ab", True, False, id="head: trailers"
        ),
        pytest.param([(start(HEAD), READ), (trailers(), DECIDE)], b"", True, False, id="head: trailers alone"),
        pytest.param([(start(BUFFERED, end=True), DECIDE)], b"", True, False, id="buffered: no body"),
        pytest.param(
            [(start(BUFFERED), CONTINUE), (body(b"abcd", end=True), DECIDE)],
            b"abcd", True, False, id="buffered: the body is one message",
        ),
        pytest.param(
            [(start(BUFFERED), CONTINUE), (body(b"abcd"), DECIDE)],
            b"abcd", True, False, id="buffered: the body is one message, and trailers may follow it",
        ),
        pytest.param(
            [(start(BUFFERED), CONTINUE), (body(b"abcdefghij", end=True), DECIDE)],
            b"abcdefgh", True, True, id="buffered: beyond head_bytes",
        ),
        pytest.param([(start(DUPLEX, end=True), DECIDE)], b"", True, False, id="duplex: no body"),
        pytest.param(
            [(start(DUPLEX), READ), (body(b"ab"), READ), (body(b"cd", end=True), DECIDE)],
            b"abcd", True, False, id="duplex: to the end",
        ),
        pytest.param(
            [(start(DUPLEX), READ), (body(b"ab"), READ), (trailers(), DECIDE)],
            b"ab", True, False, id="duplex: trailers",
        ),
        pytest.param(
            [
                (start(DUPLEX), READ), (body(b"abcdefghij"), DECIDE), (body(b"k"), ECHO), (body(b"", end=True), ECHO),
            ],
            b"abcdefgh", False, True, id="duplex: what comes after the decision is handed back",
        ),
        pytest.param(
            [(start(DUPLEX), READ), (body(b"abcdefgh"), DECIDE), (body(b"i"), ECHO), (trailers(), ECHO)],
            b"abcdefgh", False, True, id="duplex: trailers after the decision",
        ),
    ],
)  # fmt: skip
def test_a_script_asks_for_the_next_step_until_there_is_enough_to_decide_on(
    script: Script, head: bytes, complete: bool, cut_short: bool
) -> None:
    exchange = play(script)
    assert (exchange.head(), exchange.complete, exchange.cut_short) == (head, complete, cut_short)


OTHER = {kind: ProcessingRequest(**{kind: {}}) for kind in ("response_headers", "response_body", "response_trailers")}


@pytest.mark.parametrize("mode", BodyMode)
@pytest.mark.parametrize(
    ("before", "message", "text"),
    [
        pytest.param([], body(b"a"), "request_body before request_headers", id="body first"),
        pytest.param([], trailers(), "request_trailers before request_headers", id="trailers first"),
        pytest.param([], ProcessingRequest(), "an empty message before request_headers", id="nothing first"),
        *(pytest.param([], OTHER[kind], f"{kind} before request_headers", id=f"{kind} first") for kind in OTHER),
        pytest.param(["start"], headers(), "request_headers where body or trailers belong", id="second headers"),
        pytest.param(["start"], ProcessingRequest(), "an empty message where body or trailers belong", id="nothing"),
        *(pytest.param(["start"], OTHER[kind], f"{kind} where body or trailers belong", id=kind) for kind in OTHER),
        pytest.param(["only"], body(b"a"), "request_body after the end of the request", id="body after headers alone"),
        pytest.param(["start", "last"], body(b"a"), "request_body after the end of the request", id="body after end"),
        pytest.param(
            ["start", "last"], trailers(), "request_trailers after the end of the request", id="trailers after end"
        ),
        pytest.param(
            ["start", "last"], headers(), "request_headers after the end of the request", id="headers after end"
        ),
        pytest.param(
            ["start", "trailers"], trailers(), "request_trailers after the end of the request", id="second trailers"
        ),
    ],
)
def test_a_message_out_of_order_ends_the_exchange_and_says_which(
    mode: BodyMode, before: list[str], message: ProcessingRequest, text: str
) -> None:
    exchange = Exchange(head_bytes=8)
    for name in before:
        exchange.receive(
            {
                "start": start(mode),
                "only": start(mode, end=True),
                "last": body(b"a", end=True),
                "trailers": trailers(),
            }[name]
        )
    with pytest.raises(ProtocolError, match=f"^{text}$"):
        exchange.receive(message)


@pytest.mark.parametrize(
    "last",
    [body(b"x", end=True), trailers()],
    ids=["end of body", "trailers"],
)
def test_a_duplex_exchange_that_was_decided_early_still_ends_once(last: ProcessingRequest) -> None:
    exchange = play([(start(DUPLEX), READ), (body(b"abcdefgh"), DECIDE), (last, ECHO)])
    with pytest.raises(ProtocolError, match=r"^request_body after the end of the request$"):
        exchange.receive(body(b"y"))


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (ProtocolConfiguration(), "NONE"),
        (ProtocolConfiguration(request_body_mode="STREAMED"), "STREAMED"),
        (ProtocolConfiguration(request_body_mode="BUFFERED_PARTIAL"), "BUFFERED_PARTIAL"),
        (
            ProtocolConfiguration(
                request_body_mode="BUFFERED_PARTIAL", send_body_without_waiting_for_header_response=True
            ),
            "BUFFERED_PARTIAL",
        ),
        (ProtocolConfiguration(request_body_mode="GRPC"), "GRPC"),
        (ProtocolConfiguration(request_body_mode=77), "77"),
        (None, "NONE"),
    ],
)
def test_a_body_mode_that_we_do_not_speak_is_named_together_with_those_that_we_do(
    config: ProtocolConfiguration | None, mode: str
) -> None:
    message = headers()
    message.ClearField("protocol_config")
    if config is not None:
        message.protocol_config.CopyFrom(config)
    with pytest.raises(ProtocolError) as refused:
        Exchange(head_bytes=8).receive(message)
    assert str(refused.value) == (
        f"request_body_mode {mode} is not supported: use STREAMED with "
        "send_body_without_waiting_for_header_response, BUFFERED or FULL_DUPLEX_STREAMED"
    )


@pytest.mark.parametrize("mode", BodyMode)
def test_the_mode_is_the_one_that_the_first_message_announces(mode: BodyMode) -> None:
    assert play([(start(mode, end=True), DECIDE)]).mode is mode


def test_of_a_header_that_stands_there_twice_the_first_counts_and_nobody_s_credentials_are_kept() -> None:
    sent = (("tracestate", "1"), ("tracestate", "2"), ("authorization", "Bearer secret"), ("x-api-key", "secret"))
    exchange = play([(start(HEAD, *sent, end=True), DECIDE)])
    assert exchange.headers["tracestate"] == "1"
    assert set(exchange.headers) == {":path", "tracestate"}


@pytest.mark.parametrize(
    ("value", "raw", "expected"),
    [("", b"caf\xe9", "café"), ("plain", b"", "plain"), ("plain", b"raw", "raw"), ("", b"", "")],
)
def test_a_header_is_its_raw_value_where_there_is_one_else_its_value(value: str, raw: bytes, expected: str) -> None:
    message = start(HEAD, end=True)
    message.request_headers.headers.headers.add(key="tracestate", value=value, raw_value=raw)
    assert play([(message, DECIDE)]).headers["tracestate"] == expected


@pytest.mark.parametrize("mode", [HEAD, DUPLEX])
@given(chunks=st.lists(st.binary(max_size=5), max_size=8), head_bytes=st.integers(1, 20))
def test_what_is_held_is_what_was_read_and_the_head_its_first_bytes(
    mode: BodyMode, chunks: list[bytes], head_bytes: int
) -> None:
    exchange = Exchange(head_bytes=head_bytes)
    step = exchange.receive(start(mode))
    read = b""
    for chunk in chunks:
        if step is DECIDE:
            break
        step = exchange.receive(body(chunk))
        read += chunk
        assert exchange.held == len(read)
        assert (step is DECIDE) == (len(read) >= head_bytes)
    assert exchange.head() == read[:head_bytes]
    assert exchange.cut_short
    assert b"".join(exchange.take_body()) == read
    assert exchange.held == 0
    assert exchange.take_body() == []


def test_an_exchange_that_is_cut_decides_on_what_is_there_and_only_hands_back_afterwards() -> None:
    exchange = play([(start(DUPLEX), READ), (body(b"ab"), READ)])
    exchange.cut()
    assert exchange.cut_short
    assert exchange.head() == b"ab"
    assert exchange.receive(body(b"cd")) is ECHO
    assert exchange.held == 2
    assert exchange.head() == b"ab"
    assert exchange.receive(body(b"", end=True)) is ECHO
