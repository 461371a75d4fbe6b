"""What tests hold the simulated node against: the same rules, block by block, answer by answer and step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_digest

from extproc.core.types import HASH_BYTES
from extproc.lab.replay.nodes import ATTENTION_TOKENS, CONTEXT_S, SEQUENCE_S, STEP_S
from extproc.lab.replay.types import Call, Machine


def chain(symbols: str) -> bytes:
    """A block for each letter; as with real ones, equal hash means equal prefix."""
    return b"".join(xxh3_64_digest(symbols[: i + 1].encode()) for i in range(len(symbols)))


def call(
    symbols: str, answer: str = "", *, size: int = 4, tail: int = 0, answer_tokens: int = 1, at_s: float = 0.0
) -> Call:
    """A prompt of whole blocks and `tail` tokens; of `answer` as many blocks as there are in prompt and answer."""
    prompt_tokens = len(symbols) * size + tail
    whole = (prompt_tokens + answer_tokens) // size - len(symbols)
    hashes = chain(symbols + answer)[: (len(symbols) + whole) * HASH_BYTES]
    begin = len(symbols) * HASH_BYTES
    return Call(at_s, prompt_tokens, answer_tokens, hashes[:begin], hashes[begin:])


class NaiveCache:
    """A list of hashes that nobody holds, the next to be evicted first."""

    def __init__(self) -> None:
        self.pins: Counter[bytes] = Counter()
        self.there: set[bytes] = set()
        self.order: list[bytes] = []

    def find(self, hashes: Sequence[bytes]) -> int:
        return next((i for i, each in enumerate(hashes) if each not in self.there), len(hashes))

    def hold(self, each: bytes) -> None:
        if each in self.order:
            self.order.remove(each)
        self.there.add(each)
        self.pins[each] += 1

    def release(self, hashes: Sequence[bytes]) -> None:
        for each in reversed(hashes):
            self.pins[each] -= 1
            if not self.pins[each]:
                self.order.append(each)

    def evict(self, blocks: int) -> None:
        for _ in range(blocks):
            self.there.remove(self.order.pop(0))

    @property
    def pinned(self) -> int:
        return len(self.there) - len(self.order)


@dataclass
class _Naive:
    number: int
    call: Call
    hashes: list[bytes]
    generated: int = 0
    computed: int = 0
    context: int = 0
    held: list[bytes] = field(default_factory=list)
    private: int = 0
    cached: int | None = None
    first_s: float | None = None
    done_s: float | None = None
    decoding: bool = False
    began: int = 0

    @property
    def tokens(self) -> int:
        return self.call.prompt_tokens + self.generated


class NaiveNode:
    """Runs calls, given in the order of `at_s`, to their end."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.machine, self.size = machine, size
        self.capacity = machine.cache_tokens // size
        self.cache = NaiveCache()
        self.waiting: list[_Naive] = []
        self.running: list[_Naive] = []
        self.preempted = self._begun = 0

    def run(self, calls: Sequence[Call]) -> list[_Naive]:
        jobs = []
        for number, each in enumerate(calls):
            whole = each.chain + each.answer
            jobs.append(_Naive(number, each, [whole[i : i + HASH_BYTES] for i in range(0, len(whole), HASH_BYTES)]))
        coming, now = list(jobs), 0.0
        while coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                now = coming[0].call.at_s
                self.waiting.append(coming.pop(0))
            chunks, seconds = self._plan()
            now += seconds
            while coming and coming[0].call.at_s <= now:
                self.waiting.append(coming.pop(0))
            self._complete(chunks, now)
        return jobs

    def available(self) -> int:
        return self.capacity - self.cache.pinned - sum(job.private for job in self.running)

    def _make_room(self) -> None:
        beyond = len(self.cache.there) + sum(job.private for job in self.running) - self.capacity
        self.cache.evict(max(beyond, 0))

    def _growing(self) -> list[_Naive]:
        return [job for job in self.running if job.decoding and job.context % self.size == 0]

    def _plan(self) -> tuple[list[_Naive], float]:
        gave_way = False
        while len(self._growing()) > self.available():
            gave_way = True
            self.preempted += 1
            job = self.running.pop()
            if job.decoding:
                job.computed = job.tokens - 1
                self._findable(job)
            self._leave(job)
            self.waiting.insert(0, job)
        chunks, seconds = [], 0.0
        decoding = [job for job in self.running if job.decoding]
        budget = self.machine.step_tokens - len(decoding)
        while budget > 0:
            begun = [job for job in self.running if not job.decoding and job.computed < job.tokens]
            job = begun[0] if begun else None if gave_way else self._start()
            if job is None:
                break
            chunk = min(job.tokens - job.computed, budget)
            seconds += chunk * (1 + (job.computed + chunk / 2) / ATTENTION_TOKENS) / self.machine.prefill_tokens_per_s
            job.computed += chunk
            budget -= chunk
            self._findable(job)
            chunks.append(job)
        context = sum(job.context for job in decoding)
        seconds += STEP_S + SEQUENCE_S * len(decoding) + CONTEXT_S * context
        return chunks, seconds / self.machine.speed

    def _start(self) -> _Naive | None:
        if not self.waiting or len(self.running) >= self.machine.max_running:
            return None
        job = self.waiting[0]
        most = job.hashes[: (job.tokens - 1) // self.size]
        hit = self.cache.find(most)
        idle = sum(not self.cache.pins[each] for each in most[:hit])
        needed = -(-job.tokens // self.size) - hit
        if self.available() - idle - len(self._growing()) < needed:
            return None
        self.waiting.pop(0)
        for each in most[:hit]:
            self.cache.hold(each)
        job.held, job.private, job.computed = most[:hit], needed, hit * self.size
        if job.cached is None:
            job.cached = job.computed
        self.running.append(job)
        self._make_room()
        return job

    def _findable(self, job: _Naive) -> None:
        while (at := len(job.held)) < min(job.computed // self.size, len(job.hashes)):
            each = job.hashes[at]
            job.private -= 1  # of two that are the same, one stays
            self.cache.hold(each)
            job.held.append(each)

    def _leave(self, job: _Naive) -> None:
        self.cache.release(job.held)
        job.held, job.private, job.decoding, job.computed = [], 0, False, 0

    def _complete(self, chunks: list[_Naive], now: float) -> None:
        for job in self._growing():
            job.private += 1
        self._make_room()
        decoding = [job for job in self.running if job.decoding]
        for job in decoding:
            job.context += 1
            job.generated += 1
        # those of one step end in the order in which their answers began
        for job in sorted(decoding, key=lambda each: each.began):
            self._end(job, now)
        for job in chunks:
            if job.computed == job.tokens:
                job.first_s = now if job.first_s is None else job.first_s
                job.context = job.tokens
                job.generated += 1
                job.decoding = True
                self._begun += 1
                job.began = self._begun
                self._end(job, now)

    def _end(self, job: _Naive, now: float) -> None:
        if job.generated < job.call.answer_tokens:
            return
        job.done_s = now
        job.computed = job.call.prompt_tokens + job.call.answer_tokens
        self._findable(job)
        self._leave(job)
        self.running.remove(job)
