"""The event loop: who is asked when, what they see, and what becomes of calls when nodes come and go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from extproc.lab.replay.capacity import capacity
from extproc.lab.replay.simulation import RETRY_S, Joining, Outage, run, trace_rate
from extproc.lab.replay.types import Call, Machine, NodeView, Trace
from tests.lab.replay.naive_node import call

SIZE = 4
FLEET = [Machine("a", 1000.0, 10_000), Machine("b", 1000.0, 10_000)]


class Told:
    """A balancer that does as it is told, and writes down what it hears."""

    def __init__(self, choose: Callable[[int, Sequence[NodeView]], int | None]) -> None:
        self.choose = choose
        self.heard: list[tuple[str, int, float]] = []
        self.names: list[list[str]] = []
        self.views: list[list[NodeView]] = []

    def route(self, number: int, call: Call, nodes: Sequence[NodeView], now: float) -> int | None:
        self.heard.append(("route", number, now))
        self.views.append(list(nodes))
        return self.choose(number, nodes)

    def first_token(self, number: int, call: Call, node: int, now: float) -> None:
        self.heard.append(("first", number, now))

    def done(self, number: int, call: Call, node: int, now: float, *, ok: bool) -> None:
        self.heard.append(("done" if ok else "failed", number, now))

    def nodes_changed(self, names: Sequence[str], now: float) -> None:
        self.names.append(list(names))


def always(node: int | None) -> Told:
    return Told(lambda number, nodes: node)


def trace(*calls: Call, size: int = SIZE) -> Trace:
    return Trace("test", size, calls)


def test_a_call_is_routed_answered_and_over_in_the_order_of_time() -> None:
    balancer = always(1)
    (result,) = run(trace(call("abc", answer_tokens=3, at_s=0.5)), FLEET, balancer)
    ttft_s = 0.012 + 0.008
    assert (result.number, result.node, result.arrived_s, result.attempts) == (0, "b", 0.5, 1)
    assert result.ttft_s == pytest.approx(ttft_s, abs=1e-5)
    assert result.done_s == pytest.approx(0.5 + ttft_s + 2 * 0.00801, abs=1e-5)
    assert [what for what, _, _ in balancer.heard] == ["route", "first", "done"]
    assert balancer.names == [["a", "b"]]


def test_the_rate_compresses_times_and_pauses_alike() -> None:
    calls = (
        call("a"),
        call("ab", at_s=10.0)._replace(after=0, pause_s=10.0),
        call("abc", at_s=30.0)._replace(after=1, pause_s=20.0),
        call("x", at_s=40.0),
    )
    assert trace_rate(trace(*calls)) == 0.1
    results = {each.number: each for each in run(trace(*calls), FLEET, always(0), rate=0.2)}
    assert results[3].arrived_s == 20.0
    assert results[1].arrived_s == pytest.approx(results[0].done_s + 5.0)
    assert results[2].arrived_s == pytest.approx(results[1].done_s + 10.0)


def test_what_follows_a_call_that_was_shed_comes_all_the_same() -> None:
    calls = (call("a"), call("ab", at_s=1.0)._replace(after=0, pause_s=1.0))
    results = run(trace(*calls), FLEET, Told(lambda number, nodes: None if number == 0 else 0))
    assert [(each.node, each.ttft_s < math.inf) for each in results] == [("", False), ("a", True)]
    assert results[1].arrived_s == 1.0


def test_a_balancer_sees_the_last_scrape() -> None:
    calls = [call("a" * 100, answer_tokens=100, at_s=at_s) for at_s in (0.21, 0.22, 0.61)]
    balancer = always(0)
    run(trace(*calls), FLEET, balancer)
    first, second, third = (views[0] for views in balancer.views)
    assert (first.running, second.running, second.waiting) == (0, 0, 0)
    assert second.age_s == pytest.approx(0.02)
    assert (third.running, third.waiting, third.up) == (1, 1, True)
    assert third.age_s == pytest.approx(0.01)
    assert third.kv_usage == pytest.approx(400 / 10_000)


def test_a_call_whose_node_dies_is_routed_again_and_its_time_goes_on() -> None:
    calls = [call("a" * 100, at_s=0.1), call("b", at_s=0.35)]
    balancer = Told(lambda number, nodes: 1 if len(balancer.heard) > 1 else 0)
    first, second = sorted(run(trace(*calls), FLEET, balancer, incidents=[Outage("a", 0.3)]))
    assert (first.node, first.attempts, second.attempts) == ("b", 2, 1)
    assert ("failed", 0, 0.3) in balancer.heard
    assert ("route", 0, 0.3 + RETRY_S) in balancer.heard
    assert first.ttft_s == pytest.approx(0.3 + RETRY_S - 0.1 + 0.408, abs=0.02)


def test_a_call_that_fails_twice_has_failed() -> None:
    balancer = always(0)
    (result,) = run(trace(call("a", at_s=0.5)), FLEET, balancer, incidents=[Outage("a", 0.3)])
    assert (result.node, result.ttft_s, result.attempts) == ("a", math.inf, 2)
    assert result.done_s == 0.5 + RETRY_S


def test_that_a_node_is_down_shows_with_the_next_scrape_and_that_it_is_back_as_well() -> None:
    calls = [call("a", at_s=at_s) for at_s in (0.25, 0.35, 0.45, 1.05, 1.15, 1.25)]
    balancer = always(1)
    run(trace(*calls), FLEET, balancer, incidents=[Outage("a", 0.3, 1.1)])
    seen = [views[0] for views in balancer.views]
    assert [view.up for view in seen] == [True, True, False, False, False, True]
    assert [round(view.age_s, 6) for view in seen] == [0.05, 0.15, 0.25, 0.85, 0.95, 0.05]


def test_a_node_that_comes_back_holds_nothing() -> None:
    calls = [call("abc", at_s=at_s) for at_s in (0.1, 0.3, 1.0)]
    results = run(trace(*calls), FLEET, always(0), incidents=[Outage("a", 0.5, 0.9)])
    assert [each.cached_tokens for each in results] == [0, 2 * SIZE, 0]


def test_a_node_that_joins_is_announced_and_used() -> None:
    balancer = Told(lambda number, nodes: len(nodes) - 1)
    calls = [call("a", at_s=at_s) for at_s in (0.1, 0.6)]
    results = run(trace(*calls), FLEET, balancer, incidents=[Joining(Machine("c"), 0.5)])
    assert [each.node for each in results] == ["b", "c"]
    assert balancer.names == [["a", "b"], ["a", "b", "c"]]


def test_at_the_limit_what_is_not_answered_has_failed() -> None:
    calls = [call("a", answer_tokens=500, at_s=0.1), call("b" * 1000, at_s=0.2), call("c", at_s=9.0)]
    results = sorted(run(trace(*calls), FLEET, always(0), limit_s=1.0))
    assert [each.number for each in results] == [0, 1]
    assert [each.done_s for each in results] == [math.inf, math.inf]
    assert results[0].ttft_s < 0.1
    assert results[1].ttft_s == math.inf


@pytest.mark.parametrize(
    ("machines", "incidents", "rate", "message"),
    [
        ([], [], None, "no node"),
        ([FLEET[0], FLEET[0]], [], None, "one name"),
        (FLEET, [Outage("z", 1.0)], None, "no node is called z"),
        (FLEET, [Outage("c", 1.0), Joining(Machine("c"), 2.0)], None, "before it joins"),
        (FLEET, [Outage("a", 1.0, 5.0), Outage("a", 4.0)], None, "while it is down"),
        ([Machine("a", cache_tokens=15)], [], None, "does not fit"),
        (FLEET, [], 0.0, "above 0"),
    ],
)
def test_what_cannot_be_run_is_refused(
    machines: list[Machine], incidents: list[Outage | Joining], rate: float | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(trace(call("abc", answer_tokens=4)), machines, always(0), incidents=incidents, rate=rate)


def _strangers(count: int) -> Trace:
    """Calls of 1,000 tokens that have nothing in common."""
    calls = []
    for number in range(count):
        stranger = b"".join((number * 250 + i + 1).to_bytes(8) for i in range(250))
        calls.append(Call(number * 1.0, 1000, 1, stranger, b""))
    return Trace("strangers", SIZE, calls)


def test_capacity_is_what_the_prefill_of_all_nodes_allows() -> None:
    strangers = _strangers(400)
    one, two = Machine("a", 1000.0, 20_000), Machine("b", 1000.0, 20_000, speed=0.5)
    # a step of 8192 tokens: eight prompts, and its fixed cost once
    assert capacity(strangers, [one]) == pytest.approx(1.0, rel=0.03)
    assert capacity(strangers, [one, two]) == pytest.approx(1.5, rel=0.03)


def test_capacity_grows_with_what_is_shared() -> None:
    apart = _strangers(200)
    shared = [each._replace(chain=apart.calls[0].chain[:1000] + each.chain[1000:]) for each in apart.calls]
    machines = [Machine("a", 1000.0, 20_000), Machine("b", 1000.0, 20_000)]
    assert capacity(Trace("shared", SIZE, shared), machines) == pytest.approx(2 * capacity(apart, machines), rel=0.05)


def test_capacity_is_that_of_a_router_that_knows_where_prompts_are() -> None:
    """Eight prefixes of 900 tokens, of which each node has room for half."""
    calls = []
    for number, each in enumerate(_strangers(400).calls):
        prefix = _strangers(number * 5 % 8 + 1).calls[-1].chain[:1800]
        calls.append(each._replace(chain=prefix + each.chain[1800:]))
    machines = [Machine("a", 1000.0, 6_000), Machine("b", 1000.0, 6_000)]
    # 100 tokens of each remain, and 6 % for fixed costs; by the shortest queue alone it would be 16.6 a second
    assert capacity(Trace("prefixes", SIZE, calls), machines) == pytest.approx(18.8, rel=0.01)


def test_at_half_of_the_capacity_queues_stay_short_and_beyond_it_they_do_not() -> None:
    strangers = _strangers(400)
    full = capacity(strangers, FLEET)
    waits = []
    for load in (0.5, 1.3):
        turns = Told(lambda number, nodes: number % 2)
        waits.append(max(each.ttft_s for each in run(strangers, FLEET, turns, rate=load * full)))
    assert waits[0] < 1.2
    assert waits[1] > 20.0
