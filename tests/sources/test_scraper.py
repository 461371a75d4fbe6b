"""The scraper against real HTTP servers: what the fleet and the map learn, and from whom they learn nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from extproc.core.blocks import block_hashes
from extproc.core.pool import Pool
from extproc.core.types import InferenceRequest, LoadSample, Node
from extproc.sources.scraper import Scraper, ScrapeSettings
from tests.builders import pool_of, until


def page(*, waiting: int = 0, blocks: int = 1001, started: float = 100.0) -> bytes:
    return (
        f"process_start_time_seconds {started}\n"
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'
        f'vllm:num_requests_running{{engine="0"}} 1.0\n'
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
    ).encode()


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class FakeNode:
    """A node's HTTP server that answers as it is told."""

    answer: Answer
    address: str = ""
    asked: int = 0
    paths: set[str] = field(default_factory=set)

    def says(self, body: bytes, *, status: int = 200) -> None:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(body=body, status=status)

        self.answer = answer


@asynccontextmanager
async def fake_node(body: bytes = b"") -> AsyncIterator[FakeNode]:
    node = FakeNode(answer=None)  # type: ignore[arg-type]
    node.says(body or page())

    async def handle(request: web.Request) -> web.StreamResponse:
        node.asked += 1
        node.paths.add(request.path)
        return await node.answer(request)

    app = web.Application()
    app.router.add_get("/{any:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    node.address = "{}:{}".format(*runner.addresses[0])
    try:
        yield node
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scraping(pools: dict[str, Pool], *, timeout_s: float = 0.2) -> AsyncIterator[Scraper]:
    scraper = Scraper(ScrapeSettings(0.01, timeout_s, "/metrics"), time.monotonic, random.Random(1))
    scraper.replace(pools)
    try:
        yield scraper
    finally:
        await scraper.close()


def pool_on(*nodes: tuple[str, str], block_tokens: int = 16) -> Pool:
    pool = pool_of(block_tokens=block_tokens)
    pool.replace([Node(name, address, name) for name, address in nodes])
    return pool


def zeros(blocks: int, *, block_tokens: int = 16) -> InferenceRequest:
    chain = block_hashes(bytes(4 * block_tokens * blocks), block_tokens=block_tokens, salt=1)
    return InferenceRequest("m", blocks * block_tokens, {block_tokens: chain})


def sample(pool: Pool, node: str) -> LoadSample | None:
    return pool.fleet.samples()[node]


async def test_what_the_node_says_stands_in_the_fleet_with_its_time() -> None:
    async with fake_node(page(waiting=3)) as node:
        pool = pool_on(("n1", node.address))
        started = time.monotonic()
        async with scraping({"m": pool}):
            await until(lambda: sample(pool, "n1") is not None)
        taken = sample(pool, "n1")
        assert taken is not None
        assert (taken.waiting, taken.running, taken.kv_usage, taken.cache_tokens) == (3, 1, None, 16_000)
        assert started <= taken.at_s <= time.monotonic()
        assert node.paths == {"/metrics"}


async def test_a_page_that_comes_in_pieces_is_read_to_its_end() -> None:
    whole = page(waiting=7)

    async def slowly(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for at in range(0, len(whole), 40):
            await answer.write(whole[at : at + 40])
            await asyncio.sleep(0.001)
        return answer

    async with fake_node() as node:
        node.answer = slowly
        pool = pool_on(("n1", node.address))
        async with scraping({"m": pool}):
            await until(lambda: sample(pool, "n1") is not None)
        taken = sample(pool, "n1")
        assert taken is not None
        assert taken.waiting == 7


async def test_a_new_start_time_means_that_the_cache_is_void() -> None:
    prompt = zeros(10)
    async with fake_node(page(started=100.0)) as node, fake_node(page(started=100.0)) as other:
        pool = pool_on(("n1", node.address), ("n2", other.address))
        async with scraping({"m": pool}):
            await until(lambda: sample(pool, "n1") is not None and sample(pool, "n2") is not None)
            for name in ("n1", "n2"):
                pool.store(name, prompt, now=1.0)
            asked = node.asked
            await until(lambda: node.asked > asked + 2)
            assert pool.holders(prompt.chains) == {"n1": 160, "n2": 160}
            node.says(page(started=200.0))
            await until(lambda: pool.blocks("n1") == 0)
            assert pool.holders(prompt.chains) == {"n2": 160}


async def test_the_map_takes_the_size_that_the_node_announces() -> None:
    prompt = zeros(100)
    async with fake_node(page(blocks=51)) as node:
        pool = pool_on(("n1", node.address))
        pool.store("n1", prompt, now=1.0)
        assert pool.blocks("n1") == 100
        async with scraping({"m": pool}):
            await until(lambda: pool.blocks("n1") == 50)
            node.says(page(blocks=81))
            await until(lambda: (pool.store("n1", prompt, now=2.0), pool.blocks("n1") == 80)[1])


async def test_a_block_of_the_map_may_be_larger_than_the_engine_s() -> None:
    async with fake_node(page(blocks=9)) as node:
        pool = pool_on(("n1", node.address), block_tokens=64)
        pool.store("n1", zeros(10, block_tokens=64), now=1.0)
        async with scraping({"m": pool}):
            await until(lambda: pool.blocks("n1") == 2)  # 8 blocks of 16 tokens


async def test_an_exact_pool_is_hashed_in_the_blocks_that_its_nodes_announce() -> None:
    async with fake_node() as node:
        pool = pool_of(block_tokens=64, exact=True)
        pool.replace([Node("n1", node.address, "n1")])
        assert pool.block_sizes() == (64,)
        async with scraping({"m": pool}):
            await until(lambda: pool.block_sizes() == (16,))
            node.says(page().replace(b'block_size="16"', b'block_size="32"'))
            await until(lambda: pool.block_sizes() == (32,))


async def _hang(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


async def _hang_in_the_middle(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(page()[:60])
    await asyncio.sleep(3600)
    raise AssertionError


async def _hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def _error(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, body=page())


async def _too_much(request: web.Request) -> web.StreamResponse:
    return web.Response(body=page() + b"#" * (5 << 20))


async def _lies_about_its_encoding(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"not gzip", headers={"content-encoding": "gzip"})


@pytest.mark.parametrize("answer", [_hang, _hang_in_the_middle, _hang_up, _error, _too_much, _lies_about_its_encoding])
async def test_a_node_that_does_not_answer_properly_teaches_nothing_and_is_asked_again(answer: Answer) -> None:
    async with fake_node() as node, fake_node(page(waiting=1)) as other:
        node.answer = answer
        pool = pool_on(("n1", node.address), ("n2", other.address))
        async with scraping({"m": pool}, timeout_s=0.1):
            await until(lambda: node.asked >= 3)
            assert sample(pool, "n1") is None
            assert sample(pool, "n2") is not None
            node.says(page(waiting=2))
            await until(lambda: sample(pool, "n1") is not None)


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"\x00\xff" * 1000, page().replace(b" 0.0", b" NaN")])
async def test_garbage_is_an_empty_sample_and_does_not_stop_the_scraping(body: bytes) -> None:
    async with fake_node(body) as node:
        pool = pool_on(("n1", node.address))
        async with scraping({"m": pool}):
            await until(lambda: node.asked >= 3)
            taken = sample(pool, "n1")
            assert taken is not None
            assert taken.waiting is None
            node.says(page(waiting=4))
            await until(lambda: getattr(sample(pool, "n1"), "waiting", None) == 4)


async def test_a_node_that_is_not_there_costs_the_others_nothing() -> None:
    async with fake_node() as node:
        pool = pool_on(("n1", "127.0.0.1:1"), ("n2", node.address))
        async with scraping({"m": pool}):
            await until(lambda: node.asked >= 5)
        assert sample(pool, "n1") is None


async def test_nodes_that_leave_are_no_longer_asked_and_new_ones_are() -> None:
    async with fake_node() as first, fake_node() as second:
        pool = pool_on(("n1", first.address))
        async with scraping({"m": pool}) as scraper:
            await until(lambda: first.asked > 0)
            pool.replace([Node("n2", second.address, "n2")])
            scraper.replace({"m": pool})
            await until(lambda: second.asked > 0)
            asked = first.asked
            await until(lambda: second.asked > 10)
            assert first.asked <= asked + 1
            assert list(pool.fleet.samples()) == ["n2"]


async def test_a_pool_that_was_made_anew_under_its_old_name_gets_the_samples() -> None:
    async with fake_node() as node:
        old, new = pool_on(("n1", node.address)), pool_on(("n1", node.address), block_tokens=32)
        async with scraping({"m": old}) as scraper:
            await until(lambda: sample(old, "n1") is not None)
            scraper.replace({"m": new})
            await until(lambda: sample(new, "n1") is not None)


async def test_nothing_is_asked_after_the_end() -> None:
    async with fake_node() as node:
        async with scraping({"m": pool_on(("n1", node.address))}):
            await until(lambda: node.asked > 0)
        asked = node.asked
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("scrape")]
        assert node.asked == asked
