"""Nodes from a Gateway API InferencePool: the pods that it selects, at the ports that it names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass

import msgspec

from extproc.core.types import Node
from extproc.sources.discovery.kubernetes import Api, ApiError, ApiServer, Collection, Meta, Missing, Resource
from extproc.sources.discovery.source import BackOff, Common, Naming, Reporting

log = logging.getLogger(__name__)

PODS = Resource("", "v1", "pods")
POOLS = (
    Resource("inference.networking.k8s.io", "v1", "inferencepools"),
    Resource("inference.networking.x-k8s.io", "v1alpha2", "inferencepools"),
)
"""The newest first; a cluster may have both."""
ZONE_LABEL = "topology.kubernetes.io/zone"
_SLOW_S = 30.0


class _PodIp(msgspec.Struct, frozen=True):
    ip: str = ""


class _Condition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class _PodStatus(msgspec.Struct, frozen=True):
    ip: str = msgspec.field(default="", name="podIP")
    ips: list[_PodIp] | None = msgspec.field(default=None, name="podIPs")
    conditions: list[_Condition] | None = None


class Pod(msgspec.Struct, frozen=True):
    """A pod, as far as it matters."""

    metadata: Meta
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def usable(self) -> bool:
        """Ready, and not on its way out."""
        ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions or ())
        return ready and self.metadata.deletion_timestamp is None


class _Port(msgspec.Struct, frozen=True):
    number: int


class _PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    selector: dict[str, str | dict[str, str]]
    target_ports: list[_Port] | None = None
    target_port_number: int | None = None


class Pool(msgspec.Struct, frozen=True):
    """An InferencePool of either version, as far as it matters."""

    metadata: Meta
    spec: _PoolSpec


@dataclass(frozen=True, slots=True)
class Selection:
    """What a pool says: which pods, and their ports. Each port of each pod is a node."""

    labels: str
    ports: tuple[int, ...]

    @classmethod
    def of(cls, pool: Pool) -> Selection:
        """ValueError when it selects all pods or no port: what a pool cannot mean."""
        spec = pool.spec
        labels = spec.selector.get("matchLabels", spec.selector)
        if not isinstance(labels, dict) or not labels or not all(isinstance(each, str) for each in labels.values()):
            raise ValueError("its selector names no labels")
        ports = tuple(port.number for port in spec.target_ports or ())
        if not ports and spec.target_port_number is not None:
            ports = (spec.target_port_number,)
        if not ports:
            raise ValueError("it names no port")
        return cls(",".join(f"{key}={value}" for key, value in sorted(labels.items())), ports)


def nodes_of(pods: Iterable[Pod], ports: tuple[int, ...], naming: Naming, *, family: str = "any") -> tuple[Node, ...]:
    """A node for each port of each usable pod, in order of name."""
    nodes = []
    for pod in sorted((pod for pod in pods if pod.usable), key=lambda pod: pod.metadata.name):
        ips = [each.ip for each in pod.status.ips or ()] or [pod.status.ip]
        # an address of each family is the same engine twice
        ip = next((ip for ip in ips if ip and (family == "any" or (":" in ip) == (family == "ipv6"))), None)
        if ip is None:
            continue
        zone, host, name = (pod.metadata.labels or {}).get(ZONE_LABEL, ""), pod.spec.node_name, pod.metadata.name
        for port in ports:
            node_id = name if len(ports) == 1 else f"{name}:{port}"
            with suppress(ValueError):  # no address
                nodes.append(naming.node(node_id, ip, port, name=name, zone=zone, host=host))
    return tuple(nodes)


class InferencePool(Reporting):
    """Watches the pool by its name and, as long as it says the same, the pods that it selects."""

    def __init__(
        self,
        server: ApiServer,
        namespace: str,
        pool: str,
        common: Common,
        *,
        family: str = "any",
        slow_s: float = _SLOW_S,
    ) -> None:
        super().__init__(f"kubernetes inference pool {namespace}/{pool}", common)
        self._server, self._namespace, self._pool, self._family = server, namespace, pool, family
        self._slow_s = slow_s

    async def _follow(self) -> None:
        slow = BackOff(self._common.rng, first_s=self._slow_s, most_s=self._slow_s)
        async with Api(self._server) as api:
            while True:
                self._failed(await self._follow_pool(api))
                await slow.wait()

    async def _follow_pool(self, api: Api) -> str:
        """As long as there is one, in the first version that has it; says why there is none."""
        absent, refused = "", ""
        for resource in POOLS:
            params = {"fieldSelector": f"metadata.name={self._pool}"}
            pools = Collection(api, resource, self._namespace, Pool, params, self._common.rng)
            try:
                known, _ = await pools.listed()
                if known:
                    await self._follow_version(api, pools)
            except Missing:
                continue
            except ApiError as error:
                # a Role may well be for one version alone, and rights are looked at before what is installed
                refused = refused or str(error)
                continue
            absent = f"there is no InferencePool {self._pool} in namespace {self._namespace}"
            if known:
                break
        return absent or refused or f"the cluster has no InferencePools: neither {POOLS[0]} nor {POOLS[1]} is installed"

    async def _follow_version(self, api: Api, pools: Collection[Pool]) -> None:
        """Until the pool is gone."""
        selection: Selection | None = None
        following: asyncio.Task[None] | None = None
        trouble = ""

        def failed(why: str) -> None:
            nonlocal trouble
            if following is None:
                self._failed(why)
            elif why != trouble:  # its pods are known all the same
                log.warning("%s: %s", self.name, why)
            trouble = why

        async with asyncio.TaskGroup() as tasks, aclosing(pools.follow(failed)) as changes:
            try:
                async for known in changes:
                    if not known:
                        return
                    try:
                        now = Selection.of(next(iter(known.values())))
                    except ValueError as error:
                        failed(str(error))
                        continue
                    if now != selection:
                        selection = now
                        if following is not None:
                            following.cancel()
                        following = tasks.create_task(self._follow_pods(api, now), name=f"{self.name}: pods")
            finally:
                if following is not None:
                    following.cancel()

    async def _follow_pods(self, api: Api, selection: Selection) -> None:
        pods = Collection(api, PODS, self._namespace, Pod, {"labelSelector": selection.labels}, self._common.rng)
        async with aclosing(pods.follow(self._failed)) as changes:
            async for known in changes:
                self._found(self._nodes_of(known, selection))

    def _nodes_of(self, known: Mapping[str, Pod], selection: Selection) -> tuple[Node, ...]:
        return nodes_of(known.values(), selection.ports, self._common.naming, family=self._family)
