"""What it costs to scrape many nodes: `python -m extproc.lab.bench_scrape --nodes 1000`.

Each node is an address of its own on the loopback interface; all are served by another process, which has no more to do
for a scrape than to send a page. That page has the size of a real one, and the lines of an engine among others.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import time

from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits
from extproc.core.pool import Pool
from extproc.core.types import Node
from extproc.lab.wire_load import percentile
from extproc.policies.least_ttft import LeastTtft
from extproc.sources.engines import VLLM, Page
from extproc.sources.scraper import Scraper, ScrapeSettings

_GAUGES = b"""process_start_time_seconds 1.76400012345e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 5.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.375
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 123456.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 65432.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 123456.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 99.0
"""
_INFO = b"""vllm:lora_requests_info{max_lora="2",running_lora_adapters="a",waiting_lora_adapters=""} 1.79602307e+09
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="27001"} 1.0
"""


def page_of(size: int) -> bytes:
    """A page of at least `size` bytes, most of them buckets of histograms, as with the real one."""
    page = bytearray(_GAUGES)
    number = 0
    while len(page) + len(_INFO) < size:
        page += b"# HELP vllm:some_seconds_%d Histogram of how long something took in seconds.\n" % number
        page += b"# TYPE vllm:some_seconds_%d histogram\n" % number
        for bucket in range(20):
            page += b'vllm:some_seconds_%d_bucket{engine="0",le="%d.5",model_name="tiny"} 23.0\n' % (number, bucket)
        number += 1
    return bytes(page + _INFO)


class _Answering(asyncio.Protocol):
    """A node: it sends its page to whoever has asked."""

    def __init__(self, whole: bytes, few: bytes) -> None:
        self._whole, self._few = whole, few
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._asked += data
        if self._asked.endswith(b"\r\n\r\n"):
            self._transport.write(self._few if b"/?name[]=" in self._asked else self._whole)
            self._asked = b""


async def serve(port: int, page: bytes, *, select: bool) -> None:
    """Until it is killed. `select`: who asks for some of the lines gets no others, as from vLLM."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s"
    whole, few = (head % (len(body), body) for body in (page, _GAUGES + _INFO))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Answering(whole, few if select else whole), "0.0.0.0", port, backlog=4096
    )
    print("ready", flush=True)
    await server.serve_forever()


def _free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


async def measure(port: int, arguments: argparse.Namespace) -> None:
    """Scrape for as long as asked, the first third not counted, and print what was seen."""
    fleet = Fleet(PrefillRate(10_000.0), limits=LoadLimits(), price_weight=2.0)
    pool = Pool(fleet, LeastTtft(), 16, 500_000)
    pool.replace(
        [Node(f"n{i:04}", f"127.0.{1 + i // 250}.{1 + i % 250}:{port}", f"c{i}") for i in range(arguments.nodes)]
    )
    settings = ScrapeSettings(arguments.interval, 1.0, "/metrics", arguments.stale_after)
    scraper = Scraper(settings, time.monotonic, random.Random(1))
    scraper.replace({"m": pool})
    ages: list[float] = []
    try:
        await asyncio.sleep(arguments.seconds / 3)
        began, cpu, scrapes = time.monotonic(), time.process_time(), scraper.counts.scrapes
        metered = scraper.metered_s
        while time.monotonic() - began < arguments.seconds * 2 / 3:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            ages += [now - sample.at_s for sample in pool.fleet.samples().values() if sample is not None]
        passed, spent = time.monotonic() - began, time.process_time() - cpu
        count = scraper.counts.scrapes - scrapes
        metered = scraper.metered_s - metered
    finally:
        await scraper.close()
    silent = sum(sample is None for sample in pool.fleet.samples().values())
    print(f"nodes                {arguments.nodes}, {silent} of them without a sample")
    print(f"interval             {scraper.interval_s:.3f} s (asked for: {arguments.interval} s)")
    print(f"scrapes a second     {count / passed:.0f}")
    print(f"CPU of this process  {100 * spent / passed:.1f} % of a core")
    each_us, metered_us = 1e6 * spent / max(count, 1), 1e6 * metered / max(count, 1)
    print(f"CPU a scrape         {each_us:.0f} us, of which {metered_us:.0f} metered")
    p50_s, p99_s = percentile(ages, 0.5), percentile(ages, 0.99)
    print(f"age of samples       p50 {p50_s:.3f} s, p99 {p99_s:.3f} s, most {max(ages):.3f} s")
    print(f"failures             {dict(scraper.counts.failures)}")


def _picking(page: bytes) -> float:
    rounds = 300
    began = time.perf_counter()
    for _ in range(rounds):
        picked = Page(page, VLLM)
        picked.sample(at_s=0.0)
        picked.counters()
    return (time.perf_counter() - began) / rounds


def main() -> None:
    """Start the nodes, measure, stop them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--interval", type=float, default=0.2)
    parser.add_argument("--stale-after", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--page-bytes", type=int, default=60_000)
    parser.add_argument("--select", action="store_true", help="Nodes send the lines that are asked for, as vLLM does.")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    page = page_of(arguments.page_bytes)
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, page, select=arguments.select))
        return
    print(f"a page               {len(page)} bytes, read in {1e6 * _picking(page):.0f} us")
    port = _free_port()
    command = [sys.executable, "-m", "extproc.lab.bench_scrape", "--serve", str(port)]
    command += ["--page-bytes", str(arguments.page_bytes), *(["--select"] if arguments.select else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as nodes:
        try:
            assert nodes.stdout is not None
            nodes.stdout.readline()
            asyncio.run(measure(port, arguments))
        finally:
            nodes.kill()


if __name__ == "__main__":
    main()
