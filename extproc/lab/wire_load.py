"""The bench's load generator: prebuilt chat requests on raw keep-alive sockets, closed loop or at a fixed rate.

It has to be light, because it shares the machine with what it measures: requests are built before the clock starts,
a response is parsed for its status, its length and one header, and one process drives all connections.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import selectors
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WORDS = [
    *(
        "the",
        "cache",
        "holds",
        "what",
        "a",
        "node",
        "has",
        "read",
        "before",
        "and",
        "every",
        "turn",
        "of",
        "its",
        "talk",
    ),
    *(
        "function",
        "returns",
        "error",
        "when",
        "path",
        "is",
        "not",
        "found",
        "in",
        "module",
        "list",
        "files",
        "to",
        "be",
    ),
]
HEADERS = (
    "POST /v1/chat/completions HTTP/1.1\r\n"
    "host: llm.local\r\n"
    "accept: application/json\r\n"
    "accept-encoding: gzip, deflate\r\n"
    "content-type: application/json\r\n"
    "user-agent: OpenAI/Python 2.8.0\r\n"
    "x-stainless-lang: python\r\n"
    "x-stainless-package-version: 2.8.0\r\n"
    "x-stainless-runtime: CPython\r\n"
    "authorization: Bearer sk-0123456789abcdef0123456789abcdef\r\n"
    "content-length: {}\r\n\r\n"
)
MESSAGE_BYTES = 6000  # of one turn of a long conversation: an answer, or a file that a tool read
NONCE = "0" * 16
PATIENCE_S = 10


class Conversation:
    """One prebuilt chat request; each sending changes the last message, so that its tail is new to every cache."""

    def __init__(self, request: bytes) -> None:
        self._request = bytearray(request)
        self._at = request.rindex(NONCE.encode())
        self._sent = 0

    def next(self) -> memoryview:
        """The next request; it shares memory with the one before, which must have been answered."""
        self._sent += 1
        self._request[self._at : self._at + len(NONCE)] = b"%016d" % self._sent
        return memoryview(self._request)


def conversations(count: int, body_bytes: int, *, model: str, seed: int = 1) -> list[Conversation]:
    """`count` conversations whose bodies are `body_bytes` long (at least 1,000): a fifth is a system prompt that all
    of them share, three fifths are a history of their own, the last fifth is new with each request."""
    rng = random.Random(seed)
    text = _text(rng, 2 * body_bytes)
    system = text[: body_bytes // 5]
    built = []
    for number in range(count):
        history: list[dict[str, str]] = []
        left = body_bytes * 3 // 5
        while left > 0:
            length = min(left, MESSAGE_BYTES, max(200, body_bytes // 10))
            at = rng.randrange(body_bytes)
            role = "assistant" if len(history) % 2 else "user"
            history.append({"role": role, "content": f"{number} {text[at : at + length]}"})
            left -= length + 40  # what JSON puts around it
        messages = [{"role": "system", "content": system}, *history, {"role": "user", "content": NONCE + " "}]
        body = json.dumps({"model": model, "messages": messages, "stream": True, "temperature": 0.7})
        new = text.replace("\n", " ")[: body_bytes - len(body)]
        body = body.replace(NONCE, NONCE + " " + new[1:], 1)
        built.append(Conversation((HEADERS.format(len(body)) + body).encode()))
    return built


def _text(rng: random.Random, length: int) -> str:
    """Words in paragraphs, ASCII, without quotes."""
    words = rng.choices(WORDS, k=length // 4)
    words[::40] = [word + ".\n" for word in words[::40]]
    return " ".join(words)[:length]


@dataclass(slots=True)
class Load:
    """What one run saw. A request is in `latencies_s` (it was answered 200) or in `errors`, never in both."""

    latencies_s: list[float] = field(default_factory=list)
    routes: Counter[bytes] = field(default_factory=Counter)  # values of the x-route header
    errors: Counter[str] = field(default_factory=Counter)  # a status, "closed" or "no answer"
    unsent: int = 0  # due in an open loop, and never begun: the rate was not sustained
    elapsed_s: float = 0.0
    cpu_s: float = 0.0  # of this process

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_s) / self.elapsed_s


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of at least one value."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def parse(answer: bytes | bytearray) -> tuple[str, bytes, int] | None:
    """`(status, x-route, bytes in all)` of an HTTP/1.1 answer that begins at 0; None while its head is incomplete.

    ValueError for an answer without a content-length.
    """
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return None
    length = _header(answer, b"\r\ncontent-length: ", end)
    if length is None:
        raise ValueError(f"an answer without content-length: {bytes(answer[:end])!r}")
    return answer[9:12].decode(), _header(answer, b"\r\nx-route: ", end) or b"", end + 4 + int(length)


def _header(answer: bytes | bytearray, name: bytes, end: int) -> bytes | None:
    at = answer.find(name, 0, end)
    return None if at < 0 else bytes(answer[at + len(name) : answer.find(b"\r\n", at + 2)])


class _Connection:
    """One keep-alive connection that cycles over its conversations; at most one request at a time."""

    def __init__(self, port: int, turns: Sequence[Conversation], *, blocking: bool) -> None:
        self._turns, self._begun = turns, 0
        self.unsent = memoryview(b"")
        self.answer = bytearray()
        self.begun_s = 0.0
        self.closed = False
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # of the kernel, not of Python: settimeout() would cost a poll() before every call
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PATIENCE_S, 0))
        self.socket.setblocking(blocking)

    def begin(self, at_s: float) -> None:
        self.begun_s = at_s
        self.unsent = self._turns[self._begun % len(self._turns)].next()
        self._begun += 1
        self.answer.clear()
        self.send()

    def send(self) -> None:
        """Write what the socket takes (all of it when it blocks); receive() reports one that is closed."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]

    def receive(self, load: Load) -> bool:
        """Read once; True when the request is over (then `load` has it)."""
        try:
            data = self.socket.recv(65536)
        except OSError:  # reset, or PATIENCE_S without a byte
            data = b""
        now = time.perf_counter()
        if not data:
            self.closed = True
            load.errors["closed"] += 1
            return True
        self.answer += data
        parsed = parse(self.answer)
        if parsed is None or len(self.answer) < parsed[2]:
            return False
        status, route, _ = parsed
        if status == "200":
            load.latencies_s.append(now - self.begun_s)
            load.routes[route] += 1
        else:
            load.errors[status] += 1
        self.closed = bool(self.unsent)  # answered early: the rest of the request would be read as the next one
        return True


def closed_loop(port: int, turns: Sequence[Sequence[Conversation]], *, seconds: float) -> Load:
    """One connection for each of `turns`; the next request leaves when the last was answered."""
    if len(turns) > 1:
        return _drive(port, turns, seconds=seconds, rate=None)
    load, connection = Load(), _Connection(port, turns[0], blocking=True)
    cpu_s, start = time.process_time(), time.perf_counter()
    with connection.socket:
        while (now := time.perf_counter()) < start + seconds:
            connection.begin(now)
            while not connection.receive(load):
                pass
            if connection.closed:
                break
    load.elapsed_s, load.cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    return load


def open_loop(port: int, turns: Sequence[Sequence[Conversation]], *, seconds: float, rate: float) -> Load:
    """A request every `1 / rate` seconds on whichever connection is free; latency counts from the scheduled time."""
    return _drive(port, turns, seconds=seconds, rate=rate)


def _drive(port: int, turns: Sequence[Sequence[Conversation]], *, seconds: float, rate: float | None) -> Load:
    load = Load()
    connections = [_Connection(port, each, blocking=False) for each in turns]
    now = start = time.perf_counter()
    begun, scheduled = 0, 0 if rate is None else round(seconds * rate)

    def due_s() -> float | None:
        """When the next request is due. None: there is no other; what came late may begin a quarter later than all."""
        if rate is None:
            return now if now < start + seconds else None
        return start + begun / rate if begun < scheduled and now < start + 1.25 * seconds else None

    # select() sleeps with microsecond precision; epoll and poll round up to a millisecond, late for a schedule
    with selectors.SelectSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        idle, live = deque(connections), len(connections)
        cpu_s = time.process_time()
        while live:
            now = time.perf_counter()
            while (due := due_s()) is not None and due <= now and idle:
                connection = idle.popleft()
                connection.begin(due)
                begun += 1
                if connection.unsent:
                    selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
            if due is None and len(idle) == live:
                break
            ready = selector.select(due - now if due is not None and idle else PATIENCE_S)
            if not ready and (due is None or not idle):
                load.errors["no answer"] += live - len(idle)
                break
            for key, events in ready:
                connection = key.data
                if events & selectors.EVENT_WRITE:
                    connection.send()
                    if not connection.unsent:
                        selector.modify(connection.socket, selectors.EVENT_READ, connection)
                if events & selectors.EVENT_READ and connection.receive(load):
                    if connection.closed:
                        selector.unregister(connection.socket)
                        live -= 1
                    else:
                        idle.append(connection)
        load.elapsed_s, load.cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    load.unsent = max(0, scheduled - begun)
    for connection in connections:
        connection.socket.close()
    return load
