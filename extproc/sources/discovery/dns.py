"""Nodes from DNS: the addresses of a name, or the services that an SRV record lists."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Literal, TypeAlias

from dns import rcode
from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.nameserver import Do53Nameserver
from dns.resolver import NXDOMAIN, Answer, LifetimeTimeout, NoNameservers, NoResolverConfiguration

from extproc.core.types import Node
from extproc.sources.discovery.source import BackOff, Common, Reporting, split

Family: TypeAlias = Literal["any", "ipv4", "ipv6"]

_LEAST_S, _MOST_S = 1.0, 300.0
"""However long or short a record says that it holds."""
_MOST_WAIT_S = 30.0
_AT_ONCE = 16
_KINDS: dict[Family, tuple[str, ...]] = {"any": ("A", "AAAA"), "ipv4": ("A",), "ipv6": ("AAAA",)}


@dataclass(frozen=True, slots=True)
class DnsQuery:
    """What is asked, and of whom."""

    name: str
    port: int | None = None
    """Of every address; None: `name` is that of an SRV record."""
    family: Family = "any"
    """Any: IPv4 where there is any, since a node with an address of each kind would count twice."""
    resolvers: tuple[str, ...] = ()
    """`ip` or `ip:port`; none: those of /etc/resolv.conf, with its search list."""
    timeout_s: float = 5.0


class _Nothing(Exception):
    """The answer is that there is nothing of the kind."""


class _NoAnswer(Exception):
    """It could not be found out."""


class DnsSource(Reporting):
    """Asks again when a record's time is over. Of an SRV record's entries those of the lowest priority count; their
    weights do not. Nothing, as an answer, is taken for a failure: an empty fleet is the least likely reading of it."""

    def __init__(self, query: DnsQuery, common: Common) -> None:
        super().__init__(f"dns {query.name}" if query.port is None else f"dns {query.name}:{query.port}", common)
        self._query = query
        self._servers = [_server(each) for each in query.resolvers]
        self._known: dict[str, tuple[float, set[str]]] = {}
        """What an SRV record's targets were, and when: one that cannot be looked up is to cost no other node."""

    async def _follow(self) -> None:
        wait = BackOff(self._common.rng, first_s=_LEAST_S, most_s=_MOST_WAIT_S)
        while True:
            try:
                nodes, holds_s = await self._look_up()
            except (_Nothing, _NoAnswer) as error:
                self._failed(str(error))
                await wait.wait()
                continue
            wait.reset()
            self._found(nodes)
            await asyncio.sleep(min(max(holds_s, _LEAST_S), _MOST_S) * self._common.rng.uniform(1.0, 1.1))

    async def _look_up(self) -> tuple[tuple[Node, ...], float]:
        """All nodes, in a fixed order, and for how long that holds."""
        resolver = self._resolver()
        name, port = self._query.name, self._query.port
        if port is not None:
            addresses, holds_s = await self._addresses(resolver, name)
            found = {(address, port): "" for address in addresses}
        else:
            found, holds_s = await self._services(resolver)
        naming = self._common.naming
        nodes = []
        for (ip, each_port), target in sorted(found.items()):
            address = f"[{ip}]:{each_port}" if ":" in ip else f"{ip}:{each_port}"
            nodes.append(naming.node(address, ip, each_port, name=target))
        return tuple(nodes), holds_s

    async def _services(self, resolver: Resolver) -> tuple[dict[tuple[str, int], str], float]:
        records, holds_s = await self._ask(resolver, self._query.name, "SRV")
        first = min(record.priority for record in records)
        ports: dict[str, set[int]] = {}
        for record in records:
            target = record.target.to_text(omit_final_dot=True)
            # "." says that there is no such service; port 0 is none
            if record.priority == first and target and target != "." and record.port:
                ports.setdefault(target, set()).add(record.port)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def look_up(target: str) -> float:
            async with gate:
                return await self._target(resolver, target)

        held = await asyncio.gather(*map(look_up, ports))
        self._known = {target: known for target, known in self._known.items() if target in ports}
        found: dict[tuple[str, int], str] = {}
        for target in sorted(self._known):
            for ip in self._known[target][1]:
                for port in ports[target]:
                    found.setdefault((ip, port), target)
        if not found:
            raise _Nothing(f"{self._query.name} leads to no address")
        return found, min(holds_s, *held)

    async def _target(self, resolver: Resolver, target: str) -> float:
        """Make what is known of it what it is now; says for how long that holds."""
        now = self._common.clock()
        try:
            addresses, holds_s = await self._addresses(resolver, target)
        except _Nothing:
            self._known.pop(target, None)
            return _MOST_S
        except _NoAnswer:
            if target in self._known and now - self._known[target][0] > self._common.keep_s:
                del self._known[target]
            return _LEAST_S
        self._known[target] = (now, addresses)
        return holds_s

    async def _addresses(self, resolver: Resolver, name: str) -> tuple[set[str], float]:
        for kind in _KINDS[self._query.family]:
            try:
                records, holds_s = await self._ask(resolver, name, kind)
            except _Empty:
                continue
            return {record.address for record in records}, holds_s
        raise _Empty(f"{name} has no address")

    async def _ask(self, resolver: Resolver, name: str, kind: str) -> tuple[list[Any], float]:
        try:
            answer: Answer = await resolver.resolve(name, kind, raise_on_no_answer=False, search=not self._servers)
        except NXDOMAIN as error:
            raise _Nothing(f"{name} does not exist") from error
        except LifetimeTimeout as error:
            raise _NoAnswer(f"no answer about {name} in {self._query.timeout_s:g} s") from error
        except NoNameservers as error:
            raise _NoAnswer(f"no answer about {name}: {_reasons(error)}") from error
        except (DNSException, OSError) as error:
            raise _NoAnswer(f"no answer about {name}: {type(error).__name__}") from error
        if answer.rrset is None:
            raise _Empty(f"{name} has no {kind} record")
        return list(answer.rrset), float(answer.chaining_result.minimum_ttl)

    def _resolver(self) -> Resolver:
        """Made for each look: /etc/resolv.conf may have changed."""
        try:
            resolver = Resolver(configure=not self._servers)
        except NoResolverConfiguration as error:
            raise _NoAnswer("/etc/resolv.conf names no resolver") from error
        if self._servers:
            resolver.nameservers = self._servers
        resolver.lifetime = self._query.timeout_s
        resolver.timeout = min(2.0, self._query.timeout_s)
        return resolver


class _Empty(_Nothing):
    """The name is there, but has no such record."""


def _server(text: str) -> Do53Nameserver:
    try:
        host, port = ip_address(text.strip("[]")).compressed, 53
    except ValueError:
        host, port = split(text)
    return Do53Nameserver(host, port)


def _reasons(error: NoNameservers) -> str:
    """What each server said, without what is different each time."""
    reasons = set()
    for _, _, _, reason, response in error.kwargs.get("errors", ()):
        answered = response is not None and response.rcode() != rcode.NOERROR
        reasons.add(rcode.to_text(response.rcode()) if answered else type(reason).__name__)
    return ", ".join(sorted(reasons)) or "no server is left"
