"""How many calls a second a fleet can serve of a trace: what a `load` of 1.0 is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from extproc.lab.replay.jobs import Effort, Job
from extproc.lab.replay.nodes import SimulatedNode
from extproc.lab.replay.types import Machine, Trace

_OWN = 3.0
"""What a call's own prefill counts against the queue before it: a full fleet serves most where locality wins."""
_MOST_CALLS = 20_000
_WARM = 0.4
"""Of the calls, as many are not measured: caches fill."""
_FED_AT_ONCE = 64

_known: dict[tuple[str, int, int, int, tuple[Machine, ...]], float] = {}
"""A number for each fleet and trace that a process runs: some dozens."""


def capacity(trace: Trace, machines: Sequence[Machine]) -> float:
    """The sustained rate, in calls per second, at which `machines` serve `trace` when none of them is ever idle.

    The trace's first 20,000 calls are fed in their order, without regard to their times: the next one comes as soon as
    a node has nothing waiting. Each goes where backlog + 3 * own prefill is least, both exact: locality, as far as
    queues stay even, decided with knowledge that no router has. From the time when two fifths of the calls have been
    fed to the time when all have, it is measured what the nodes' time goes into: prefill seconds for each prompt, and
    other seconds (those of decoding, in full batches) for each token of an answer. The capacity is the number of nodes
    over the seconds of one whole call, with the mean answer of the trace. (Answers are not simply counted: those that
    begin together end together, and with a thousand of them in flight a trace is over after a few such waves; with long
    answers in a short trace the figure is still up to a tenth too high.) So it is what a very good policy can sustain:
    at a `load` of 0.95 a worse one is beyond its own limit. Kept for each trace and fleet.
    """
    key = (
        trace.name,
        len(trace.calls),
        sum(call.prompt_tokens for call in trace.calls),
        trace.block_tokens,
        tuple(sorted(machines, key=lambda machine: machine.name)),
    )
    found = _known.get(key)
    if found is None:
        found = _known[key] = _measure(trace, machines)
    return found


def _measure(trace: Trace, machines: Sequence[Machine]) -> float:
    nodes = [SimulatedNode(machine, trace.block_tokens) for machine in machines]
    calls = trace.calls[:_MOST_CALLS]
    warm_at = int(len(calls) * _WARM)
    events: list[tuple[float, int]] = []
    fed, warm = 0, Effort()
    hungry, now = list(range(len(nodes))), 0.0
    while True:
        for i in hungry:
            for _ in range(_FED_AT_ONCE):
                if nodes[i].waiting or fed == len(calls):
                    break
                if fed == warm_at:
                    warm = _total(nodes)
                chosen = _best(nodes, Job(fed, calls[fed]), now)
                heappush(events, (nodes[chosen].next_s, chosen))
                fed += 1
        if fed == len(calls) and _total(nodes).prompts > warm.prompts:
            break
        now, i = heappop(events)
        hungry = []
        if nodes[i].next_s == now:
            nodes[i].step()
            if nodes[i].next_s < math.inf:
                heappush(events, (nodes[i].next_s, i))
            hungry.append(i)
    spent = zip(_total(nodes), warm, strict=True)
    prompts, tokens, prefill_s, busy_s = (after - before for after, before in spent)
    answer_tokens = sum(call.answer_tokens - 1 for call in calls) / len(calls)
    decode_s = (busy_s - prefill_s) / tokens * answer_tokens if tokens else (busy_s - prefill_s) / prompts
    call_s = prefill_s / prompts + decode_s
    return len(nodes) / call_s


def _total(nodes: Sequence[SimulatedNode]) -> Effort:
    efforts = [node.effort for node in nodes]
    return Effort(
        sum(each.prompts for each in efforts),
        sum(each.tokens for each in efforts),
        sum(each.prefill_s for each in efforts),
        sum(each.busy_s for each in efforts),
    )


def _best(nodes: Sequence[SimulatedNode], job: Job, now: float) -> int:
    costs = []
    for node in nodes:
        own_s = node.prefill_s(job.call, node.hit_tokens(job.call))
        costs.append(node.backlog_s(now) + _OWN * own_s)
    chosen = costs.index(min(costs))
    nodes[chosen].submit(job, now)
    return chosen
