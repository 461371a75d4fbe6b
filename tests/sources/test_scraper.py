"""The scraper against real HTTP servers: what the fleet and the map learn, and from whom they learn nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from extproc.core.blocks import block_hashes
from extproc.core.pool import Pool
from extproc.core.types import InferenceRequest, LoadSample, Node
from extproc.sources.pages import MAX_PAGE_BYTES, Cause, Meter, PageError, PageReader
from extproc.sources.scraper import Pace, Scraper, ScrapeSettings
from tests.builders import pool_of, until


def page(*, waiting: int = 0, blocks: int = 1001, started: float | None = 100.0) -> bytes:
    start = "" if started is None else f"process_start_time_seconds {started}\n"
    return (
        f"{start}"
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
    connections: set[int] = field(default_factory=set)
    """Their ports on the other side."""

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
        assert request.transport is not None
        node.connections.add(request.transport.get_extra_info("peername")[1])
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
async def scraping(
    pools: dict[str, Pool],
    *,
    interval_s: float = 0.01,
    timeout_s: float = 0.2,
    cpu_clock: Callable[[], float] = time.thread_time,
) -> AsyncIterator[Scraper]:
    settings = ScrapeSettings(interval_s, timeout_s, "/metrics")
    scraper = Scraper(settings, time.monotonic, random.Random(1), cpu_clock)
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
        assert node.paths <= {"/metrics", "/metrics/"}


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


async def test_a_fault_in_reading_a_page_is_counted_and_does_not_end_the_scraping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Faulty(Pool):
        def observe(self, node: str, sample: LoadSample) -> bool:
            raise KeyError(node)

    async with fake_node() as node:
        pool = pool_on(("a", node.address))
        pool.__class__ = Faulty
        async with scraping({"m": pool}) as scraper:
            await until(lambda: scraper.counts.failures[Cause.ERROR] >= 3)
            pool.__class__ = Pool
            await until(lambda: sample(pool, "a") is not None)
    assert sum("was not read" in each.message for each in caplog.records) == 1


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


# ---- restarts ----


def counting(*, prompts: int | None, ended: int | None = 1, extra: str = "") -> bytes:
    """A page that does not say when its process was started."""
    tokens = "" if prompts is None else f'vllm:prompt_tokens_total{{engine="0"}} {prompts}.0\n'
    success = "" if ended is None else f'vllm:request_success_total{{engine="0"}} {ended}.0\n'
    return page(started=None) + tokens.encode() + success.encode() + extra.encode()


@pytest.mark.parametrize(
    ("pages", "voided"),
    [
        ([counting(prompts=100), counting(prompts=100)], False),
        ([counting(prompts=100), counting(prompts=200)], False),
        ([counting(prompts=100), counting(prompts=20)], True),
        ([counting(prompts=100, ended=9), counting(prompts=300, ended=2)], True),
        ([counting(prompts=100), counting(prompts=None), counting(prompts=100)], False),  # a page that lacks a line
        ([counting(prompts=100), counting(prompts=None), counting(prompts=20)], True),
        ([counting(prompts=100), b"starting", counting(prompts=20)], True),
        ([counting(prompts=100), b"starting", counting(prompts=120)], False),
        ([counting(prompts=100), b"", counting(prompts=None)], True),  # b"": no answer; then counts as of a new process
        ([page(started=1.0), page(started=1.0)], False),
        ([page(started=1.0), b"starting", page(started=1.0)], False),
        ([page(started=1.0), b"starting", page(started=2.0)], True),
        ([page(started=1.0), page(started=None), page(started=1.0)], False),
        ([page(started=2.0), b"", page(started=1.0)], True),
        ([page(started=1.0) + counting(prompts=9), page(started=1.0) + counting(prompts=3)], True),
    ],
)
async def test_a_restart_shows_in_the_start_time_or_in_counters_that_went_back(
    pages: list[bytes], voided: bool
) -> None:
    prompt = zeros(10)
    async with fake_node(pages[0]) as node:
        pool = pool_on(("n1", node.address))
        async with scraping({"m": pool}) as scraper:
            await until(lambda: scraper.counts.scrapes > 2)
            pool.store("n1", prompt, now=1.0)
            for body in pages[1:]:
                if body:
                    node.says(body)
                else:
                    node.answer = _hang_up
                asked = node.asked
                await until(lambda asked=asked: node.asked > asked + 2)
            assert pool.blocks("n1") == (0 if voided else 10)
            assert scraper.counts.restarts == voided  # once


# ---- two nodes behind one address ----


async def test_ranks_behind_one_address_are_told_apart_and_asked_for_once() -> None:
    two = page(waiting=1) + page(waiting=5, blocks=2001, started=None).replace(b'"0"', b'"1"')
    two = two.replace(b'{block_size="16",num_gpu_blocks="1001"', b'{block_size="16",engine="0",num_gpu_blocks="1001"')
    two = two.replace(b'{block_size="16",num_gpu_blocks="2001"', b'{block_size="16",engine="1",num_gpu_blocks="2001"')
    async with fake_node(two) as node:
        pool = pool_of()
        pool.replace([Node(f"n{rank}", node.address, "n", rank=rank) for rank in (0, 1)])
        async with scraping({"m": pool}) as scraper:
            await until(lambda: sample(pool, "n1") is not None)
            assert scraper.counts.scrapes == node.asked
            found = [sample(pool, name) for name in ("n0", "n1")]
        assert [(each.waiting, each.cache_tokens) for each in found if each] == [(1, 16_000), (5, 32_000)]
        assert len(node.connections) == 1


async def test_pools_that_share_an_address_share_its_samples() -> None:
    async with fake_node(page(waiting=2)) as node:
        pools = {"a": pool_on(("n1", node.address)), "b": pool_on(("other", node.address))}
        async with scraping(pools):
            await until(lambda: node.asked >= 5)
            await until(lambda: sample(pools["a"], "n1") is not None)
            assert sample(pools["a"], "n1") == sample(pools["b"], "other")
        assert len(node.connections) == 1


# ---- how often ----


async def test_a_connection_is_kept_and_one_that_the_server_closed_is_no_failure() -> None:
    async with fake_node() as node, fake_node() as closing:

        async def close(_: web.Request) -> web.Response:
            answer = web.Response(body=page())
            answer.force_close()
            return answer

        closing.answer = close
        pool = pool_on(("n1", node.address), ("n2", closing.address))
        async with scraping({"m": pool}) as scraper:
            await until(lambda: node.asked >= 20 and closing.asked >= 20)
            assert not scraper.counts.failures
        assert len(node.connections) == 1
        assert len(closing.connections) >= 20


async def test_who_does_not_answer_is_asked_less_often_and_at_once_again_when_it_does() -> None:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    pool = pool_on(("n1", f"127.0.0.1:{port}"))
    async with scraping({"m": pool}) as scraper:
        await until(lambda: scraper.counts.failures[Cause.CONNECT] >= 3)
        await asyncio.sleep(0.7)
        assert 5 <= scraper.counts.failures[Cause.CONNECT] <= 10  # not 70
        async with raw_node(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page()), page()), port=port):
            await until(lambda: scraper.counts.scrapes >= 20)
            assert sample(pool, "n1") is not None


async def test_one_failure_does_not_make_it_less_often() -> None:
    asked_at: list[float] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked_at.append(time.monotonic())
        return web.Response(body=page(), status=200 if len(asked_at) != 1 else 503)

    async with fake_node() as node:
        node.answer = answer
        async with scraping({"m": pool_on(("n1", node.address))}, interval_s=0.1) as scraper:
            await until(lambda: len(asked_at) >= 2)
            assert scraper.counts.failures == {Cause.STATUS: 1}
    assert asked_at[1] - asked_at[0] < 0.18


@pytest.mark.parametrize(
    ("per_second", "shortest", "longest"),
    [
        (0.0, 0.2, 0.2),
        (0.3, 0.2, 0.2),
        (0.8, 0.4, 0.5),  # of a core at the configured interval: at twice that it is its share
        (2.0, 1.0, 1.25),
        (50.0, 2.0, 2.0),  # a sample is to live for two scrapes and a half
    ],
)
def test_the_interval_is_what_a_share_of_a_core_can_pay(per_second: float, shortest: float, longest: float) -> None:
    settings = ScrapeSettings(0.2, 1.0, "/metrics", stale_after_s=5.0)
    pace = Pace(0.2)
    now = total_s = 0.0
    for _ in range(400):
        now += 0.1
        total_s += 0.1 * per_second * 0.2 / pace.interval_s
        pace.spent(total_s, settings, now=now)
    assert shortest <= pace.interval_s <= longest
    for _ in range(400):
        now += 0.1
        pace.spent(total_s, settings, now=now)
    assert pace.interval_s == 0.2


async def test_scraping_that_takes_too_much_is_done_less_often() -> None:
    ticks = 0.0

    def cpu_clock() -> float:
        nonlocal ticks
        ticks += 0.002
        return ticks

    async with fake_node() as node:
        async with scraping({"m": pool_on(("n1", node.address))}) as quick:
            assert quick.interval_s == 0.01
        async with scraping({"m": pool_on(("n1", node.address))}, cpu_clock=cpu_clock) as slow:
            await until(lambda: slow.interval_s > 0.015)
            slow.settings = replace(slow.settings, interval_s=0.5)
            assert slow.interval_s == 0.5


async def test_pages_of_nobody_are_counted() -> None:
    async with fake_node(b"<html>hello</html>") as node:
        pool = pool_on(("n1", node.address))
        async with scraping({"m": pool}) as scraper:
            await until(lambda: scraper.counts.unknown_pages >= 3)
            node.says(page())
            await until(lambda: getattr(sample(pool, "n1"), "waiting", None) == 0)
            unknown = scraper.counts.unknown_pages
            await until(lambda: scraper.counts.scrapes > unknown + 5)
            assert scraper.counts.unknown_pages == unknown


# ---- asking for some lines ----


async def test_where_lines_can_be_asked_for_no_others_are_made() -> None:
    registry = CollectorRegistry()
    waiting = Gauge("vllm:num_requests_waiting", "w", ["engine"], registry=registry)
    Counter("vllm:prompt_tokens", "t", ["engine"], registry=registry).labels("0").inc(7)
    Gauge("vllm:engine_sleep_state", "s", registry=registry)
    sizes: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        names = request.query.getall("name[]", []) if request.path == "/metrics/" else []
        found = registry.restricted_registry(names) if names else registry
        body = generate_latest(found)  # type: ignore[arg-type]
        sizes.append(len(body))
        return web.Response(body=body)

    async with fake_node() as node:
        node.answer = answer
        pool = pool_on(("n1", node.address))
        async with scraping({"m": pool}):
            for value in (3, 4):
                waiting.labels("0").set(value)
                await until(lambda value=value: getattr(sample(pool, "n1"), "waiting", None) == value)
            await until(lambda: len(sizes) > 5)
        taken = sample(pool, "n1")
        assert taken is not None
        assert taken.prompt_tokens == 7.0
    assert sizes[0] > max(sizes[1:])


@pytest.mark.parametrize("status", [200, 307, 404])
async def test_where_asking_for_lines_fails_whole_pages_are_asked_for(status: int) -> None:
    asked: list[bool] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append("name[]" in request.query)
        return (
            web.Response(body=b"# nothing")
            if asked[-1] and status == 200
            else web.Response(body=page(waiting=3), status=status if asked[-1] else 200)
        )

    async with fake_node() as node:
        node.answer = answer
        pool = pool_on(("n1", node.address))
        async with scraping({"m": pool}) as scraper:
            await until(lambda: len(asked) > 10)
            assert scraper.counts.unknown_pages == 0
            assert not scraper.counts.failures
            taken = sample(pool, "n1")
        assert taken is not None
        assert taken.waiting == 3
    assert asked == [False, True] + [False] * (len(asked) - 2)


# ---- what comes over the wire ----


@asynccontextmanager
async def raw_node(*answers: bytes, port: int = 0, pause_s: float = 0.0) -> AsyncIterator[str]:
    """Sends an answer to each question, the last one again and again, and b"" as the end of the connection."""
    left = list(answers)
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            answer = left.pop(0) if len(left) > 1 else left[0]
            for piece in answer.split(b"|pause|"):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            if not answer or answer.endswith(b"|pause|"):
                return

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await talk(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


def meter() -> Meter:
    return Meter(time.thread_time)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (OK + b"content-length:0\r\n\r\n", b""),
        (OK + b"Content-Length: 5\r\n|pause|\r\nhe|pause|llo", b"hello"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (OK + b"Transfer-Encoding: Chunked\r\n\r\nA;x=y\r\nhello|pause|hello\r|pause|\n0\r\n\r|pause|\n", b"hello" * 2),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n|pause|3\r\nllo\r\n0\r\nA: b\r\n\r\n", b"hello"),
        (OK + b"\r\nto |pause|the end|pause|", b"to the end"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    ],
)
async def test_every_way_to_send_a_body_is_read(answer: bytes, body: bytes) -> None:
    async with raw_node(answer, pause_s=0.01) as address:
        reader = PageReader(address, meter())
        for _ in range(3):
            assert await reader.get("/metrics", timeout_s=1.0) == body
        reader.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"", Cause.CLOSED),
        (b"HTTP/1.1 20|pause|", Cause.CLOSED),
        (OK + b"Content-Length: 5\r\n\r\nhell|pause|", Cause.CLOSED),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n|pause|", Cause.CLOSED),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", Cause.STATUS),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Cause.STATUS),
        (b"SSH-2.0-OpenSSH\r\n\r\n", Cause.MALFORMED),
        (b"\xff\xfe\r\n\r\n", Cause.MALFORMED),
        (OK + b"Content-Length: 2\r\n\r\nhello", Cause.MALFORMED),
        (OK + b"Content-Length: -2\r\n\r\n", Cause.MALFORMED),
        (OK + b"Content-Length: \xb2\r\n\r\n", Cause.MALFORMED),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok", Cause.MALFORMED),
        (OK + b"Transfer-Encoding: gzip\r\n\r\n", Cause.MALFORMED),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", Cause.MALFORMED),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", Cause.MALFORMED),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nhello\r\n", Cause.MALFORMED),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nhXX0\r\n\r\n", Cause.MALFORMED),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nhello", Cause.MALFORMED),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 2000, Cause.MALFORMED),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000, Cause.MALFORMED),
        (OK + b"Content-Length: 4194305\r\n\r\n", Cause.TOO_LARGE),
        (OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", Cause.TOO_LARGE),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n400001\r\n", Cause.TOO_LARGE),
        (OK + b"\r\n" + b"x" * (MAX_PAGE_BYTES + 1), Cause.TOO_LARGE),
        (OK + b"X: y\r\n" * 20_000, Cause.TOO_LARGE),
        (OK + b"Content-Length: 5\r\n\r\nhell", Cause.TIMEOUT),
    ],
)
async def test_every_other_answer_is_a_failure_with_its_cause_and_the_next_page_is_read(
    answer: bytes, cause: Cause
) -> None:
    async with raw_node(answer, OK + b"Content-Length: 2\r\n\r\nok", pause_s=0.01) as address:
        reader = PageReader(address, meter())
        with pytest.raises(PageError) as raised:
            await reader.get("/metrics", timeout_s=0.3)
        assert raised.value.cause is cause
        assert await reader.get("/metrics", timeout_s=1.0) == b"ok"
        reader.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "[::1]:1", "no-such-host.invalid:80", "a" * 70 + ":80", "127.0.0.1:99999"]
)
async def test_where_nobody_listens_the_cause_is_the_connection(address: str) -> None:
    with pytest.raises(PageError) as raised:
        await PageReader(address, meter()).get("/metrics", timeout_s=5.0)
    assert raised.value.cause is Cause.CONNECT


async def test_an_idle_connection_that_was_closed_meanwhile_is_made_anew() -> None:
    good = OK + b"Content-Length: 2\r\n\r\nok"
    async with raw_node(good, b"", good) as address:
        reader = PageReader(address, meter())
        assert await reader.get("/metrics", timeout_s=1.0) == b"ok"
        assert await reader.get("/metrics", timeout_s=1.0) == b"ok"  # closed upon the question, without a byte
        reader.close()
        await asyncio.sleep(0)


async def test_what_comes_unasked_is_no_answer_to_the_next_question() -> None:
    async with raw_node(OK + b"Content-Length: 2\r\n\r\nok|pause|" + OK, pause_s=0.02) as address:
        reader = PageReader(address, meter())
        for _ in range(3):
            assert await reader.get("/metrics", timeout_s=1.0) == b"ok"
            await asyncio.sleep(0.05)
        reader.close()
        await asyncio.sleep(0)


async def test_a_node_that_leaves_while_it_is_asked_leaves_nothing_behind() -> None:
    gone = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        try:
            await asyncio.sleep(3600)
        finally:
            gone.set()
        raise AssertionError

    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1, handler_cancellation=True)
    runner.app.router.add_get("/metrics", hang)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pool = pool_on(("n1", "{}:{}".format(*runner.addresses[0])))
    async with scraping({"m": pool}, timeout_s=60.0) as scraper:
        await asyncio.sleep(0.1)
        scraper.replace({})
        async with asyncio.timeout(5):
            await gone.wait()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("scrape")]
    await runner.cleanup()


@pytest.mark.parametrize("leave", [True, False])
async def test_the_connection_of_a_node_that_left_is_closed(leave: bool) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = page()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(OK + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        pool = pool_on(("n1", f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        async with scraping({"m": pool}, interval_s=0.2) as scraper:
            await until(lambda: scraper.counts.scrapes > 0)  # now it waits for the next time
            if leave:
                scraper.replace({})
            else:
                await scraper.close()
            async with asyncio.timeout(5):
                await ended.wait()
