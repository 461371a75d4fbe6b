"""One router measured once: a load through it and what the nodes counted, and what it adds to a request on its own."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from extproc.lab.bench_path import busy_s, cpu_s
from extproc.lab.demo import MODEL
from extproc.lab.load import Session, summarize
from extproc.lab.peers.workloads import Workload, held

PAIRS, WARM_UP_PAIRS = 300, 30


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload through one router. Times are None when nothing was served."""

    requests: int
    errors: dict[str, int]
    hit_ratio: float | None
    """Of prompt tokens, as the nodes counted them."""
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    skew: float | None
    """Prompt tokens that the busiest node computed, over the mean of the nodes; 1 is even."""
    requests_per_s: float
    """Served while the load was on."""
    others_cores: float | None
    """What programs that are not part of this used meanwhile; None where the system does not say."""


def measured(
    url: str, nodes: Sequence[str], workload: Workload, sessions: Sequence[Session], seconds: float
) -> Measured:
    """Hold the sessions through the router at `url`; the nodes' counters are at zero before."""
    begun_at, others_before_s = time.perf_counter(), others_s()
    replies, in_time = asyncio.run(held(url, workload, sessions, seconds))
    others_after_s, took_s = others_s(), time.perf_counter() - begun_at
    summary = summarize(replies, nodes=len(nodes))
    errors = Counter(reply.error for reply in replies if reply.error is not None)
    ttft_s = [reply.ttft_s for reply in replies if reply.error is None and reply.ttft_s is not None]
    queried, computed = zip(*map(counted, nodes), strict=True)
    return Measured(
        requests=len(replies),
        errors=dict(errors),
        hit_ratio=1 - sum(computed) / sum(queried) if sum(queried) else None,
        ttft_mean_s=statistics.fmean(ttft_s) if ttft_s else None,
        ttft_p50_s=summary.ttft_p50_s,
        ttft_p95_s=summary.ttft_p95_s,
        ttft_p99_s=summary.ttft_p99_s,
        skew=max(computed) * len(nodes) / sum(computed) if sum(computed) else None,
        requests_per_s=max(0, in_time - errors.total()) / seconds,
        others_cores=None
        if others_before_s is None or others_after_s is None
        else max(0.0, (others_after_s - others_before_s) / took_s),
    )


def counted(node: str) -> tuple[float, float]:
    """Prompt tokens that came to the node, and those of them that it had to compute."""
    with urllib.request.urlopen(f"{node}/metrics", timeout=5.0) as answer:
        page = answer.read().decode()
    totals: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            totals[sample.name] += sample.value
    queries, hits = totals["vllm:prefix_cache_queries_total"], totals["vllm:prefix_cache_hits_total"]
    return queries, queries - hits


async def added_latency_s(url: str, node: str) -> float:
    """The median of a trivial request through the router, less that of one to a node; in turn, one at a time.

    RuntimeError: one was not answered.
    """
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    times_s: dict[str, list[float]] = {url: [], node: []}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as http:
        for number in range(WARM_UP_PAIRS + PAIRS):
            for each, taken in times_s.items():
                sent_at = time.perf_counter()
                async with http.post(f"{each}/v1/chat/completions", json=body) as answer:
                    text = await answer.text()
                    if answer.status != 200:
                        raise RuntimeError(f"an idle request was answered with {answer.status}: {text[:200]}")
                if number >= WARM_UP_PAIRS:
                    taken.append(time.perf_counter() - sent_at)
    return statistics.median(times_s[url]) - statistics.median(times_s[node])


def others_s() -> float | None:
    """CPU time that programs other than this and its children have used since the machine started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if not children.exists():
        return None
    own = os.times()
    ours_s = own.user + own.system + own.children_user + own.children_system
    return busy_s() - ours_s - sum(cpu_s(int(pid)) for pid in children.read_text().split())
