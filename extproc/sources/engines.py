"""Engines' metrics pages: which line says what. One table an engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from extproc.core.types import LoadSample

_WAITING, _RUNNING = b"vllm:num_requests_waiting", b"vllm:num_requests_running"
_USAGE, _OLD_USAGE = b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"
_STARTED = b"process_start_time_seconds"
_CACHE = b"vllm:cache_config_info"
"""vLLM says both sizes as labels of this one; where an engine has a line for each, these are names of lines."""
_NAMES = (_WAITING, _RUNNING, _USAGE, _OLD_USAGE, _CACHE, _STARTED)

_LINE = re.compile(rb"^(%s)(\{[^\n]*\})? (\S+)(?: -?\d+)?\r?$" % b"|".join(_NAMES), re.MULTILINE)
# No longer than any size there is: int() refuses more than 4,300 digits.
_BLOCK_SIZE = re.compile(rb'[{,]block_size="0*([1-9]\d{0,8})"')
_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="(\d{1,12})"')

_ABSURD = 1e18
"""What is beyond it is no number of anything, and sums of it would overflow."""


def _lines(page: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(name, labels, value) of the lines that are wanted. Looking for their names is five times as fast as matching
    every line of a page of 100 KB."""
    page = b"\n" + page
    for name in _NAMES:
        at = page.find(b"\n" + name)
        while at >= 0:
            end = page.find(b"\n", at + 1)
            yield from _LINE.findall(page[at + 1 : end if end >= 0 else len(page)])
            at = page.find(b"\n" + name, at + 1)


def vllm(page: bytes, *, at_s: float) -> LoadSample:
    """A sample from vLLM's page; several engines behind it (data-parallel ranks) are summed, their KV usage averaged.

    What the page does not have stays None; so does the size of a block where engines differ in it, and that of the
    cache where one of them does not say its own. A cache is one block smaller than announced: vLLM keeps a null block.
    """
    found: dict[bytes, list[float]] = {}
    sizes: list[int | None] = []
    caches: list[int | None] = []
    for name, labels, value in _lines(page):
        if name == _CACHE:
            size, blocks = _BLOCK_SIZE.search(labels), _BLOCKS.search(labels)
            sizes.append(int(size[1]) if size else None)
            caches.append(max(int(blocks[1]) - 1, 0) * int(size[1]) if size and blocks else None)
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if abs(number) < _ABSURD:  # nor NaN
            found.setdefault(name, []).append(number)
    waiting, running, started = found.get(_WAITING), found.get(_RUNNING), found.get(_STARTED)
    usage = found.get(_USAGE) or found.get(_OLD_USAGE)
    known = [each for each in caches if each is not None]
    return LoadSample(
        at_s=at_s,
        waiting=int(sum(waiting)) if waiting else None,
        running=int(sum(running)) if running else None,
        kv_usage=min(max(sum(usage) / len(usage), 0.0), 1.0) if usage else None,
        cache_tokens=(sum(known) or None) if len(known) == len(caches) else None,
        started_at_s=started[0] if started else None,
        block_tokens=sizes[0] if len(set(sizes)) == 1 else None,
    )
