"""What happens to a fleet one day: a prefix gets hot, nodes join or die, a crowd comes, a tenant floods. In figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from extproc.lab.replay import policies, traces
from extproc.lab.replay.report import percentile, summarise
from extproc.lab.replay.simulation import Incident, Joining, Outage, run
from extproc.lab.replay.suite_load import offered
from extproc.lab.replay.types import Machine, Result, Trace

Figures = Mapping[str, float]
Scenario = Callable[[str, int], Figures]
"""From a policy and a seed."""

_CACHE = 500_000
_WARM_UP = 0.2
_MINUTE_S = 60.0
_MIDDLE = 0.5


@lru_cache(maxsize=16)
def _traffic(spec: str, nodes: int, load: float, seed: int) -> tuple[Trace, Sequence[Machine]]:
    """Calls at fixed times, at `load` of what that many nodes serve; and these."""
    machines = [Machine(f"node-{i}", cache_tokens=_CACHE) for i in range(nodes)]
    return offered(traces.load(spec, seed=seed), machines, load, warm_up=_WARM_UP).trace, machines


def _replay(
    trace: Trace,
    machines: Sequence[Machine],
    policy: str,
    seed: int,
    incidents: Sequence[Incident] = (),
    joining: Sequence[Machine] = (),
) -> list[Result]:
    every = [*machines, *joining]
    balancer = policies.make(policy, seed=seed, machines=every, block_tokens=trace.block_tokens)
    return run(trace, machines, balancer, incidents=incidents)


def _between(results: Sequence[Result], begin_s: float, end_s: float) -> list[Result]:
    return [each for each in results if begin_s <= each.arrived_s < end_s]


def _ttft_s(results: Sequence[Result], share: float) -> float:
    """That percentile of what was answered, in seconds; 0.0 where nothing was."""
    return percentile(sorted(each.ttft_s for each in results if each.ttft_s < math.inf), share) or 0.0


def _hit_rate(results: Sequence[Result]) -> float:
    return sum(each.cached_tokens for each in results) / max(sum(each.prompt_tokens for each in results), 1)


def _work(results: Sequence[Result]) -> Counter[str]:
    """Uncached tokens by node."""
    found: Counter[str] = Counter()
    for each in results:
        found[each.node] += each.prompt_tokens - each.cached_tokens
    return found


def hot_prefix(policy: str, seed: int) -> Figures:
    """Four of five calls share one prefix, on 4 nodes at 80 % load; and at 25 %, where one node could serve all."""
    found: dict[str, float] = {}
    for load in (0.25, 0.8):
        trace, machines = _traffic("hot:calls=5000", 4, load, seed)
        summary = summarise(_replay(trace, machines, policy, seed), machines, slo_ttft_s=2.0, warm_up=_WARM_UP)
        found |= {
            f"max/mean work at {load:.0%}": summary.skew or 0.0,
            f"TTFT mean at {load:.0%}": summary.ttft_mean_s or 0.0,
            f"p99 at {load:.0%}": summary.ttft_p99_s or 0.0,
        }
    return found


def scale_up(policy: str, seed: int) -> Figures:
    """16 prefixes are warm on 2 nodes at 80 % load, and 2 more nodes join."""
    trace, machines = _traffic("hot:calls=5000,share=0,prefixes=16,prefix_tokens=8000", 2, 0.8, seed)
    joining = [Machine(f"new-{i}", cache_tokens=_CACHE) for i in range(2)]
    at_s = _MIDDLE * trace.calls[-1].at_s
    incidents = [Joining(machine, at_s) for machine in joining]
    results = _replay(trace, machines, policy, seed, incidents, joining)
    before, after = _between(results, at_s - _MINUTE_S, at_s), _between(results, at_s, at_s + _MINUTE_S)
    work = _work(after)
    return {
        "work of the new": sum(work[machine.name] for machine in joining) / max(sum(work.values()), 1),
        "calls of the new": sum(each.node.startswith("new-") for each in after) / max(len(after), 1),
        "p95 before": _ttft_s(before, 0.95),
        "p95 after": _ttft_s(after, 0.95),
    }


def flash_crowd(policy: str, seed: int) -> Figures:
    """Chat on 4 nodes, and a crowd that asks about one long document nobody saw before, faster than one node can
    answer."""
    trace, machines = _traffic("flash:conversations=1600,per_s=3.5,crowd=1200,crowd_per_s=40", 4, 0.5, seed)
    results = _replay(trace, machines, policy, seed)
    crowd = [each for each in results if trace.calls[each.number].session is None]
    begin_s, end_s = min(each.arrived_s for each in crowd), max(each.arrived_s for each in crowd)
    chats = [each for each in results if trace.calls[each.number].session is not None]
    return {
        "crowd mean": sum(each.ttft_s for each in crowd) / len(crowd),
        "crowd p95": _ttft_s(crowd, 0.95),
        "chats p95 before": _ttft_s(_between(chats, begin_s - _MINUTE_S, begin_s), 0.95),
        "chats p95 during": _ttft_s(_between(chats, begin_s, end_s), 0.95),
        "all p95 during": _ttft_s(_between(results, begin_s, end_s), 0.95),
    }


def hot_node_dies(policy: str, seed: int) -> Figures:
    """Chat on 4 nodes at 60 % load, so that three have 80 %; the node with most of the calls dies for good."""
    trace, machines = _traffic("chat:conversations=1200,per_s=4.5,think_s=10", 4, 0.6, seed)
    at_s = 0.6 * trace.calls[-1].at_s
    calm = [each for each in _replay(trace, machines, policy, seed) if at_s - _MINUTE_S <= each.arrived_s < at_s]
    hottest = Counter(each.node for each in calm).most_common(1)[0][0]
    last = {trace.calls[each.number].session: each.node for each in sorted(calm, key=lambda each: each.arrived_s)}
    results = _replay(trace, machines, policy, seed, [Outage(hottest, at_s)])
    after = [
        each
        for each in results
        if each.done_s >= at_s
        and each.arrived_s < at_s + _MINUTE_S
        and last.get(trace.calls[each.number].session) == hottest
    ]
    nodes = Counter(each.node for each in after if each.ttft_s < math.inf)
    return {
        "sessions": sum(node == hottest for node in last.values()),
        "on nodes": len(nodes),
        "most on one": max(nodes.values()) / nodes.total(),
        "p99 before": _ttft_s(calm, 0.99),
        "p99 of theirs after": _ttft_s(after, 0.99),
        "p99 of all after": _ttft_s(_between(results, at_s, at_s + _MINUTE_S), 0.99),
        "errors": sum(each.ttft_s == math.inf for each in results),
    }


def tenant_floods(policy: str, seed: int) -> Figures:
    """Six tenants chat on 4 nodes, and one of them sends three times as much as all, in long prompts, from the middle
    on."""
    spec = "tenants:conversations=200,per_s=0.3,flood=1500,flood_per_s=5,flood_tokens=6000"
    trace, machines = _traffic(spec, 4, 0.6, seed)
    results = _replay(trace, machines, policy, seed)
    flood = [each.arrived_s for each in results if trace.calls[each.number].session is None]
    others = [each for each in results if each.tenant != 0]
    before = _between(others, min(flood) - 2 * _MINUTE_S, min(flood))
    during = _between(others, min(flood), max(flood))
    return {
        "others' mean before": sum(each.ttft_s for each in before) / max(len(before), 1),
        "during": sum(each.ttft_s for each in during) / max(len(during), 1),
        "p95 before": _ttft_s(before, 0.95),
        "p95 during": _ttft_s(during, 0.95),
        "hit rate before": _hit_rate(before),
        "hit rate during": _hit_rate(during),
    }


SCENARIOS: Mapping[str, tuple[Scenario, Sequence[str]]] = MappingProxyType(
    {
        "hot prefix": (hot_prefix, ("ours", "least-request", "gie", "llm-d", "sglang", "smg", "aibrix", "lmetric")),
        "scale-up": (scale_up, ("ours", "least-request", "gie", "llm-d", "sglang", "lmetric")),
        "flash crowd": (flash_crowd, ("ours", "least-request", "gie", "llm-d", "sglang", "lmetric")),
        "hot node dies": (hot_node_dies, ("ours", "least-request", "gie", "llm-d", "sglang", "lmetric")),
        "one tenant floods": (tenant_floods, ("ours", "least-request", "gie", "llm-d", "sglang", "lmetric")),
    }
)
"""With the policies that are worth a look."""


def figures(seed: int = 1, ours: str = "ours") -> Iterator[str]:
    """A table for each scenario, in Markdown. `ours`: as what ours is run."""
    for name, (scenario, specs) in SCENARIOS.items():
        rows = []
        for spec in specs:
            found = scenario(ours if spec == "ours" else spec, seed)
            rows.append(f"| {spec} | {' | '.join(f'{value:.3g}' for value in found.values())} |")
        about = " ".join((scenario.__doc__ or "").split())
        head = [f"| policy | {' | '.join(found)} |", f"| --- | {' | '.join(['---:'] * len(found))} |"]
        yield "\n".join([f"### {name}", "", about, "", *head, *rows, ""])
