"""Nodes from Kubernetes EndpointSlices: the endpoints of a service, or of whatever a label selector takes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from extproc.core.types import Node
from extproc.sources.discovery.kubernetes import Api, ApiServer, Collection, Meta, Missing, Resource
from extproc.sources.discovery.source import BackOff, Common, Naming, Reporting

RESOURCE = Resource("discovery.k8s.io", "v1", "endpointslices")
SERVICE_LABEL = "kubernetes.io/service-name"
_SLOW_S = 30.0


class _Reference(msgspec.Struct, frozen=True):
    name: str = ""
    uid: str = ""


class _Conditions(msgspec.Struct, frozen=True):
    """None: unknown, which is to be taken for good."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None

    @property
    def usable(self) -> bool:
        # `ready` alone is not enough: with publishNotReadyAddresses it is true while an engine still loads
        return self.ready is not False and self.serving is not False and not self.terminating


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str] | None = None
    conditions: _Conditions | None = None
    target_ref: _Reference | None = None
    node_name: str | None = None
    zone: str | None = None


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class Slice(msgspec.Struct, frozen=True, rename="camel"):
    """An EndpointSlice, as far as it matters."""

    metadata: Meta
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


def nodes_of(
    slices: Iterable[Slice], port: str | int | None, naming: Naming, *, family: str = "any"
) -> tuple[tuple[Node, ...], str | None]:
    """The usable endpoints, each pod once, in order of address; and why there may be fewer than there should be.

    A pod may be in several slices at once: while they are rearranged, and with an address of each family.
    """
    found: dict[str, Node] = {}
    problem = None
    wanted = {"any": ("IPv4", "IPv6"), "ipv4": ("IPv4",), "ipv6": ("IPv6",)}[family]
    for each in sorted(slices, key=lambda each: (each.address_type, each.metadata.name)):
        if each.address_type not in wanted or not each.endpoints:
            continue
        number = _number(each, port)
        if number is None:
            names = ", ".join(f"{p.name or '(no name)'} {p.port}" for p in each.ports or ()) or "none"
            asked = "one port" if port is None else f"a port {port}"
            problem = f"{each.metadata.name} has not {asked}: its ports are {names}"
            continue
        for endpoint in each.endpoints:
            if not endpoint.addresses or not (endpoint.conditions or _Conditions()).usable:
                continue
            ip, pod = endpoint.addresses[0], endpoint.target_ref or _Reference()
            zone, host = endpoint.zone or "", endpoint.node_name or ""
            try:
                node = naming.node(pod.name or f"{ip}:{number}", ip, number, zone=zone, host=host)
            except ValueError as error:
                problem = f"{each.metadata.name}: {error}"
                continue
            found.setdefault(pod.uid or pod.name or ip, node)
    return tuple(sorted(found.values(), key=lambda node: node.address)), problem


def _number(each: Slice, port: str | int | None) -> int | None:
    """The number of the port that is meant; None: it has none such."""
    if each.ports is None:  # all ports
        return port if isinstance(port, int) else None
    usable = [p for p in each.ports if p.port is not None and p.protocol in (None, "TCP")]
    if port is not None:
        usable = [p for p in usable if (p.port if isinstance(port, int) else p.name or "") == port]
    return usable[0].port if len(usable) == 1 else None


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Which slices are read, and which of their ports."""

    namespace: str
    service: str | None = None
    selector: str = ""
    """Label selector of the slices, as in kubectl; beside `service` it narrows."""
    port: str | int | None = None
    """Name or number; None: the only one."""
    family: str = "any"
    """"any": IPv4 where a pod has both."""

    @property
    def labels(self) -> str:
        """ValueError where neither is given: all endpoints of a namespace are no fleet."""
        parts = [f"{SERVICE_LABEL}={self.service}"] if self.service else []
        if self.selector:
            parts.append(self.selector)
        if not parts:
            raise ValueError("a service or a selector is needed")
        return ",".join(parts)


class EndpointSlices(Reporting):
    """Lists them, then watches. None, as an answer, is an empty fleet: the API server knows."""

    def __init__(self, server: ApiServer, endpoints: Endpoints, common: Common) -> None:
        super().__init__(
            f"kubernetes endpoints {endpoints.namespace}/{endpoints.service or endpoints.selector}", common
        )
        self._server, self._endpoints = server, endpoints
        self._params = {"labelSelector": endpoints.labels}

    async def _follow(self) -> None:
        slow = BackOff(self._common.rng, first_s=_SLOW_S, most_s=_SLOW_S)
        endpoints = self._endpoints
        async with Api(self._server) as api:
            slices = Collection(api, RESOURCE, endpoints.namespace, Slice, self._params, self._common.rng)
            while True:
                try:
                    async with aclosing(slices.follow(self._failed)) as changes:
                        async for known in changes:
                            nodes, problem = nodes_of(
                                known.values(), endpoints.port, self._common.naming, family=endpoints.family
                            )
                            if problem is not None and not nodes:
                                self._failed(problem)
                            else:
                                self._found(nodes)
                except Missing as error:
                    self._failed(str(error))
                await slow.wait()
