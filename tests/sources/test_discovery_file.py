"""Nodes from real files: read when they changed and stood still, and believed for a while when they cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import Node
from extproc.sources.discovery.file import FileSource, parse
from extproc.sources.discovery.source import Naming
from tests.builders import until
from tests.sources.discovering import common, following

LOOK_S = 0.02


def toml(*addresses: str) -> str:
    return "".join(f'[[nodes]]\naddress = "{address}"\n' for address in addresses)


def source(path: Path, *, keep_s: float = 300.0) -> FileSource:
    return FileSource(path, common(keep_s=keep_s), look_s=LOOK_S)


def put(path: Path, text: str) -> None:
    """In the place of what was there, whole."""
    path.with_suffix(".new").write_text(text, encoding="utf-8")
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (
            ".toml",
            '[[nodes]]\nname = "a"\naddress = "10.0.0.1:8000"\nweight = 2\n[[nodes]]\naddress = "[FD00::01]:80"\n',
        ),
        (".yaml", "nodes:\n- {name: a, address: '10.0.0.1:8000', weight: 2}\n- address: '[fd00::1]:80'\n"),
        (".json", '{"nodes": [{"name": "a", "address": "10.0.0.1:8000", "weight": 2}, {"address": "[fd00::1]:80"}]}'),
    ],
)
def test_each_format_says_the_same(suffix: str, text: str) -> None:
    nodes = parse(text.encode(), suffix, Naming("c-{name}"), names=False)
    assert nodes == (
        Node("a", "10.0.0.1:8000", "c-a", 2.0),
        Node("[fd00::1]:80", "[fd00::1]:80", "c-[fd00::1]:80", 1.0),
    )


def test_a_cluster_of_its_own_and_names_where_they_may_be() -> None:
    text = (
        b'[[nodes]]\naddress = "Engine-1.svc:8000"\ncluster = "c"\nzone = "z"\n[[nodes]]\naddress = "b:1"\nzone = "z"\n'
    )
    nodes = parse(text, ".toml", Naming("{ip}/{port}/{zone}"), names=True)
    assert [(node.address, node.cluster) for node in nodes] == [("engine-1.svc:8000", "c"), ("b:1", "b/1/z")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "missing required field"),
        ("nodes = 1", "Expected `array`"),
        ('[[nodes]]\naddress = "10.0.0.1:80"\ncolour = 1', "colour"),
        ('[[nodes]]\naddress = "10.0.0.1"', "not of the form ip:port"),
        ('[[nodes]]\naddress = "10.0.0.1:65536"', "not of the form ip:port"),
        ('[[nodes]]\naddress = "10.0.0.1:0"', "not of the form ip:port"),
        ('[[nodes]]\naddress = "10.0.0.256:80"', "10.0.0.256"),
        ('[[nodes]]\naddress = "fd00::1:80"', "brackets"),
        ('[[nodes]]\naddress = "engine:80"', "engine"),
        ('[[nodes]]\naddress = "10.0.0.1:80"\nweight = 0', "weight"),
        ('[[nodes]]\naddress = "10.0.0.1:80"\nweight = nan', "weight"),
        (toml("10.0.0.1:80", "10.0.0.1:80"), "given twice"),
        (toml("[fd00::1]:80", "[fd00:0::1]:80"), "given twice"),
        ('[[nodes]]\naddress = "10.0.0.1:8', "string"),
        ("nodes = " + "[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_list_of_nodes_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text.encode(), ".toml", Naming(), names=False)


@given(st.binary(max_size=200), st.sampled_from([".toml", ".yaml", ".json"]))
def test_any_bytes_are_a_list_or_a_value_error(data: bytes, suffix: str) -> None:
    try:
        nodes = parse(data, suffix, Naming(), names=True)
    except ValueError:
        return
    assert all(isinstance(node, Node) for node in nodes)


def test_yaml_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError, match="nesting depth"):
        parse(b"[" * 20_000, ".yaml", Naming(), names=False)


def test_a_file_of_another_kind_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has to end in"):
        source(tmp_path / "nodes.ini")


async def test_replacing_the_file_replaces_the_fleet(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    put(path, toml("10.0.0.1:80"))
    async with following(source(path)) as told:
        await told.until_nodes("10.0.0.1:80")
        put(path, toml("10.0.0.1:80", "10.0.0.2:80"))
        await told.until_nodes("10.0.0.1:80", "10.0.0.2:80")
        put(path, "nodes = []")
        await told.until_nodes()
        assert told.error is None


async def test_a_mounted_config_map_is_followed_through_its_links(tmp_path: Path) -> None:
    for name, address in (("first", "10.0.0.1:80"), ("second", "10.0.0.2:80")):
        (tmp_path / name).mkdir()
        put(tmp_path / name / "nodes.toml", toml(address))
    (tmp_path / "data").symlink_to("first")
    (tmp_path / "nodes.toml").symlink_to("data/nodes.toml")
    async with following(source(tmp_path / "nodes.toml")) as told:
        await told.until_nodes("10.0.0.1:80")
        (tmp_path / "new").symlink_to("second")
        (tmp_path / "new").replace(tmp_path / "data")
        await told.until_nodes("10.0.0.2:80")


async def test_a_broken_file_leaves_the_fleet_and_says_why_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    put(path, toml("10.0.0.1:80"))
    async with following(source(path)) as told:
        await told.until_nodes("10.0.0.1:80")
        put(path, toml("10.0.0.2:80")[:-4])
        await told.until_error("the fleet stays as it was")
        assert [node.address for node in told.nodes] == ["10.0.0.1:80"]
        put(path, toml("10.0.0.2:80"))
        await told.until_nodes("10.0.0.2:80")
        assert told.error is None
        assert len(told.lists) == 2


async def test_a_file_that_is_being_written_in_place_is_not_read_before_it_stands_still(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    put(path, toml("10.0.0.1:80"))
    writes: list[str] = []

    class Writing(FileSource):
        """Before each look the writer has gone on: what is there is always a whole list, of too few nodes."""

        reading = False

        def _stamp(self) -> tuple[int, ...] | None:
            if writes and not self.reading:
                path.write_text(writes.pop(0), encoding="utf-8")
            return super()._stamp()

        async def _read(self, stamp: tuple[int, ...]) -> bool:
            self.reading = True
            try:
                return await super()._read(stamp)
            finally:
                self.reading = False

    async with following(Writing(path, common(), look_s=LOOK_S)) as told:
        await told.until_nodes("10.0.0.1:80")
        addresses = [f"10.0.1.{i}:80" for i in range(20)]
        writes += [toml(*addresses[: n + 1]) for n in range(20)]
        await told.until_nodes(*addresses)
        assert len(told.lists) == 2


async def test_what_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    put(path, toml("10.0.0.1:80"))

    class Raced(FileSource):
        raced = False

        def _nodes_in(self) -> tuple[Node, ...]:
            nodes = super()._nodes_in()
            if not self.raced:
                self.raced = True
                path.write_text(toml("10.0.0.1:80", "10.0.0.2:80"), encoding="utf-8")
            return nodes

    async with following(Raced(path, common(), look_s=LOOK_S)) as told:
        await told.until_nodes("10.0.0.1:80", "10.0.0.2:80")
        assert len(told.lists) == 1


async def test_a_file_that_was_out_of_reach_and_is_the_same_is_well_again(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "nodes.toml"
    put(path, toml("10.0.0.1:80"))
    async with following(source(path)) as told:
        await told.until_nodes("10.0.0.1:80")
        (tmp_path / "here").rename(tmp_path / "away")
        await told.until_error("No such file")
        (tmp_path / "away").rename(tmp_path / "here")
        await told.until_error(None)


def test_ranks_of_an_engine_are_nodes_of_their_own() -> None:
    text = '[[nodes]]\naddress = "10.0.0.1:80"\nrank = 0\n[[nodes]]\naddress = "10.0.0.1:80"\nrank = 1\n'
    nodes = parse(text.encode(), ".toml", Naming("c"), names=False)
    assert [(each.id, each.address, each.rank) for each in nodes] == [
        ("10.0.0.1:80/0", "10.0.0.1:80", 0),
        ("10.0.0.1:80/1", "10.0.0.1:80", 1),
    ]


async def test_the_nodes_of_a_file_that_is_gone_stay_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    put(path, toml("10.0.0.1:80"))
    async with following(source(path, keep_s=0.3)) as told:
        await told.until_nodes("10.0.0.1:80")
        text = path.read_text(encoding="utf-8")
        path.unlink()
        await told.until_error("No such file")
        assert told.nodes
        await told.until_nodes()
        path.write_text(text, encoding="utf-8")
        await told.until_nodes("10.0.0.1:80")
        assert told.error is None


async def test_a_file_that_comes_back_in_time_has_changed_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    put(path, toml("10.0.0.1:80"))
    async with following(source(path)) as told:
        await told.until_nodes("10.0.0.1:80")
        for _ in range(5):
            path.rename(tmp_path / "away")
            await told.until_error("No such file")
            (tmp_path / "away").rename(path)
            await told.until_error(None)
        assert len(told.lists) == 1


async def test_a_file_that_comes_late_is_found(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with following(source(path)) as told:
        await told.until_error("No such file")
        put(path, json.dumps({"nodes": [{"address": "10.0.0.1:80"}]}))
        await told.until_nodes("10.0.0.1:80")


@pytest.mark.parametrize("kind", ["pipe", "folder"])
async def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nodes.toml"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    async with following(source(path)) as told:
        await told.until_error("not a regular file")


async def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    path.touch()
    os.truncate(path, 1 << 30)
    async with following(source(path)) as told:
        await told.until_error("larger than 4 MiB")


async def test_what_breaks_one_look_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours costs what a failing source costs."""
    path = tmp_path / "nodes.toml"
    put(path, toml("10.0.0.1:80"))
    monkeypatch.setattr("extproc.sources.discovery.source._RESTART_S", 0.01)

    class Buggy(FileSource):
        bugs = 1

        def _nodes_in(self) -> tuple[Node, ...]:
            if self.bugs:
                self.bugs -= 1
                raise KeyError("x")
            return super()._nodes_in()

    async with following(Buggy(path, common(), look_s=LOOK_S)) as told:
        await told.until_nodes("10.0.0.1:80")
        await until(lambda: told.error is None)
