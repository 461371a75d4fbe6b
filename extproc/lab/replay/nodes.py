"""A simulated LLM node in virtual time: steps under a token budget, continuous batching, one cache for all blocks.

The model, after vLLM's scheduler. A step gives every running answer one token; what the budget has left goes to
prompts in chunks, first come first served. A request starts when there is a place for it and when the blocks of its
whole prompt can be had, free or evictable. Blocks can be found from the step on that computes them, as in vLLM; of a
block that two requests compute at the same time one stays. Where running answers find no block, the request that came
last gives way: it goes back to the head of the queue, and what it had is computed again, as far as it is not found.
The first token comes at the end of the step that finishes the prompt.

A step takes, over the machine's speed: prefill tokens / prefill_tokens_per_s, more by their context / ATTENTION_TOKENS
(attention grows with what a token looks back on), + STEP_S + SEQUENCE_S for each running answer + CONTEXT_S for each
token that the running answers look back on. The constants are of the size seen with models of 8B to 70B on GPUs of the
H100's kind, in bf16: weights are read in about 8 ms, 0.1 MB of KV cache per token at 3.3 TB/s in 30 ns; at 100,000
tokens of context attention doubles what a token costs.

Steps in which nothing is prefilled are taken together up to the next end of an answer, or the next arrival.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from itertools import count

from extproc.core.types import HASH_BYTES
from extproc.lab.replay.block_cache import BlockCache
from extproc.lab.replay.jobs import Effort, Job, Scrape, Step
from extproc.lab.replay.types import Call, Machine

STEP_S, SEQUENCE_S, CONTEXT_S = 0.008, 10e-6, 30e-9
ATTENTION_TOKENS = 100_000.0


class SimulatedNode:
    """`submit` and `step` are called in the order of time; between `step`s nothing happens before `next_s`."""

    def __init__(
        self, machine: Machine, block_tokens: int, *, scrape_s: float = 0.2, started_at_s: float = 0.0
    ) -> None:
        self.machine = machine
        self.block_tokens = block_tokens
        self.capacity = machine.cache_tokens // block_tokens
        """In blocks."""
        self._scrape_s = scrape_s
        self._per_token_s = 1.0 / (machine.prefill_tokens_per_s * machine.speed)
        self._seen = Scrape(0, 0, 0.0, 0, 0)
        self._scrape_number = -1.0
        self._queries = self._hits = 0
        self.effort = Effort()
        self.up = True
        self._empty(started_at_s)

    def _empty(self, now: float) -> None:
        self.started_at_s = now
        self.cache = BlockCache()
        self.next_s = math.inf
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        """In the order in which they started; what is prefilled comes last."""
        self._prefilling: deque[Job] = deque()
        self._chunks: list[Job] = []
        self._ends: list[tuple[int, int, Job]] = []
        """Answers by the step in which they end; one that gave way meanwhile is stale."""
        self._order = count()
        self._decoding = 0
        self._context = 0
        """Tokens that running answers look back on."""
        self._private = 0
        self._steps = 0
        self._growing = [0] * self.block_tokens
        """How many running answers need another block in each step, by its number modulo the block size."""
        self._since_s = now
        self._planned_steps = 0
        self._prefilling_s = self._step_s = self._longer_s = 0.0
        """Of the first of those that are taken together, and by how much each is longer than the one before."""
        self._planned = BlockCache()
        """What waiting requests will leave in the cache."""
        self._queued_s = 0.0

    # ---- what is seen of it ----

    def scrape(self, now: float) -> Scrape:
        """What its metrics said at the last multiple of the scrape interval."""
        return self._seen if now // self._scrape_s == self._scrape_number else self._metrics()

    def _metrics(self) -> Scrape:
        used = self.cache.pinned + self._private
        return Scrape(len(self.waiting), len(self.running), used / self.capacity, self._queries, self._hits)

    def _touch(self, now: float) -> None:
        """Before anything changes: what is so far is what scrapes between the last change and now see."""
        number = now // self._scrape_s
        if number != self._scrape_number:
            self._seen = self._metrics()
            self._scrape_number = number

    def hit_tokens(self, call: Call) -> int:
        """What `call` would find of its prompt when its turn comes: what is cached now, and what the requests before it
        will have left there, if nothing of it is evicted until then."""
        most = (call.prompt_tokens - 1) // self.block_tokens
        found = self.cache.find(call.chain, most)[0]
        if self.waiting and found < most:
            found = max(found, self._planned.find(call.chain, most)[0])
        return found * self.block_tokens

    def prefill_s(self, call: Call, hit_tokens: int) -> float:
        """How long it prefills what is not found, with nothing else to do."""
        return self._prefill_s(hit_tokens, call.prompt_tokens - hit_tokens)

    def backlog_s(self, now: float) -> float:
        """How long it will prefill what it was given; running answers, which slow it down, are left out."""
        begun = sum(self._prefill_s(job.computed, job.tokens - job.computed) for job in self._prefilling)
        # chunks of the step in progress count as computed
        return begun + self._queued_s + (max(self.next_s - now, 0.0) if self._chunks else 0.0)

    def _prefill_s(self, begin: int, tokens: int) -> float:
        return tokens * (1.0 + (begin + tokens * 0.5) / ATTENTION_TOKENS) * self._per_token_s

    # ---- what happens to it ----

    def submit(self, job: Job, now: float) -> None:
        """A request arrives; it waits for the end of the step in progress."""
        self._touch(now)
        hit = self.hit_tokens(job.call)
        job.estimate_s = self.prefill_s(job.call, hit)
        self._queued_s += job.estimate_s
        job.planned = self._planned.extend(self._planned.root, job.call.chain, 0, job.call.blocks)
        self.waiting.append(job)
        if self.next_s == math.inf:
            self._plan(now)
        elif self._planned_steps > 1 and len(self.waiting) == 1:
            self._interrupt(now)

    def step(self) -> Step:
        """What is planned until `next_s` is done; then the next is planned."""
        now = self.next_s
        self._touch(now)
        done = Step([], [])
        prompts, tokens, prefill_s, busy_s = self.effort
        self.effort = Effort(
            prompts + sum(job.computed == job.tokens for job in self._chunks),
            tokens + self._decoding * self._planned_steps,
            prefill_s + self._prefilling_s,
            busy_s + now - self._since_s,
        )
        self._decoded(self._planned_steps)
        while self._ends and self._ends[0][0] <= self._steps:
            end_at, _, job = heappop(self._ends)
            if job.end_at == end_at:
                self._stop_decoding(job)
                self._finish(job)
                done.ended.append(job)
        for job in self._chunks:
            if job.computed < job.tokens:
                continue
            if job.first_token_s is None:
                job.first_token_s = now
                done.first.append(job)
            left = job.call.answer_tokens - job.generated - 1
            if left > 0:
                self._start_decoding(job, left)
            else:
                self._finish(job)
                done.ended.append(job)
        self._plan(now)
        return done

    def fail(self, now: float) -> list[Job]:
        """It goes down, and all that it had is lost; returns the requests that failed."""
        self._touch(now)
        lost = [*self.running.values(), *self.waiting]
        self._empty(now)
        self.up = False
        return lost

    def come_back(self, now: float) -> None:
        """It is up again, empty, with counters at zero."""
        self._queries = self._hits = 0
        self._empty(now)
        self.up = True

    # ---- steps ----

    def _plan(self, now: float) -> None:
        self._chunks = []
        gave_way = self._give_way()
        budget = self.machine.step_tokens - self._decoding
        seconds = 0.0
        while budget > 0:
            job = self._next_prompt(start=not gave_way)
            if job is None:
                break
            chunk = min(job.tokens - job.computed, budget)
            seconds += self._prefill_s(job.computed, chunk)
            job.computed += chunk
            budget -= chunk
            self._make_findable(job)
            self._chunks.append(job)
            if job.computed == job.tokens:
                self._prefilling.popleft()
        self._prefilling_s = seconds
        self._since_s, self._planned_steps = now, 1
        if not self._chunks and not self._decoding:
            self.next_s, self._planned_steps = math.inf, 0
            return
        speed, decoding = self.machine.speed, self._decoding
        self._step_s = seconds + (STEP_S + SEQUENCE_S * decoding + CONTEXT_S * self._context) / speed
        self._longer_s = CONTEXT_S * decoding / speed  # each answer looks back on one token more
        if not self._chunks and not gave_way:  # after that step another may start
            while self._ends[0][2].end_at != self._ends[0][0]:
                heappop(self._ends)
            steps = self._ends[0][0] - self._steps
            room = (self._available() // decoding - 1) * self.block_tokens
            self._planned_steps = max(min(steps, room), 1)
        self.next_s = now + self._lasts(self._planned_steps)

    def _lasts(self, steps: int) -> float:
        return steps * self._step_s + self._longer_s * (steps * (steps - 1) / 2)

    def _interrupt(self, now: float) -> None:
        """Of the steps that are taken together, only those up to the one in progress."""
        gone, low, high = now - self._since_s, 1, self._planned_steps
        while low < high:
            middle = (low + high) >> 1
            if self._lasts(middle) < gone:
                low = middle + 1
            else:
                high = middle
        self._planned_steps = low
        self.next_s = self._since_s + self._lasts(low)

    def _next_prompt(self, *, start: bool) -> Job | None:
        """The prompt that is prefilled next: one that has begun, or the first that waits, if it can and may `start`."""
        if self._prefilling:
            return self._prefilling[0]
        if not start or not self.waiting or len(self.running) >= self.machine.max_running:
            return None
        job = self.waiting[0]
        size, chain = self.block_tokens, job.chain
        most = (job.tokens - 1) // size
        hit, idle = self.cache.find(chain, most)
        needed = -(-job.tokens // size) - hit
        if self._available() - idle - self._growth(1) < needed:
            return None
        self.waiting.popleft()
        self._unplan(job)
        job.held, job.held_blocks = self.cache.pin(chain, most), hit
        job.private = needed
        self._take(needed)
        job.computed = hit * size
        if job.cached_tokens is None:
            job.cached_tokens = job.computed
            self._queries += job.tokens
            self._hits += job.computed
        self.running[job.number] = job
        self._prefilling.append(job)
        return job

    def _unplan(self, job: Job) -> None:
        if job.planned is not None:
            self._queued_s = self._queued_s - job.estimate_s if self.waiting else 0.0  # no rounding adds up
            self._planned.release(job.planned)
            self._planned.evict(self._planned.blocks - self._planned.pinned)
            job.planned = None

    # ---- answers ----

    def _start_decoding(self, job: Job, left: int) -> None:
        job.begun_at, job.end_at = self._steps, self._steps + left
        heappush(self._ends, (job.end_at, next(self._order), job))
        self._growing[(self._steps + 1 - job.tokens) % self.block_tokens] += 1
        self._decoding += 1
        self._context += job.tokens

    def _stop_decoding(self, job: Job) -> None:
        """Count what it generated, and the blocks that it took for that."""
        steps = self._steps - job.begun_at
        self._growing[(job.begun_at + 1 - job.tokens) % self.block_tokens] -= 1
        self._decoding -= 1
        self._context -= job.tokens + steps
        size = self.block_tokens
        job.private += -(-(job.tokens + steps) // size) - -(-job.tokens // size)
        job.generated += 1 + steps
        job.end_at = -1

    def _decoded(self, steps: int) -> None:
        """Every running answer is longer by as many tokens."""
        self._take(self._growth(steps))
        self._context += self._decoding * steps
        self._steps += steps

    def _growth(self, steps: int) -> int:
        """How many blocks running answers need for that."""
        whole, rest = divmod(steps, self.block_tokens)
        growth, growing, at = whole * self._decoding, self._growing, self._steps + 1
        for each in range(at, at + rest):
            growth += growing[each % self.block_tokens]
        return growth

    def _finish(self, job: Job) -> None:
        """It leaves: all of its blocks that are whole can be found until they are evicted."""
        del self.running[job.number]
        job.computed = job.call.prompt_tokens + job.call.answer_tokens
        self._make_findable(job)
        self._leave(job)

    def _leave(self, job: Job) -> None:
        self.cache.release(job.held)
        self._private -= job.private
        job.held, job.held_blocks, job.private = self.cache.root, 0, 0

    # ---- blocks ----

    def _make_findable(self, job: Job) -> None:
        end = min(job.computed // self.block_tokens, len(job.chain) // HASH_BYTES, job.held_blocks + job.private)
        if end > job.held_blocks:
            job.held = self.cache.extend(job.held, job.chain, job.held_blocks, end)
            job.private -= end - job.held_blocks
            self._private -= end - job.held_blocks
            job.held_blocks = end

    def _available(self) -> int:
        """Blocks that are free or can be evicted."""
        return self.capacity - self._private - self.cache.pinned

    def _take(self, blocks: int) -> None:
        self._private += blocks
        beyond = self.cache.blocks + self._private - self.capacity
        if beyond > 0:
            self.cache.evict(beyond)

    def _give_way(self) -> bool:
        """Requests leave, the last first, until those that stay have the blocks of the next step. Did one?"""
        gave_way = False
        while self._growth(1) > self._available():
            gave_way = True
            job = self.running.pop(next(reversed(self.running)))
            if job.end_at > 0:
                self._stop_decoding(job)
                job.tokens = job.call.prompt_tokens + job.generated
                job.computed = job.tokens - 1
                self._make_findable(job)
            else:
                self._prefilling.remove(job)
            self._leave(job)
            job.end_at = 0
            self.waiting.appendleft(job)
        return gave_way
