"""Gets one address's metrics page over a connection that is kept: HTTP/1.1, one GET at a time.

A general client takes twice as long for it (250 us; 130 here), and 1,000 nodes are asked more than once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import cast

MAX_PAGE_BYTES = 4 << 20
_MAX_HEAD_BYTES = 64 << 10
_MAX_SIZE_LINE_BYTES = 1024
"""Of a chunk."""
_MAX_CHUNKS = 16_384
"""Each takes a microsecond; engines send a page in one, and who sends it by the line stays far below."""
_AT_ONCE_BYTES = 256 << 10


class Cause(StrEnum):
    """Why there is no page."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    CLOSED = "closed"
    """The connection ended before the page did."""
    STATUS = "status"
    """Not 200."""
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    ERROR = "error"
    """There is one, and a fault of ours in reading it."""


class PageError(Exception):
    """There is no page, and why."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else str(cause))
        self.cause = cause


class Meter:
    """CPU time that getting pages took, and the memory that all connections receive into, one after the other."""

    def __init__(self, cpu_clock: Callable[[], float]) -> None:
        self.cpu_s = 0.0
        self.cpu_clock = cpu_clock
        self.memory = memoryview(bytearray(_AT_ONCE_BYTES))


class PageReader:
    """Owns the connection to one address."""

    def __init__(self, address: str, meter: Meter) -> None:
        self.address = address
        self._meter = meter
        self._connection: _Connection | None = None

    async def get(self, path: str, *, timeout_s: float) -> bytes:
        """The page; PageError when there is none. Not to be called again before it returned."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._connection is not None and self._connection.usable:
                    try:
                        return await self._connection.ask(path, self.address)
                    except _Stale:  # the server had enough of it just now, and never saw the question
                        pass
                self._connection = await self._connect()
                return await self._connection.ask(path, self.address)
        except TimeoutError:
            raise PageError(Cause.TIMEOUT) from None
        finally:
            if self._connection is not None and not self._connection.usable:
                self.close()

    def close(self) -> None:
        """Without a word. What is asked just now ends in PageError."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def _connect(self) -> _Connection:
        host, _, port = self.address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._meter), host.removeprefix("[").removesuffix("]"), int(port)
            )
        except TimeoutError:  # the system's, which is an OSError too, or ours
            raise
        except (OSError, ValueError, OverflowError) as error:
            raise PageError(Cause.CONNECT, str(error)) from None
        return connection


class _Stale(PageError):
    def __init__(self) -> None:
        super().__init__(Cause.CLOSED, "before a byte of the answer")


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[bytes] | None = None
        self._began_s = 0.0
        self._data = bytearray()
        """Received and not used: of the head, of a body of known length, or of the next chunk."""
        self._head_seen = False
        self._left: int | None = None
        """Length of the body; None: chunked, or to the end of the connection."""
        self._chunks: bytearray | None = None
        """The body as far as it came, where it comes in chunks."""
        self._chunk_count = 0
        self._keep = True

    @property
    def usable(self) -> bool:
        """Can it be asked?"""
        return self._transport is not None and self._waiter is None and self._keep

    async def ask(self, path: str, host: str) -> bytes:
        assert self._transport is not None
        began_s = self._meter.cpu_clock()
        self._data.clear()
        self._head_seen, self._left, self._chunks = False, None, None
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        question = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: text/plain\r\nAccept-Encoding: identity\r\n\r\n"
        self._transport.write(question.encode())
        self._meter.cpu_s += self._meter.cpu_clock() - began_s
        try:
            return await waiter
        finally:
            if waiter.cancelled():  # what still comes would be taken for the next answer
                self._keep = False
            self._waiter = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(PageError(Cause.CLOSED))

    # ---- what asyncio calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._head_seen and self._left is None and self._chunks is None and error is None:
            self._answer(bytes(self._data))  # its end is the page's
        elif not self._head_seen and not self._data:
            self._end(_Stale())
        else:
            self._end(PageError(Cause.CLOSED))

    def get_buffer(self, _: int) -> memoryview:
        self._began_s = self._meter.cpu_clock()
        return self._meter.memory

    def buffer_updated(self, count: int) -> None:
        if self._waiter is None or self._waiter.done():
            self._fail(PageError(Cause.MALFORMED, "more than was asked for"))
        else:
            self._data += self._meter.memory[:count]
            try:
                self._take()
            except PageError as error:
                self._fail(error)
            except ValueError:
                self._fail(PageError(Cause.MALFORMED))
        self._meter.cpu_s += self._meter.cpu_clock() - self._began_s

    # ---- the answer ----

    def _take(self) -> None:
        if not self._head_seen:
            end = self._data.find(b"\r\n\r\n")
            if end < 0 or end > _MAX_HEAD_BYTES:
                if len(self._data) > _MAX_HEAD_BYTES:
                    raise PageError(Cause.TOO_LARGE, "head")
                return
            head = bytes(self._data[:end])
            del self._data[: end + 4]
            self._take_head(head)
        if self._chunks is not None:
            self._take_chunks(self._chunks)
        elif len(self._data) > (MAX_PAGE_BYTES if self._left is None else self._left):
            raise PageError(Cause.TOO_LARGE if self._left is None else Cause.MALFORMED)
        elif len(self._data) == self._left:
            self._answer(bytes(self._data))

    def _take_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError
        if status[:3] != "200":
            raise PageError(Cause.STATUS, status[:3])
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if fields.get("content-encoding", "identity").lower() != "identity":
            raise PageError(Cause.MALFORMED, "encoded")
        connection = fields.get("connection", "").lower()
        self._keep = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        if "transfer-encoding" in fields:
            if fields["transfer-encoding"].lower() != "chunked":
                raise ValueError
            self._chunks, self._chunk_count = bytearray(), 0
        elif "content-length" in fields:
            length = fields["content-length"]
            if not (length.isascii() and length.isdigit()):
                raise ValueError
            if len(length) > 12 or int(length) > MAX_PAGE_BYTES:
                raise PageError(Cause.TOO_LARGE, length[:20])
            self._left = int(length)
        else:
            self._keep = False
        self._head_seen = True

    def _take_chunks(self, body: bytearray) -> None:
        data, at = self._data, 0
        while (end := data.find(b"\r\n", at, at + _MAX_SIZE_LINE_BYTES)) >= 0:
            size = int(data[at:end].partition(b";")[0], 16)
            self._chunk_count += 1
            if size < 0 or self._chunk_count > _MAX_CHUNKS:
                raise ValueError
            if len(body) + size > MAX_PAGE_BYTES:
                raise PageError(Cause.TOO_LARGE)
            if not size:
                # no trailer, or some
                last = end + 4 if data.startswith(b"\r\n", end + 2) else data.find(b"\r\n\r\n", end + 2) + 4
                if last > 3 and len(data) >= last:
                    if len(data) > last:
                        raise ValueError
                    self._answer(bytes(body))
                    return
                break
            after = end + 2 + size
            if len(data) < after + 2:
                break
            if data[after : after + 2] != b"\r\n":
                raise ValueError
            body += data[end + 2 : after]
            at = after + 2
        else:
            if len(data) - at >= _MAX_SIZE_LINE_BYTES:
                raise ValueError
        del data[:at]
        if len(data) > MAX_PAGE_BYTES + _MAX_SIZE_LINE_BYTES:
            raise PageError(Cause.TOO_LARGE, "trailer")

    def _answer(self, page: bytes) -> None:
        self._data.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(page)

    def _end(self, error: PageError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _fail(self, error: PageError) -> None:
        self._end(error)
        self._keep = False
        self._data.clear()
        if self._transport is not None:
            self._transport.abort()
