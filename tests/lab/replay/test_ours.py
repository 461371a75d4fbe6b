"""The router in virtual time: it hears what production tells it, when production does; and the oracle knows better."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from extproc.config import PolicyConfig
from extproc.core.types import HASH_BYTES
from extproc.lab.replay import policies
from extproc.lab.replay.oracle import Oracle
from extproc.lab.replay.ours import MODEL, Ours, configured, weights_of
from extproc.lab.replay.simulation import Outage, run
from extproc.lab.replay.types import Call, Machine, NodeView, Result, Trace
from tests.lab.replay.naive_node import call

SIZE = 16
FLEET = [Machine(f"node-{i}", 10_000.0, 100_000) for i in range(4)]


def conversations(count: int, turns: int, *, every_s: float = 0.5, seed: int = 1) -> Trace:
    """Each turn sends all that was said before and 320 tokens more; those of different conversations mix."""
    rng = random.Random(seed)
    calls = []
    for _ in range(count):
        said, at_s = rng.randbytes(60 * HASH_BYTES), rng.uniform(0.0, count * every_s)
        for _ in range(turns):
            answer = rng.randbytes(4 * HASH_BYTES)
            calls.append(Call(at_s, len(said) // HASH_BYTES * SIZE + 1, 64, said, answer))
            said += answer + rng.randbytes(16 * HASH_BYTES)
            at_s += rng.uniform(5.0, 15.0)
    calls.sort()
    return Trace("conversations", SIZE, [each._replace(at_s=each.at_s - calls[0].at_s) for each in calls])


def hits(results: Sequence[Result]) -> float:
    return sum(each.cached_tokens for each in results) / sum(each.prompt_tokens for each in results)


def mean_ttft_s(results: Sequence[Result]) -> float:
    return sum(each.ttft_s for each in results) / len(results)


def test_turns_go_where_the_conversation_is() -> None:
    trace = conversations(40, 6)
    ours = run(trace, FLEET, Ours(SIZE))
    spread = run(trace, FLEET, policies.make("least-request", seed=1, machines=FLEET, block_tokens=SIZE))
    assert hits(ours) > hits(spread) + 0.2
    assert mean_ttft_s(ours) < 0.8 * mean_ttft_s(spread)


def test_the_same_run_twice_gives_the_same_results() -> None:
    trace = conversations(20, 4)
    incidents = [Outage("node-1", 3.0, 6.0)]
    assert run(trace, FLEET, Ours(SIZE), incidents=incidents) == run(trace, FLEET, Ours(SIZE), incidents=incidents)


def test_the_oracle_promises_what_is_found() -> None:
    trace = conversations(40, 6, every_s=0.05)
    promised: dict[int, int] = {}

    class Noting(Oracle):
        def route(self, number: int, call: Call, nodes: Sequence[NodeView], now: float) -> int | None:
            chosen = super().route(number, call, nodes, now)
            promised[number] = self._sent[number].ticket.decision.chosen.matched_tokens
            return chosen

    results = run(trace, FLEET, Noting(SIZE))
    assert hits(results) > 0.5
    assert {each.number: each.cached_tokens for each in results} == promised


def test_an_oracle_of_one_thing_believes_the_other_as_ours_does() -> None:
    """Both calls are of 800 tokens, on a node that takes ten times as long for them as the router believes."""
    slow = [Machine("node-0", 1_000.0, 100_000)]
    calls = [call("a" * 50, size=SIZE), call("b" * 50, size=SIZE, at_s=0.01)]
    waits: dict[bool, float] = {}
    for queues in (False, True):

        class Noting(Oracle):
            def route(self, number: int, call: Call, nodes: Sequence[NodeView], now: float) -> int | None:
                chosen = super().route(number, call, nodes, now)
                waits[queues] = self._sent[number].ticket.decision.chosen.wait_s  # noqa: B023
                return chosen

        run(Trace("two", SIZE, calls), slow, Noting(SIZE, queues=queues))
    assert waits == pytest.approx({False: 0.07, True: 0.80}, abs=0.01)


def test_the_access_log_comes_when_it_is_written_and_only_then() -> None:
    # each of 1,600 tokens takes about 0.17 s, its answer 0.8 s more
    long = [call(letter * 100, size=SIZE, answer_tokens=100, at_s=at_s) for letter, at_s in (("a", 0.0), ("b", 1.05))]
    later = call("c", size=SIZE, at_s=1.15)
    in_flight: list[int] = []

    class Counting(Ours):
        def route(self, number: int, call: Call, nodes: Sequence[NodeView], now: float) -> int | None:
            chosen = super().route(number, call, nodes, now)
            in_flight.append(len(self.router))
            return chosen

    ours = Counting(SIZE, access_log_delay_s=0.1)
    results = run(Trace("three", SIZE, [*long, later]), FLEET[:1], ours)
    assert 0.95 < results[0].done_s < 1.05
    assert in_flight == [1, 2, 2]


def test_the_rate_is_learnt_from_access_logs() -> None:
    slow = [Machine("node-0", 2_000.0, 100_000)]
    strangers = [call(chr(97 + i) * 100, size=SIZE, at_s=3.0 * i) for i in range(12)]
    ours = Ours(SIZE)
    run(Trace("strangers", SIZE, strangers), slow, ours)
    assert ours.pool.fleet.rate.tokens_per_s == pytest.approx(1_950.0, rel=0.03)


def test_a_dead_node_is_left_until_it_is_back_and_then_holds_nothing() -> None:
    trace = conversations(160, 6)
    results = run(trace, FLEET, Ours(SIZE), incidents=[Outage("node-1", 20.0, 40.0)])
    there = [each for each in results if each.node == "node-1"]
    assert all(each.done_s <= 20.0 or each.arrived_s >= 40.0 for each in there)
    assert [each for each in there if each.arrived_s > 41.0]
    assert all(each.ttft_s < 60.0 for each in results)
    again = [each for each in results if each.attempts == 2]
    assert 0 < len(again) < 12
    # the first access log of a second attempt, or five seconds without a scrape, and nothing is tried there any more
    assert all(each.arrived_s < 26.0 for each in again)


def test_counters_of_hits_are_scraped() -> None:
    ours = Ours(SIZE)
    run(conversations(40, 6), FLEET, ours)
    sample = ours.pool.fleet.sample("node-0")
    assert sample is not None
    assert sample.cache_tokens == 100_000
    assert sample.prefix_queries is not None
    assert sample.prefix_hits is not None
    assert 0 < sample.prefix_hits < sample.prefix_queries


def test_it_is_built_from_the_default_configuration() -> None:
    config = configured(["a", "b"], SIZE, PolicyConfig(price_weight=3.0), {"a": 2.0, "b": 0.5})
    (model,) = config.models
    assert (model.name, model.block_tokens) == (MODEL, SIZE)
    assert [(node.name, node.weight) for node in model.nodes] == [("a", 2.0), ("b", 0.5)]
    assert len({node.address for node in model.nodes}) == 2
    ours = Ours(SIZE, policy=config.policy)
    ours.nodes_changed(["a", "b"], 0.0)
    assert ours.pool.fleet.price_weight == 3.0
    assert ours.pool.exact


def test_weights_are_speeds_over_their_mean() -> None:
    machines = [Machine("a", 1000.0), Machine("b", 1000.0, speed=3.0)]
    assert weights_of(machines) == {"a": 0.5, "b": 1.5}
    for spec, weights in (("ours", [1.0, 1.0]), ("ours:weights=true", [0.5, 1.5])):
        ours = policies.make(spec, seed=1, machines=machines, block_tokens=SIZE)
        assert isinstance(ours, Ours)
        ours.nodes_changed(["a", "b"], 0.0)
        assert [node.weight for node in ours.pool.fleet.nodes()] == weights


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nobody", "there is no policy 'nobody': take one of ours, oracle"),
        ("lmetric:x=1", "lmetric has no settings"),
        ("ours:prize_weight=1", "prize_weight"),
        ("ours:price_weight=much", "price_weight"),
        ("ours:access_log_delay_s=-1", "access_log_delay_s"),
        ("ours:caches=false", "caches"),
        ("oracle:weights=true", "weights"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_by_name(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policies.make(spec, seed=1, machines=FLEET, block_tokens=SIZE)


@pytest.mark.parametrize("name", policies.NAMES)
def test_every_policy_serves_every_call(name: str) -> None:
    trace = conversations(6, 3)
    results = run(trace, FLEET, policies.make(name, seed=1, machines=FLEET, block_tokens=SIZE))
    assert sorted(each.number for each in results) == list(range(18))
    assert all(each.node and each.ttft_s < 30.0 for each in results)
