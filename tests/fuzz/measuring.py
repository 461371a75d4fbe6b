"""Measures a loop: the CPU time of every step it takes for a case, and how long others keep it from its next one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from heapq import heappush, heappushpop
from pathlib import Path
from typing import Any

from extproc.app import SWITCH_S
from extproc.reading import Passed
from tests.fuzz.bodies import Case

LIMIT_S = 0.005
"""What a step of the loop may take, and how long the loop may be kept from its next one."""

_TICK_S = 0.001
_WORST = 12

CASE: ContextVar[Case | None] = ContextVar("case", default=None)
"""Whose step it is; None: the harness's own."""


@dataclass(order=True, slots=True)
class Slow:
    """A step of the loop that took long, or a time in which it could take none."""

    seconds: float
    case: Case | None = field(compare=False)
    note: str = field(default="", compare=False)


@dataclass(slots=True)
class Findings:
    """What came of all cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, Case | None]] = field(default_factory=list)
    """No more than `most_faults` of them; `fault_count` has all."""
    fault_count: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    slow_steps: Counter[str] = field(default_factory=Counter)
    """Above the limit, by kind of case."""
    worst_steps: list[Slow] = field(default_factory=list)
    held_up: Counter[str] = field(default_factory=Counter)
    """Times in which a thread kept the interpreter to itself for longer than the limit, by kind of case."""
    worst_waits: list[Slow] = field(default_factory=list)
    longest_wall_s: float = 0.0
    most_faults: int = 50

    def fault(self, what: str, case: Case | None = None) -> None:
        self.fault_count[what] += 1
        if self.fault_count[what] <= 3 and len(self.faults) < self.most_faults:
            self.faults.append((what, case))

    def step(self, cpu_s: float, wall_s: float, collecting_s: float, case: Case) -> None:
        self.steps += 1
        self.longest_wall_s = max(self.longest_wall_s, wall_s)
        note = f"{collecting_s * 1e3:.1f} ms of it garbage collection" if collecting_s > 0.001 else ""
        _keep(self.worst_steps, Slow(cpu_s, case, note))
        if cpu_s > LIMIT_S:
            self.slow_steps[case.kind] += 1

    def wait(self, seconds: float, case: Case | None) -> None:
        if seconds > LIMIT_S and case is not None:
            self.held_up[case.kind] += 1
            _keep(self.worst_waits, Slow(seconds, case))


def _keep(worst: list[Slow], new: Slow) -> None:
    if len(worst) < _WORST:
        heappush(worst, new)
    elif worst[0] < new:
        heappushpop(worst, new)


# ---- the loop ----


class Loop(asyncio.SelectorEventLoop):
    """Measures what it runs for a case by this thread's CPU time: what else the machine does is not counted."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings
        self._collecting_s = self._collecting_since = 0.0

    def collected(self, phase: str, _: Any) -> None:
        """To be called by the garbage collector."""
        now = time.thread_time()
        if phase == "start":
            self._collecting_since = now
        else:
            self._collecting_s += max(now - self._collecting_since, 0.0)

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        context = copy_context() if context is None else context  # an empty one is false
        if context.get(CASE) is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(self._timed, callback, args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context  # an empty one is false
        if context.get(CASE) is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, self._timed, callback, args, context=context)

    def _timed(self, callback: Any, args: tuple[Any, ...]) -> None:
        collecting = self._collecting_s
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            callback(*args)
        finally:
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            case = CASE.get()
            assert case is not None
            self._findings.step(cpu, wall, self._collecting_s - collecting, case)


class Threads(Executor):
    """A pool of one thread, and what came of each piece of work there."""

    def __init__(self, findings: Findings) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._findings = findings
        self.last: Case | None = None
        """Whose work it does, or did last."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(self._run, CASE.get(), partial(fn, *args, **kwargs))

    def _run(self, case: Case | None, work: Callable[[], Any]) -> Any:
        if case is not None:
            self.last = case
        try:
            return work()
        except (ValueError, Passed):  # what the request is refused for
            raise
        except BaseException as error:
            self._findings.fault(f"in a thread: {place(error)}", case)
            raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


async def watch(threads: Threads, findings: Findings) -> None:
    """Count the times in which the loop wanted to go on and could not: not for its own work, nor for want of a CPU,
    but while another of our threads worked. Such a thread keeps the interpreter's lock."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(_Queue()) as queue:
        before: tuple[float, float, float] | None = None
        while True:
            own = time.thread_time()
            now = (loop.time(), own + queue.waited_s(), time.process_time() - own)
            if before is not None:
                wall, own, others = (b - a for a, b in zip(before, now, strict=True))
                findings.wait(min(wall - own - _TICK_S, others), threads.last)
            before = now
            await asyncio.sleep(_TICK_S)


class _Queue:
    """How long this thread has waited for a CPU: Linux tells, elsewhere it is taken to be no time."""

    def __init__(self) -> None:
        path = Path("/proc/thread-self/schedstat")
        self._file = path.open("rb", buffering=0) if path.exists() else None

    def waited_s(self) -> float:
        if self._file is None:
            return 0.0
        self._file.seek(0)
        return int(self._file.read().split()[1]) / 1e9

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def place(error: BaseException) -> str:
    """Kind and place of an exception, without its words."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
    return f"{type(error).__name__}{place}"


@contextlib.contextmanager
def as_the_app() -> Iterator[None]:
    """Garbage collection and threads as the application sets them."""
    threshold, switch_s = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
        sys.setswitchinterval(switch_s)
