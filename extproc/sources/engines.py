"""Engines' metrics pages: which line says what. One table an engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from extproc.core.types import LoadSample

_ABSURD = 1e18
"""What is beyond it is no number of anything, and sums of it would overflow."""

_MAX_ADAPTERS = 1024
"""Names beyond it are dropped."""

_START = b"\nprocess_start_time_seconds "
"""The same on every page that has it."""


class Line(NamedTuple):
    """Where a number stands: in the value of the lines of that name, or in one of their labels."""

    name: bytes
    label: bytes = b""
    """Not empty: the number is this label's."""
    only: bytes = b""
    """Lines without this are about something else."""
    but: bytes = b""
    """Not empty: and so are those with this."""
    repeated: bool = False
    """A rank has several (of each tensor-parallel rank, or by priority beside the total): the largest is it."""
    blocks_if: bytes = b""
    """Not empty: on a page that has this it counts blocks, not tokens."""


Lines: TypeAlias = tuple[Line, ...]
"""The newest name first; the first that is on the page holds."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What one engine calls things. What it does not tell stays empty."""

    name: str
    prefix: bytes
    """What names of its lines begin with, and of no other engine's."""
    rank: bytes = b""
    """The label that says whose data-parallel rank's a line is."""
    null_blocks: int = 0
    """Blocks of each cache that hold nothing ever."""
    waiting: Lines = ()
    running: Lines = ()
    kv_usage: Lines = ()
    used_blocks: Lines = ()
    """For the usage, where there is no line for it."""
    block_tokens: Lines = ()
    blocks: Lines = ()
    cache_tokens: Lines = ()
    prefix_queries: Lines = ()
    prefix_hits: Lines = ()
    prefix_misses: Lines = ()
    """Queries are hits and misses, where there is no line for them."""
    prompt_tokens: Lines = ()
    max_loras: Lines = ()
    adapters: bytes = b""
    """The lines whose labels name adapters, and whose value is when that was so."""
    counters: Lines = ()
    """They only grow, unless the engine was restarted."""

    def names(self) -> tuple[bytes, ...]:
        """All the names in this table."""
        lines = (line for each in self.__slots__ if isinstance(found := getattr(self, each), tuple) for line in found)
        return tuple(sorted({line.name for line in lines} | ({self.adapters} - {b""}), reverse=True))


VLLM = Engine(
    "vllm",
    b"vllm:",
    rank=b"engine",
    null_blocks=1,
    waiting=(Line(b"vllm:num_requests_waiting"),),
    running=(Line(b"vllm:num_requests_running"),),
    kv_usage=(Line(b"vllm:kv_cache_usage_perc"), Line(b"vllm:gpu_cache_usage_perc")),
    block_tokens=(Line(b"vllm:cache_config_info", b"block_size"),),
    blocks=(Line(b"vllm:cache_config_info", b"num_gpu_blocks"),),
    cache_tokens=(Line(b"vllm:cache_config_info", b"kv_cache_size_tokens"),),
    prefix_queries=(
        Line(b"vllm:prefix_cache_queries_total"),
        Line(b"vllm:gpu_prefix_cache_queries_total", blocks_if=b"number of queried blocks"),
    ),
    prefix_hits=(
        Line(b"vllm:prefix_cache_hits_total"),
        Line(b"vllm:gpu_prefix_cache_hits_total", blocks_if=b"number of queried blocks"),
    ),
    prompt_tokens=(Line(b"vllm:prompt_tokens_total"),),
    max_loras=(Line(b"vllm:lora_requests_info", b"max_lora"),),
    adapters=b"vllm:lora_requests_info",
    counters=(Line(b"vllm:prompt_tokens_total"), Line(b"vllm:request_success_total")),
)

SGLANG = Engine(
    "sglang",
    b"sglang:",
    rank=b"dp_rank",
    waiting=(Line(b"sglang:num_queue_reqs", repeated=True),),
    running=(Line(b"sglang:num_running_reqs", repeated=True),),
    kv_usage=(Line(b"sglang:token_usage", repeated=True),),
    block_tokens=(
        Line(b"sglang:page_size", repeated=True),
        Line(b"sglang:cache_config_info", b"page_size", repeated=True),
    ),
    blocks=(Line(b"sglang:num_pages", repeated=True), Line(b"sglang:cache_config_info", b"num_pages", repeated=True)),
    cache_tokens=(Line(b"sglang:max_total_num_tokens", repeated=True),),
    prefix_queries=(Line(b"sglang:prompt_tokens_total"),),
    prefix_hits=(
        Line(b"sglang:cached_tokens_total", but=b'cache_source="total"'),
        Line(b"sglang:cached_tokens_total"),
    ),
    prompt_tokens=(Line(b"sglang:prompt_tokens_total"),),
    max_loras=(Line(b"sglang:lora_pool_slots_total", repeated=True),),
    counters=(Line(b"sglang:prompt_tokens_total"), Line(b"sglang:num_requests_total")),
)

# Its Prometheus page is /prometheus/metrics; /metrics is JSON, and whoever reads it takes it away from others.
TRT_LLM = Engine(
    "trt-llm",
    b"trtllm_",
    waiting=(Line(b"trtllm_num_requests_waiting"),),
    running=(Line(b"trtllm_num_requests_running"),),
    kv_usage=(Line(b"trtllm_kv_cache_utilization"),),
    used_blocks=(Line(b"trtllm_kv_cache_used_blocks"),),
    block_tokens=(Line(b"trtllm_kv_cache_tokens_per_block"),),
    blocks=(Line(b"trtllm_kv_cache_max_blocks"),),
    prefix_hits=(Line(b"trtllm_kv_cache_reused_blocks_total", blocks_if=b"\n"),),
    prefix_misses=(Line(b"trtllm_kv_cache_missed_blocks_total", blocks_if=b"\n"),),
    prompt_tokens=(Line(b"trtllm_prompt_tokens_total"),),
    counters=(Line(b"trtllm_prompt_tokens_total"), Line(b"trtllm_request_success_total")),
)

_OF_REQUESTS, _OF_BLOCKS = b"nv_trt_llm_request_metrics", b"nv_trt_llm_kv_cache_block_metrics"

TRITON = Engine(
    "triton",
    b"nv_",
    waiting=(Line(_OF_REQUESTS, only=b'request_type="waiting"'),),
    running=(Line(_OF_REQUESTS, only=b'request_type="scheduled"'),),
    kv_usage=(Line(_OF_BLOCKS, only=b'kv_cache_block_type="fraction"'),),
    used_blocks=(Line(_OF_BLOCKS, only=b'kv_cache_block_type="used"'),),
    block_tokens=(Line(_OF_BLOCKS, only=b'kv_cache_block_type="tokens_per"'),),
    blocks=(Line(_OF_BLOCKS, only=b'kv_cache_block_type="max"'),),
    counters=(Line(b"nv_inference_request_success"),),
)

# Its prompt_tokens_total leaves out what was cached: no count of prompts' tokens.
LLAMA_CPP = Engine(
    "llama.cpp",
    b"llamacpp:",
    waiting=(Line(b"llamacpp:requests_deferred"),),
    running=(Line(b"llamacpp:requests_processing"),),
    kv_usage=(Line(b"llamacpp:kv_cache_usage_ratio"),),
    counters=(Line(b"llamacpp:prompt_tokens_total"), Line(b"llamacpp:tokens_predicted_total")),
)

TGI = Engine(
    "tgi",
    b"tgi_",
    waiting=(Line(b"tgi_queue_size"),),
    running=(Line(b"tgi_batch_current_size"),),
    prompt_tokens=(Line(b"tgi_request_input_length_sum"),),
    counters=(Line(b"tgi_request_input_length_sum"), Line(b"tgi_request_count")),
)

ENGINES = (VLLM, SGLANG, TRT_LLM, TRITON, LLAMA_CPP, TGI)


def _pattern(engine: Engine) -> re.Pattern[bytes]:
    # What all names begin with is looked for as one string, which takes 25 us in a page of 60 KB; `^` would take 600.
    names = b"|".join(name.removeprefix(engine.prefix) for name in engine.names())
    return re.compile(rb"\n%s(%s)(\{[^\n]*\})? (\S+)(?: -?\d+)?\r?(?=\n|\Z)" % (engine.prefix, names))


_PATTERNS = {engine.name: _pattern(engine) for engine in ENGINES}
# Labels are kept with a comma for the brace before them, so that what is looked for begins with a string here too.
_RANKS = {engine.name: re.compile(rb',%s="(\d{1,9})"' % engine.rank) for engine in ENGINES if engine.rank}
_LABEL = {
    line.label: re.compile(rb',%s="([^"]{1,64})"' % line.label)
    for engine in ENGINES
    for lines in (engine.block_tokens, engine.blocks, engine.cache_tokens, engine.max_loras)
    for line in lines
    if line.label
}
_ADAPTERS = re.compile(rb',(?:running|waiting)_lora_adapters="((?:[^"\\]|\\.)*)"')


def _number(text: bytes) -> float | None:
    """None: not a number, or none of anything."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < _ABSURD else None  # nor NaN


def _total(found: Sequence[float | None]) -> float | None:
    """Of those that are numbers; None: none is."""
    known = [each for each in found if each is not None]
    return sum(known) if known else None


class Counter(NamedTuple):
    """What only grows, over the lines that tell it: with fewer of them the sum is not to be compared."""

    lines: int
    value: float


class Page:
    """The lines of one page that are wanted. Reading a page of 60 KB takes 80 us, half of it the search."""

    def __init__(self, page: bytes, engine: Engine | None = None) -> None:
        """`engine`: whose page it was last time; it is looked at first."""
        page = b"\n" + page
        self.engine: Engine | None = None
        """None: nobody's that we know."""
        self._page = page
        self._rows: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for each in ENGINES if engine is None else (engine, *ENGINES):
            if b"\n" + each.prefix in page:
                self.engine = each
                break
        else:
            return
        for name, labels, value in _PATTERNS[self.engine.name].findall(page):
            self._rows.setdefault(self.engine.prefix + name, []).append((b"," + labels[1:], value))

    def sample(self, *, at_s: float, rank: int | None = None) -> LoadSample:
        """What it tells of one data-parallel rank, or (None) of all together: summed, their usage averaged.

        What the page does not have stays None; so does the size of a block where ranks differ in it, and that of the
        cache where one of them does not say its own. Of a rank, counts need its label; sizes may be without any.
        """
        engine = self.engine
        if engine is None:
            return LoadSample(at_s)
        waiting, running = self._sum(engine.waiting, rank), self._sum(engine.running, rank)
        sizes = [_whole(each) for each in self._numbers(engine.block_tokens, rank, loose=True)[1]]
        block_tokens = sizes[0] if len(set(sizes)) == 1 else None
        hits = self._sum(engine.prefix_hits, rank, block_tokens)
        queries = self._sum(engine.prefix_queries, rank, block_tokens)
        if queries is None and hits is not None:
            misses = self._sum(engine.prefix_misses, rank, block_tokens)
            queries = None if misses is None else hits + misses
        slots = [each for each in self._numbers(engine.max_loras, None)[1] if each is not None]
        return LoadSample(
            at_s=at_s,
            waiting=None if waiting is None else int(waiting),
            running=None if running is None else int(running),
            kv_usage=self._usage(rank),
            cache_tokens=self._caches(sizes, rank),
            started_at_s=self._started(),
            block_tokens=block_tokens,
            prefix_queries=queries,
            prefix_hits=hits,
            prompt_tokens=self._sum(engine.prompt_tokens, rank),
            loras=self._adapters(),
            max_loras=_whole(max(slots)) if slots else None,
        )

    def names(self) -> frozenset[bytes]:
        """Names of the lines that were found; empty where the engine is not known."""
        start = {_START.strip()} if self._rows and _START in self._page else set()
        return frozenset(self._rows.keys() | start)

    def counters(self, *, rank: int | None = None) -> tuple[Counter, ...]:
        """What only grows while the engine runs; where a line is missing, nothing of nothing."""
        if self.engine is None:
            return ()
        found = (
            [each for each in self._numbers((line,), rank)[1] if each is not None] for line in self.engine.counters
        )
        return tuple(Counter(len(each), sum(each)) for each in found)

    def _numbers(
        self, lines: Lines, rank: int | None, *, loose: bool = False
    ) -> tuple[Line | None, list[float | None]]:
        """The line that is there, and its numbers in the order of the page. `loose`: what has no rank is of all."""
        assert self.engine is not None
        for line in lines:
            rows = self._rows.get(line.name)
            if rows is None:
                continue
            if line.only or line.but:
                rows = [row for row in rows if line.only in row[0] and not (line.but and line.but in row[0])]
            if rank is not None:
                rows = [row for row in rows if (loose if (of := self._rank(row[0])) is None else of == rank)]
            found = [self._read(line, row) for row in rows]
            if any(number is not None for number in found):
                if line.repeated:
                    found = self._largest(rows, found)
                return line, found
        return None, []

    def _read(self, line: Line, row: tuple[bytes, bytes]) -> float | None:
        if not line.label:
            return _number(row[1])
        there = _LABEL[line.label].search(row[0])
        return _number(there[1]) if there else None

    def _rank(self, labels: bytes) -> int | None:
        assert self.engine is not None
        match = _RANKS[self.engine.name].search(labels) if self.engine.rank else None
        return int(match[1]) if match else None

    def _largest(self, rows: list[tuple[bytes, bytes]], found: list[float | None]) -> list[float | None]:
        most: dict[int | None, float | None] = {}
        for (labels, _), number in zip(rows, found, strict=True):
            rank = self._rank(labels)
            before = most.get(rank)
            most[rank] = number if before is None else before if number is None else max(before, number)
        return list(most.values())

    def _sum(self, lines: Lines, rank: int | None, block_tokens: int | None = None) -> float | None:
        """None: no line is there."""
        line, found = self._numbers(lines, rank)
        total = _total(found)
        if total is None or line is None or not line.blocks_if or line.blocks_if not in self._page:
            return total
        return None if block_tokens is None else total * block_tokens

    def _usage(self, rank: int | None) -> float | None:
        assert self.engine is not None
        known = [each for each in self._numbers(self.engine.kv_usage, rank)[1] if each is not None]
        if known:
            return min(max(sum(known) / len(known), 0.0), 1.0)
        used, of = self._sum(self.engine.used_blocks, rank), self._sum(self.engine.blocks, rank)
        return min(max(used / of, 0.0), 1.0) if used is not None and of else None

    def _caches(self, sizes: list[int | None], rank: int | None) -> int | None:
        """Of blocks and of tokens the smaller, where both are told: layers of several kinds share blocks."""
        assert self.engine is not None
        null, told = self.engine.null_blocks, []
        blocks = self._numbers(self.engine.blocks, rank, loose=True)[1]
        if blocks and len(blocks) == len(sizes):
            made = [
                None if size is None or count is None else max(count - null, 0) * size
                for size, count in zip(sizes, blocks, strict=True)
            ]
            told.append(made)
        if tokens := self._numbers(self.engine.cache_tokens, rank, loose=True)[1]:
            told.append(tokens)
        sums = [sum(each for each in some if each is not None) for some in told if None not in some]
        return int(min(sums)) or None if sums and min(sums) >= 0 else None

    def _started(self) -> float | None:
        at = self._page.find(_START)
        if at < 0:
            return None
        words = self._page[at + len(_START) : at + len(_START) + 64].split(b"\n", 1)[0].split()
        return _number(words[0]) if words else None

    def _adapters(self) -> tuple[str, ...] | None:
        """Label sets that were so once stay on the page: the one of the latest time holds."""
        assert self.engine is not None
        rows = self._rows.get(self.engine.adapters, ())
        _, labels = max(((_number(value) or 0.0, labels) for labels, value in rows), default=(0.0, None))
        if labels is None:
            return None
        names = {name for match in _ADAPTERS.finditer(labels) for name in match[1].split(b",") if name}
        return tuple(sorted(name.decode(errors="replace") for name in names)[:_MAX_ADAPTERS])


def _whole(number: float | None) -> int | None:
    """As a size of something: a whole number of at least 1."""
    return int(number) if number is not None and 1 <= number < 1e9 and number == int(number) else None
