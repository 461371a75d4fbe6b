"""Our rule with exact caches and exact queues: what better information could bring, and no better rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from extproc.config import PolicyConfig
from extproc.core.types import Candidate, Decision, InferenceRequest, Policy
from extproc.lab.replay.nodes import SimulatedNode
from extproc.lab.replay.ours import Ours
from extproc.lab.replay.types import Call, NodeView


class _Informed:
    """A policy whose candidates say what is so: what each node will find of the prompt when its turn comes (cached
    blocks, and prompts before it in the queue), how long it prefills that, and how long what is before it."""

    def __init__(self, policy: Policy, nodes: Mapping[str, SimulatedNode], *, caches: bool, queues: bool) -> None:
        self._policy = policy
        self._nodes = nodes
        self._caches, self._queues = caches, queues
        self.call: Call | None = None
        self.now = 0.0

    def __call__(self, request: InferenceRequest, candidates: Sequence[Candidate], *, price: float) -> Decision:
        assert self.call is not None
        call, now = self.call, self.now
        found = []
        for each in candidates:
            node = self._nodes[each.node.id]
            if self._caches:
                hit = node.hit_tokens(call)
                uncached, prefill_s = call.prompt_tokens - hit, node.prefill_s(call, hit)
                each = each._replace(matched_tokens=hit, uncached_tokens=uncached, prefill_s=prefill_s)
            if self._queues:
                each = each._replace(wait_s=node.backlog_s(now), suspect=not node.up)
            found.append(each)
        return self._policy(request, found, price=price)


class Oracle(Ours):
    """Only what a pool believes of `caches` and of `queues` is replaced; own choices show in the nodes at once."""

    def __init__(
        self, block_tokens: int, *, policy: PolicyConfig | None = None, caches: bool = True, queues: bool = True
    ) -> None:
        # a guard would hold what is believed against what is known
        policy = replace(PolicyConfig() if policy is None else policy, control_percent=0.0)
        super().__init__(block_tokens, policy=policy)
        self._caches, self._queues = caches, queues
        self._informed: _Informed | None = None

    def nodes_changed(self, names: Sequence[str], now: float) -> None:
        """As for ours; the pool's policy is told the truth."""
        super().nodes_changed(names, now)
        self._informed = _Informed(self.pool.policy, self._nodes, caches=self._caches, queues=self._queues)
        self.pool.policy = self._informed

    def route(self, number: int, call: Call, nodes: Sequence[NodeView], now: float) -> int | None:
        """Where the rule sends it."""
        assert self._informed is not None
        self._informed.call, self._informed.now = call, now
        return super().route(number, call, nodes, now)
