"""Nodes from a Gateway API InferencePool, against a server that replays what the API server sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from extproc.core.types import Node
from extproc.sources.discovery.inference_pool import InferencePool, Pod, Pool, Selection, nodes_of
from extproc.sources.discovery.kubernetes import ApiServer
from extproc.sources.discovery.source import Naming
from tests.builders import until
from tests.sources.discovering import common, following
from tests.sources.kubernetes_api import (
    GONE,
    OLD_POOLS,
    PODS,
    POOLS,
    Collection,
    FakeApi,
    bookmark,
    fake_api,
    inference_pool,
    pod,
)

V1 = {"selector": {"matchLabels": {"app": "vllm", "a.b/c": "d"}}, "targetPorts": [{"number": 8000}]}
OLD = {"selector": {"app": "vllm"}, "targetPortNumber": 8000}


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as made:
        made.put(PODS)
        yield made


def source(api: FakeApi, *, keep_s: float = 300.0) -> InferencePool:
    return InferencePool(ApiServer(api.url, None, None, 5.0), "llm", "pool", common(keep_s=keep_s), slow_s=0.1)


def read_pods(*pods: dict[str, Any]) -> list[Pod]:
    return [msgspec.convert(each, Pod) for each in pods]


def test_a_ready_pod_becomes_a_node_with_what_names_it() -> None:
    pods = read_pods(
        pod("p2", "10.0.0.2"),
        pod("p1", "10.0.0.1"),
        pod("starting", "10.0.0.3", ready=False),
        pod("leaving", "10.0.0.4", leaving=True),
        pod("pending", None),
    )
    assert nodes_of(pods, (8000,), Naming("{name}/{address}/{zone}/{host}")) == (
        Node("p1", "10.0.0.1:8000", "p1/10.0.0.1:8000/zone-b/gpu-2"),
        Node("p2", "10.0.0.2:8000", "p2/10.0.0.2:8000/zone-b/gpu-2"),
    )


def test_each_port_of_a_pod_is_a_node() -> None:
    nodes = nodes_of(read_pods(pod("p1", "10.0.0.1")), (8000, 8001), Naming())
    assert [(each.id, each.address) for each in nodes] == [("p1:8000", "10.0.0.1:8000"), ("p1:8001", "10.0.0.1:8001")]


@pytest.mark.parametrize(
    ("family", "found"), [("any", ["10.0.0.1:80"]), ("ipv4", ["10.0.0.1:80"]), ("ipv6", ["[fd00::1]:80"])]
)
def test_a_pod_with_an_address_of_each_family_is_one_node(family: str, found: list[str]) -> None:
    pods = read_pods(pod("p1", "10.0.0.1", ips=["10.0.0.1", "fd00::1"]))
    assert [each.address for each in nodes_of(pods, (80,), Naming(), family=family)] == found


@pytest.mark.parametrize(
    ("spec", "selection"),
    [
        (V1, Selection("a.b/c=d,app=vllm", (8000,))),
        (OLD, Selection("app=vllm", (8000,))),
        (V1 | {"targetPorts": [{"number": 1}, {"number": 2}]}, Selection("a.b/c=d,app=vllm", (1, 2))),
        (V1 | {"selector": {"matchLabels": {}}}, "no labels"),
        (V1 | {"selector": {}}, "no labels"),
        (V1 | {"targetPorts": []}, "no port"),
    ],
)
def test_a_pool_of_either_version_says_which_pods_and_ports(spec: dict[str, Any], selection: Selection | str) -> None:
    pool = msgspec.convert(inference_pool("pool", spec), Pool)
    if isinstance(selection, Selection):
        assert Selection.of(pool) == selection
    else:
        with pytest.raises(ValueError, match=selection):
            Selection.of(pool)


@pytest.mark.parametrize(("path", "spec"), [(POOLS, V1), (OLD_POOLS, OLD)])
async def test_the_pods_of_the_pool_are_followed(api: FakeApi, path: str, spec: dict[str, Any]) -> None:
    api.put(path, inference_pool("pool", spec))
    api.put(PODS, pod("p1", "10.0.0.1"))
    async with following(source(api)) as told:
        await told.until_nodes("10.0.0.1:8000")
        assert (await api.watch(path)).params["fieldSelector"] == "metadata.name=pool"
        watch = await api.watch(PODS)
        assert watch.params["labelSelector"].endswith("app=vllm")
        watch.sends(
            ("ADDED", pod("p2", None, ready=False, version=101)), ("MODIFIED", pod("p2", "10.0.0.2", version=102))
        )
        await told.until_nodes("10.0.0.1:8000", "10.0.0.2:8000")
        watch.sends(("MODIFIED", pod("p1", "10.0.0.1", leaving=True, version=103)))
        await told.until_nodes("10.0.0.2:8000")
        watch.sends(("DELETED", pod("p1", "10.0.0.1", version=104)), bookmark(110, "Pod"), ("ERROR", GONE))
        api.put(PODS, pod("p3", "10.0.0.3"))
        await told.until_nodes("10.0.0.3:8000")
    await until(lambda: api.open == 0)


async def test_a_pool_in_both_versions_is_read_in_the_newer_and_one_in_the_older_alone_there(api: FakeApi) -> None:
    api.put(POOLS)
    api.put(OLD_POOLS, inference_pool("pool", OLD | {"targetPortNumber": 9}))
    api.put(PODS, pod("p1", "10.0.0.1"))
    async with following(source(api)) as told:
        await told.until_nodes("10.0.0.1:9")
    api.put(POOLS, inference_pool("pool", V1))
    async with following(source(api)) as told:
        await told.until_nodes("10.0.0.1:8000")


async def test_where_there_are_no_pools_it_says_so_and_asks_again(api: FakeApi) -> None:
    async with following(source(api)) as told:
        await told.until_error("the cluster has no InferencePools")
        api.put(POOLS)
        await told.until_error("there is no InferencePool pool in namespace llm")
        api.put(PODS, pod("p1", "10.0.0.1"))
        api.put(POOLS, inference_pool("pool", V1))
        await told.until_nodes("10.0.0.1:8000")
        assert told.error is None


async def test_a_right_that_is_missing_for_one_version_does_not_hide_the_other(api: FakeApi) -> None:
    api.put(POOLS).refuses(403, "Forbidden", "no")
    api.put(PODS, pod("p1", "10.0.0.1"))
    async with following(source(api)) as told:
        await told.until_error("not allowed to list inferencepools.inference.networking.k8s.io")
        api.put(OLD_POOLS, inference_pool("pool", OLD))
        await told.until_nodes("10.0.0.1:8000")


async def test_pods_that_may_not_be_read_are_said(api: FakeApi) -> None:
    api.put(POOLS, inference_pool("pool", V1))
    api.collections[PODS].refuses(403, "Forbidden", "no")
    async with following(source(api)) as told:
        await told.until_error('not allowed to list pods in namespace llm: a Role there has to have apiGroups: [""]')


async def test_another_selector_leads_to_other_pods_and_no_empty_fleet_between(api: FakeApi) -> None:
    api.put(POOLS, inference_pool("pool", V1))
    api.put(PODS, pod("p1", "10.0.0.1"))
    async with following(source(api)) as told:
        pools, first = await api.watch(POOLS), await api.watch(PODS)
        await told.until_nodes("10.0.0.1:8000")
        api.put(PODS, pod("p2", "10.0.0.2"))
        changed = {"selector": {"matchLabels": {"app": "sglang"}}, "targetPorts": [{"number": 30000}]}
        pools.sends(("MODIFIED", inference_pool("pool", changed, version=51)))
        assert (await api.watch(PODS)).params["labelSelector"] == "app=sglang"
        await told.until_nodes("10.0.0.2:30000")
        first.sends(("ADDED", pod("p9", "10.0.0.9", version=300)))
        pools.sends(("MODIFIED", inference_pool("pool", changed, version=52)))
        await asyncio.sleep(0.1)
        assert [[node.address for node in each] for each in told.lists] == [["10.0.0.1:8000"], ["10.0.0.2:30000"]]
        assert api.watches[PODS].empty(), "the same selection is followed on"


async def test_trouble_with_the_pool_alone_leaves_its_pods(api: FakeApi) -> None:
    api.put(POOLS, inference_pool("pool", V1))
    api.put(PODS, pod("p1", "10.0.0.1"))
    async with following(source(api, keep_s=0.2)) as told:
        pools, pods = await api.watch(POOLS), await api.watch(PODS)
        pools.sends(("MODIFIED", inference_pool("pool", V1 | {"selector": {}}, version=51)))
        api.refused_watches[POOLS] = Collection()
        api.refused_watches[POOLS].refuses(403, "Forbidden", "no")
        pools.ends()
        await asyncio.sleep(0.5)
        assert told.error is None
        pods.sends(("ADDED", pod("p2", "10.0.0.2", version=101)))
        await told.until_nodes("10.0.0.1:8000", "10.0.0.2:8000")


async def test_a_pool_that_is_deleted_keeps_its_pods_for_the_time_set(api: FakeApi) -> None:
    api.put(POOLS, inference_pool("pool", V1))
    api.put(PODS, pod("p1", "10.0.0.1"))
    async with following(source(api, keep_s=0.5)) as told:
        await told.until_nodes("10.0.0.1:8000")
        pools, _ = await api.watch(POOLS), await api.watch(PODS)
        api.put(POOLS)
        pools.sends(("DELETED", inference_pool("pool", V1, version=51)))
        await told.until_error("there is no InferencePool")
        assert told.nodes
        await told.until_nodes()
        await until(lambda: api.open == 0)
