"""Engines' metrics pages: which line says what. One table an engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from extproc.core.types import LoadSample

_VLLM = re.compile(
    rb"^(vllm:num_requests_waiting|vllm:num_requests_running|vllm:kv_cache_usage_perc|vllm:gpu_cache_usage_perc"
    rb"|vllm:cache_config_info|process_start_time_seconds)(\{[^\n]*\})? (\S+)(?: -?\d+)?\r?$",
    re.MULTILINE,
)
_BLOCK_SIZE = re.compile(rb'[{,]block_size="(\d+)"')
_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="(\d+)"')


_NAMES = (
    b"vllm:num_requests_waiting",
    b"vllm:num_requests_running",
    b"vllm:kv_cache_usage_perc",
    b"vllm:gpu_cache_usage_perc",
    b"vllm:cache_config_info",
    b"process_start_time_seconds",
)


def _lines(page: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(name, labels, value) of the lines that are wanted. Looking for their names is five times as fast as matching
    every line of a page of 100 KB."""
    page = b"\n" + page
    for name in _NAMES:
        at = page.find(b"\n" + name)
        while at >= 0:
            end = page.find(b"\n", at + 1)
            yield from _VLLM.findall(page[at + 1 : end if end >= 0 else len(page)])
            at = page.find(b"\n" + name, at + 1)


def vllm(page: bytes, *, at_s: float) -> LoadSample:
    """A sample from vLLM's page; several engines behind it (data-parallel ranks) are summed, their KV usage averaged.

    What the page does not have stays None. The cache is one block smaller than announced: vLLM keeps a null block.
    """
    found: dict[bytes, list[float]] = {}
    cache_tokens = None
    for name, labels, value in _lines(page):
        if name == b"vllm:cache_config_info":
            size, blocks = _BLOCK_SIZE.search(labels), _BLOCKS.search(labels)
            if size and blocks:
                cache_tokens = max(int(blocks[1]) - 1, 0) * int(size[1])
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            found.setdefault(name, []).append(number)
    waiting = found.get(b"vllm:num_requests_waiting")
    running = found.get(b"vllm:num_requests_running")
    usage = found.get(b"vllm:kv_cache_usage_perc") or found.get(b"vllm:gpu_cache_usage_perc")
    started = found.get(b"process_start_time_seconds")
    return LoadSample(
        at_s=at_s,
        waiting=int(sum(waiting)) if waiting else None,
        running=int(sum(running)) if running else None,
        kv_usage=min(max(sum(usage) / len(usage), 0.0), 1.0) if usage else None,
        cache_tokens=cache_tokens or None,
        started_at_s=started[0] if started else None,
    )
