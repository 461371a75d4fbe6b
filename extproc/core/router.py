"""One decision: match, choose, reserve and record in one synchronous step; and its settlement, exactly once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address

from extproc.core.fleet import Reservation
from extproc.core.pool import Pool
from extproc.core.types import (
    CacheEvent,
    End,
    FeedState,
    InferenceRequest,
    Node,
    NodeId,
    Outcome,
    Refusal,
    Rejection,
    Settled,
    Ticket,
)


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
        fleet = pool.fleet
        if not len(fleet):
            return Rejection(Refusal.NO_NODE)
        if name is None or name in self._tickets:
            self._count += 1
            name = f"{self._prefix}{self._count:x}"
        candidates, price = pool.candidates(request, now=now), fleet.price(now=now)
        guard = pool.guard
        if guard is None:
            decision = pool.policy(request, candidates, price=price)
        else:
            decision = guard.decide(name, pool.policy, request, candidates, price=price)
        if pool.shadow is not None:
            pool.shadow.see(decision, request, candidates, price=price)
        node = decision.node.id
        idle = fleet.idle(node, now=now)
        stored = pool.send(node, request, now=now)
        if request.session is not None:
            pool.sessions.note(request.session, node, request.prompt_tokens, now=now)
        uncached = decision.chosen.uncached_tokens
        reservation = fleet.reserve(node, uncached, now=now, prompt_tokens=request.prompt_tokens)
        ticket = Ticket(name, request, decision, stored, now if received_at_s is None else received_at_s, now, idle)
        self._tickets[ticket.id] = (ticket, reservation)
        self._chain_bytes += request.chain_bytes
        return ticket

    def extend(self, ticket_id: str, request: InferenceRequest, *, now: float) -> bool:
        """Hashing went on after the decision: `request` is the ticket's own with more of its chains, or others where
        what was known was wrong. Its node holds all of it, and so will whoever answers in its place. False: settled,
        nothing is done."""
        entry = self._tickets.get(ticket_id)
        if entry is None:
            return False
        ticket, reservation = entry
        pool = self.pools.get(ticket.request.model)
        stored = ticket.stored
        if pool is not None:
            stored = pool.extend(ticket.decision.node.id, stored, request, now=now)
        self._chain_bytes += request.chain_bytes - ticket.request.chain_bytes
        self._tickets[ticket_id] = (replace(ticket, request=request, stored=stored), reservation)
        return True

    def settle(self, ticket_id: str, outcome: Outcome, *, now: float) -> Settled | None:
        """Release a ticket's work and learn from its outcome. None: not ours, or settled before."""
        entry = self._tickets.pop(ticket_id, None)
        return None if entry is None else self._settle(*entry, outcome, now=now)

    def cache_events(self, pool: str, node: NodeId, events: Sequence[CacheEvent], *, now: float) -> None:
        """What a node's engine says of its cache, in order. Nobody's: nothing."""
        found = self.pools.get(pool)
        if found is not None:
            found.cache_events(node, events, now=now)

    def feed(self, pool: str, node: NodeId, state: FeedState, *, now: float) -> None:
        """How complete a node's events are from now on. Nobody's: nothing."""
        found = self.pools.get(pool)
        if found is not None:
            found.feed(node, state, now=now)

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
        request = ticket.request
        self._chain_bytes -= request.chain_bytes
        pool = self.pools.get(request.model)
        node = ticket.decision.node
        elsewhere = _elsewhere(node, outcome, pool)
        # A client that left may have left before or after the prefill: only an answer is proof that it was computed.
        computed = outcome.answered and not elsewhere
        if computed:
            first_token_at_s = now if outcome.client_ttft_s is None else ticket.received_at_s + outcome.client_ttft_s
            reservation.release(first_token_at_s=min(now, first_token_at_s), now=now)
            reservation.answered(now=now)
        else:
            reservation.release(first_token_at_s=None, now=now)
            if outcome.routed and (elsewhere or outcome.end is End.FAILED):
                reservation.failed(now=now)
        if pool is None:  # a reload took the model away
            return Settled(ticket, outcome, elsewhere)
        if pool.guard is not None:
            rate = pool.fleet.rate
            prefill_s = rate.work(request.prompt_tokens, request.prompt_tokens) / rate.tokens_per_s
            pool.guard.settled(ticket, outcome, prefill_s=prefill_s, now=now)
        chosen = ticket.decision.chosen
        pool.settle(
            node.id,
            ticket.stored,
            promised=chosen.matched_tokens,
            prompt_tokens=request.prompt_tokens,
            computed=computed,
            now=now,
        )
        if not computed and outcome.end is not End.LOST:
            pool.take_back(node.id, ticket.stored)
        if request.session is not None and outcome.end is End.FAILED:
            pool.sessions.forget(request.session, node.id)
        if elsewhere and outcome.answered:
            other = _who(node, outcome, pool)
            if other is not None:
                pool.store(other.id, request, now=now)
                if request.session is not None:
                    pool.sessions.move(request.session, node.id, other.id, request.prompt_tokens, now=now)
        # what a session lets expect is no prediction that an answer could be held against
        sure = computed and not chosen.session_tokens
        if ticket.idle and sure and outcome.end is End.SERVED and outcome.engine_ttft_s is not None:
            ttft_s = outcome.engine_ttft_s * node.weight
            pool.fleet.rate.observe(chosen.uncached_tokens, ttft_s, request.prompt_tokens)
        return Settled(ticket, outcome, elsewhere and outcome.routed)


def _who(node: Node, outcome: Outcome, pool: Pool) -> Node | None:
    """Which node answered in place of `node`; None: nobody we know, or one of several ranks and no telling which."""
    there = [each for each in pool.fleet.nodes() if each.address == outcome.served_by]
    if len(there) > 1:  # a repeated request has the headers of the first: the rank that was chosen for another address
        there = [each for each in there if each.rank is not None and each.rank == node.rank]
    return there[0] if len(there) == 1 else None


def _elsewhere(node: Node, outcome: Outcome, pool: Pool | None) -> bool:
    """Did another node answer? The access log has ip:port; one whose address is a name is recognised by exclusion.

    Ranks of one address look alike in it, and each answers what it was sent."""
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
