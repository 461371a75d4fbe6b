"""Reads requests on the loop or, where it takes long, by threads, within the time that there is for a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from extproc.reading import Cause, Cut, Interpreter, Passed, Phases, Reading, Unkeyed, structure
from extproc.tokens.encoder import Job
from extproc.wire.exchange import Exchange
from extproc.wire.requests import api_of

_INLINE_STRUCTURE = 6000
"""Of a head that is parsed on the loop: some 2,000 objects, in a millisecond or two."""
_SAMPLED_BYTES, _SAMPLE, _EVERY, _PROSE = 32 << 10, 1024, 8, 0.05
"""Larger heads are looked at in samples; one with less structure than prose and code have is taken for such."""
_INLINE_HEAD_BYTES = 512 << 10
"""But no more of it than this: 3,000 short messages may look like prose."""
_INLINE_BYTES = 8192
"""Of text that is tokenized on the loop, 0.6 ms with a fast tokenizer; more goes to a thread, which costs 0.1 ms."""
_INLINE_BYTES_SLOW = 1024
_INLINE_WEIGHT = 64
"""Messages, parts and calls that are rendered on the loop, in a millisecond."""


class Reader:
    """Reads requests; what takes long is left to threads: parsing to its own, so that no tokenizer is in its way."""

    def __init__(
        self,
        interpreter: Interpreter,
        parsers: Executor,
        tokenizers: Executor,
        clock: Callable[[], float],
        report: Callable[[str, Exception], None] | None = None,
    ) -> None:
        """`report` is told of mistakes of ours that come after the decision."""
        self.interpreter = interpreter
        self.report = report
        self.faults: dict[str, str] = {}
        """By pool: why its tokenizer is not there, or what its self-test found."""
        self.waiting_bytes = 0
        """Of prompts that threads have not read yet."""
        self._parsers, self._tokenizers = parsers, tokenizers
        self._clock = clock

    async def begin(self, exchange: Exchange, phases: Phases) -> Reading:
        """What the head says; the prompt is still to be hashed. Passed: it is not for us."""
        api = api_of(exchange.headers.get(":path", ""))
        if api is None:
            raise Passed(Cause.UNKNOWN_PATH)
        interpreter, settings = self.interpreter, self.interpreter.settings
        if phases.cut is Cut.NO_ROOM:
            reading = interpreter.unread(exchange)
        elif head := exchange.head():
            read = partial(interpreter.read, api, exchange, head)
            if "content-encoding" not in exchange.headers and _quick(head):
                reading = read()
            elif self._full(len(head)):
                reading = interpreter.unread(exchange, Cut.BUSY)
            else:
                pending = self._in_thread(self._parsers, read, len(head))
                done, _ = await asyncio.wait((pending,), timeout=settings.decide_s)
                reading = pending.result() if done else self._late(exchange)
        elif exchange.cut_short:
            reading = interpreter.unread(exchange)
        else:
            raise Passed(Cause.EMPTY_BODY)
        phases.cut, phases.unkeyed = phases.cut or reading.why_cut, reading.unkeyed
        phases.parsed_s = self._clock()
        allowed_s = settings.decide_s + settings.decide_s_per_16_kib * exchange.held / 16384
        reading.until_s = phases.collected_s + allowed_s
        return reading

    async def finish(self, reading: Reading, phases: Phases) -> None:
        """Hash the prompt, or as much of it as the decision deadline allows."""
        if reading.plain is not None:
            while not reading.plain.advance():
                await asyncio.sleep(0)
                if self._clock() >= reading.until_s:
                    phases.cut = Cut.DECISION_DEADLINE
                    break
        elif reading.job is not None:
            try:
                await self._run(reading, reading.job, phases)
            except ValueError:
                phases.unkeyed = Unkeyed.TEMPLATE
                reading.tokens += reading.job.tokens
                reading.job, reading.exact = None, False

    async def _run(self, reading: Reading, job: Job, phases: Phases) -> None:
        encoder = job.encoder
        quick = job.weight <= _INLINE_WEIGHT
        inline = _INLINE_BYTES if encoder.tokenizer.fast else _INLINE_BYTES_SLOW
        if not quick or job.fresh_bytes > inline or not job.run(inline):
            if self._full(job.fresh_bytes):
                phases.cut = Cut.BUSY
                return
            rest = self._in_thread(self._tokenizers, job.run, job.fresh_bytes)
            done, _ = await asyncio.wait((rest,), timeout=reading.until_s - self._clock())
            if not done:
                phases.cut, reading.rest = Cut.DECISION_DEADLINE, rest
                return
            rest.result()
        if job.short:
            phases.cut = Cut.UNBROKEN
        if job.continued and not self.waiting_bytes and encoder.wants_check():
            self._in_thread(self._tokenizers, partial(encoder.check, job), job.text_bytes)

    def _late(self, exchange: Exchange) -> Reading:
        try:
            return self.interpreter.unread(exchange, Cut.DECISION_DEADLINE)
        except Passed:  # several pools, and nobody knows yet which
            raise Passed(Cause.LATE) from None

    def _full(self, size: int) -> bool:
        return self.waiting_bytes + size > self.interpreter.settings.backlog_bytes

    def _in_thread(self, threads: Executor, work: Callable[[], Any], size: int) -> asyncio.Future[Any]:
        self.waiting_bytes += size
        future = asyncio.get_running_loop().run_in_executor(threads, work)

        def done(future: asyncio.Future[Any]) -> None:
            self.waiting_bytes -= size
            error = None if future.cancelled() else future.exception()
            # whoever waited for it may have left; what the request is refused for is no mistake
            if isinstance(error, Exception) and not isinstance(error, ValueError | Passed) and self.report is not None:
                self.report("request read in vain", error)

        future.add_done_callback(done)
        return future


def _quick(head: bytes) -> bool:
    """Can it be parsed on the loop?"""
    if len(head) <= _SAMPLED_BYTES:
        return structure(head) <= _INLINE_STRUCTURE
    if len(head) > _INLINE_HEAD_BYTES:
        return False
    found = 0
    for at in range(0, len(head), _EVERY * _SAMPLE):
        in_sample = structure(head[at : at + _SAMPLE])
        if in_sample > _PROSE * _SAMPLE:
            found += in_sample
    return found * _EVERY <= _INLINE_STRUCTURE
