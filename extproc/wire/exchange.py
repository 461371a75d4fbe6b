"""One HTTP request as one ext_proc stream: a state machine without I/O."""

from __future__ import annotations

from enum import Enum, StrEnum

from extproc.wire.envoy_pb2 import HttpHeaders, ProcessingRequest, ProtocolConfiguration
from extproc.wire.messages import NAME_HEADER

_Mode = ProtocolConfiguration


HEADERS = frozenset((":path", "content-encoding", "content-length", NAME_HEADER, "traceparent", "tracestate"))
"""The request headers that are always read; others, credentials among them, are never taken off the message."""


class ProtocolError(ValueError):
    """The stream breaks the protocol, or speaks a mode that we do not; it ends with this text."""


class BodyMode(StrEnum):
    """How Envoy sends the body."""

    HEAD = "prompt-head"
    BUFFERED = "buffered"
    DUPLEX = "full-duplex"


class Step(Enum):
    """What the server has to do next."""

    READ = "read the next message"
    CONTINUE = "let the headers go on, then read (BUFFERED waits for that)"
    DECIDE = "the head is complete: decide and reply"
    ECHO = "hand back the message just received (FULL_DUPLEX_STREAMED, after the reply)"


class _State(Enum):
    START = "start"
    COLLECT = "collect"
    DECIDED = "decided"
    ENDED = "ended"


def _body_mode(config: ProtocolConfiguration) -> BodyMode:
    mode = config.request_body_mode
    if mode == _Mode.STREAMED and config.send_body_without_waiting_for_header_response:
        return BodyMode.HEAD
    if mode == _Mode.BUFFERED:
        return BodyMode.BUFFERED
    if mode == _Mode.FULL_DUPLEX_STREAMED:
        return BodyMode.DUPLEX
    known = _Mode.BodySendMode.DESCRIPTOR.values_by_number.get(mode)
    raise ProtocolError(
        f"request_body_mode {mode if known is None else known.name} is not supported: use STREAMED with "
        "send_body_without_waiting_for_header_response, BUFFERED or FULL_DUPLEX_STREAMED"
    )


class Exchange:
    """Collects headers and the head of the body until there is enough to decide on.

    `receive` takes one message and says what to do; out of order is a ProtocolError. The server may stop waiting at any
    time (`cut`), and then decides on what is there.
    """

    __slots__ = (
        "_chunks",
        "_head_bytes",
        "_keep",
        "_state",
        "complete",
        "has_body",
        "headers",
        "held",
        "mode",
        "trailers",
    )

    def __init__(self, *, head_bytes: int, keep: frozenset[str] = HEADERS) -> None:
        self._head_bytes = head_bytes
        self._keep = keep
        self._state = _State.START
        self._chunks: list[bytes] = []
        self.held = 0
        """Bytes of the head so far."""
        self.complete = False
        """The end of the body was seen."""
        self.has_body = False
        """The headers were not the end of the request."""
        self.trailers = False
        """The body ended with trailers."""
        self.mode = BodyMode.HEAD
        self.headers: dict[str, str] = {}
        """Those to `keep` that were sent; of a name that stands there twice, the first."""

    def receive(self, message: ProcessingRequest) -> Step:
        """Take the next message of the stream."""
        kind = message.WhichOneof("request") or "an empty message"
        if self._state is _State.START:
            if kind != "request_headers":
                raise ProtocolError(f"{kind} before request_headers")
            return self._start(message.request_headers, message.protocol_config)
        if self._state is _State.ENDED:
            raise ProtocolError(f"{kind} after the end of the request")
        if kind == "request_body":
            body = message.request_body
            end = body.end_of_stream
            if self._state is _State.DECIDED:
                if end:
                    self._state = _State.ENDED
                return Step.ECHO
            chunk = body.body  # each look at it makes a copy
            if chunk:
                self._chunks.append(chunk)
                self.held += len(chunk)
            return self._collected(end=end)
        if kind == "request_trailers":
            if self._state is _State.DECIDED:
                self._state = _State.ENDED
                return Step.ECHO
            self.trailers = True
            return self._collected(end=True)
        raise ProtocolError(f"{kind} where body or trailers belong")

    def _start(self, headers: HttpHeaders, config: ProtocolConfiguration) -> Step:
        self.mode = _body_mode(config)
        for header in headers.headers.headers:
            key = header.key
            if key in self._keep and key not in self.headers:
                self.headers[key] = header.raw_value.decode("latin-1") or header.value
        if headers.end_of_stream:
            self.complete = True
            self._state = _State.ENDED
            return Step.DECIDE
        self.has_body = True
        self._state = _State.COLLECT
        return Step.CONTINUE if self.mode is BodyMode.BUFFERED else Step.READ

    def _collected(self, *, end: bool) -> Step:
        # BUFFERED sends the whole body as one message, which is not the end of the request where trailers follow it
        if end or self.mode is BodyMode.BUFFERED:
            self.complete = True
            self._state = _State.ENDED
            return Step.DECIDE
        if self.held >= self._head_bytes:
            self._state = _State.DECIDED
            return Step.DECIDE
        return Step.READ

    @property
    def ended(self) -> bool:
        """The last message of the request was received."""
        return self._state is _State.ENDED

    def cut(self) -> None:
        """Stop collecting: decide on what has arrived."""
        self._state = _State.DECIDED

    def head(self) -> bytes:
        """The head of the body, at most `head_bytes` of it where more was buffered."""
        joined = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        return joined if len(joined) <= self._head_bytes else joined[: self._head_bytes]

    def take_body(self) -> list[bytes]:
        """All that was collected, for FULL_DUPLEX_STREAMED to hand back; no longer held."""
        chunks, self._chunks, self.held = self._chunks, [], 0
        return chunks

    @property
    def cut_short(self) -> bool:
        """Is the head not the whole body?"""
        return not self.complete or self.held > self._head_bytes
