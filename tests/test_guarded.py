"""From the configuration to the metrics: a guard and a second policy on live decisions."""

from __future__ import annotations

from extproc.app import apply_pools
from extproc.config import parse
from extproc.core.guard import Guard
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.shadow import Shadow
from extproc.core.types import End, Outcome, Reason, Ticket
from extproc.policies.least_ttft import LeastTtft
from extproc.policies.second import most_matched, tightened
from tests.builders import chat, pool_of
from tests.core.test_router import prompt, routed, router_of
from tests.test_telemetry import value, watched

CONFIG = """
[policy]
{policy}
[[models]]
name = "m"
nodes = [{{ name = "a", address = "10.0.0.1:8000" }}, {{ name = "b", address = "10.0.0.2:8000" }}]
"""


def applied(pools: dict[str, Pool], policy: str) -> Pool:
    apply_pools(pools, parse(CONFIG.format(policy=policy)))
    return pools["m"]


def test_the_configuration_makes_changes_and_ends_guard_and_shadow() -> None:
    pools: dict[str, Pool] = {}
    assert applied(pools, "").guard is None
    pool = applied(pools, "control_percent = 1")
    guard = pool.guard
    assert guard is not None
    assert guard.usual_share == 0.01
    assert pool.shadow is None
    pool = applied(pools, 'control_percent = 2.5\nshadow = "locality"\ncrowding = 0.3')
    assert pool.guard is guard  # what it knows is kept
    assert guard.usual_share == 0.025
    shadow = pool.shadow
    assert shadow is not None
    assert shadow.name == "locality"
    assert applied(pools, 'control_percent = 1\nshadow = "locality"').shadow is shadow
    pool = applied(pools, 'shadow = "latency"\ncontrol_percent = 0')
    assert pool.guard is None
    assert pool.shadow is not shadow
    assert applied(pools, "").shadow is None


def test_a_control_request_is_routed_as_if_nothing_were_cached_and_teaches_the_guard() -> None:
    router = router_of(2)
    pool = router.pools["m"]
    first = routed(router, prompt("a" * 40), now=0.0)
    pool.guard = Guard(0.999999, tightened(LeastTtft()))
    again = routed(router, prompt("a" * 40), now=0.01)  # the first is still there, and would have drawn it
    assert again.decision.reason is Reason.CONTROL
    assert again.decision.node != first.decision.node
    assert pool.guard.requests == 1
    router.settle(again.id, Outcome(End.SERVED, answered=True, client_ttft_s=0.2), now=0.5)
    assert pool.guard.counts(now=0.5) == (0.0, 1.0)
    router.settle(first.id, Outcome(End.SERVED, answered=True, client_ttft_s=0.2), now=0.5)
    assert pool.guard.counts(now=0.5) == (1.0, 1.0)


def test_the_same_name_is_in_the_same_group() -> None:
    def reasons(router: Router) -> dict[str, Reason]:
        router.pools["m"].guard = Guard(0.3, tightened(LeastTtft()), salt=5)
        tickets = [router.route(prompt("b" * 8), now=float(n), name=f"id-{n}") for n in range(50)]
        return {each.id: each.decision.reason for each in tickets if isinstance(each, Ticket)}

    control, other = (
        {name for name, reason in reasons(router_of(count)).items() if reason is Reason.CONTROL} for count in (2, 5)
    )
    assert 5 < len(control) < 30
    assert control == other


async def test_metrics_tell_of_both() -> None:
    pool = pool_of("n1", "n2")
    pool.guard = Guard(0.999999, tightened(LeastTtft()))
    pool.shadow = Shadow("locality", most_matched)
    async with watched({"m": pool}) as server:
        await server.ask(chat("a" * 2000))
        assert value(server, "requests_total", pool="m", reason="control", tokens="approximate") == 1
        assert value(server, "guard_tightness", pool="m") == 0.0
        assert value(server, "guard_share", pool="m") == 0.999999
        assert value(server, "guard_answers", pool="m", group="control") == 0.0
        assert value(server, "guard_ratio", pool="m", quantile="0.95") is None  # nothing to compare yet
        assert value(server, "shadow_requests_total", pool="m", policy="locality") == 1
    pool.guard = pool.shadow = None
    async with watched({"m": pool}) as server:
        assert value(server, "guard_tightness", pool="m") is None
