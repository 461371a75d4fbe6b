"""Made-up traces, each a pure function of a seed and sizes: what they model is what routers get wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from random import Random

from extproc.core.types import Chain
from extproc.lab.replay.trace_parts import Conversation, arrange, fresh, until
from extproc.lab.replay.types import Call, Trace

BLOCK_TOKENS = 64
_RUNGS = 8
"""Of a ladder of rates."""


def _around(rng: Random, mean: float, spread: float = 0.5) -> int:
    """A length around `mean` with a long tail (lognormal), between 1 and 20 times the mean."""
    return max(1, int(min(rng.lognormvariate(log(mean) - spread * spread / 2, spread), 20 * mean)))


def _arrivals(rng: Random, count: int, per_s: float, start_s: float = 0.0) -> list[float]:
    """Poisson arrivals."""
    at_s, times = start_s, []
    for _ in range(count):
        at_s += rng.expovariate(per_s)
        times.append(at_s)
    return times


def _heads(rng: Random, count: int, tokens: int) -> list[Chain]:
    """Beginnings that many prompts share."""
    return [fresh(rng, tokens // BLOCK_TOKENS) for _ in range(count)]


def _popular(rng: Random, count: int) -> Callable[[], int]:
    """Draws a number below `count`, number k about 1 / (k + 1) as often as the first (Zipf)."""
    weights = [1 / (rank + 1) for rank in range(count)]
    numbers = range(count)
    return lambda: rng.choices(numbers, weights)[0]


def _once(
    rng: Random,
    at_s: float,
    own_tokens: int,
    answer_tokens: int,
    *,
    head: Chain = b"",
    head_tokens: int = 0,
    tenant: int = 0,
) -> Sequence[Call]:
    """A conversation of one turn."""
    only = Conversation(rng, BLOCK_TOKENS, at_s=at_s, head=head, head_tokens=head_tokens, tenant=tenant)
    only.turn(own_tokens, answer_tokens)
    return only.calls


def _ending(name: str, talks: Sequence[Sequence[Call]], chats: Sequence[Sequence[Call]]) -> Trace:
    """A trace of `talks` that ends when the last of `chats` begins, so that it does not thin out."""
    trace = arrange(name, BLOCK_TOKENS, talks)
    if not chats:
        return trace
    first_s = min(talk[0].at_s for talk in talks)
    return until(trace, max(talk[0].at_s for talk in chats) - first_s)


def groups(
    seed: int,
    *,
    groups: int = 150,
    prompts: int = 5,
    shared_tokens: int = 6000,
    own_tokens: int = 1200,
    answer_tokens: int = 1000,
    calls: int = 6000,
    per_s: float = 20.0,
    last_per_s: float = 0.0,
) -> Trace:
    """Groups of prompts that share a long beginning, sent again and again: llm-d's benchmark.

    The prompts (all groups' shuffled once) are sent in turn, as their load generator does, so that from the second
    round on a cache that is large enough has each whole. Poisson arrivals at `per_s`, or up a ladder of eight rates to
    `last_per_s`.
    """
    rng = Random(seed)
    made = []
    for head in _heads(rng, groups, shared_tokens):
        row = [_once(rng, 0.0, own_tokens, 1, head=head, head_tokens=shared_tokens)[0] for _ in range(prompts)]
        made += row
    rng.shuffle(made)
    rates = [per_s + (max(last_per_s, per_s) - per_s) * rung / (_RUNGS - 1) for rung in range(_RUNGS)]
    at_s, drawn = 0.0, []
    for number in range(calls):
        at_s += rng.expovariate(rates[number * _RUNGS // calls])
        call = made[number % len(made)]
        blocks = (call.prompt_tokens + answer_tokens) // BLOCK_TOKENS - call.blocks
        drawn.append(call._replace(at_s=at_s, answer_tokens=answer_tokens, answer=fresh(rng, blocks)))
    return arrange("groups", BLOCK_TOKENS, [drawn])


def _chats(
    rng: Random,
    *,
    conversations: int,
    per_s: float,
    systems: int,
    system_tokens: int,
    turns: float,
    question_tokens: int,
    answer_tokens: int,
    think_s: float,
    tenant: int = 0,
    first_session: int = 0,
) -> list[Sequence[Call]]:
    """Conversations of about `turns` turns (geometric), each under one of a few system prompts."""
    heads, popular = _heads(rng, systems, system_tokens), _popular(rng, systems)
    talks: list[Sequence[Call]] = []
    for number, at_s in enumerate(_arrivals(rng, conversations, per_s)):
        talk = Conversation(
            rng,
            BLOCK_TOKENS,
            at_s=at_s,
            head=heads[popular()],
            head_tokens=system_tokens,
            session=first_session + number,
            tenant=tenant,
        )
        while True:
            own, answer = _around(rng, question_tokens), _around(rng, answer_tokens)
            talk.turn(own, answer, pause_s=1.0 + rng.expovariate(1 / think_s))
            if rng.random() * turns < 1.0:
                break
        talks.append(talk.calls)
    return talks


def chat(
    seed: int,
    *,
    conversations: int = 1000,
    per_s: float = 1.0,
    systems: int = 6,
    system_tokens: int = 1500,
    turns: float = 8.0,
    question_tokens: int = 200,
    answer_tokens: int = 300,
    think_s: float = 30.0,
) -> Trace:
    """People who chat: a few system prompts (Zipf), a growing history that keeps the answers, time to think.

    Closed loop: who waits longer for an answer asks the next question later.
    """
    talks = _chats(
        Random(seed),
        conversations=conversations,
        per_s=per_s,
        systems=systems,
        system_tokens=system_tokens,
        turns=turns,
        question_tokens=question_tokens,
        answer_tokens=answer_tokens,
        think_s=think_s,
    )
    return _ending("chat", talks, talks)


def agents(
    seed: int,
    *,
    agents: int = 200,
    per_s: float = 0.2,
    prefixes: int = 4,
    prefix_tokens: int = 12_000,
    least_turns: int = 10,
    most_turns: int = 60,
    task_tokens: int = 1500,
    result_tokens: int = 700,
    answer_tokens: int = 120,
    pause_s: float = 2.0,
) -> Trace:
    """Agents at work: a few long beginnings of system prompt and tools, many turns of a short answer (a call of a tool)
    and what the tool says, with hardly a pause. Closed loop."""
    rng = Random(seed)
    heads, popular = _heads(rng, prefixes, prefix_tokens), _popular(rng, prefixes)
    talks: list[Sequence[Call]] = []
    for number, at_s in enumerate(_arrivals(rng, agents, per_s)):
        talk = Conversation(
            rng, BLOCK_TOKENS, at_s=at_s, head=heads[popular()], head_tokens=prefix_tokens, session=number
        )
        for turn in range(rng.randint(least_turns, most_turns)):
            own = _around(rng, result_tokens, 1.0) if turn else _around(rng, task_tokens)
            talk.turn(own, _around(rng, answer_tokens), pause_s=0.2 + rng.expovariate(1 / pause_s))
        talks.append(talk.calls)
    return _ending("agents", talks, talks)


def hot(
    seed: int,
    *,
    calls: int = 6000,
    per_s: float = 20.0,
    share: float = 0.8,
    hot_tokens: int = 8000,
    prefixes: int = 200,
    prefix_tokens: int = 2000,
    own_tokens: int = 500,
    answer_tokens: int = 200,
) -> Trace:
    """One prefix that most requests share (`share` of them), beside many others: a router that only follows what is
    cached sends most traffic to one node. Open loop, Poisson."""
    rng = Random(seed)
    (hottest,), others, popular = _heads(rng, 1, hot_tokens), _heads(rng, prefixes, prefix_tokens), rng.randrange
    drawn = []
    for at_s in _arrivals(rng, calls, per_s):
        is_hot = rng.random() < share
        head, tokens = (hottest, hot_tokens) if is_hot else (others[popular(prefixes)], prefix_tokens)
        own, answer = _around(rng, own_tokens), _around(rng, answer_tokens)
        drawn.append(_once(rng, at_s, own, answer, head=head, head_tokens=tokens))
    return arrange("hot", BLOCK_TOKENS, drawn)


def flash(
    seed: int,
    *,
    conversations: int = 900,
    per_s: float = 1.0,
    crowd: int = 1500,
    crowd_per_s: float = 25.0,
    crowd_after: float = 0.5,
    crowd_tokens: int = 16_000,
    own_tokens: int = 200,
    answer_tokens: int = 150,
) -> Trace:
    """Steady chat, and in the middle (after `crowd_after` of its time) a crowd that asks about one long document nobody
    saw before."""
    rng = Random(seed)
    talks = _chats(
        rng,
        conversations=conversations,
        per_s=per_s,
        systems=6,
        system_tokens=1500,
        turns=8.0,
        question_tokens=200,
        answer_tokens=300,
        think_s=30.0,
    )
    start_s = crowd_after * talks[-1][0].at_s if talks else 0.0
    (head,) = _heads(rng, 1, crowd_tokens)
    crowding: list[Sequence[Call]] = []
    for at_s in _arrivals(rng, crowd, crowd_per_s, start_s):
        own, answer = _around(rng, own_tokens), _around(rng, answer_tokens)
        crowding.append(_once(rng, at_s, own, answer, head=head, head_tokens=crowd_tokens))
    return _ending("flash", talks + crowding, talks)


def tenants(
    seed: int,
    *,
    tenants: int = 6,
    conversations: int = 150,
    per_s: float = 0.15,
    systems: int = 2,
    system_tokens: int = 2000,
    flood: int = 1500,
    flood_per_s: float = 5.0,
    flood_tokens: int = 6000,
) -> Trace:
    """Tenants who chat, each under its own system prompts (`conversations` of each, `per_s`), until tenant 0 floods the
    fleet from the middle on with long prompts that share a system prompt and nothing else."""
    rng = Random(seed)
    talks: list[Sequence[Call]] = []
    for tenant in range(tenants):
        talks += _chats(
            rng,
            conversations=conversations,
            per_s=per_s,
            systems=systems,
            system_tokens=system_tokens,
            turns=6.0,
            question_tokens=200,
            answer_tokens=250,
            think_s=30.0,
            tenant=tenant,
            first_session=tenant * conversations,
        )
    (head,) = _heads(rng, 1, system_tokens)
    start_s = max((talk[0].at_s for talk in talks), default=0.0) / 2
    flooding: list[Sequence[Call]] = []
    for at_s in _arrivals(rng, flood, flood_per_s, start_s):
        own = _around(rng, flood_tokens)
        flooding.append(_once(rng, at_s, own, _around(rng, 100), head=head, head_tokens=system_tokens))
    return _ending("tenants", talks + flooding, talks)


def mixed(
    seed: int,
    *,
    calls: int = 4000,
    per_s: float = 10.0,
    own_tokens: int = 400,
    answer_tokens: int = 200,
    burst_every_s: float = 20.0,
    burst: int = 6,
    burst_tokens: int = 40_000,
) -> Trace:
    """Short prompts that share nothing, and now and then a burst of very long ones within a second: nothing to gain
    from caches, and much to lose behind a long prompt."""
    rng = Random(seed)
    drawn = [
        _once(rng, at_s, _around(rng, own_tokens), _around(rng, answer_tokens)) for at_s in _arrivals(rng, calls, per_s)
    ]
    end_s = drawn[-1][0].at_s if drawn else 0.0
    at_s = rng.expovariate(1 / burst_every_s)
    while at_s < end_s:
        drawn += [_once(rng, at_s + rng.random(), _around(rng, burst_tokens, 0.3), 100) for _ in range(burst)]
        at_s += rng.expovariate(1 / burst_every_s)
    return arrange("mixed", BLOCK_TOKENS, drawn)


GENERATORS: dict[str, Callable[..., Trace]] = {
    each.__name__: each for each in (groups, chat, agents, hot, flash, tenants, mixed)
}
