"""Traffic in which locality hurts the tail, and how long the guard takes to notice: tiny caches with a stale map, and
bursts of long prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType

from extproc.config import PolicyConfig
from extproc.core.types import HASH_BYTES, Chain, LoadSample
from extproc.lab.replay.generators import BLOCK_TOKENS
from extproc.lab.replay.nodes import SimulatedNode
from extproc.lab.replay.ours import Ours
from extproc.lab.replay.report import percentile
from extproc.lab.replay.simulation import run
from extproc.lab.replay.trace_parts import arrange, fresh
from extproc.lab.replay.types import Call, Machine, NodeView, Result, Trace
from extproc.policies.least_ttft import LeastTtft
from extproc.policies.second import Tightened

NODES, CACHE_TOKENS = 8, 40_000
OVERSTATED = 80
"""So many times larger is what every other node says of its cache."""
DOCUMENTS, DOCUMENT_TOKENS = 400, 6_000
BURST, BURST_EVERY_S = 16, 3.0
STEADY_PER_S = 0.5
_ANSWER_TOKENS = 50


def bursts(seed: int, *, hours: float) -> Trace:
    """Bursts of long prompts within a second, each about another one of many documents: when one of these comes again,
    no cache holds it any more. And now and then a prompt of about 1,300 tokens. 45 % of what the fleet can serve."""
    rng = Random(seed)
    heads = [fresh(rng, DOCUMENT_TOKENS // BLOCK_TOKENS) for _ in range(DOCUMENTS)]
    end_s, at_s = 3600.0 * hours, 0.0
    calls: list[Call] = []
    while (at_s := at_s + rng.expovariate(STEADY_PER_S)) < end_s:
        calls.append(_call(rng, at_s, b"", int(rng.lognormvariate(7.0, 0.6))))
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(1.0 / BURST_EVERY_S)) < end_s:
        about = rng.sample(heads, BURST)
        calls += [_call(rng, at_s + rng.random(), head, int(rng.lognormvariate(6.0, 0.5))) for head in about]
    return arrange("bursts", BLOCK_TOKENS, [[call] for call in calls])


def _call(rng: Random, at_s: float, head: Chain, own_tokens: int) -> Call:
    prompt = len(head) // HASH_BYTES * BLOCK_TOKENS + own_tokens + 1
    row = head + fresh(rng, (prompt + _ANSWER_TOKENS) // BLOCK_TOKENS - len(head) // HASH_BYTES)
    end = prompt // BLOCK_TOKENS * HASH_BYTES
    return Call(at_s, prompt, _ANSWER_TOKENS, row[:end], row[end:])


class Misled(Ours):
    """The router of a fleet of which every other node overstates its cache, and none counts hits: so the map believes
    that these hold everything, and trust cannot know better.

    `latency`: the policy is the control group's.
    """

    def __init__(self, *, policy: PolicyConfig, latency: bool = False) -> None:
        super().__init__(BLOCK_TOKENS, policy=policy)
        self._latency = latency
        self.levels: list[tuple[float, int]] = []
        """The guard's, each with when it began."""

    def nodes_changed(self, names: Sequence[str], now: float) -> None:
        """As for ours."""
        super().nodes_changed(names, now)
        if self._latency and isinstance(self.pool.policy, LeastTtft):
            self.pool.policy = Tightened(self.pool.policy, 1.0)

    def route(self, number: int, call: Call, nodes: Sequence[NodeView], now: float) -> int | None:
        """As ours does."""
        found = super().route(number, call, nodes, now)
        guard = self.pool.guard
        if guard is not None and (not self.levels or self.levels[-1][1] != guard.level):
            self.levels.append((now, guard.level))
        return found

    def _sample(self, node: SimulatedNode, at_s: float, now: float) -> LoadSample:
        sample = super()._sample(node, at_s, now)
        tokens = node.machine.cache_tokens
        if self._numbers[node.machine.name] % 2 == 0:
            tokens *= OVERSTATED
        return replace(sample, cache_tokens=tokens, prefix_queries=None, prefix_hits=None)


_RUNS: Mapping[str, tuple[bool, bool]] = MappingProxyType(
    {"without guard": (False, False), "latency alone": (False, True), "with guard": (True, False)}
)
"""Is there a guard, and is the policy the control group's?"""


def replay(name: str, trace: Trace, *, percent: float = 1.0) -> tuple[list[Result], list[tuple[float, int]]]:
    """What became of the calls, and the guard's levels. `name`: "without guard", "latency alone" or "with guard";
    `percent`: its control group."""
    guarded, latency = _RUNS[name]
    balancer = Misled(policy=PolicyConfig(control_percent=percent if guarded else 0.0), latency=latency)
    machines = [Machine(f"node-{i}", cache_tokens=CACHE_TOKENS) for i in range(NODES)]
    return run(trace, machines, balancer), balancer.levels


def p99_s(results: Sequence[Result], begin_s: float, end_s: float) -> float:
    """Of the calls that arrived then; 0.0 where there were none."""
    return percentile(sorted(each.ttft_s for each in results if begin_s <= each.arrived_s < end_s), 0.99) or 0.0


def figures(seed: int = 1, *, hours: float = 3.0, parts: int = 12) -> str:
    """A table in Markdown: p99 in each part of the time, and the guard's level at its end."""
    trace = bursts(seed, hours=hours)
    runs = {name: replay(name, trace) for name in _RUNS}
    levels = runs["with guard"][1]
    rows = [f"| until | {' | '.join(_RUNS)} | level |", f"| ---: | {' | '.join(['---:'] * len(_RUNS))} | ---: |"]
    part_s = 3600.0 * hours / parts
    for part in range(parts):
        begin_s, end_s = part * part_s, (part + 1) * part_s
        tails = " | ".join(f"{p99_s(results, begin_s, end_s):.2f}" for results, _ in runs.values())
        level = [each for at_s, each in levels if at_s < end_s][-1]
        rows.append(f"| {end_s / 60:.0f} min | {tails} | {level} |")
    return "\n".join(rows)
