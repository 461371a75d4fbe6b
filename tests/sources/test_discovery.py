"""Several sources for each pool: how their nodes are merged, and what a reload does to them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import Node
from extproc.sources.discovery.discovery import Discovery, Wanted, merge
from extproc.sources.discovery.source import BackOff, Naming, Publish, Reporting, SourceState, joined, split
from tests.builders import until
from tests.sources.discovering import common, following


def node(address: str, node_id: str = "") -> Node:
    return Node(node_id or address, address, f"c-{address}")


@dataclass(slots=True)
class Scripted:
    """A source that says what the test tells it to."""

    publish: Publish | None = None
    ended: bool = False

    async def run(self, publish: Publish) -> None:
        self.publish = publish
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True

    def state(self) -> SourceState:
        return SourceState("scripted", 0, None, "it fails")

    async def says(self, *nodes: Node) -> None:
        await until(lambda: self.publish is not None)
        assert self.publish is not None
        self.publish(nodes)


@dataclass(slots=True)
class Applied:
    discovery: Discovery = field(init=False)
    lists: dict[str, list[tuple[Node, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.discovery = Discovery(lambda name, nodes: self.lists.setdefault(name, []).append(nodes))

    def addresses(self, pool: str = "m") -> list[str]:
        return [node.address for node in self.lists[pool][-1]]


def from_(**sources: Scripted) -> dict[object, Callable[[], Scripted]]:
    return {key: (lambda source=source: source) for key, source in sources.items()}


async def test_static_nodes_are_there_at_once_and_those_of_sources_follow_in_their_order() -> None:
    a, b, applied = Scripted(), Scripted(), Applied()
    applied.discovery.replace({"m": Wanted((node("s:1"),), from_(a=a, b=b)), "n": Wanted()})
    assert (applied.addresses(), applied.addresses("n")) == (["s:1"], [])
    await b.says(node("b:1"), node("s:1", "other"))
    await a.says(node("a:1"))
    assert applied.addresses() == ["s:1", "a:1", "b:1"]
    assert applied.lists["m"][-1][0].id == "s:1", "the first that names an address describes it"
    await a.says()
    assert applied.addresses() == ["s:1", "b:1"]
    await applied.discovery.close()
    assert a.ended
    assert b.ended
    assert applied.addresses() == ["s:1", "b:1"], "closing takes nothing away"


async def test_a_source_that_stays_in_the_configuration_goes_on() -> None:
    a, other, applied = Scripted(), Scripted(), Applied()
    applied.discovery.replace({"m": Wanted((), from_(a=a))})
    await a.says(node("a:1"))
    applied.discovery.replace({"m": Wanted((node("s:1"),), from_(a=other))})
    assert applied.addresses() == ["s:1", "a:1"]
    assert not a.ended
    assert other.publish is None
    await applied.discovery.close()


async def test_nodes_of_a_source_that_was_replaced_stay_until_the_new_one_has_spoken() -> None:
    old, new, applied = Scripted(), Scripted(), Applied()
    applied.discovery.replace({"m": Wanted((), from_(old=old))})
    await old.says(node("a:1"), node("a:2"))
    applied.discovery.replace({"m": Wanted((), from_(new=new))})
    assert applied.addresses() == ["a:1", "a:2"]
    await until(lambda: old.ended)
    told = len(applied.lists["m"])
    await old.says(node("a:3"))
    assert len(applied.lists["m"]) == told, "who was taken away has no say"
    assert applied.addresses() == ["a:1", "a:2"]
    await new.says(node("a:2"))
    assert applied.addresses() == ["a:2"]
    await applied.discovery.close()


async def test_nodes_of_a_source_that_was_taken_away_go_at_once() -> None:
    a, b, applied = Scripted(), Scripted(), Applied()
    applied.discovery.replace({"m": Wanted((), from_(a=a, b=b))})
    await a.says(node("a:1"))
    await b.says(node("b:1"))
    applied.discovery.replace({"m": Wanted((), from_(b=b))})
    assert applied.addresses() == ["b:1"]
    applied.discovery.replace({})
    await until(lambda: a.ended and b.ended)
    await b.says(node("b:2"))
    assert applied.addresses() == ["b:1"], "a pool that is gone is told nothing"
    await applied.discovery.close()


async def test_states_are_told_by_pool_and_flapping_leaves_nothing_behind() -> None:
    applied, before = Applied(), asyncio.all_tasks()
    for i in range(200):
        source = Scripted()
        applied.discovery.replace({"m": Wanted((), from_(**{f"s{i}": source}))})
        await source.says(node("a:1"))
    assert [state.error for state in applied.discovery.state()["m"]] == ["it fails"]
    assert applied.addresses() == ["a:1"]
    await until(lambda: len(asyncio.all_tasks() - before) == 1)
    await applied.discovery.close()
    assert asyncio.all_tasks() == before
    assert applied.discovery.state() == {}


NODES = st.builds(
    lambda i, port, rank: Node(i, f"10.0.0.1:{port}", "c", 1.0, rank),
    st.sampled_from(["a", "b", "a@10.0.0.1:2"]),
    st.integers(1, 3),
    st.sampled_from([None, 0, 1]),
)


@given(st.lists(st.lists(NODES)))
def test_merged_nodes_have_an_address_and_an_id_of_their_own(groups: list[list[Node]]) -> None:
    merged = merge(groups)
    flat = [each for group in groups for each in group]
    assert len({each.id for each in merged}) == len(merged)
    assert [(each.address, each.rank) for each in merged] == list(
        dict.fromkeys((each.address, each.rank) for each in flat)
    )
    for each in merged:
        first = next(other for other in flat if (other.address, other.rank) == (each.address, each.rank))
        assert each.id == first.id or each.id.startswith(f"{first.id}@")


# ---- what sources share ----


class Obedient(Reporting):
    async def _follow(self) -> None:
        await asyncio.Event().wait()

    async def well(self, *addresses: str) -> None:
        self._found(tuple(map(node, addresses)))

    async def ill(self, why: str = "broken") -> None:
        self._failed(why)


async def test_a_failing_source_keeps_its_nodes_for_the_time_set_and_not_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "extproc.sources.discovery")
    source = Obedient("it", common(keep_s=0.1))
    async with following(source) as told:
        await asyncio.sleep(0)
        await source.well("a:1")
        for _ in range(20):
            await source.ill()
        assert told.nodes
        assert told.error == "broken"
        await source.well("a:1")
        await asyncio.sleep(0.15)
        assert told.nodes, "it recovered in time"
        await source.ill()
        await told.until_nodes()
        assert source.state().last_good_s is not None
        await source.well("a:1")
        assert [len(each) for each in told.lists] == [1, 0, 1]
    said = [record.message for record in caplog.records]
    assert [line.split()[0] for line in said] == ["it:", "it", "it:", "it", "it"], said


async def test_a_source_that_never_knew_anything_says_so_when_its_time_is_over() -> None:
    source = Obedient("it", common(keep_s=0.05))
    async with following(source) as told:
        await asyncio.sleep(0)
        await source.ill()
        assert told.lists == []
        await until(lambda: told.lists == [()])


async def test_a_source_that_was_cancelled_says_nothing_more() -> None:
    source = Obedient("it", common(keep_s=0.02))
    async with following(source) as told:
        await asyncio.sleep(0)
        await source.well("a:1")
        await source.ill()
    await asyncio.sleep(0.05)
    assert len(told.lists) == 1


async def test_waits_double_to_a_bound_and_are_shortened_by_half_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def note(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("extproc.sources.discovery.source.asyncio.sleep", note)
    wait = BackOff(random.Random(1), first_s=1.0, most_s=6.0)
    for _ in range(6):
        await wait.wait()
    wait.reset()
    await wait.wait()
    for seconds, full in zip(waited, [1, 2, 4, 6, 6, 6, 1], strict=True):
        assert full / 2 <= seconds <= full
    assert len(set(waited)) == len(waited)


@pytest.mark.parametrize(
    ("template", "cluster"),
    [
        ("{name}", "pod"),
        ("{address}", "[fd00::1]:80"),
        ("outbound|{port}||{name}.{zone}", "outbound|80||pod.z"),
        ("{host}/{ip}", "h/[fd00::1]"),
    ],
)
def test_a_cluster_is_named_by_the_template(template: str, cluster: str) -> None:
    made = Naming(template, 2.0).node("id", "FD00:0::1", 80, name="pod", zone="z", host="h")
    assert made == Node("id", "[fd00::1]:80", cluster, 2.0)


@pytest.mark.parametrize("template", ["{nam}", "{", "{0}", "{name.x}", "{port:s}"])
def test_what_is_no_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="no template"):
        Naming(template)


@given(st.ip_addresses(), st.integers(1, 65535))
def test_what_is_joined_can_be_split(ip: object, port: int) -> None:
    text = joined(str(ip), port)
    host, again = split(text)
    assert joined(host, again) == text
    assert again == port


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    try:
        host, port = split(text, names=True)
    except ValueError:
        return
    assert host
    assert 0 < port < 65536
