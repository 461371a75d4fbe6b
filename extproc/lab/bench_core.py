"""What the core costs alone, without a network: hash, match and route, memory, and the longest single call.

Each job runs in a process of its own, with the garbage collector set as the server sets it, and
prints its results as JSON. Chains are random bytes where only the map is measured: to it, a hash is a hash.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from extproc.app import apply_pools
from extproc.config import Config, ModelConfig, NodeConfig
from extproc.core.blocks import TOKEN_BYTES, block_hashes, chain_blocks
from extproc.core.pool import Pool
from extproc.core.prefix_map import PrefixMap
from extproc.core.router import Router
from extproc.core.types import HASH_BYTES, Chain, End, InferenceRequest, Outcome, Ticket
from extproc.lab.wire_load import percentile

BLOCK_TOKENS = 16
NODE_BLOCKS = 31_250  # 500,000 tokens
TURN_BLOCKS = 32  # 512 tokens: a question and its answer
SHORT_BLOCKS = 8  # the map bounds a node's segments at capacity / 8, so nothing makes more segments of more blocks
PROMPT_TOKENS = (2_048, 32_768, 131_072)
MODEL = "tiny"

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one call takes. `longest_cpu_s` leaves out the time in which the machine ran somebody else."""

    call: str
    prompt_tokens: int
    nodes: int | None
    calls: int
    p50_s: float
    p99_s: float
    longest_s: float
    longest_cpu_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What a filled map takes: growth of the resident set since before it existed; and the dearest step on the way."""

    nodes: int
    filled_with: str
    blocks: int
    segments: int
    grown_bytes: int
    longest_store_cpu_s: float


class Stopwatch:
    """Collects the durations of one kind of call."""

    def __init__(self) -> None:
        self._wall_s: list[float] = []
        self._cpu_s: list[float] = []

    def time(self, call: Callable[[], Result]) -> Result:
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        result = call()
        self._wall_s.append(time.perf_counter() - wall_s)
        self._cpu_s.append(time.thread_time() - cpu_s)
        return result

    async def time_async(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """The same for a coroutine; the processor's time is that of this thread."""
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        result = await call()
        self._wall_s.append(time.perf_counter() - wall_s)
        self._cpu_s.append(time.thread_time() - cpu_s)
        return result

    def add(self, wall_s: float) -> None:
        """A duration that was measured elsewhere."""
        self._wall_s.append(wall_s)

    def timing(self, call: str, prompt_tokens: int, nodes: int | None) -> Timing:
        p50_s, p99_s = percentile(self._wall_s, 0.5), percentile(self._wall_s, 0.99)
        return Timing(
            call,
            prompt_tokens,
            nodes,
            len(self._wall_s),
            p50_s,
            p99_s,
            max(self._wall_s),
            max(self._cpu_s, default=0.0),
        )


def time_hash(calls: int) -> list[Timing]:
    """Hashing whole prompts, token ids or text: 4 bytes a token."""
    rng, timings = random.Random(1), []
    for tokens in PROMPT_TOKENS:
        watch = Stopwatch()
        for _ in range(calls):
            data = rng.randbytes(tokens * TOKEN_BYTES)
            watch.time(lambda data=data: block_hashes(data, block_tokens=BLOCK_TOKENS, salt=1))  # type: ignore[misc]
        timings.append(watch.timing("hash", tokens, None))
    return timings


def time_route(nodes: int, calls: int) -> list[Timing]:
    """Match and route on full nodes: a quarter of each prompt is a system prompt that many share, a quarter the turns
    that its conversation had before (on one node), and half is new. Storing it has to drop as much."""
    rng, pool = random.Random(2), _pool(nodes)
    fill(pool.prefix_maps[BLOCK_TOKENS], _names(nodes), conversations(rng))
    return [each for tokens in PROMPT_TOKENS for each in _time_prompts(pool, rng, tokens, calls)]


def _time_prompts(pool: Pool, rng: random.Random, tokens: int, calls: int) -> list[Timing]:
    blocks, names, held = tokens // BLOCK_TOKENS, _names(len(pool.fleet)), pool.prefix_maps[BLOCK_TOKENS]
    systems = [_new(rng, blocks // 4) for _ in range(4)]
    routing, route, match = _Routing(pool), Stopwatch(), Stopwatch()
    for number in range(2 * calls):
        if number % 8 == 0:  # the last turns of eight conversations follow the first turns of all of them
            open_chains = [_talk(held, rng, rng.choice(names), rng.choice(systems)) for _ in range(8)]
        chain = open_chains[number % 8] + _new(rng, blocks // 2)
        if number % 2:  # either, so that one does not find its data in the processor's cache because of the other
            match.time(lambda chain=chain: held.match(chain))  # type: ignore[misc]
            routing.route(chain, Stopwatch())
        else:
            routing.route(chain, route)
    return [watch.timing(name, tokens, len(names)) for name, watch in (("match", match), ("route", route))]


def time_eviction(nodes: int, calls: int) -> list[Timing]:
    """The dearest route: a prompt of 128k new tokens, for which a node has to drop only short ones."""
    rng, pool = random.Random(3), _pool(nodes)
    fill(pool.prefix_maps[BLOCK_TOKENS], _names(nodes), short_prompts(rng))
    routing, watch = _Routing(pool), Stopwatch()
    for _ in range(calls):
        routing.route(_new(rng, PROMPT_TOKENS[-1] // BLOCK_TOKENS), watch)
    return [watch.timing("route, worst eviction", PROMPT_TOKENS[-1], nodes)]


def measure_memory(nodes: int, filled_with: str) -> Memory:
    """Fill a map of `nodes` x NODE_BLOCKS and see what that took."""
    rng, before = random.Random(4), _resident_bytes()
    prefix_map, names = PrefixMap(), _names(nodes)
    for name in names:
        prefix_map.add_node(name, NODE_BLOCKS)
    longest_s = fill(prefix_map, names, conversations(rng) if filled_with == "conversations" else short_prompts(rng))
    gc.collect()
    grown = _resident_bytes() - before
    return Memory(nodes, filled_with, sum(map(prefix_map.blocks, names)), prefix_map.segments(), grown, longest_s)


class _Routing:
    """Routes, and settles what was routed two requests a node ago; time passes as on a half busy fleet."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._now = pool, 0.0
        self._router = Router({MODEL: pool}, ticket_ttl_s=600.0, ticket_prefix="t")
        self._out: deque[str] = deque()

    def route(self, chain: Chain, watch: Stopwatch) -> None:
        request = InferenceRequest(MODEL, chain_blocks(chain) * BLOCK_TOKENS, {BLOCK_TOKENS: chain})
        ticket = watch.time(lambda: self._router.route(request, now=self._now))
        assert isinstance(ticket, Ticket)
        fleet = self._pool.fleet
        self._now += ticket.decision.chosen.uncached_tokens / (fleet.rate.tokens_per_s * len(fleet) * 0.5)
        self._out.append(ticket.id)
        if len(self._out) > 2 * len(fleet):
            self._router.settle(self._out.popleft(), Outcome(End.SERVED, answered=True), now=self._now)


def fill(prefix_map: PrefixMap, names: Sequence[str], prompts_of_a_node: Callable[[], Iterator[Chain]]) -> float:
    """Store prompts on each node until it has been given 1.2 times what it holds; returns the CPU of the longest store.

    That one grew a table or paid for the garbage collector.
    """
    longest_s = 0.0
    for name in names:
        given, prompts = 0, prompts_of_a_node()
        while given < 1.2 * NODE_BLOCKS:
            chain = next(prompts)
            begun_s = time.thread_time()
            stored = prefix_map.store(name, chain, now=0.0)
            longest_s = max(longest_s, time.thread_time() - begun_s)
            given += chain_blocks(chain) - stored.from_block
    return longest_s


def conversations(rng: random.Random) -> Callable[[], Iterator[Chain]]:
    """Conversations of 2 to 16 turns after a system prompt of 1,000 to 8,000 tokens; 64 of these, 8 on each node."""
    systems = [_new(rng, rng.randint(64, 512)) for _ in range(64)]

    def of_a_node() -> Iterator[Chain]:
        here = rng.sample(systems, 8)
        while True:
            chain = rng.choice(here)
            for _ in range(rng.randint(2, 16)):
                chain += _new(rng, rng.randint(TURN_BLOCKS // 2, TURN_BLOCKS * 3 // 2))
                yield chain

    return of_a_node


def short_prompts(rng: random.Random) -> Callable[[], Iterator[Chain]]:
    """The hardest case for a map that keeps runs of blocks: no prompt shares a block with another."""

    def of_a_node() -> Iterator[Chain]:
        while True:
            yield _new(rng, SHORT_BLOCKS)

    return of_a_node


def _talk(prefix_map: PrefixMap, rng: random.Random, name: str, system: Chain) -> Chain:
    """Turn after turn on one node, until the conversation is twice as long as its system prompt."""
    chain = system
    while len(chain) < 2 * len(system):
        chain += _new(rng, TURN_BLOCKS)
        prefix_map.store(name, chain, now=0.0)
    return chain


def _new(rng: random.Random, blocks: int) -> Chain:
    return rng.randbytes(blocks * HASH_BYTES)


def _names(nodes: int) -> list[str]:
    return [f"node-{number:04}" for number in range(nodes)]


def _pool(nodes: int) -> Pool:
    """A pool as the server builds it."""
    config = tuple(
        NodeConfig(name=name, address=f"10.0.{number // 250}.{number % 250}:8000")
        for number, name in enumerate(_names(nodes))
    )
    model = ModelConfig(name=MODEL, block_tokens=BLOCK_TOKENS, cache_tokens=NODE_BLOCKS * BLOCK_TOKENS, nodes=config)
    pools: dict[str, Pool] = {}
    apply_pools(pools, Config(models=(model,)))
    return pools[MODEL]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


JOBS: dict[str, Callable[..., Any]] = {
    "hash": time_hash,
    "route": time_route,
    "evict": time_eviction,
    "memory": measure_memory,
}


def plan(*, quick: bool) -> list[list[str]]:
    """The jobs of a run, as arguments of `run_job`."""
    sizes, calls = ([8, 64], "100") if quick else ([8, 64, 1000], "500")
    kinds = ("conversations", "short prompts")
    memory = [["memory", str(nodes), kind] for nodes in sizes if nodes > 8 for kind in kinds]
    return [["hash", calls], *(["route", str(nodes), calls] for nodes in sizes), ["evict", "64", calls], *memory]


def run_job(job: Sequence[str]) -> list[Timing | Memory]:
    """Run a job in a fresh process."""
    done = subprocess.run([sys.executable, "-m", "extproc.lab.bench_core", *job], capture_output=True, check=True)
    found = json.loads(done.stdout)
    return [Memory(**each) for each in found] if job[0] == "memory" else [Timing(**each) for each in found]


def main() -> None:
    name, *arguments = sys.argv[1:]
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as app.py does
    found = JOBS[name](*(int(each) if each.isdecimal() else each for each in arguments))
    print(json.dumps([asdict(each) for each in (found if isinstance(found, list) else [found])]))


if __name__ == "__main__":
    main()
