"""The simulated engine: a block-granular prefix cache and the scheduler of one node, after vLLM's.

A prompt is token ids, 4 bytes each; of a model without a tokenizer it is text filled up to whole tokens, each 4 bytes
of which are one. What follows vLLM: only full blocks are found again, leading ones only; a fully cached prompt computes
its last block anew; the blocks of running requests are pinned; of the free ones those that hold nothing are reused
first, then the least recently used, tails before heads; block 0 is the null block; what is stored and removed is told
step by step, in order. What is simpler: a request takes all its blocks, its answer's included, when it is admitted, so
nothing is ever preempted; and prompts are computed one after another.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_128_digest

TOKEN_BYTES = 4
# Every so many tokens the blocks computed so far become cached, and an abort keeps them. vLLM's step is often 2048.
PREFILL_CHUNK_TOKENS = 512
LETTERS = "abcdefghijklmnopqrstuvwxyz"

BlockKey: TypeAlias = bytes
"""What a block is found by: a digest of its tokens, of what keeps them apart, and of the block before it."""


class Stored(NamedTuple):
    """Blocks of one request that one step filled, each the child of the one before."""

    keys: Sequence[BlockKey]
    parent: BlockKey | None
    """None: the first of them begins the prompt."""
    tokens: bytes
    salt: str
    lora: str | None


class Removed(NamedTuple):
    """A block was reused; another with the same key may still be there."""

    key: BlockKey


class Cleared(NamedTuple):
    """Every block was forgotten."""


Event: TypeAlias = Stored | Removed | Cleared


class Voice(NamedTuple):
    """The tokens that answers are made of, and the text of each."""

    first: Sequence[bytes]
    later: Sequence[bytes]
    text: Mapping[bytes, str]


def block_keys(tokens: bytes, *, block_tokens: int, salt: str = "", lora: str | None = None) -> list[BlockKey]:
    """One key for each full block; equal keys mean equal adapter, salt and tokens up to the block's end.

    The same in every process, as vLLM's are since 0.30.
    """
    size = block_tokens * TOKEN_BYTES
    apart = msgspec.msgpack.encode((lora, salt))
    key, keys = b"", []
    for end in range(size, len(tokens) + 1, size):
        key = xxh3_128_digest(key + tokens[end - size : end] + apart)
        keys.append(key)
    return keys


def answer_to(prompt: bytes, tokens: int, voice: Voice | None = None) -> bytes:
    """`tokens` tokens of made-up words; the prompt alone decides which."""
    rng = random.Random(zlib.crc32(prompt))
    if voice is not None:
        return b"".join([*rng.choices(voice.first), *rng.choices(voice.later, k=tokens - 1)])
    letters = "".join(rng.choices(LETTERS, k=3 * tokens))
    return "".join(" " + letters[start : start + 3] for start in range(0, len(letters), 3)).encode()


class BlockCache:
    """The blocks of one node: what each holds, who pins it, which free one is reused next. Bounded by `blocks`."""

    def __init__(self, blocks: int, *, removed: Callable[[BlockKey], None] = lambda _: None) -> None:
        """`removed` is told what a reused block held."""
        self.usable = blocks - 1
        self._removed = removed
        self._free = OrderedDict.fromkeys(range(1, blocks))
        self._uses = [0] * blocks
        self._key: list[BlockKey | None] = [None] * blocks
        # Two requests that compute the same tokens each keep their block: the older is found, the other succeeds it.
        self._holders: dict[BlockKey, list[int]] = {}

    @property
    def in_use(self) -> int:
        """How many blocks running requests hold."""
        return self.usable - len(self._free)

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks that hold the leading keys; ends at the first key that no block holds."""
        found = []
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            found.append(holders[0])
        return found

    def take(self, keys: Iterable[BlockKey], total: int) -> tuple[list[int], int] | None:
        """`total` blocks, now pinned, and how many of them (the leading ones) `match` found; None: too few are free."""
        found = self.match(keys)
        free_after = len(self._free) - sum(self._uses[block] == 0 for block in found)
        if total - len(found) > free_after:
            return None
        for block in found:
            self._free.pop(block, None)
        blocks = found + [self._reuse() for _ in range(total - len(found))]
        for block in blocks:
            self._uses[block] += 1
        return blocks, len(found)

    def store(self, block: int, key: BlockKey) -> None:
        """The block's tokens are computed now, so `match` finds it."""
        self._key[block] = key
        self._holders.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Unpin what `take` returned: what holds nothing is reused next, of the rest the tail before the head."""
        empty = []
        for block in reversed(blocks):
            self._uses[block] -= 1
            if self._uses[block] == 0:
                self._free[block] = None
                if self._key[block] is None:
                    empty.append(block)
        for block in reversed(empty):
            self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget everything; False and no change while a request runs."""
        if self.in_use:
            return False
        self._key = [None] * len(self._key)
        self._holders.clear()
        return True

    def _reuse(self) -> int:
        block, _ = self._free.popitem(last=False)
        key, self._key[block] = self._key[block], None
        if key is not None:
            self._holders[key].remove(block)
            if not self._holders[key]:
                del self._holders[key]
            self._removed(key)
        return block


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not even queued."""

    reason: Literal["never fits", "queue full"]
    message: str


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the engine."""

    prompt_tokens: int
    answer: bytes
    tokens: bytes  # what its blocks hold in the end
    salt: str
    lora: str | None
    keys: list[BlockKey]  # of the full blocks of prompt and answer
    total_blocks: int
    stage: Literal["waiting", "running", "done"] = "waiting"
    blocks: list[int] = field(default_factory=list)
    stored_blocks: int = 0
    cached_tokens: int = 0  # known once it runs


class Engine:
    """Admits first come, first served; computes one prompt at a time; running requests decode side by side."""

    def __init__(
        self,
        *,
        blocks: int,
        block_tokens: int,
        prefill_tokens_per_s: float,
        decode_s: float,
        max_running: int,
        max_queue: int,
        voice: Voice | None = None,
        publish: Callable[[Sequence[Event]], None] | None = None,
    ) -> None:
        """`publish` gets what each step did to the cache, when it did something; None: nobody wants to know."""
        self.cache = BlockCache(blocks, removed=lambda key: self._note(Removed(key)))
        self.capacity_tokens = self.cache.usable * block_tokens
        self.waiting = 0
        self.running = 0
        self._block_tokens = block_tokens
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_s = decode_s
        self._max_running = max_running
        self._max_queue = max_queue
        self._voice = voice
        self._publish = publish
        self._events: list[Event] = []  # of the step under way: at most one for each block, and a clearing
        self._jobs: set[Job] = set()
        self._prefill = asyncio.Lock()  # first in, first out
        self._freed = asyncio.Event()

    def adapters(self, stage: Literal["waiting", "running"]) -> list[str]:
        """The LoRA adapters of the requests there."""
        return sorted({job.lora for job in self._jobs if job.stage == stage and job.lora is not None})

    def reset(self) -> bool:
        """Forget every block; False and no change while a request runs. Told with the next step, as vLLM does."""
        if not self.cache.reset():
            return False
        if not self._events or not isinstance(self._events[-1], Cleared):
            self._note(Cleared())
        return True

    def submit(self, prompt: bytes, max_tokens: int, *, salt: str = "", lora: str | None = None) -> Job | Refusal:
        """Queue a prompt; its answer will be `max_tokens` long. Whoever gets a job must `finish` it in the end."""
        prompt_tokens = len(prompt) // TOKEN_BYTES
        if prompt_tokens + max_tokens > self.capacity_tokens:
            return Refusal(
                "never fits",
                f"This model's maximum context length is {self.capacity_tokens} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {prompt_tokens} tokens.",
            )
        if self.waiting >= self._max_queue:
            return Refusal("queue full", f"{self.waiting} requests are waiting already.")
        self.waiting += 1
        answer = answer_to(prompt, max_tokens, self._voice)
        # The last answer token is never fed back into the model, so no block keeps it.
        tokens = prompt + answer[:-TOKEN_BYTES]
        job = Job(
            prompt_tokens=prompt_tokens,
            answer=answer,
            tokens=tokens,
            salt=salt,
            lora=lora,
            keys=block_keys(tokens, block_tokens=self._block_tokens, salt=salt, lora=lora),
            total_blocks=-(-len(tokens) // (self._block_tokens * TOKEN_BYTES)),
        )
        self._jobs.add(job)
        return job

    async def tokens(self, job: Job) -> AsyncGenerator[str]:
        """The answer token by token; the first comes at the end of prefill. Use with `aclosing`."""
        loop = asyncio.get_running_loop()
        async with self._prefill:
            await self._admit(job)
            await self._compute_prompt(job)
        first_at = loop.time()
        for index in range(len(job.answer) // TOKEN_BYTES):
            if index:
                await _sleep_until(first_at + index * self._decode_s)
                self._step(job, job.prompt_tokens + index)
            token = job.answer[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES]
            yield token.decode() if self._voice is None else self._voice.text[token]

    def finish(self, job: Job) -> None:
        """Free the job's slot and blocks, whatever its stage; what was computed stays cached. Idempotent."""
        if job.stage == "waiting":
            self.waiting -= 1
        elif job.stage == "running":
            self.running -= 1
            self.cache.release(job.blocks)
            self._freed.set()
        job.stage = "done"
        self._jobs.discard(job)

    async def _admit(self, job: Job) -> None:
        # At least one token has to be computed: without it there is nothing to sample the first answer token from.
        findable = job.keys[: (job.prompt_tokens - 1) // self._block_tokens]
        while self.running >= self._max_running or (taken := self.cache.take(findable, job.total_blocks)) is None:
            self._freed.clear()
            await self._freed.wait()
        job.blocks, job.stored_blocks = taken
        job.cached_tokens = job.stored_blocks * self._block_tokens
        job.stage = "running"
        self.waiting -= 1
        self.running += 1

    async def _compute_prompt(self, job: Job) -> None:
        start = asyncio.get_running_loop().time()
        computed = job.cached_tokens
        while computed < job.prompt_tokens:
            computed = min(computed + PREFILL_CHUNK_TOKENS, job.prompt_tokens)
            await _sleep_until(start + (computed - job.cached_tokens) / self._prefill_tokens_per_s)
            self._step(job, computed)

    def _step(self, job: Job, computed_tokens: int) -> None:
        """The blocks that are full now can be found; what has changed since the last step is told."""
        first = job.stored_blocks
        while (job.stored_blocks + 1) * self._block_tokens <= computed_tokens:
            self.cache.store(job.blocks[job.stored_blocks], job.keys[job.stored_blocks])
            job.stored_blocks += 1
        if self._publish is None:
            return
        if job.stored_blocks > first:
            block_bytes = self._block_tokens * TOKEN_BYTES
            tokens = job.tokens[first * block_bytes : job.stored_blocks * block_bytes]
            parent = job.keys[first - 1] if first else None
            self._note(Stored(job.keys[first : job.stored_blocks], parent, tokens, job.salt, job.lora))
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _note(self, event: Event) -> None:
        if self._publish is not None:
            self._events.append(event)


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
