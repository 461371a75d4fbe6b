"""Nodes from EndpointSlices, against a server that replays what the API server sends."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import Node
from extproc.sources.discovery.endpoint_slices import Endpoints, EndpointSlices, Slice, nodes_of
from extproc.sources.discovery.kubernetes import ApiServer
from extproc.sources.discovery.source import Naming
from tests.builders import until
from tests.sources.discovering import common, following
from tests.sources.kubernetes_api import (
    GONE,
    SLICES,
    Collection,
    FakeApi,
    bookmark,
    endpoint,
    endpoint_slice,
    fake_api,
)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as made:
        made.put(SLICES)
        yield made


def source(
    api: FakeApi,
    *,
    token: Path | None = None,
    ca: Path | None = None,
    keep_s: float = 300.0,
    quiet_s: float = 60.0,
    timeout_s: float = 5.0,
    **endpoints: Any,
) -> EndpointSlices:
    server = ApiServer(api.url, token, ca, timeout_s, quiet_s)
    return EndpointSlices(server, Endpoints("llm", **({"service": "vllm"} | endpoints)), common(keep_s=keep_s))


# ---- which endpoints are nodes ----


def read(*slices: dict[str, Any]) -> list[Slice]:
    return [msgspec.json.decode(json.dumps(each), type=Slice) for each in slices]


def addresses(*slices: dict[str, Any], port: str | int | None = None, family: str = "any") -> list[str]:
    return [node.address for node in nodes_of(read(*slices), port, Naming(), family=family)[0]]


def test_an_endpoint_becomes_a_node_with_what_names_it() -> None:
    slices = read(endpoint_slice("s", endpoint("10.0.0.1", "vllm-0")))
    nodes, problem = nodes_of(slices, None, Naming("{name}/{address}/{zone}/{host}"))
    assert nodes == (Node("vllm-0", "10.0.0.1:8000", "vllm-0/10.0.0.1:8000/zone-a/gpu-1"),)
    assert problem is None


@pytest.mark.parametrize(
    ("conditions", "usable"),
    [
        ({}, True),
        ({"ready": True}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False, "serving": False, "terminating": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),  # drains
        ({"ready": False, "serving": False, "terminating": True}, False),
        ({"ready": True, "serving": False, "terminating": False}, False),  # publishNotReadyAddresses
        ({"ready": True, "serving": True, "terminating": True}, False),  # ... of one that drains
        ({"ready": None, "serving": None, "terminating": None}, True),
    ],
)
def test_only_what_is_ready_and_stays_is_used(conditions: dict[str, bool | None], usable: bool) -> None:
    made = endpoint("10.0.0.1") | {"conditions": conditions}
    assert addresses(endpoint_slice("s", made)) == (["10.0.0.1:8000"] if usable else [])


BOTH = (("http", 8000), ("metrics", 9090))


@pytest.mark.parametrize(
    ("ports", "port", "number"),
    [
        ((("http", 8000),), None, 8000),
        ((("", 8000),), None, 8000),
        (((None, 8000),), None, 8000),
        (BOTH, "http", 8000),
        (BOTH, "metrics", 9090),
        (BOTH, 9090, 9090),
        (BOTH, None, None),
        (BOTH, "grpc", None),
        (BOTH, 80, None),
        ((), None, None),
        (None, 8000, 8000),
        (None, "http", None),
    ],
)
def test_the_port_is_chosen_by_name_or_number(ports: Any, port: str | int | None, number: int | None) -> None:
    nodes, problem = nodes_of(read(endpoint_slice("s", endpoint("10.0.0.1"), ports=ports)), port, Naming())
    assert [each.address for each in nodes] == ([] if number is None else [f"10.0.0.1:{number}"])
    assert (problem is None) == (number is not None)


def test_a_pod_in_several_slices_is_one_node() -> None:
    first = endpoint_slice("a", endpoint("10.0.0.1", "p1"), endpoint("10.0.0.2", "p2", ready=False))
    second = endpoint_slice("b", endpoint("10.0.0.2", "p2"), endpoint("10.0.0.1", "p1"), endpoint("10.0.0.3", "p3"))
    assert addresses(first, second) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("any", ["10.0.0.1:8000", "[fd00::2]:8000"]),
        ("ipv4", ["10.0.0.1:8000"]),
        ("ipv6", ["[fd00::1]:8000", "[fd00::2]:8000"]),
    ],
)
def test_a_pod_with_an_address_of_each_family_is_one_node(family: str, found: list[str]) -> None:
    six = endpoint_slice("a", endpoint("fd00::1", "p1"), endpoint("fd00::2", "p2"), family="IPv6")
    four = endpoint_slice("b", endpoint("10.0.0.1", "p1"))
    names = endpoint_slice("c", endpoint("example.com", "p3"), family="FQDN")
    assert addresses(six, four, names, family=family) == found


def test_an_address_that_is_none_is_left_out_and_told() -> None:
    nodes, problem = nodes_of(read(endpoint_slice("s", endpoint("x"), endpoint("10.0.0.1"))), None, Naming())
    assert [each.address for each in nodes] == ["10.0.0.1:8000"]
    assert "'x'" in (problem or "")


@given(st.permutations(range(6)))
def test_the_order_in_which_slices_are_listed_says_nothing(order: list[int]) -> None:
    slices = [endpoint_slice(f"s{i}", endpoint(f"10.0.0.{i // 2}", f"p{i // 2}", uid=f"u{i // 2}")) for i in range(6)]
    assert addresses(*(slices[i] for i in order)) == [f"10.0.0.{i}:8000" for i in range(3)]


@pytest.mark.parametrize(
    ("service", "selector", "labels"),
    [
        ("vllm", "", "kubernetes.io/service-name=vllm"),
        (None, "app=vllm,tier in (a,b)", "app=vllm,tier in (a,b)"),
        ("vllm", "app=x", "kubernetes.io/service-name=vllm,app=x"),
    ],
)
async def test_the_server_is_asked_for_these_slices_alone(
    api: FakeApi, service: str | None, selector: str, labels: str
) -> None:
    async with following(source(api, service=service, selector=selector)):
        watch = await api.watch(SLICES)
        assert api.lists == [(SLICES, {"limit": "50", "labelSelector": labels})]
        seconds = int(watch.params.pop("timeoutSeconds"))
        assert 60 < seconds < 600
        assert watch.params == {
            "labelSelector": labels,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": "100",
        }


def test_all_endpoints_of_a_namespace_are_refused() -> None:
    with pytest.raises(ValueError, match="a service or a selector"):
        EndpointSlices(ApiServer("http://127.0.0.1:1"), Endpoints("llm"), common())


# ---- list and watch ----


async def test_what_is_listed_and_what_changes_is_followed(api: FakeApi) -> None:
    api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1"), endpoint("10.0.0.2", "p2")))
    async with following(source(api)) as told:
        await told.until_nodes("10.0.0.1:8000", "10.0.0.2:8000")
        watch = await api.watch(SLICES)
        watch.sends(("ADDED", endpoint_slice("s2", endpoint("10.0.0.3", "p3"), version=101)))
        await told.until_nodes("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
        draining = endpoint("10.0.0.1", "p1", ready=False, serving=True, terminating=True)
        watch.sends(("MODIFIED", endpoint_slice("s1", draining, endpoint("10.0.0.2", "p2"), version=102)))
        await told.until_nodes("10.0.0.2:8000", "10.0.0.3:8000")
        watch.sends(("DELETED", endpoint_slice("s1", draining, endpoint("10.0.0.2", "p2"), version=103)))
        await told.until_nodes("10.0.0.3:8000")
        watch.sends(("DELETED", endpoint_slice("s2", endpoint("10.0.0.3", "p3"), version=104)))
        await told.until_nodes()
        assert told.error is None, "the API server says that there is nobody, and it knows"
    await until(lambda: api.open == 0)


async def test_a_watch_that_ends_goes_on_from_the_last_version_without_listing(api: FakeApi) -> None:
    api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1")))
    async with following(source(api)) as told:
        first = await api.watch(SLICES)
        first.sends(bookmark(150))
        first.ends()
        second = await api.watch(SLICES)
        assert second.params["resourceVersion"] == "150"
        second.sends(("MODIFIED", endpoint_slice("s1", endpoint("10.0.0.2", "p2"), version=160)))
        second.ends()
        third = await api.watch(SLICES)
        assert third.params["resourceVersion"] == "160"
        assert api.listed(SLICES) == 1
        await told.until_nodes("10.0.0.2:8000")
        assert told.error is None


async def test_half_a_line_at_a_disconnect_is_dropped_and_comes_again(api: FakeApi) -> None:
    api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1")))
    event = json.dumps({"type": "MODIFIED", "object": endpoint_slice("s1", endpoint("10.0.0.2", "p"), version=101)})
    async with following(source(api)) as told:
        first = await api.watch(SLICES)
        first.sends_bytes(event.encode()[:200])
        first.breaks()
        second = await api.watch(SLICES)
        assert second.params["resourceVersion"] == "100"
        assert [node.address for node in told.nodes] == ["10.0.0.1:8000"]
        for at in range(0, len(event), 50):  # lines come in any pieces, several at once included
            second.sends_bytes(event.encode()[at : at + 50])
        again = event.replace("10.0.0.2", "10.0.0.3").replace('"101"', '"102"')
        second.sends_bytes(b"\n" + again.encode() + b"\n\n")
        await told.until_nodes("10.0.0.3:8000")
        second.ends()
        assert (await api.watch(SLICES)).params["resourceVersion"] == "102"


@pytest.mark.parametrize("how", ["event", "answer"])
async def test_what_was_missed_is_made_up_for_by_a_new_list(api: FakeApi, how: str) -> None:
    api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1")), endpoint_slice("s2", endpoint("10.0.0.2", "p2")))
    async with following(source(api)) as told:
        first = await api.watch(SLICES)
        # s1 goes and s3 comes while nobody watches, and the server has forgotten since
        api.put(
            SLICES, endpoint_slice("s2", endpoint("10.0.0.2", "p2")), endpoint_slice("s3", endpoint("10.0.0.3", "p3"))
        )
        api.collections[SLICES].version = "205"
        if how == "event":
            first.sends(("ERROR", GONE))
        else:
            refused = api.refused_watches[SLICES] = Collection()
            refused.refuses(410, "Expired", "too old resource version: 100 (205)")
            first.ends()
            await until(lambda: api.listed(SLICES) > 1)
            refused.allows()
        await told.until_nodes("10.0.0.2:8000", "10.0.0.3:8000")
        assert (await api.watch(SLICES)).params["resourceVersion"] == "205"
        assert told.error is None


async def test_a_server_that_forgets_at_once_is_not_hammered(api: FakeApi) -> None:
    api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1")))
    api.refused_watches[SLICES] = Collection()
    api.refused_watches[SLICES].refuses(410, "Expired", "too old")
    async with following(source(api)) as told:
        await told.until_nodes("10.0.0.1:8000")
        await asyncio.sleep(2.0)
        assert 3 <= api.listed(SLICES) <= 9
        assert told.nodes


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": {"metadata": {"name": 1}}}',
        b'{"type": "ADDED", "object": {"metadata": {"name": "s9"}, "endpoints": [{"addresses": "x"}]}}',
        b'{"type": "BOOKMARK", "object": null}',
        b"\xff\xfe",
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}',
    ],
)
async def test_an_event_that_cannot_be_read_leads_to_a_new_list(api: FakeApi, line: bytes) -> None:
    api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1")))
    async with following(source(api)) as told:
        watch = await api.watch(SLICES)
        api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.2", "p2")), version="300")
        watch.sends_bytes(line + b"\n")
        await told.until_nodes("10.0.0.2:8000")
        assert (await api.watch(SLICES)).params["resourceVersion"] == "300"
        await told.until_error(None)


async def test_an_event_of_an_unknown_type_is_passed_over(api: FakeApi) -> None:
    async with following(source(api)) as told:
        watch = await api.watch(SLICES)
        watch.sends(("RENAMED", {}), ("ADDED", endpoint_slice("s1", endpoint("10.0.0.1", "p1"))))
        await told.until_nodes("10.0.0.1:8000")
        assert api.listed(SLICES) == 1


async def test_a_long_list_comes_in_pages_and_begins_anew_when_it_expires_between(api: FakeApi) -> None:
    collection = api.put(SLICES, *(endpoint_slice(f"s{i}", endpoint(f"10.0.0.{i}", f"p{i}")) for i in range(120)))
    collection.expired_page = True
    async with following(source(api)) as told:
        await told.until_nodes(*(f"10.0.0.{i}:8000" for i in range(120)))
        asked = [params.get("continue") for _, params in api.lists]
        assert asked == [None, "50", None, "50", "100"]


async def test_a_watch_that_has_died_without_a_word_is_given_up(api: FakeApi) -> None:
    async with following(source(api, quiet_s=0.2)) as told:
        first = await api.watch(SLICES)
        second = await api.watch(SLICES)
        assert second is not first
        second.sends(("ADDED", endpoint_slice("s1", endpoint("10.0.0.1", "p1"))))
        await told.until_nodes("10.0.0.1:8000")
        assert api.listed(SLICES) == 1
        await until(lambda: api.open <= 1)


async def test_what_may_not_be_read_says_which_right_is_missing_and_works_once_it_is_there(api: FakeApi) -> None:
    said = 'endpointslices.discovery.k8s.io is forbidden: User "system:serviceaccount:llm:default" cannot list'
    api.collections[SLICES].refuses(403, "Forbidden", said)
    async with following(source(api)) as told:
        await told.until_error("not allowed to list endpointslices.discovery.k8s.io in namespace llm")
        for part in ('apiGroups: ["discovery.k8s.io"]', 'resources: ["endpointslices"]', '"watch"', "serviceaccount"):
            assert part in (told.error or "")
        api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1"))).allows()
        await told.until_nodes("10.0.0.1:8000")
        assert told.error is None


async def test_a_watch_that_may_not_be_opened_says_so_and_leaves_the_fleet(api: FakeApi) -> None:
    api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1")))
    api.refused_watches[SLICES] = Collection()
    api.refused_watches[SLICES].refuses(403, "Forbidden", "no")
    async with following(source(api)) as told:
        await told.until_error("not allowed to watch")
        assert told.nodes
        api.refused_watches.clear()
        await told.until_error(None)
        assert len(told.lists) == 1


async def test_a_token_that_was_replaced_is_used_at_the_next_request(api: FakeApi, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n", encoding="ascii")
    api.tokens = {"first"}
    async with following(source(api, token=token)) as told:
        watch = await api.watch(SLICES)
        assert watch.headers["Authorization"] == "Bearer first"
        api.tokens = {"second"}
        watch.ends()
        await told.until_error("does not accept the token")
        token.write_text("second\n", encoding="ascii")
        assert (await api.watch(SLICES)).headers["Authorization"] == "Bearer second"
        await told.until_error(None)


async def test_without_its_token_it_says_which_file_is_missing(api: FakeApi, tmp_path: Path) -> None:
    async with following(source(api, token=tmp_path / "token")) as told:
        await told.until_error(f"the token {tmp_path / 'token'} cannot be read")


async def test_a_server_that_is_away_keeps_the_fleet_for_the_time_set() -> None:
    async with fake_api() as api:
        api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1")))
        running = source(api, keep_s=0.5)
        async with following(running) as told:
            watch = await api.watch(SLICES)
            api.collections[SLICES].refuses(503, "ServiceUnavailable", "etcdserver: leader changed")
            api.refused_watches[SLICES] = api.collections[SLICES]
            watch.breaks()
            await told.until_error("503")
            assert told.nodes
            await told.until_nodes()
            api.refused_watches.clear()
            await told.until_nodes("10.0.0.1:8000")
            assert told.error is None


async def test_a_server_that_cannot_be_reached_is_named() -> None:
    async with fake_api() as api:
        pass
    async with following(source(api)) as told:
        await told.until_error(api.url)
        assert "Connect" in (told.error or "")


async def test_a_server_that_does_not_answer_is_given_up_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with following(source(FakeApi(f"http://127.0.0.1:{port}"), timeout_s=0.2)) as told:
            await told.until_error("does not answer in time")


async def test_a_missing_port_is_said_and_a_port_that_comes_is_used(api: FakeApi) -> None:
    api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1"), ports=BOTH))
    async with following(source(api)) as told:
        await told.until_error("s1 has not one port: its ports are http 8000, metrics 9090")
        (await api.watch(SLICES)).sends(("MODIFIED", endpoint_slice("s1", endpoint("10.0.0.1", "p1"), version=101)))
        await told.until_nodes("10.0.0.1:8000")
        assert told.error is None


async def test_flapping_ends_where_the_api_does(api: FakeApi) -> None:
    async with following(source(api)) as told:
        watch = await api.watch(SLICES)
        for i in range(1000):
            flapping = endpoint("10.0.0.1", "p1", ready=bool(i % 2))
            watch.sends(("MODIFIED", endpoint_slice("s1", flapping, version=200 + i)))
        watch.sends(("MODIFIED", endpoint_slice("s1", endpoint("10.0.0.2", "p2"), version=2000)))
        await told.until_nodes("10.0.0.2:8000")
        assert api.listed(SLICES) == 1
        assert all(a != b for a, b in zip(told.lists, told.lists[1:], strict=False))


async def test_cancelled_in_a_list_it_leaves_no_connection() -> None:
    started = asyncio.Event()
    ended = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        started.set()
        await reader.read()
        ended.set()
        writer.close()

    async with await asyncio.start_server(slow, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with following(source(FakeApi(f"http://127.0.0.1:{port}"))):
            async with asyncio.timeout(5):
                await started.wait()
        async with asyncio.timeout(5):
            await ended.wait()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with two certificates for 127.0.0.1, each its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("no `openssl` command found: apt-get install openssl brings one")
    for name in ("ours", "other"):
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=kubernetes"
        command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {name}.key -out {name}.crt"
        subprocess.run(command.split(), check=True, capture_output=True, timeout=30, cwd=tmp_path)
    return tmp_path


async def test_the_server_has_to_prove_itself_by_the_authority_that_the_pod_was_given(certificates: Path) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates / "ours.crt", certificates / "ours.key")
    ca = certificates / "ca.crt"
    ca.write_bytes((certificates / "other.crt").read_bytes())
    async with fake_api(tls) as api:
        api.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "p1")))
        async with following(source(api, ca=ca)) as told:
            await told.until_error("has no certificate that can be trusted")
            ca.write_bytes((certificates / "ours.crt").read_bytes())
            await told.until_nodes("10.0.0.1:8000")


async def test_the_bodies_of_refusals_are_shortened(api: FakeApi) -> None:
    api.collections[SLICES].code = 500
    api.collections[SLICES].said = b"<html>\n" + b"x" * 100_000
    async with following(source(api)) as told:
        await told.until_error("answers 500 to list")
        assert len(told.error or "") < 500
        assert "\n" not in (told.error or "")
