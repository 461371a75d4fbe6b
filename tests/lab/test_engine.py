"""The simulated engine: the block cache against a naive model, and the rules of admission."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.lab.engine import (
    PREFILL_CHUNK_TOKENS,
    TOKEN_BYTES,
    BlockCache,
    Cleared,
    Engine,
    Event,
    Job,
    Refusal,
    Removed,
    Stored,
    Voice,
    answer_to,
    block_keys,
)

BLOCK_TOKENS = 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
PATIENCE_S = 10.0


@dataclass(slots=True, eq=False)
class NaiveBlock:
    text: str | None = None
    uses: int = 0


class NaiveCache:
    """The same rules, as searches over lists: free blocks in the order of reuse, blocks with a text as stored."""

    def __init__(self, blocks: int) -> None:
        self.free = [NaiveBlock() for _ in range(blocks - 1)]
        self.stored: list[NaiveBlock] = []
        self.removed: list[str] = []

    def match(self, texts: list[str]) -> list[NaiveBlock]:
        found = []
        for text in texts:
            holder = next((block for block in self.stored if block.text == text), None)
            if holder is None:
                break
            found.append(holder)
        return found

    def take(self, texts: list[str], total: int) -> tuple[list[NaiveBlock], int] | None:
        found = self.match(texts)
        others = [block for block in self.free if block not in found]
        if total - len(found) > len(others):
            return None
        blocks = found + others[: total - len(found)]
        for block in blocks:
            block.uses += 1
            if block not in found:
                if block.text is not None:
                    self.removed.append(block.text)
                block.text = None
        self.free = [block for block in self.free if block not in blocks]
        self.stored = [block for block in self.stored if block.text is not None]
        return blocks, len(found)

    def store(self, block: NaiveBlock, text: str) -> None:
        block.text = text
        self.stored.append(block)

    def release(self, blocks: list[NaiveBlock]) -> None:
        for block in blocks[::-1]:
            block.uses -= 1
        freed = [block for block in blocks[::-1] if block.uses == 0]
        empty = [block for block in freed if block.text is None]
        self.free = empty + self.free + [block for block in freed if block.text is not None]


def prefixes(text: str) -> list[str]:
    """A letter stands for a block's own text; what a block is found by is everything up to its end."""
    return [text[:end] for end in range(1, len(text) + 1)]


# Few letters and a small cache: many shared prefixes, many evictions, the same text computed twice.
TAKE = st.tuples(st.just("take"), st.text("ab", max_size=6), st.integers(0, 2))  # a text, blocks more
STORE = st.tuples(st.just("store"), st.integers(0, 7), st.integers(0, 7))  # which of those held, which of its blocks
RELEASE = st.tuples(st.just("release"), st.integers(0, 7), st.none())
PROBES = [prefixes(text) for text in ("aaaaaa", "ababab", "baabba", "bbbbbb")]


@settings(max_examples=500)
@given(blocks=st.integers(2, 9), steps=st.lists(st.one_of(TAKE, STORE, RELEASE), max_size=60))
def test_the_block_cache_does_what_a_naive_model_does(blocks: int, steps: list[tuple[str, Any, Any]]) -> None:
    removed: list[bytes] = []
    cache, naive = BlockCache(blocks, removed=removed.append), NaiveCache(blocks)
    number = {block: index for index, block in enumerate(naive.free, start=1)}  # 0 is the null block
    held: list[tuple[list[str], list[NaiveBlock]]] = []
    for kind, which, more in steps:
        if kind == "take":
            texts = prefixes(which)
            taken, expected = (
                cache.take(map(str.encode, texts), len(texts) + more),
                naive.take(texts, len(texts) + more),
            )
            if expected is None:
                assert taken is None
            else:
                assert taken == ([number[block] for block in expected[0]], expected[1])
                held.append((texts, expected[0]))
        elif held and kind == "store":
            texts, own = held[which % len(held)]
            index = more % len(own) if own else 0
            if index < len(texts) and own[index].text is None:
                cache.store(number[own[index]], texts[index].encode())
                naive.store(own[index], texts[index])
        elif held:
            _, own = held.pop(which % len(held))
            cache.release([number[block] for block in own])
            naive.release(own)
        assert cache.in_use == len({block for _, own in held for block in own})
        assert removed == [text.encode() for text in naive.removed]
        for probe in PROBES:
            assert cache.match(map(str.encode, probe)) == [number[block] for block in naive.match(probe)]


def test_free_blocks_are_reused_tail_first() -> None:
    cache = BlockCache(5)
    texts = [each.encode() for each in prefixes("abcd")]
    taken = cache.take(texts, 4)
    assert taken is not None
    for block, key in zip(taken[0], texts, strict=True):
        cache.store(block, key)
    cache.release(taken[0])
    for left in (3, 2, 1, 0):
        assert cache.take([], 1) is not None
        assert len(cache.match(texts)) == left


def test_of_two_blocks_with_one_text_the_older_is_found_until_it_is_evicted() -> None:
    cache = BlockCache(3)
    first, second = cache.take([b"7"], 1), cache.take([b"7"], 1)
    assert first is not None
    assert second is not None
    cache.store(first[0][0], b"7")
    cache.store(second[0][0], b"7")
    assert cache.match([b"7"]) == first[0]
    cache.release(first[0])
    assert cache.take([], 1) == (first[0], 0)
    assert cache.match([b"7"]) == second[0]
    cache.release(second[0])
    assert cache.take([], 1) == (second[0], 0)
    assert cache.match([b"7"]) == []


def test_a_free_block_that_holds_nothing_is_reused_before_one_that_holds_something() -> None:
    cache = BlockCache(4)
    taken = cache.take([b"7"], 3)
    assert taken is not None
    [head, *rest] = taken[0]
    cache.store(head, b"7")
    cache.release(taken[0])
    assert cache.take([], 2) == (rest[::-1], 0)
    assert cache.match([b"7"]) == [head]


def test_a_cache_in_use_is_not_reset() -> None:
    cache = BlockCache(3)
    taken = cache.take([], 1)
    assert taken is not None
    cache.store(taken[0][0], b"7")
    assert not cache.reset()
    assert cache.match([b"7"])
    cache.release(taken[0])
    assert cache.reset()
    assert not cache.match([b"7"])


@given(
    left=st.binary(max_size=80),
    right=st.binary(max_size=80),
    salts=st.tuples(st.sampled_from("xy"), st.sampled_from("xy")),
)
def test_keys_agree_exactly_on_shared_full_blocks(left: bytes, right: bytes, salts: tuple[str, str]) -> None:
    ours, theirs = (
        block_keys(text, block_tokens=1, salt=salt) for text, salt in zip((left, right), salts, strict=True)
    )
    assert len(ours) == len(left) // TOKEN_BYTES
    for end, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        same = salts[0] == salts[1] and left[: end * TOKEN_BYTES] == right[: end * TOKEN_BYTES]
        assert (one == other) == same


def test_the_answer_depends_on_the_prompt_alone_and_is_whole_tokens() -> None:
    assert answer_to(b"abcd", 5) == answer_to(b"abcd", 5)
    assert answer_to(b"abcd", 5) != answer_to(b"abce", 5)
    assert len(answer_to(b"abcd", 5)) == 5 * TOKEN_BYTES


def engine(**changes: Any) -> Engine:
    defaults: dict[str, Any] = {
        "blocks": 64,
        "block_tokens": BLOCK_TOKENS,
        "prefill_tokens_per_s": 1e9,
        "decode_s": 0.0,
        "max_running": 4,
        "max_queue": 8,
    }
    return Engine(**{**defaults, **changes})


def prompt(blocks: int, first: str = "a") -> bytes:
    return (first * BLOCK_BYTES * blocks).encode()


def submitted(on: Engine, text: bytes, max_tokens: int = 1, **apart: str) -> Job:
    job = on.submit(text, max_tokens, **apart)
    assert isinstance(job, Job)
    return job


async def run(on: Engine, text: bytes, max_tokens: int = 1, **apart: str) -> Job:
    """Run a request to its end."""
    job = submitted(on, text, max_tokens, **apart)
    async with asyncio.timeout(PATIENCE_S):
        assert "".join([token async for token in on.tokens(job)]).encode() == job.answer
    on.finish(job)
    return job


@asynccontextmanager
async def started(on: Engine, text: bytes, max_tokens: int) -> AsyncGenerator[Job]:
    """A request that has given its first token and stays there."""
    job = submitted(on, text, max_tokens)
    async with aclosing(on.tokens(job)) as tokens:
        await anext(tokens)
        yield job
    on.finish(job)


@pytest.mark.parametrize(
    ("first", "second", "cached_blocks"),
    [
        (prompt(5), prompt(5) + b"more", 5),
        (prompt(5), prompt(5), 4),  # fully cached: the last block is computed anew
        (prompt(5) + b"tail", prompt(5) + b"tail", 5),  # what is left is the partial block
        (prompt(5), prompt(2) + prompt(3, "b"), 2),
        (prompt(5), prompt(1, "b") + prompt(4), 0),
        (prompt(5), prompt(3), 2),
        (b"1234", b"1234", 0),
    ],
)
async def test_leading_full_blocks_are_cached_and_one_token_is_left_to_compute(
    first: bytes, second: bytes, cached_blocks: int
) -> None:
    on = engine()
    assert (await run(on, first)).cached_tokens == 0
    assert (await run(on, second)).cached_tokens == cached_blocks * BLOCK_TOKENS


async def test_the_salt_separates_caches() -> None:
    on = engine()
    await run(on, prompt(5), salt="one")
    assert (await run(on, prompt(5), salt="two")).cached_tokens == 0
    assert (await run(on, prompt(5), salt="one")).cached_tokens == 4 * BLOCK_TOKENS


@pytest.mark.parametrize(("answer_tokens", "cached_blocks"), [(1, 3), (BLOCK_TOKENS, 3), (BLOCK_TOKENS + 1, 4), (9, 5)])
async def test_the_next_turn_finds_the_answer_except_its_last_token(answer_tokens: int, cached_blocks: int) -> None:
    on = engine()
    job = await run(on, prompt(3), answer_tokens)
    following = await run(on, prompt(3) + job.answer + prompt(2, "c"))
    assert following.cached_tokens == cached_blocks * BLOCK_TOKENS


async def test_prompts_are_computed_in_order_so_a_second_equal_prompt_finds_the_first() -> None:
    on = engine(prefill_tokens_per_s=1e5)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(on, prompt(5, letter) + b"last")) for letter in "aab"]
    assert [task.result().cached_tokens for task in tasks] == [0, 5 * BLOCK_TOKENS, 0]


async def test_the_first_token_takes_the_uncached_tokens_over_the_prefill_rate() -> None:
    loop, on = asyncio.get_running_loop(), engine(prefill_tokens_per_s=100.0)
    begin = loop.time()
    await run(on, prompt(10))
    cold_s = loop.time() - begin
    await run(on, prompt(10) + b"more")
    warm_s = loop.time() - begin - cold_s
    assert cold_s >= 0.4
    assert warm_s < cold_s / 2


async def test_each_later_token_takes_one_decode_step_whoever_else_runs() -> None:
    loop, on = asyncio.get_running_loop(), engine(decode_s=0.1)
    begin = loop.time()
    async with asyncio.TaskGroup() as group:
        for letter in "abcd":
            group.create_task(run(on, prompt(1, letter), 5))
    assert 0.4 <= loop.time() - begin < 1.2  # one after another they would take 1.6


async def test_blocks_of_a_running_request_survive_and_free_ones_are_evicted() -> None:
    on = engine(blocks=11)
    async with started(on, prompt(4), 2):
        await run(on, prompt(4, "b"))
        await run(on, prompt(5, "c"))  # needs the blocks of b, not those of a
        assert (await run(on, prompt(4) + b"more")).cached_tokens == 4 * BLOCK_TOKENS
    assert on.cache.in_use == 0


async def test_a_request_waits_for_blocks_and_later_ones_wait_behind_it() -> None:
    on, order = engine(blocks=11), []

    async def run_and_note(text: bytes) -> None:
        await run(on, text)
        order.append(text)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group, started(on, prompt(4), 2):
        big = group.create_task(run_and_note(prompt(8, "b")))
        small = group.create_task(run_and_note(prompt(1, "c")))
        await run_the_loop_dry()
        assert (on.waiting, on.running) == (2, 1)
        assert not big.done()
        assert not small.done()
    assert order == [prompt(8, "b"), prompt(1, "c")]


async def first_token(on: Engine, job: Job) -> str:
    async with aclosing(on.tokens(job)) as tokens:
        return await anext(tokens)


async def run_the_loop_dry() -> None:
    """Let every task go as far as it can without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_no_more_than_max_running_run_and_the_others_follow_in_order() -> None:
    on, order = engine(max_running=1), []

    async def run_and_note(letter: str) -> None:
        await run(on, prompt(1, letter))
        order.append(letter)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group, started(on, prompt(1), 2):
        for letter in "bcd":
            group.create_task(run_and_note(letter))
        await run_the_loop_dry()
        assert (on.waiting, on.running, order) == (3, 1, [])
    assert order == ["b", "c", "d"]
    assert (on.waiting, on.running) == (0, 0)


async def test_what_can_never_fit_and_what_finds_the_queue_full_is_refused() -> None:
    on = engine(blocks=5, max_queue=1)
    fits = submitted(on, prompt(3), BLOCK_TOKENS)
    too_many = on.submit(prompt(1), 1)
    assert isinstance(too_many, Refusal)
    assert too_many.reason == "queue full"
    on.finish(fits)
    too_long = on.submit(prompt(3), BLOCK_TOKENS + 1)
    assert isinstance(too_long, Refusal)
    assert too_long.reason == "never fits"
    assert on.waiting == 0


async def test_the_largest_request_that_is_accepted_runs() -> None:
    on = engine(blocks=5)
    async with asyncio.timeout(PATIENCE_S):
        await run(on, prompt(3), BLOCK_TOKENS)


@pytest.mark.parametrize("stage", ["waiting", "running"])
async def test_an_aborted_request_frees_its_place_and_finishing_twice_changes_nothing(stage: str) -> None:
    on = engine(max_running=1, prefill_tokens_per_s=1.0)
    first = submitted(on, prompt(1))
    task = asyncio.create_task(first_token(on, first))
    await run_the_loop_dry()
    assert first.stage == "running"
    second = submitted(on, prompt(1, "b"))
    waiting = asyncio.create_task(first_token(on, second))
    await run_the_loop_dry()
    aborted, aborted_task = (first, task) if stage == "running" else (second, waiting)
    aborted_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await aborted_task
    on.finish(aborted)
    on.finish(aborted)
    await run_the_loop_dry()
    assert (on.waiting, on.running) == (0, 1)
    other, other_task = (second, waiting) if stage == "running" else (first, task)
    assert other.stage == "running"
    other_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other_task
    on.finish(other)
    assert (on.waiting, on.running, on.cache.in_use) == (0, 0, 0)


async def test_an_aborted_prefill_keeps_the_chunks_it_computed() -> None:
    chunks = 200  # of 20 ms each; the abort comes soon after the first
    on = engine(blocks=chunks * PREFILL_CHUNK_TOKENS, prefill_tokens_per_s=PREFILL_CHUNK_TOKENS / 0.02)
    text = prompt(chunks * PREFILL_CHUNK_TOKENS // BLOCK_TOKENS)
    job = submitted(on, text)
    task = asyncio.create_task(first_token(on, job))
    async with asyncio.timeout(PATIENCE_S):
        while job.stored_blocks == 0:
            await run_the_loop_dry()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    on.finish(job)
    kept_tokens = job.stored_blocks * BLOCK_TOKENS
    assert kept_tokens in range(PREFILL_CHUNK_TOKENS, chunks * PREFILL_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS)
    assert (await run(on, text[: (kept_tokens + 1) * TOKEN_BYTES])).cached_tokens == kept_tokens


class Told:
    """What an engine told of its steps, one list for each."""

    def __init__(self, **changes: int) -> None:
        self.steps: list[list[Event]] = []
        self.engine = engine(**changes, publish=lambda events: self.steps.append(list(events)))

    async def of(self, text: bytes, max_tokens: int = 1, **apart: str) -> list[list[Event]]:
        """The steps of one request."""
        self.steps.clear()
        await run(self.engine, text, max_tokens, **apart)
        return [*self.steps]


def keys(text: bytes, **apart: str) -> list[bytes]:
    return block_keys(text, block_tokens=BLOCK_TOKENS, **apart)


def stored(text: bytes, first: int, last: int, salt: str = "", lora: str | None = None) -> Stored:
    """The event of the blocks from `first` to before `last` of a text."""
    known = keys(text, salt=salt, lora=lora)
    parent = known[first - 1] if first else None
    return Stored(known[first:last], parent, text[first * BLOCK_BYTES : last * BLOCK_BYTES], salt, lora)


async def test_only_what_is_new_is_told_as_stored_behind_its_parent() -> None:
    told, text = Told(), prompt(3) + b"more"
    longer = text + prompt(1, "b")
    assert await told.of(b"1234") == []  # no full block
    assert await told.of(text) == [[stored(text, 0, 3)]]
    assert await told.of(text) == []  # all of it was there
    assert await told.of(longer) == [[stored(longer, 3, 4)]]


async def test_a_fully_cached_prompt_stores_its_last_block_again() -> None:
    told = Told()
    await told.of(prompt(3))
    assert await told.of(prompt(3)) == [[stored(prompt(3), 2, 3)]]


async def test_an_answer_is_told_block_by_block_as_it_fills_them() -> None:
    told, tokens = Told(), 2 * BLOCK_TOKENS + 1
    text = prompt(1) + answer_to(prompt(1), tokens)
    assert await told.of(prompt(1), tokens) == [[stored(text, block, block + 1)] for block in range(3)]


async def test_a_long_prompt_is_told_chunk_by_chunk() -> None:
    a_chunk = PREFILL_CHUNK_TOKENS // BLOCK_TOKENS
    told, text = Told(blocks=1024), bytes(TOKEN_BYTES) * (2 * PREFILL_CHUNK_TOKENS + BLOCK_TOKENS)
    chunks = ((0, a_chunk), (a_chunk, 2 * a_chunk), (2 * a_chunk, 2 * a_chunk + 1))
    assert await told.of(text) == [[stored(text, *chunk)] for chunk in chunks]


async def test_what_gives_way_is_told_tail_first_and_before_what_takes_its_place() -> None:
    told = Told(blocks=7)  # 6 to use
    old, new = prompt(4), prompt(4, "b")
    await told.of(old)
    gone = [Removed(key) for key in keys(old)[:1:-1]]
    assert await told.of(new) == [[*gone, stored(new, 0, 4)]]
    assert await told.of(old + b"more") == [
        [*(Removed(key) for key in keys(new)[:0:-1]), stored(old + b"more", 2, 4)],
    ]


async def test_of_a_block_that_is_there_twice_either_copy_is_told_when_it_goes() -> None:
    told, text = Told(blocks=5), prompt(2)
    await told.of(text)
    await told.of(text)  # its last block twice now
    [step] = await told.of(prompt(4, "b")[:-TOKEN_BYTES])  # all blocks there are
    assert step.count(Removed(keys(text)[1])) == 2
    assert step.count(Removed(keys(text)[0])) == 1


@pytest.mark.parametrize("following", [b"1234", prompt(2) + b"more"])
async def test_a_reset_is_told_with_the_next_step_whatever_that_does(following: bytes) -> None:
    told = Told()
    await told.of(prompt(2) + b"more")
    told.steps.clear()
    assert told.engine.reset()
    assert told.engine.reset()
    assert told.steps == []
    blocks = len(following) // BLOCK_BYTES
    assert await told.of(following) == [[Cleared(), *([stored(following, 0, blocks)] if blocks else [])]]


async def test_a_reset_that_is_refused_is_not_told() -> None:
    told = Told()
    async with started(told.engine, prompt(1), 2):
        assert not told.engine.reset()
    assert await told.of(b"1234") == []


async def test_adapter_and_salt_are_told_and_keep_blocks_apart() -> None:
    told, text = Told(), prompt(2) + b"more"
    for apart in ({}, {"salt": "mine"}, {"lora": "mine"}, {"salt": "mine", "lora": "mine"}):
        assert await told.of(text, **apart) == [[stored(text, 0, 2, **apart)]]
    assert len({key for salt in ("", "s") for lora in (None, "l") for key in keys(text, salt=salt, lora=lora)}) == 8


async def test_the_adapters_of_waiting_and_running_requests_are_known() -> None:
    on = engine(max_running=1)
    async with started(on, prompt(1), 2):
        waiting = [on.submit(prompt(1), 1, lora=lora) for lora in ("b", "a", "b")]
        assert (on.adapters("running"), on.adapters("waiting")) == ([], ["a", "b"])
        for job in waiting:
            assert isinstance(job, Job)
            on.finish(job)
    assert on.adapters("waiting") == []


async def test_a_voice_speaks_in_its_own_tokens() -> None:
    voice = Voice([b"1111"], [b"2222", b"3333"], {b"1111": "one", b"2222": " two", b"3333": " three"})
    on = engine(voice=voice)
    job = submitted(on, prompt(1), 3)
    words = [token async for token in on.tokens(job)]
    on.finish(job)
    assert words[0] == "one"
    assert {*words[1:]} <= {" two", " three"}
    assert job.answer == b"".join(token for word in words for token, text in voice.text.items() if text == word)
