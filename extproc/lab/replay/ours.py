"""kvaffinity itself as a balancer: the real router with the default configuration, told what production tells it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from extproc.app import apply_pools
from extproc.config import Config, ModelConfig, NodeConfig, PolicyConfig, ServerConfig
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.types import HASH_BYTES, Answered, End, InferenceRequest, LoadSample, Outcome, Ticket
from extproc.lab.replay.nodes import SimulatedNode
from extproc.lab.replay.simulation import ATTEMPTS
from extproc.lab.replay.types import Call, Machine, NodeView

MODEL = "replay"
_EXPIRE_S = 1.0


def configured(
    names: Sequence[str], block_tokens: int, policy: PolicyConfig, weights: Mapping[str, float] | None = None
) -> Config:
    """The default configuration with these nodes; requests carry the engine's tokens. `weights`: 1.0 when left out."""
    nodes = tuple(
        NodeConfig(
            name=name,
            address=f"10.{i >> 16 & 255}.{i >> 8 & 255}.{i & 255}:8000",
            weight=1.0 if weights is None else weights[name],
        )
        for i, name in enumerate(names)
    )
    # a tokenizer makes the pool exact; pools alone never load it
    model = ModelConfig(name=MODEL, tokenizer=MODEL, block_tokens=block_tokens, nodes=nodes)
    return Config(models=(model,), policy=policy)


class Turns:
    """Which call each call goes on from: in production a request's messages tell."""

    def __init__(self) -> None:
        self._ends: dict[bytes, tuple[int, Call]] = {}
        """By the last block of a prompt, the call that had it last."""

    def request_of(self, number: int, call: Call, block_tokens: int) -> InferenceRequest:
        """What the router is told of a call."""
        answered, chain = self._answered(call), call.chain
        if chain:
            self._ends[chain[-HASH_BYTES:]] = number, call
        return InferenceRequest(
            MODEL, call.prompt_tokens, {block_tokens: chain}, exact=True, turn=number, answered=answered
        )

    def _answered(self, call: Call) -> Answered | None:
        chain = call.chain
        for at in range(len(chain), 0, -HASH_BYTES):
            number, before = self._ends.get(chain[at - HASH_BYTES : at], (-1, call))
            if number >= 0:
                if chain[at : at + len(before.answer)] != before.answer:
                    return None
                end = before.prompt_tokens + before.answer_tokens - 1
                return Answered(number, before.prompt_tokens, min(end, call.prompt_tokens))
        return None


class _Sent(NamedTuple):
    ticket: Ticket
    sent_s: float
    tried: tuple[int, ...] = ()
    """The nodes that failed."""


class Ours:
    """The router, with scrapes as they come, and access logs `access_log_delay_s` after the end of a request.

    Envoy's access log tells the time to the first token, but only then; `first_token` is only noted for it. A second
    attempt goes where Envoy sends it: to the first of the decision's fallbacks, and the router hears of it when all is
    over. Where the router has no node, the least requests in the last scrapes decide.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        policy: PolicyConfig | None = None,
        weights: Mapping[str, float] | None = None,
        access_log_delay_s: float = 0.1,
    ) -> None:
        self._block_tokens = block_tokens
        self._policy = PolicyConfig() if policy is None else policy
        self._weights = weights
        self._delay_s = access_log_delay_s
        self.pools: dict[str, Pool] = {}
        ttl_s = ServerConfig().ticket_ttl_s
        self.router = Router(self.pools, ticket_ttl_s=ttl_s, ticket_prefix="")
        self._turns = Turns()
        self._nodes: Mapping[str, SimulatedNode] = {}
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._addresses: list[str] = []
        self._scraped_s: dict[str, float] = {}
        self._sent: dict[int, _Sent] = {}
        self._first_token_s: dict[int, float] = {}
        self._logs: deque[tuple[float, str, Outcome]] = deque()
        """In the order of time: what the access log has not told yet."""
        self._expired_s = 0.0

    def attach(self, nodes: Mapping[str, SimulatedNode]) -> None:
        """Their metrics have counters, which a NodeView has not."""
        self._nodes = nodes

    def nodes_changed(self, names: Sequence[str], now: float) -> None:
        """The configuration was reloaded."""
        weights = self._weights and {name: self._weights.get(name, 1.0) for name in names}
        config = configured(names, self._block_tokens, self._policy, weights)
        self._names = list(names)
        self._numbers = {name: i for i, name in enumerate(names)}
        self._addresses = [node.address for node in config.models[0].nodes]
        apply_pools(self.pools, config)

    @property
    def pool(self) -> Pool:
        return self.pools[MODEL]

    def route(self, number: int, call: Call, nodes: Sequence[NodeView], now: float) -> int | None:
        """Where the router sends it, which it then counts on."""
        self._hear(now)
        self._observe(nodes, now)
        sent = self._sent.get(number)
        if sent is not None:
            ranked = (self._numbers.get(each.node.id) for each in sent.ticket.decision.ranked)
            other = next((i for i in ranked if i is not None and i not in sent.tried), None)
            if other is not None:
                return other
            self._log(number, sent.tried[-1], now, ok=False)
        request = self._turns.request_of(number, call, self._block_tokens)
        ticket = self.router.route(request, now=now)
        if not isinstance(ticket, Ticket):
            return min(range(len(nodes)), key=lambda i: (not nodes[i].up, nodes[i].waiting + nodes[i].running))
        self._sent[number] = _Sent(ticket, now)
        return self._numbers[ticket.decision.node.id]

    def first_token(self, number: int, call: Call, node: int, now: float) -> None:
        """What the access log will say of it."""
        self._first_token_s[number] = now

    def done(self, number: int, call: Call, node: int, now: float, *, ok: bool) -> None:
        """Its line of the access log is written, unless there is another attempt; it is read later."""
        sent = self._sent.get(number)
        if sent is not None and not ok and len(sent.tried) + 1 < ATTEMPTS:
            self._sent[number] = sent._replace(tried=(*sent.tried, node))
            self._first_token_s.pop(number, None)
        elif sent is not None:
            self._log(number, node, now, ok=ok)

    def _log(self, number: int, node: int, now: float, *, ok: bool) -> None:
        first_s = self._first_token_s.pop(number, None)
        sent = self._sent.pop(number)
        ttft_s = None if first_s is None else first_s - sent.sent_s
        outcome = Outcome(
            End.SERVED if ok else End.FAILED,
            served_by=self._addresses[node],
            answered=first_s is not None,
            client_ttft_s=ttft_s,
            engine_ttft_s=ttft_s,
            total_s=now - sent.sent_s,
            attempts=len(sent.tried) + 1,
        )
        self._logs.append((now + self._delay_s, sent.ticket.id, outcome))

    def _hear(self, now: float) -> None:
        """The access log up to now, and what is given up."""
        logs = self._logs
        while logs and logs[0][0] <= now:
            at_s, ticket_id, outcome = logs.popleft()
            self.router.settle(ticket_id, outcome, now=at_s)
        if now - self._expired_s >= _EXPIRE_S:
            self._expired_s = now
            self.router.expire(now=now)

    def _observe(self, nodes: Sequence[NodeView], now: float) -> None:
        """The scrapes that came since the last request, of each node the last one."""
        pool, scraped_s = self.pool, self._scraped_s
        for view in nodes:
            name = view.name
            at_s = now - view.age_s
            node = self._nodes.get(name)
            if not view.up or node is None or at_s - scraped_s.get(name, -1.0) < 1e-6:
                continue
            scraped_s[name] = at_s
            pool.observe(name, self._sample(node, at_s, now))

    def _sample(self, node: SimulatedNode, at_s: float, now: float) -> LoadSample:
        scrape = node.scrape(now)
        return LoadSample(
            at_s,
            scrape.waiting,
            scrape.running,
            scrape.kv_usage,
            node.machine.cache_tokens,
            node.started_at_s,
            self._block_tokens,
            scrape.prefix_queries,
            scrape.prefix_hits,
            scrape.prefix_queries,
        )


def weights_of(machines: Sequence[Machine]) -> dict[str, float]:
    """Prefill speeds relative to their mean: what an operator who knows them would configure."""
    speeds = {machine.name: machine.prefill_tokens_per_s * machine.speed for machine in machines}
    mean = sum(speeds.values()) / len(speeds)
    return {name: speed / mean for name, speed in speeds.items()}
