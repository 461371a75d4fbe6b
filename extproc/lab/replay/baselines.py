"""The peers' policies as balancers: each decides by its published rule, on what that system has in production.

That is: exact in-flight counts (it sits in the stream of answers), scraped values where the rule uses them, and its own
prefix index, written at routing. In their favour all indices have the size of the node's cache, as their automatic
sizing or an operator would have it (the pickers' 31,250 blocks are for nodes that do not say), and are emptied when a
node goes down; those of systems that can read KV events also learn the answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from extproc.core.types import HASH_BYTES
from extproc.lab.replay import baselines_rules as rules
from extproc.lab.replay.baselines_memory import ActiveBlocks, RecentBlocks, RecentWork, hashes_of
from extproc.lab.replay.baselines_rules import Ask, Row, Rule
from extproc.lab.replay.types import Balancer, Call, Machine, NodeView

_WINDOW_S = 180.0
_HEAD_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Baseline:
    """A system: its rule, and what it keeps of each node for that."""

    rule: Rule
    index: bool = True
    """Does it keep a prefix index?"""
    answers: bool = False
    """Does its index learn of an answer when that ends?"""
    ttl_s: float = math.inf
    """How long a block stands in its index."""
    active: bool = False
    """Does it count the blocks in use?"""
    work: bool = False
    """Does it count recent work?"""


_DYNAMO_TTL_S = 120.0

BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "random": Baseline(rules.random_choice, index=False),
        "round-robin": Baseline(rules.round_robin, index=False),
        "least-request": Baseline(rules.least_request, index=False),
        "power-of-two": Baseline(rules.power_of_two, index=False),
        "gie": Baseline(rules.gie),
        "llm-d": Baseline(rules.llm_d, answers=True),
        "dynamo": Baseline(rules.dynamo, answers=True, active=True),
        "dynamo-ttl": Baseline(rules.dynamo, ttl_s=_DYNAMO_TTL_S, active=True),
        "sglang": Baseline(rules.sglang),
        "smg": Baseline(rules.smg, answers=True),
        "aibrix": Baseline(rules.aibrix, answers=True),
        "kubeai": Baseline(rules.kubeai, index=False),
        "preble": Baseline(rules.preble, work=True),
        "lmetric": Baseline(rules.lmetric, answers=True),
    }
)


def make(name: str, *, seed: int, machines: Sequence[Machine], block_tokens: int) -> Balancer:
    """The baseline of that name, for a fleet of `machines` and a trace of such blocks."""
    baseline = BASELINES.get(name)
    if baseline is None:
        raise ValueError(f"there is no baseline {name!r}; choose one of {', '.join(BASELINES)}")
    return TrackingBalancer(baseline, seed=seed, machines=machines, block_tokens=block_tokens)


class _Node:
    """What is kept of one node."""

    __slots__ = ("active", "held", "in_flight", "name", "queued_tokens", "tokens_per_s", "work")

    def __init__(self, name: str, machine: Machine, baseline: Baseline, block_tokens: int) -> None:
        self.name = name
        self.tokens_per_s = machine.prefill_tokens_per_s * machine.speed
        self.in_flight = 0
        self.queued_tokens = 0
        blocks = max(1, machine.cache_tokens // block_tokens)
        self.held = RecentBlocks(blocks, baseline.ttl_s) if baseline.index else None
        self.active = ActiveBlocks() if baseline.active else None
        self.work = RecentWork(_WINDOW_S) if baseline.work else None

    def row(self, at: int, view: NodeView, ask: Ask, hashes: Sequence[int], now: float) -> Row:
        matched = 0 if self.held is None else self.held.match(hashes, now)
        uncached = max(1, ask.prompt_tokens - matched * ask.block_tokens)
        active = new = 0
        if self.active is not None:
            active, new = len(self.active), len(hashes) - self.active.match(hashes)
        load_s = evict_s = 0.0
        if self.work is not None and self.held is not None:
            load_s = self.work.total_s(now)
            victims = self.held.victims(len(hashes) - matched, now - _WINDOW_S)
            evict_s = victims * ask.block_tokens / self.tokens_per_s
        return Row(
            at,
            self.name,
            view.waiting,
            view.running,
            view.kv_usage,
            self.in_flight,
            self.queued_tokens,
            matched,
            uncached,
            active,
            new,
            load_s,
            evict_s,
            uncached / self.tokens_per_s,
        )


class _Sent(NamedTuple):
    """A call in flight."""

    node: _Node
    hashes: Sequence[int]
    queued_tokens: int
    """0 from its first token on."""


class TrackingBalancer:
    """A balancer that keeps a baseline's books and asks its rule. See `Balancer` for the methods."""

    def __init__(self, baseline: Baseline, *, seed: int, machines: Sequence[Machine], block_tokens: int) -> None:
        if not machines:
            raise ValueError("a baseline needs at least one machine")
        self._baseline = baseline
        self._chance = Random(seed)
        self._machines = {machine.name: machine for machine in machines}
        self._default = machines[0]
        self._tokens_per_s = sum(each.prefill_tokens_per_s * each.speed for each in machines) / len(machines)
        self._block_tokens = block_tokens
        self._nodes: list[_Node] = []
        self._sent: dict[int, _Sent] = {}
        self._turn = 0

    def in_flight(self) -> Mapping[str, int]:
        """How many calls each node has."""
        return {node.name: node.in_flight for node in self._nodes}

    def queued_tokens(self) -> Mapping[str, int]:
        """How many uncached prompt tokens of calls without a first token each node has."""
        return {node.name: node.queued_tokens for node in self._nodes}

    def held_blocks(self) -> Mapping[str, int]:
        """How many blocks the index has of each node."""
        return {node.name: 0 if node.held is None else len(node.held) for node in self._nodes}

    def route(self, number: int, call: Call, nodes: Sequence[NodeView], now: float) -> int | None:
        """None only where no node is up."""
        self._release(number)
        hashes = hashes_of(call.chain) if self._baseline.index else ()
        ask = Ask(
            self._turn,
            call.prompt_tokens,
            call.blocks,
            self._block_tokens,
            call.chain[: _HEAD_BLOCKS * HASH_BYTES][-HASH_BYTES:] or number.to_bytes(HASH_BYTES),
            self._tokens_per_s,
        )
        rows = []
        for at, (node, view) in enumerate(zip(self._nodes, nodes, strict=True)):
            if view.up:
                rows.append(node.row(at, view, ask, hashes, now))
            elif node.held is not None:
                node.held.clear()
        if not rows:
            return None
        self._turn += 1
        chosen = self._baseline.rule(ask, rows, self._chance)
        self._send(number, self._nodes[chosen.at], hashes, chosen, now)
        return chosen.at

    def first_token(self, number: int, call: Call, node: int, now: float) -> None:
        """Its prompt is computed."""
        sent = self._sent.get(number)
        if sent is not None:
            sent.node.queued_tokens -= sent.queued_tokens
            self._sent[number] = sent._replace(queued_tokens=0)

    def done(self, number: int, call: Call, node: int, now: float, *, ok: bool) -> None:
        """Where the node failed, its cache is taken for lost."""
        sent = self._release(number)
        if sent is None:
            return
        if sent.node.work is not None:
            sent.node.work.add(call.answer_tokens / sent.node.tokens_per_s, now)
        if sent.node.held is None:
            return
        if not ok:
            sent.node.held.clear()
        elif self._baseline.answers:
            sent.node.held.store([*sent.hashes, *hashes_of(call.answer)], now)

    def nodes_changed(self, names: Sequence[str], now: float) -> None:
        """What is known of those that stay, stays. One that `machines` does not name is taken to be like the first."""
        known = {node.name: node for node in self._nodes}
        self._nodes = [known.get(name) or self._new(name) for name in names]

    def _new(self, name: str) -> _Node:
        return _Node(name, self._machines.get(name, self._default), self._baseline, self._block_tokens)

    def _send(self, number: int, node: _Node, hashes: Sequence[int], row: Row, now: float) -> None:
        self._sent[number] = _Sent(node, hashes, row.uncached_tokens)
        node.in_flight += 1
        node.queued_tokens += row.uncached_tokens
        if node.held is not None:
            node.held.store(hashes, now)
        if node.active is not None:
            node.active.add(hashes)
        if node.work is not None:
            node.work.add(row.prefill_s, now)

    def _release(self, number: int) -> _Sent | None:
        sent = self._sent.pop(number, None)
        if sent is not None:
            sent.node.in_flight -= 1
            sent.node.queued_tokens -= sent.queued_tokens
            if sent.node.active is not None:
                sent.node.active.remove(sent.hashes)
        return sent
