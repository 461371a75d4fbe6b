"""A trace, a fleet and a balancer in virtual time: who went where, and what became of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol, runtime_checkable

from extproc.lab.replay.jobs import Job
from extproc.lab.replay.nodes import SimulatedNode
from extproc.lab.replay.types import Balancer, Machine, NodeView, Result, Trace

RETRY_S = 0.05
ATTEMPTS = 2
_EVERY = 100
"""Calls between two signs of progress."""


@runtime_checkable
class Insider(Protocol):
    """A balancer that may look into the nodes themselves: an oracle, or one that is told more than a NodeView has."""

    def attach(self, nodes: Mapping[str, SimulatedNode]) -> None:
        """Called before `nodes_changed`, each time."""


class Outage(NamedTuple):
    """A node goes down, and comes back empty. Virtual time."""

    node: str
    at_s: float
    until_s: float = math.inf


class Joining(NamedTuple):
    """A node joins the fleet. Virtual time."""

    machine: Machine
    at_s: float


Incident = Outage | Joining


def run(
    trace: Trace,
    machines: Sequence[Machine],
    balancer: Balancer,
    *,
    rate: float | None = None,
    scrape_s: float = 0.2,
    incidents: Sequence[Incident] = (),
    limit_s: float = math.inf,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Replay `trace` on `machines` through `balancer`; results in the order in which the calls were over.

    `rate`: calls per second over the whole trace (None: as recorded). The trace's clock runs faster or slower for
    that, pauses between an answer and the next turn included, so that what is reused after how much else stays the
    same; how fast nodes are does not change. Calls that wait for an answer come later than the rate says where answers
    take long. At `limit_s` what is not answered counts as failed.

    A call whose node dies, or is down, is given to the balancer again after RETRY_S, once; TTFT counts from its first
    arrival, to the first token of the attempt that was served. ValueError where a node is too small for a call.
    """
    _check(trace, machines, incidents)
    simulation = _Simulation(trace, machines, balancer, _pace(trace, rate), scrape_s, incidents, progress)
    return simulation.run(limit_s)


def trace_rate(trace: Trace) -> float:
    """Calls per second as recorded; infinity where all come at once."""
    duration_s = trace.calls[-1].at_s if trace.calls else 0.0
    return len(trace.calls) / duration_s if duration_s else math.inf


def _pace(trace: Trace, rate: float | None) -> float:
    """How much faster than recorded the trace's clock runs at that many calls per second."""
    if rate is None:
        return 1.0
    if not 0.0 < rate < math.inf:
        raise ValueError(f"{rate} calls per second: it has to be above 0")
    return rate / trace_rate(trace) or 1.0


def _check(trace: Trace, machines: Sequence[Machine], incidents: Sequence[Incident]) -> None:
    if not machines:
        raise ValueError("no node to replay on: give at least one")
    every = [*machines, *(each.machine for each in incidents if isinstance(each, Joining))]
    names = {machine.name for machine in every}
    if len(names) < len(every):
        raise ValueError("two nodes of one name: each needs its own")
    unknown = {each.node for each in incidents if isinstance(each, Outage)} - names
    if unknown:
        raise ValueError(f"no node is called {', '.join(sorted(unknown))}: there are {', '.join(sorted(names))}")
    there_s = {each.machine.name: each.at_s for each in incidents if isinstance(each, Joining)}
    for each in sorted((each for each in incidents if isinstance(each, Outage)), key=lambda outage: outage.at_s):
        if each.at_s < there_s.get(each.node, 0.0):
            raise ValueError(f"{each.node} cannot fail at {each.at_s:g} s, before it joins or while it is down")
        there_s[each.node] = each.until_s
    smallest = min(every, key=lambda machine: machine.cache_tokens)
    size = trace.block_tokens
    longest = max((call.prompt_tokens + call.answer_tokens for call in trace.calls), default=0)
    if -(-longest // size) > smallest.cache_tokens // size:
        raise ValueError(
            f"a call of {longest} tokens does not fit into the {smallest.cache_tokens} of {smallest.name}: "
            f"give the nodes at least {longest + size} cache tokens, or leave such calls out of the trace"
        )


class _Under(NamedTuple):
    """A call that is on its way."""

    arrived_s: float
    attempts: int
    node: int
    job: Job | None
    """None: it waits for its next attempt."""


class _Simulation:
    """One run. An event is (time, order, what is to be done, with what)."""

    def __init__(
        self,
        trace: Trace,
        machines: Sequence[Machine],
        balancer: Balancer,
        pace: float,
        scrape_s: float,
        incidents: Sequence[Incident],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._calls = trace.calls
        self._block_tokens = trace.block_tokens
        self._balancer = balancer
        self._pace = pace
        self._scrape_s = scrape_s
        self._incidents = incidents
        self._progress = progress
        self._events: list[tuple[float, int, Callable[[int, float], None], int]] = []
        self._count = 0
        self._nodes: list[SimulatedNode] = []
        self._scheduled_s: list[float] = []
        """For which time each node's next step is in the events."""
        self._down_s: list[float | None] = []
        """When each node went down for the last time."""
        self._views: list[tuple[float, NodeView]] = []
        """Each node's last scrape, and when that was."""
        self._under: dict[int, _Under] = {}
        self._results: list[Result] = []
        self._open = [number for number, call in enumerate(trace.calls) if call.after is None]
        self._opened = 0
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(trace.calls):
            if call.after is not None:
                self._followers[call.after].append(number)
        for machine in machines:
            self._add(machine, 0.0)
        self._tell(0.0)

    def run(self, limit_s: float) -> list[Result]:
        """Until every call is over, or `limit_s`."""
        for number, incident in enumerate(self._incidents):
            self._at(incident.at_s, self._happen, number)
        self._next_arrival()
        calls = len(self._calls)
        while self._events and len(self._results) < calls:
            now, _, what, number = heappop(self._events)
            if now > limit_s:
                break
            what(number, now)
        for number in sorted(self._under):
            self._over(number, math.inf)
        if self._progress is not None:
            self._progress(len(self._results) % _EVERY)
        return self._results

    def _at(self, at_s: float, what: Callable[[int, float], None], number: int) -> None:
        self._count += 1
        heappush(self._events, (at_s, self._count, what, number))

    # ---- calls ----

    def _next_arrival(self) -> None:
        if self._opened < len(self._open):
            number = self._open[self._opened]
            self._opened += 1
            self._at(self._calls[number].at_s / self._pace, self._arrive, number)

    def _arrive(self, number: int, now: float) -> None:
        self._under[number] = _Under(now, 0, -1, None)
        self._send(number, now)
        if self._calls[number].after is None:
            self._next_arrival()

    def _send(self, number: int, now: float) -> None:
        call, under = self._calls[number], self._under[number]
        chosen = self._balancer.route(number, call, self._seen(now), now)
        if chosen is None:
            self._under[number] = under._replace(node=-1)
            self._over(number, now)
            return
        node = self._nodes[chosen]
        self._under[number] = _Under(
            under.arrived_s, under.attempts + 1, chosen, Job(number, call) if node.up else None
        )
        job = self._under[number].job
        if job is None:
            self._fail(number, now)
            return
        node.submit(job, now)
        self._schedule(chosen)

    def _fail(self, number: int, now: float) -> None:
        """Its node is down."""
        under = self._under[number]
        self._balancer.done(number, self._calls[number], under.node, now, ok=False)
        if under.attempts < ATTEMPTS:
            self._under[number] = under._replace(job=None)
            self._at(now + RETRY_S, self._send, number)
        else:
            self._over(number, now)

    def _over(self, number: int, now: float, *, job: Job | None = None) -> None:
        """Answered by `job`, or failed for good, or shed; at infinity: not over when time was up."""
        call, under = self._calls[number], self._under.pop(number)
        cached, first_s = 0, math.inf
        if job is not None or now == math.inf:
            known = under.job
            if known is not None:
                cached = known.cached_tokens or 0
                first_s = math.inf if known.first_token_s is None else known.first_token_s
        self._results.append(
            Result(
                number,
                "" if under.node < 0 else self._nodes[under.node].machine.name,
                under.arrived_s,
                first_s - under.arrived_s,
                now,
                cached,
                call.prompt_tokens,
                call.answer_tokens,
                call.tenant,
                under.attempts,
            )
        )
        for follower in self._followers.pop(number, ()):
            self._at(now + self._calls[follower].pause_s / self._pace, self._arrive, follower)
        if self._progress is not None and len(self._results) % _EVERY == 0:
            self._progress(_EVERY)

    # ---- nodes ----

    def _add(self, machine: Machine, now: float) -> None:
        self._nodes.append(SimulatedNode(machine, self._block_tokens, scrape_s=self._scrape_s, started_at_s=now))
        self._scheduled_s.append(math.inf)
        self._down_s.append(None)
        self._views.append((now, NodeView(machine.name, 0, 0, 0.0, 0.0, True)))

    def _tell(self, now: float) -> None:
        if isinstance(self._balancer, Insider):
            self._balancer.attach({node.machine.name: node for node in self._nodes})
        self._balancer.nodes_changed([node.machine.name for node in self._nodes], now)

    def _seen(self, now: float) -> list[NodeView]:
        """Every node as its last scrape that was answered shows it."""
        last_s = now // self._scrape_s * self._scrape_s
        found = []
        for i, node in enumerate(self._nodes):
            down_s = self._down_s[i]
            if node.started_at_s <= last_s if node.up else down_s is not None and down_s > last_s:
                scrape = node.scrape(now)
                view = NodeView(node.machine.name, scrape.waiting, scrape.running, scrape.kv_usage, now - last_s, True)
                self._views[i] = last_s, view
            else:
                at_s, view = self._views[i]
                view = view._replace(age_s=now - at_s, up=down_s is None)
            found.append(view)
        return found

    def _schedule(self, i: int) -> None:
        next_s = self._nodes[i].next_s
        if next_s != self._scheduled_s[i]:
            self._scheduled_s[i] = next_s
            if next_s < math.inf:
                self._at(next_s, self._step, i)

    def _step(self, i: int, now: float) -> None:
        node = self._nodes[i]
        if node.next_s != now:  # it was planned anew since
            return
        done = node.step()
        for job in done.first:
            self._balancer.first_token(job.number, job.call, i, now)
        for job in done.ended:
            self._balancer.done(job.number, job.call, i, now, ok=True)
            self._over(job.number, now, job=job)
        self._schedule(i)

    def _happen(self, number: int, now: float) -> None:
        incident = self._incidents[number]
        if isinstance(incident, Joining):
            self._add(incident.machine, now)
            self._tell(now)
            return
        i = [node.machine.name for node in self._nodes].index(incident.node)
        if now > incident.at_s:
            self._nodes[i].come_back(now)
            return
        lost = self._nodes[i].fail(now)
        self._down_s[i] = now
        self._scheduled_s[i] = math.inf
        for job in lost:
            self._fail(job.number, now)
        if incident.until_s < math.inf:
            self._at(incident.until_s, self._happen, number)
