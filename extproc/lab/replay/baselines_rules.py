"""The baselines' rules, each from its published formula: which node, by what a router of that kind knows.

Each takes the call, one row for each node that is up (at least one) and a source of chance, and returns a row. Where a
formula leaves a tie, chance decides. All blocks are the trace's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple, TypeAlias

from xxhash import xxh64_intdigest


class Ask(NamedTuple):
    """What a rule may know of a call."""

    turn: int
    """How many calls were routed before it."""
    prompt_tokens: int
    blocks: int
    """Full ones, of the prompt."""
    block_tokens: int
    head: bytes
    """Equal where the prompts' heads are."""
    tokens_per_s: float
    """What one node prefills, as an operator would write it down for the fleet: the mean."""


class Row(NamedTuple):
    """What a rule may know of a node."""

    at: int
    """Its place among all nodes."""
    name: str
    waiting: int = 0
    """Scraped, as are `running` and `kv_usage`."""
    running: int = 0
    kv_usage: float = 0.0
    in_flight: int = 0
    """Sent there and not ended, by the router's own count."""
    queued_tokens: int = 0
    """Of those, the uncached prompt tokens of the ones without a first token."""
    matched: int = 0
    """Leading blocks of the prompt that it is believed to hold."""
    uncached_tokens: int = 0
    """Of the prompt; at least 1: the last token is always computed."""
    active_blocks: int = 0
    """Different blocks of the prompts in flight there."""
    new_blocks: int = 0
    """Blocks of the prompt that are not active there."""
    load_s: float = 0.0
    """Work that it was given in the last three minutes."""
    evict_s: float = 0.0
    """Prefill of what it would drop for this prompt and used in the last three minutes."""
    prefill_s: float = 0.0
    """Of the uncached tokens."""


Rule: TypeAlias = Callable[[Ask, Sequence[Row], Random], Row]


def _least(rows: Sequence[Row], cost: Callable[[Row], float | tuple[float, ...]], chance: Random) -> Row:
    costs = [cost(row) for row in rows]
    least = min(costs)
    best = [row for row, each in zip(rows, costs, strict=True) if each == least]
    return best[0] if len(best) == 1 else chance.choice(best)


def _in_flight(row: Row) -> int:
    return row.in_flight


def _longest(rows: Sequence[Row]) -> list[Row]:
    """Those that match the most; empty where none matches anything."""
    longest = max(row.matched for row in rows)
    return [row for row in rows if row.matched == longest] if longest else []


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


def random_choice(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """Any node."""
    return chance.choice(rows)


def round_robin(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """One after the other."""
    return rows[ask.turn % len(rows)]


def least_request(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """The fewest in flight."""
    return _least(rows, _in_flight, chance)


def power_of_two(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """The one with fewer in flight of two different nodes, drawn at random."""
    return _least(chance.sample(rows, min(2, len(rows))), _in_flight, chance)


def gie(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """3 * matched share + 2 * (max queue - queue) / (max - min) + 2 * (1 - KV usage); the highest wins.

    Equal queues count 1 for every node.
    """
    longest, shortest = max(row.waiting for row in rows), min(row.waiting for row in rows)

    def cost(row: Row) -> float:
        share = row.matched / ask.blocks if ask.blocks else 0.0
        queue = (longest - row.waiting) / (longest - shortest) if longest > shortest else 1.0
        return -(3.0 * share + 2.0 * queue + 2.0 * (1.0 - row.kv_usage))

    return _least(rows, cost, chance)


_LLM_D_AFFINITY = 0.80
_LLM_D_PENALTY_S = 18.0


def llm_d(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """Among the nodes that match 0.80 of the prompt, unless the best other is 18 s better: the least token load.

    The load is queued uncached tokens plus the prompt's own; the seconds are queued tokens by the fleet's rate, which
    stands for the 15,928 tokens/s of their default (measured on their hardware, to be set for one's own).
    """
    warm = [row for row in rows if ask.blocks and row.matched / ask.blocks >= _LLM_D_AFFINITY]
    cold = [row for row in rows if row not in warm] if warm else []
    if warm and cold:
        ahead = min(row.queued_tokens for row in warm) - min(row.queued_tokens for row in cold)
        if ahead / ask.tokens_per_s > _LLM_D_PENALTY_S:
            warm = []
    return _least(warm or rows, lambda row: row.queued_tokens + row.uncached_tokens, chance)


def dynamo(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """The least max(active prefill + prompt - overlap, 0) + decode blocks (active and the prompt's new ones).

    All in blocks, overlap credit 1, temperature 0. Not here: its queue in front of the router, which holds calls back
    while every node has 16 full steps to prefill; a balancer has to answer at once.
    """

    def cost(row: Row) -> float:
        prefill = (row.queued_tokens + ask.prompt_tokens) / ask.block_tokens - row.matched
        return max(prefill, 0.0) + row.active_blocks + row.new_blocks

    return _least(rows, cost, chance)


_MATCHES = 0.3
"""Share of a prompt above which sglang's router and smg call it cached."""


def sglang(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """Where in-flight counts differ by more than 64 and 1.5 times: the fewest, for everyone; else the longest match.

    A match of at most 0.3 of the prompt counts as none: then the fewest in flight. Of several that match the same the
    least loaded (theirs takes any).
    """
    most, fewest = max(row.in_flight for row in rows), min(row.in_flight for row in rows)
    if most - fewest > 64 and most > 1.5 * fewest:
        return least_request(ask, rows, chance)
    holders = _longest(rows)
    if holders and holders[0].matched > _MATCHES * ask.blocks:
        return least_request(ask, holders, chance)
    return least_request(ask, rows, chance)


def smg(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """The longest match above 0.3 of the prompt, unless that node is too loaded; else the fewest in flight.

    Too loaded: more in flight than 1.5 times the mean, and than the mean plus a margin of 2 sigma, in [4, 64]. Nodes
    with 8 waiting or 0.8 KV usage are left out of all this while another is below.
    """
    able = [row for row in rows if row.waiting < 8 and row.kv_usage < 0.8] or rows
    holders = _longest(able)
    if holders and holders[0].matched > _MATCHES * ask.blocks:
        holder = least_request(ask, holders, chance)
        mean, deviation = _mean_and_deviation([row.in_flight for row in able])
        margin = max(4.0, min(64.0, 2.0 * deviation))
        if holder.in_flight <= mean + margin or holder.in_flight <= 1.5 * mean:
            return holder
    return least_request(ask, able, chance)


def aibrix(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """The best match of the nodes with at most mean + 1 sigma in flight; else the fewest in flight.

    Of matches that are equal in whole per cent, the one with fewer in flight. Where counts differ by more than 8, only
    matches of the nodes with the fewest count.
    """
    mean, deviation = _mean_and_deviation([row.in_flight for row in rows])
    most, fewest = max(row.in_flight for row in rows), min(row.in_flight for row in rows)
    bound = fewest if most - fewest > 8 else mean + deviation
    matching = [row for row in rows if row.matched and row.in_flight <= bound]
    if not matching:
        return least_request(ask, rows, chance)
    return _least(matching, lambda row: (-(row.matched * 100 // ask.blocks), row.in_flight), chance)


_REPLICAS = 256


@lru_cache(maxsize=64)
def _ring(names: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Points in order, and for each which of `names` it belongs to."""
    points = sorted(
        (xxh64_intdigest(f"{name}{i}".encode()), at) for at, name in enumerate(names) for i in range(_REPLICAS)
    )
    return [point for point, _ in points], [at for _, at in points]


def kubeai(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """Consistent hash of the prompt's head, on to the next node while one would exceed 1.25 times the mean in flight.

    256 points a node. Where all exceed it (fewer in flight than nodes), the first. The head is the first two blocks:
    their default of 100 characters, and often one block, is a system prompt that all share, which their operator would
    not leave at that.
    """
    bound = 1.25 * (sum(row.in_flight for row in rows) + 1) / len(rows)
    points, owners = _ring(tuple(row.name for row in rows))
    begin = bisect_left(points, xxh64_intdigest(ask.head))
    seen: dict[int, None] = {}
    for step in range(len(points)):
        at = owners[(begin + step) % len(points)]
        if rows[at].in_flight + 1 <= bound:
            return rows[at]
        seen[at] = None
        if len(seen) == len(rows):
            break
    return rows[next(iter(seen))]


def preble(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """E2. Where at least half is cached: the longest match, the least loaded of several; else the least total cost.

    The cost is the work of the last three minutes, what the node would have to prefill again for the blocks it drops,
    and the prefill of this prompt. Rebalancing: what would go to the most loaded node goes to the least loaded one,
    while it has more than 1.5 times as much.
    """
    holders = _longest(rows)
    if holders and 2 * holders[0].uncached_tokens <= ask.prompt_tokens:
        chosen = _least(holders, lambda row: row.load_s, chance)
        most, fewest = max(row.load_s for row in rows), min(row.load_s for row in rows)
        if chosen.load_s < most or most <= 1.5 * fewest:
            return chosen
        return _least(rows, lambda row: row.load_s, chance)
    return _least(rows, lambda row: row.load_s + row.evict_s + row.prefill_s, chance)


def lmetric(ask: Ask, rows: Sequence[Row], chance: Random) -> Row:
    """The least (queued uncached + own uncached tokens) * (batch size + 1); the batch is what is in flight."""
    return _least(rows, lambda row: (row.queued_tokens + row.uncached_tokens) * (row.in_flight + 1), chance)
