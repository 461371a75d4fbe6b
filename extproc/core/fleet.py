"""The nodes of one pool: their last load sample, and what we sent them that is not settled."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from extproc.core.cost import Fading, PrefillRate, price
from extproc.core.types import Candidate, LoadSample, Node, NodeId

_SUSPECT_S, _MAX_SUSPECT_S = 1.0, 30.0
"""How long a node is avoided after a failure, doubled with each further one."""

_LARGE = 1e100
"""Sums are brought back to size long before they overflow (after four hours)."""

_REMEMBERED = 512
"""Of the requests sent to one node lately: more that wait there count as others'."""
_ON_ITS_WAY_S = 0.01
"""What was sent so shortly before a scrape may not have been there."""

_OVERFULL_WAITING, _OVERFULL_KV = 2.0, 0.1
"""A node that is full is avoided where others are less so: it has that many times their mean waiting, or that much more
of its cache in use. Where all are full, none is."""

_OWN_WAITS = 10.0
"""Where requests wait that many times what the mean one computes, the fleet counts as half in use, whatever else says:
waits come at once, what is sent is averaged over a minute."""

_FORGIVEN_S = 60.0
"""A node that stopped answering scrapes that long ago and still is in the fleet may have lost its metrics alone: it is
tried again, and is suspect by its failures where it has any."""

WINDOW_S = 60.0
"""Over which utilisation and recent work are averaged."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """When a node counts as saturated, and how long a sample is believed."""

    stale_after_s: float = 5.0
    max_waiting: int = 8
    max_kv_usage: float = 0.95


@dataclass(slots=True)
class _Standing:
    node: Node
    busy_until_s: float = -math.inf
    """The fluid queue: when the uncached work sent there will have been prefilled."""
    in_flight: int = 0
    in_flight_tokens: int = 0
    reserved_s: float = 0.0
    """All work ever put there, in seconds: what is queued behind a request is what was added since."""
    work_sum: float = 0.0
    """Work put there, as a sum that fades."""
    sample: LoadSample | None = None
    failures: int = 0
    """In a row."""
    suspect_until_s: float = -math.inf
    """Requests sent there failed: until then it is avoided."""
    answered_at_s: float = -math.inf
    sent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """When what was sent there last was sent, and its work in seconds, in that order."""

    def queued_s(self, waiting: int, until_s: float, mean_s: float) -> float:
        """How long its prefill will take, from `until_s` on, if so many requests were waiting then. `mean_s`: what one
        is taken to be that we did not send."""
        # Engines start requests in the order in which they come: those that wait are the last ones sent before then.
        later_s = queued_s = begun_s = 0.0
        for at_s, work_s in reversed(self.sent):
            if at_s > until_s - _ON_ITS_WAY_S:
                later_s += work_s
            elif waiting:
                waiting -= 1
                queued_s += work_s
            else:
                begun_s = work_s
                break
        queued_s += waiting * mean_s
        left_s = self.busy_until_s - until_s - queued_s - later_s
        return min(max(left_s, 0.0), begun_s) + queued_s + later_s


class Changes(NamedTuple):
    """What `replace` did."""

    added: tuple[Node, ...]
    removed: tuple[Node, ...]


class Reservation(NamedTuple):
    """Work put on a node until it is released. One that left and came back is another: it refers to the old one."""

    standing: _Standing
    tokens: int
    work_s: float
    until_s: float
    """When its prefill is predicted to be done."""
    reserved_s: float

    def release(self, *, first_token_at_s: float | None, now: float) -> None:
        """The request is over. None: its prompt was never computed, so that it no longer keeps others waiting.

        A first token proves that all that was queued before it is done; what was added since is all that can be left.
        """
        standing = self.standing
        standing.in_flight -= 1
        standing.in_flight_tokens -= self.tokens
        if first_token_at_s is None:
            # what has drained meanwhile keeps nobody waiting any more, and is not to be taken off what came after
            standing.busy_until_s -= min(self.work_s, max(self.until_s - now, 0.0))
        else:
            left_s = standing.reserved_s - self.reserved_s
            standing.busy_until_s = min(standing.busy_until_s, first_token_at_s + left_s)

    def failed(self, *, now: float) -> None:
        """The node did not answer it: avoid the node for a while, longer each time (a node that fails at once never has
        anything waiting, and would draw everything)."""
        standing = self.standing
        standing.suspect_until_s = now + min(_SUSPECT_S * 2.0**standing.failures, _MAX_SUSPECT_S)
        standing.failures = min(standing.failures + 1, 16)

    def answered(self, *, now: float = -math.inf) -> None:
        """The node answered it: it is not avoided any more."""
        self.standing.answered_at_s = max(self.standing.answered_at_s, now)
        self.standing.failures = 0
        self.standing.suspect_until_s = -math.inf


class _Mean:
    """Of what nodes say; 0.0 where none does."""

    __slots__ = ("_count", "_sum")

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float | None, sign: int) -> None:
        """One more, or (-1) one less."""
        if value is not None:
            self._sum += sign * value
            self._count += sign

    @property
    def mean(self) -> float:
        return max(self._sum, 0.0) / self._count if self._count else 0.0


class Fleet:
    """Reserve at the choice, release at the outcome; in between the work drains at the node's prefill rate."""

    def __init__(self, rate: PrefillRate, *, limits: LoadLimits, price_weight: float) -> None:
        self.rate = rate
        self.limits = limits
        self.price_weight = price_weight
        self.thrift = 0.0
        """What throughput counts against the time to first token, in [0, 1]; see cost.price."""
        self._standings: dict[NodeId, _Standing] = {}
        self._fading = Fading(WINDOW_S)
        self._work_sum = 0.0
        """In seconds of a node of weight 1."""
        self._count_sum = 0.0
        """Requests."""
        self._capacity = 0.0
        self._mean_wait_s = 0.0
        """As of the last snapshot."""
        self._usage = _Mean()
        self._waiting = _Mean()
        self._left: list[_Standing] = []
        """Those that have requests in flight."""

    def __len__(self) -> int:
        return len(self._standings)

    def replace(self, nodes: Iterable[Node]) -> Changes:
        """Make `nodes` the fleet. The same id, address and rank keep their state; else it is a new node. One that left
        and comes back is a new one as well; what is in flight to the old one is released there."""
        wanted = {node.id: node for node in nodes}
        removed, added = [], []
        for node_id, standing in list(self._standings.items()):
            new = wanted.get(node_id)
            old = standing.node
            if new is None or (new.address, new.rank) != (old.address, old.rank):
                removed.append(old)
                self._count(standing.sample, None)
                self._left.append(standing)
                del self._standings[node_id]
            else:
                standing.node = new
        for node in wanted.values():
            if node.id not in self._standings:
                self._standings[node.id] = _Standing(node)
                added.append(node)
        self._left = [standing for standing in self._left if standing.in_flight]
        self._standings = dict(sorted(self._standings.items()))
        self._capacity = sum(standing.node.weight for standing in self._standings.values())
        return Changes(tuple(added), tuple(removed))

    def draining(self) -> dict[NodeId, int]:
        """Requests in flight to nodes that left, where there are any."""
        self._left = [standing for standing in self._left if standing.in_flight]
        found: dict[NodeId, int] = {}
        for standing in self._left:
            found[standing.node.id] = found.get(standing.node.id, 0) + standing.in_flight
        return found

    def nodes(self) -> tuple[Node, ...]:
        """In id order."""
        return tuple(standing.node for standing in self._standings.values())

    def knows(self, node: NodeId) -> bool:
        """Is there a node of that name?"""
        return node in self._standings

    def observe(self, node: NodeId, sample: LoadSample) -> bool:
        """Take a scrape; True when it shows that the engine was restarted since the last one."""
        standing = self._standings.get(node)
        if standing is None:
            return False
        before, standing.sample = standing.sample, sample
        self._count(before, sample)
        if sample.waiting is not None:
            mean_s = self._work_sum / self._count_sum / standing.node.weight if self._count_sum else 0.0
            standing.busy_until_s = sample.at_s + standing.queued_s(sample.waiting, sample.at_s, mean_s)
        restarted = (
            before is not None
            and before.started_at_s is not None
            and sample.started_at_s is not None
            and before.started_at_s != sample.started_at_s
        )
        if restarted:
            standing.failures, standing.suspect_until_s = 0, -math.inf
        return restarted

    def _count(self, before: LoadSample | None, after: LoadSample | None) -> None:
        for sample, sign in ((before, -1), (after, 1)):
            if sample is not None:
                self._usage.add(sample.kv_usage, sign)
                self._waiting.add(sample.waiting, sign)

    def candidates(self, matched: Mapping[NodeId, int], *, prompt_tokens: int, now: float) -> tuple[Candidate, ...]:
        """A snapshot in id order; `matched` in tokens, absent is 0. At least one token is always left to compute."""
        rate, limits = self.rate.tokens_per_s, self.limits
        attention = 1.0 / self.rate.attention_tokens
        most = max(prompt_tokens - 1, 0)
        scale = self._fading.scale(now=now)
        total_wait_s = 0.0
        full_waiting = max(limits.max_waiting, _OVERFULL_WAITING * self._waiting.mean)
        full_usage = max(limits.max_kv_usage, min(self._usage.mean + _OVERFULL_KV, 1.0))
        found: list[Candidate] = []
        new = (
            tuple.__new__
        )  # what a named tuple's own does, without a Python frame: 64 of them were a quarter of a route
        for node_id, standing in self._standings.items():
            hit = min(matched.get(node_id, 0), most)
            node, wait_s = standing.node, standing.busy_until_s - now
            uncached = prompt_tokens - hit
            if wait_s > 0.0:
                total_wait_s += wait_s
            else:
                wait_s = 0.0
            kv_usage, age, saturated = 0.0, math.inf, False
            suspect = standing.suspect_until_s > now
            sample = standing.sample
            if sample is not None:
                age = now - sample.at_s
                waiting = sample.waiting or 0
                kv_usage = sample.kv_usage or 0.0
                if age > limits.stale_after_s:
                    # it used to answer scrapes; but metrics may be missing of a node that answers requests
                    answered = standing.answered_at_s > sample.at_s + limits.stale_after_s
                    suspect = suspect or (age <= _FORGIVEN_S and not answered)
                else:
                    saturated = waiting >= full_waiting or kv_usage >= full_usage
            found.append(
                new(
                    Candidate,
                    (
                        node,
                        hit,
                        uncached,
                        wait_s,
                        uncached * (1.0 + (prompt_tokens - 0.5 * uncached) * attention) / (rate * node.weight),
                        standing.in_flight,
                        standing.work_sum / scale,
                        kv_usage,
                        age,
                        saturated,
                        suspect,
                        False,
                        0,
                        0.0,
                        0.0,
                    ),
                )
            )
        self._mean_wait_s = total_wait_s / len(found) if found else 0.0
        return tuple(found)

    def _restart_sums(self, now: float) -> None:
        factor = self._fading.restart(now=now)
        self._work_sum *= factor
        self._count_sum *= factor
        for standing in self._standings.values():
            standing.work_sum *= factor

    def price(self, *, now: float) -> float:
        """See cost.price."""
        work_s = self._work_sum / self._fading.scale(now=now)
        own_s = self._work_sum / self._count_sum if self._count_sum else 0.0
        queueing = self._mean_wait_s / (self._mean_wait_s + _OWN_WAITS * own_s) if own_s else 0.0
        return price(
            work_s,
            window_s=WINDOW_S,
            capacity=self._capacity,
            weight=self.price_weight,
            busy=max(self._usage.mean, queueing),
            thrift=self.thrift,
        )

    def idle(self, node: NodeId, *, now: float) -> bool:
        """Nothing of ours is in flight or still to be prefilled there, and its last sample shows nothing either."""
        standing = self._standings[node]
        sample = standing.sample
        quiet = sample is None or not (sample.waiting or sample.running)
        return quiet and not standing.in_flight and standing.busy_until_s <= now

    def reserve(self, node: NodeId, tokens: int, *, now: float, prompt_tokens: int = 0) -> Reservation:
        """Put `tokens` of uncached work on `node`: the end of a prompt of so many."""
        standing = self._standings[node]
        work = self.rate.work(tokens, max(prompt_tokens, tokens))
        work_s = work / (self.rate.tokens_per_s * standing.node.weight)
        standing.sent.append((now, work_s))
        until_s = standing.busy_until_s = max(standing.busy_until_s, now) + work_s
        standing.reserved_s += work_s
        standing.in_flight += 1
        standing.in_flight_tokens += tokens
        scale = self._fading.scale(now=now)
        if scale > _LARGE:
            self._restart_sums(now)
            scale = 1.0
        standing.work_sum += work_s * scale
        self._work_sum += work_s * standing.node.weight * scale
        self._count_sum += scale
        return Reservation(standing, tokens, work_s, until_s, standing.reserved_s)

    def in_flight(self) -> dict[NodeId, tuple[int, int]]:
        """Requests and uncached tokens sent to each node and not settled."""
        return {node: (each.in_flight, each.in_flight_tokens) for node, each in self._standings.items()}

    def work_s(self, *, now: float) -> dict[NodeId, float]:
        """Uncached work sent to each node in the last minute (decayed), in seconds of its prefill."""
        scale = self._fading.scale(now=now)
        return {node: each.work_sum / scale for node, each in self._standings.items()}

    def sample(self, node: NodeId) -> LoadSample | None:
        """The last sample of a node that is in the fleet."""
        return self._standings[node].sample

    def samples(self) -> dict[NodeId, LoadSample | None]:
        """The last sample of each node."""
        return {node: each.sample for node, each in self._standings.items()}
