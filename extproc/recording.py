"""A recording of the traffic that can be replayed and given away: one line for each settled request, without text.

The file is JSON lines: a Header, then Entries in the order in which requests ended. A restart appends another header;
what follows it has other hashes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from extproc.core.types import HASH_BYTES, InferenceRequest, Settled

log = logging.getLogger(__name__)

VERSION = 1
LEAST_BLOCK_TOKENS = 64
"""Smaller blocks are taken together: a file of a quarter the size, and a replay knows a prompt to 32 tokens."""

_WINDOW = 2048
"""An entry's chain may lean on one of as many before it."""
_WINDOW_BLOCKS = 400_000
"""Of all chains in the window: about 50 MB."""
_MAX_WAITING = 20_000
_MAX_WAITING_BYTES = 64 << 20
"""Of chains. At 1,000 requests a second and 16 KiB each four seconds' worth; writing is done every second."""
_CLOSE_S = 5.0

_Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Seconds = Annotated[float, Meta(ge=0.0, lt=1e12)]


class Header(msgspec.Struct):
    """The first line, and the first after each restart."""

    recording: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    started_at_s: _Seconds
    """Wall clock."""


class Entry(msgspec.Struct, omit_defaults=True):
    """One request. Hashes (chain, session, tenant, turn, adapter) are keyed with what is not in the file: equal is
    equal, within one header, and nothing else is to be learnt from them."""

    at_s: _Seconds
    """When its headers came, since the header's time."""
    model: str
    """The pool."""
    prompt_tokens: _Natural
    end: str
    node: str
    reason: str
    block_tokens: _Natural = 0
    """0: its prompt was not turned into blocks."""
    back: _Natural = 0
    """Its chain begins as that of the entry so many before; 0: as none."""
    kept: _Natural = 0
    """So many blocks of that."""
    new: bytes = b""
    """The hashes that follow, 8 bytes each."""
    cut: bool = False
    """Only the beginning of the prompt was seen."""
    exact: bool = False
    """The tokens are the engine's."""
    session: int | None = None
    tenant: int | None = None
    adapter: int | None = None
    turn: int | None = None
    """A name for this prompt."""
    before: int | None = None
    """The name of the turn before this one."""
    answered: _Natural = 0
    """Tokens of the answer to that."""
    matched_tokens: _Natural = 0
    """Predicted for the node; so are the next two."""
    wait_s: _Seconds = 0.0
    prefill_s: _Seconds = 0.0
    ttft_s: _Seconds | None = None
    """What the client waited; None: not measured. A whole answer where it was not streamed."""
    engine_ttft_s: _Seconds | None = None
    total_s: _Seconds | None = None
    attempts: _Natural = 1
    elsewhere: bool = False
    """Another node than `node` answered."""


class RecordingError(OSError):
    """The file cannot be recorded to; the message says what to do."""


@dataclass(slots=True)
class Counts:
    """What became of requests that were to be recorded."""

    written: int = 0
    dropped: int = 0
    """Too many were waiting to be written, or recording had stopped."""


class Keyed:
    """Settled requests as entries: hashes keyed anew, chains as what they add to one before. Not thread-safe."""

    def __init__(self, key: bytes, *, now: float) -> None:
        """`key`: up to 64 bytes. `now`: the header's time, by the router's clock."""
        self._key = key
        self._started_s = now
        self._count = 0
        self._window: deque[tuple[int, array[int]]] = deque()
        """The entries that have a chain, by number."""
        self._blocks = 0
        self._last_of: dict[int, int] = {}
        """The last entry in the window that has a block. Whole chains are in it: who has a block has all before it."""

    def entry(self, settled: Settled, tenant: int | str | None = None) -> Entry:
        ticket, outcome, elsewhere = settled
        request, chosen = ticket.request, ticket.decision.chosen
        size, chain = _recorded_chain(request)
        back, kept = self._leaning(chain)
        new = b"".join([self._digest(block.to_bytes(HASH_BYTES, "little"), HASH_BYTES) for block in chain[kept:]])
        answered = request.answered
        return Entry(
            at_s=round(max(ticket.received_at_s - self._started_s, 0.0), 4),
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            end=outcome.end.value,
            node=chosen.node.id,
            reason=ticket.decision.reason.value,
            block_tokens=size,
            back=back,
            kept=kept,
            new=new,
            cut=request.cut_chains is not None,
            exact=request.exact,
            session=self._name("session", request.session),
            tenant=self._name("tenant", tenant),
            adapter=self._name("adapter", request.adapter),
            turn=self._name("turn", request.turn),
            before=None if answered is None else self._name("turn", answered.turn),
            answered=0 if answered is None else max(answered.end - answered.begin, 0),
            matched_tokens=chosen.matched_tokens,
            wait_s=_rounded(chosen.wait_s) or 0.0,
            prefill_s=_rounded(chosen.prefill_s) or 0.0,
            ttft_s=_rounded(outcome.client_ttft_s),
            engine_ttft_s=_rounded(outcome.engine_ttft_s),
            total_s=_rounded(outcome.total_s),
            attempts=max(outcome.attempts, 0),
            elsewhere=elsewhere,
        )

    def _leaning(self, chain: array[int]) -> tuple[int, int]:
        """How many entries back the one is that shares most of `chain`, and how many blocks; and remember `chain`."""
        self._count += 1
        number, known = self._count, self._last_of
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in known:
                low = middle + 1
            else:
                high = middle
        back = number - known[chain[low - 1]] if low else 0
        if chain:
            known.update(dict.fromkeys(chain, number))
            self._window.append((number, chain))
            self._blocks += len(chain)
        while self._window and (self._window[0][0] <= number - _WINDOW or self._blocks > _WINDOW_BLOCKS):
            gone, blocks = self._window.popleft()
            self._blocks -= len(blocks)
            for block in blocks:
                if known.get(block) == gone:
                    del known[block]
        return back, low

    def _digest(self, data: bytes, size: int) -> bytes:
        return blake2b(data, digest_size=size, key=self._key).digest()

    def _name(self, kind: str, value: int | str | None) -> int | None:
        return None if value is None else int.from_bytes(self._digest(f"{kind} {value}".encode(), 6), "little")


def _recorded_chain(request: InferenceRequest) -> tuple[int, array[int]]:
    """Its smallest blocks, taken together to at least LEAST_BLOCK_TOKENS; (0, nothing) where it has none."""
    chains = request.chains if request.cut_chains is None else request.cut_chains
    if not chains:
        return 0, array("Q")
    size = min(chains)
    together = max(1, -(-LEAST_BLOCK_TOKENS // size))
    return size * together, array("Q", chains[size])[together - 1 :: together]


def _rounded(seconds: float | None) -> float | None:
    """None also for what no clock shows."""
    return round(seconds, 5) if seconds is not None and 0.0 <= seconds < 1e12 else None


_Waiting = tuple[Settled, int | str | None]


class Recorder:
    """Writes settled requests to a file: `settled` puts one aside and returns, a thread does the rest every second."""

    def __init__(
        self,
        path: Path,
        *,
        started_at_s: float,
        now: float,
        max_bytes: int = 1 << 30,
        flush_s: float = 1.0,
        key: bytes | None = None,
    ) -> None:
        """Appends to a recording, or begins one, that nobody but its owner can read. `started_at_s` is `now` by the
        wall clock. Of the file, whoever wrote it, there will be no more than `max_bytes`. Raises RecordingError."""
        self.counts = Counts()
        self.stopped: str | None = None
        """Why nothing is recorded any more; None: it is."""
        self._max_bytes = max_bytes
        self._flush_s = flush_s
        self._keyed = Keyed(secrets.token_bytes(32) if key is None else key, now=now)
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._wake = threading.Event()
        self._closing = False
        self._path = path
        self._fd = _opened(path)
        try:
            self._size = os.fstat(self._fd).st_size
            self._write([self._encoder.encode(Header(VERSION, started_at_s))])
        except OSError as error:
            os.close(self._fd)
            raise _unwritable(path, error) from error
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def settled(self, settled: Settled, *, tenant: int | str | None = None) -> None:
        """Record it, unless recording has stopped. A few us; never waits for the file. Drops the oldest that wait where
        there are too many. `tenant`: whoever is to be told apart, by any name; the name is not recorded."""
        with self._lock:  # held by the thread for no longer than it takes to exchange two names
            if self.stopped is not None or self._closing:
                self.counts.dropped += 1
                return
            waiting = self._waiting
            waiting.append((settled, tenant))
            self._waiting_bytes += settled.ticket.request.chain_bytes
            while len(waiting) > _MAX_WAITING or (self._waiting_bytes > _MAX_WAITING_BYTES and len(waiting) > 1):
                self._waiting_bytes -= waiting.popleft()[0].ticket.request.chain_bytes
                self.counts.dropped += 1

    def status(self) -> dict[str, str | int | None]:
        """For the health page."""
        counts = self.counts
        return {
            "file": str(self._path),
            "written": counts.written,
            "dropped": counts.dropped,
            "stopped": self.stopped,
        }

    def close(self) -> None:
        """Write what waits and close the file; blocks, for five seconds at most."""
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("recording to %s: the disk does not answer, the last lines may be missing", self._path)

    def _run(self) -> None:
        try:
            while self.stopped is None and not self._closing:
                self._wake.wait(self._flush_s)
                self._flush()
            self._flush()  # what came between
        except Exception as error:  # a bug of ours must not become the user's; its message may quote anything
            place = traceback.format_tb(error.__traceback__)[-1].strip()
            self._stop(f"{type(error).__name__} at {place}")
        finally:
            os.close(self._fd)

    def _flush(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            self._waiting_bytes = 0
        if self.stopped is None:
            self._write_all(waiting)
        else:
            self._drop(len(waiting))

    def _write_all(self, waiting: deque[_Waiting]) -> None:
        lines: list[bytes] = []
        size = 0
        while waiting:
            line = self._encoder.encode(self._keyed.entry(*waiting.popleft()))
            if self._size + size + len(line) + 1 > self._max_bytes:
                self._try_write(lines)
                self._drop(1 + len(waiting))
                self._stop(f"it has reached {self._max_bytes} bytes")
                return
            lines.append(line)
            size += len(line) + 1
            time.sleep(0)  # the loop need not wait until it is given the interpreter
        self._try_write(lines)

    def _try_write(self, lines: Sequence[bytes]) -> None:
        try:
            self._write(lines)
            self.counts.written += len(lines)
        except OSError as error:
            self._drop(len(lines))
            self._stop(str(error))

    def _write(self, lines: Sequence[bytes]) -> None:
        """All of them or none, as far as the disk lets us."""
        data = memoryview(b"".join([line + b"\n" for line in lines]))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size = os.fstat(self._fd).st_size

    def _drop(self, number: int) -> None:
        with self._lock:
            self.counts.dropped += number

    def _stop(self, why: str) -> None:
        if self.stopped is None:
            self.stopped = why
            log.warning("recording to %s stops: %s", self._path, why)


def _opened(path: Path) -> int:
    """For appending, by us alone. What a crash cut off is ended with a line break, so that what follows it can be
    read."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise RecordingError(f"{path} is no file: give the path of one, or of none yet")
        try:  # entries lean on those before them, so those of two processes cannot be told apart again
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordingError(f"{path} is being recorded to by another process: give another path") from error
        status = os.fstat(fd)
        if status.st_size:
            if not os.pread(fd, 16, 0).startswith(b'{"recording":'):
                raise RecordingError(f"{path} is there and no recording: give another path, nothing was written to it")
            if os.pread(fd, 1, status.st_size - 1) != b"\n":
                os.write(fd, b"\n")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unwritable(path: Path, error: OSError) -> RecordingError:
    return RecordingError(
        f"cannot record to {path}: {error.strerror}; give a file that can be written, where there is a directory for it"
    )
