"""One decision: match, choose, reserve and record in one synchronous step; and its settlement, exactly once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from extproc.core.fleet import Fleet, Reservation
from extproc.core.prefix_map import PrefixMap
from extproc.core.types import (
    End,
    InferenceRequest,
    LoadSample,
    Node,
    NodeId,
    Outcome,
    Policy,
    Refusal,
    Rejection,
    Settled,
    Ticket,
)


@dataclass(slots=True)
class Pool:
    """The nodes that serve one model."""

    fleet: Fleet
    prefix_map: PrefixMap
    policy: Policy
    block_tokens: int
    cache_tokens: int
    """Cache size of a node until it says so itself."""

    def replace(self, nodes: Iterable[Node]) -> None:
        """Make `nodes` the pool's fleet; what left is forgotten."""
        changes = self.fleet.replace(nodes)
        for node in changes.removed:
            self.prefix_map.remove_node(node.id)
        samples = self.fleet.samples()
        for node in self.fleet.nodes():
            sample = samples[node.id]
            if sample is None or sample.cache_tokens is None:
                self.prefix_map.add_node(node.id, max(1, self.cache_tokens // self.block_tokens))

    def observe(self, node: NodeId, sample: LoadSample) -> bool:
        """Take a scrape; True when the engine was restarted: what it held is forgotten. A stranger's: nothing."""
        if not self.fleet.knows(node):
            return False
        restarted = self.fleet.observe(node, sample)
        if restarted:
            self.prefix_map.clear(node)
        if sample.cache_tokens is not None:
            self.prefix_map.add_node(node, max(1, sample.cache_tokens // self.block_tokens))
        return restarted


class Router:
    """All pools and the tickets that are out. Nothing awaits, so nothing comes between match and reserve."""

    def __init__(
        self,
        pools: dict[str, Pool],
        *,
        ticket_ttl_s: float,
        ticket_prefix: str,
        max_tickets: int = 100_000,
        max_chain_bytes: int = 256 << 20,
    ) -> None:
        self.pools = pools
        self.ticket_ttl_s = ticket_ttl_s
        self._max_tickets = max_tickets
        self._max_chain_bytes = max_chain_bytes
        self._chain_bytes = 0
        self._prefix = ticket_prefix
        self._count = 0
        self._tickets: OrderedDict[str, tuple[Ticket, Reservation]] = OrderedDict()

    def __len__(self) -> int:
        """How many tickets are out. Beyond `max_tickets`, or `max_chain_bytes`, `expire` gives up the oldest."""
        return len(self._tickets)

    def route(
        self, request: InferenceRequest, *, now: float, name: str | None = None, received_at_s: float | None = None
    ) -> Ticket | Rejection:
        """Choose a node, put the work on it and record what it will hold. `name`: the ticket's id, if it is new."""
        pool = self.pools.get(request.model)
        if pool is None:
            return Rejection(Refusal.UNKNOWN_MODEL)
        fleet, prefix_map = pool.fleet, pool.prefix_map
        if not len(fleet):
            return Rejection(Refusal.NO_NODE)
        matched = prefix_map.match(request.chain)
        if request.cut_chain is not None:
            for node, blocks in prefix_map.match(request.cut_chain).items():
                matched[node] = max(blocks, matched.get(node, 0))
        candidates = fleet.candidates(
            matched, block_tokens=pool.block_tokens, prompt_tokens=request.prompt_tokens, now=now
        )
        decision = pool.policy(request, candidates, price=fleet.price(now=now))
        node = decision.node.id
        idle = fleet.idle(node, now=now)
        recorded = request.chain if request.cut_chain is None else request.cut_chain
        stored = prefix_map.store(node, recorded, now=now)
        reservation = fleet.reserve(node, decision.chosen.uncached_tokens, now=now)
        if name is None or name in self._tickets:
            self._count += 1
            name = f"{self._prefix}{self._count:x}"
        ticket = Ticket(name, request, decision, stored, now if received_at_s is None else received_at_s, now, idle)
        self._tickets[ticket.id] = (ticket, reservation)
        self._chain_bytes += len(stored.chain)
        return ticket

    def settle(self, ticket_id: str, outcome: Outcome, *, now: float) -> Settled | None:
        """Release a ticket's work and learn from its outcome. None: not ours, or settled before."""
        entry = self._tickets.pop(ticket_id, None)
        return None if entry is None else self._settle(*entry, outcome, now=now)

    def _full(self) -> bool:
        return len(self._tickets) > self._max_tickets or self._chain_bytes > self._max_chain_bytes

    def expire(self, *, now: float) -> list[Settled]:
        """Settle as LOST what no access log came for within the time limit. To be called about once a second."""
        lost = []
        while self._tickets:
            ticket, reservation = next(iter(self._tickets.values()))
            if now - ticket.routed_at_s < self.ticket_ttl_s and not self._full():
                break
            del self._tickets[ticket.id]
            lost.append(self._settle(ticket, reservation, Outcome(End.LOST), now=now))
        return lost

    def _settle(self, ticket: Ticket, reservation: Reservation, outcome: Outcome, *, now: float) -> Settled:
        self._chain_bytes -= len(ticket.stored.chain)
        pool = self.pools.get(ticket.request.model)
        node = ticket.decision.node
        elsewhere = _elsewhere(node, outcome, pool)
        # A client that left may have left before or after the prefill: only an answer is proof that it was computed.
        computed = outcome.answered and not elsewhere
        if computed:
            first_token_at_s = now if outcome.client_ttft_s is None else ticket.received_at_s + outcome.client_ttft_s
            reservation.release(first_token_at_s=min(now, first_token_at_s), now=now)
            reservation.answered()
        else:
            reservation.release(first_token_at_s=None, now=now)
            if outcome.routed and (elsewhere or outcome.end is End.FAILED):
                reservation.failed(now=now)
        if pool is None:  # a reload took the model away
            return Settled(ticket, outcome, elsewhere)
        if not computed and outcome.end is not End.LOST:
            pool.prefix_map.take_back(node.id, ticket.stored)
        if elsewhere and outcome.answered:
            for other in pool.fleet.nodes():
                if other.address == outcome.served_by:
                    pool.prefix_map.store(other.id, ticket.stored.chain, now=now)
        if ticket.idle and computed and outcome.end is End.SERVED and outcome.engine_ttft_s is not None:
            pool.fleet.rate.observe(ticket.decision.chosen.uncached_tokens, outcome.engine_ttft_s * node.weight)
        return Settled(ticket, outcome, elsewhere and outcome.routed)


def _elsewhere(node: Node, outcome: Outcome, pool: Pool | None) -> bool:
    """Did another node answer? The access log has ip:port; one whose address is a name is recognised by exclusion."""
    served_by = outcome.served_by
    if served_by is None or served_by == node.address:
        return False
    if pool is not None and any(served_by == each.address for each in pool.fleet.nodes()):
        return True
    try:
        ip_address(node.address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return outcome.attempts > 1
    return True
