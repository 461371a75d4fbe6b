"""What a source of nodes is, and what all of them share: names, back-off, and how long a failing one is believed."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Protocol, TypeAlias

from extproc.core.types import Node

log = logging.getLogger(__name__)

Publish: TypeAlias = Callable[[tuple[Node, ...]], None]

_RESTART_S = 5.0
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class SourceState:
    """How a source is."""

    name: str
    nodes: int
    last_good_s: float | None
    """When it was last known to be right, by the application's clock; None: never."""
    error: str | None
    """What is wrong with it now."""


class Source(Protocol):
    """Knows some of a pool's nodes."""

    async def run(self, publish: Publish) -> None:
        """For ever: call `publish` with all of its nodes whenever they changed. Handles what goes wrong itself."""

    def state(self) -> SourceState: ...


class BackOff:
    """Waits that double from `first_s` to `most_s`, each shortened by up to half, so that replicas do not march."""

    def __init__(self, rng: random.Random, *, first_s: float, most_s: float) -> None:
        self._rng = rng
        self._first_s, self._most_s = first_s, most_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    async def wait(self) -> None:
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, self._most_s)
        await asyncio.sleep(wait_s)


@lru_cache(maxsize=8192)  # a list of nodes is made anew for each of its changes, mostly of the same addresses
def joined(host: str, port: int) -> str:
    """`host:port` as Envoy writes it; ValueError when the host is no IP address or the port none of TCP's."""
    if not 0 < port < 65536:
        raise ValueError(f"{port} is not a port")
    address = ip_address(host)
    return f"{address.compressed}:{port}" if address.version == 4 else f"[{address.compressed}]:{port}"


def split(text: str, *, names: bool = False) -> tuple[str, int]:
    """Host and port of `ip:port`, `[ip]:port` or, where `names`, `name:port`; ValueError when it is none of these."""
    host, colon, port = text.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ValueError(f"{text!r} is not of the form ip:port")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if ip_address(bare).version == 6 and bare == host:
            raise ValueError(f"{text!r}: an IPv6 address needs brackets")
    except ValueError:
        # a name of digits and dots is a mistyped address
        if not names or not _HOST.fullmatch(host) or not re.search("[A-Za-z_-]", host):
            raise
        return host.lower(), int(port)
    return bare, int(port)


@dataclass(frozen=True, slots=True)
class Naming:
    """How the nodes of a source are described where the source itself says nothing."""

    cluster: str = "{name}"
    """What Envoy calls it, of {name}, {address} (ip:port), {ip}, {port}, {zone} and {host} (the machine's name)."""
    weight: float = 1.0

    def __post_init__(self) -> None:
        try:
            self.node("n", "127.0.0.1", 1)
        except (LookupError, AttributeError, ValueError) as error:
            raise ValueError(f"cluster = {self.cluster!r} is no template: {error}") from error

    def node(self, node_id: str, ip: str, port: int, *, name: str = "", zone: str = "", host: str = "") -> Node:
        """The node at that address; ValueError when it is none. `name` is the id where it is left out."""
        address = joined(ip, port)
        cluster = self.cluster.format(
            name=name or node_id, address=address, ip=address.rpartition(":")[0], port=port, zone=zone, host=host
        )
        return Node(node_id, address, cluster, self.weight)


@dataclass(frozen=True, slots=True)
class Common:
    """What every source is given."""

    naming: Naming
    keep_s: float
    """How long the nodes of a source that fails stay."""
    clock: Callable[[], float]
    rng: random.Random


class Reporting(ABC):
    """A source that says what it found with `_found` and what went wrong with `_failed`, as often as it likes.

    Changes alone are published and logged. Its nodes stay while it fails, for `keep_s`; then it has none.
    """

    def __init__(self, name: str, common: Common) -> None:
        self.name = name
        self._common = common
        self._publish: Publish | None = None
        self._nodes: tuple[Node, ...] | None = None
        """None: it has not said any yet."""
        self._last_good_s: float | None = None
        self._error: str | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @abstractmethod
    async def _follow(self) -> None:
        """For ever: look, and call `_found` or `_failed`."""

    async def run(self, publish: Publish) -> None:
        """As in Source."""
        self._publish = publish
        try:
            while True:
                try:
                    await self._follow()
                except Exception as error:  # a bug of ours is to cost the fleet no more than a failing source does
                    log.exception("%s broke down", self.name)
                    self._failed(f"broke down: {type(error).__name__}")
                await asyncio.sleep(_RESTART_S)
        finally:
            self._publish = None
            self._stop_expiry()

    def state(self) -> SourceState:
        return SourceState(self.name, len(self._nodes or ()), self._last_good_s, self._error)

    def _found(self, nodes: tuple[Node, ...]) -> None:
        """These are all there are, as of now."""
        self._last_good_s = self._common.clock()
        self._stop_expiry()
        if self._error is not None:
            log.info("%s is well again, with %d nodes", self.name, len(nodes))
            self._error = None
        self._say(nodes)

    def _failed(self, why: str) -> None:
        """It cannot be told what there is."""
        if why != self._error:
            log.warning("%s: %s", self.name, why)
            self._error = why
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(self._common.keep_s, self._expire)

    def _expire(self) -> None:
        # the handle stays: there is nothing left that could expire until something is found again
        if self._nodes:
            log.warning("%s fails since %g s: its nodes are given up", self.name, self._common.keep_s)
        self._say(())

    def _say(self, nodes: tuple[Node, ...]) -> None:
        if nodes != self._nodes and self._publish is not None:
            self._nodes = nodes
            self._publish(nodes)

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
