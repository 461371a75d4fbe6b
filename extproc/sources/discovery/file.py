"""Nodes from a file that others write: TOML, YAML or JSON."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from extproc.core.types import Node
from extproc.sources.discovery.source import Common, Naming, Reporting, joined, split

LOOK_S = 1.0
_MAX_BYTES = 4 << 20
_READERS: dict[str, Any] = {
    ".toml": msgspec.toml.decode,
    ".yaml": msgspec.yaml.decode,
    ".yml": msgspec.yaml.decode,
    ".json": msgspec.json.decode,
}

Stamp: TypeAlias = tuple[int, ...]


class _Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    address: str
    name: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    cluster: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    zone: str = ""
    rank: Annotated[int, msgspec.Meta(ge=0, le=1023)] | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: Annotated[tuple[_Listed, ...], msgspec.Meta(max_length=10_000)]


def parse(data: bytes, suffix: str, naming: Naming, *, names: bool) -> tuple[Node, ...]:
    """The nodes that a file lists; ValueError says what is wrong with it. `names`: an address may be name:port."""
    try:
        file = _READERS[suffix](data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # a YAML reader shows the place on several lines
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    nodes = tuple(_node(each, naming, names=names) for each in file.nodes)
    for what, values in (("name", [each.id for each in nodes]), ("address", [_cache(each) for each in nodes])):
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise ValueError(f"the {what} {twice} is given twice")
    return nodes


def _node(listed: _Listed, naming: Naming, *, names: bool) -> Node:
    host, port = split(listed.address, names=names)
    try:
        address = joined(host, port)
    except ValueError:
        address = f"{host}:{port}"
    node_id = listed.name or (address if listed.rank is None else f"{address}/{listed.rank}")
    cluster = listed.cluster or naming.cluster.format(
        name=node_id, address=address, ip=address.rpartition(":")[0], port=port, zone=listed.zone, host=""
    )
    return Node(node_id, address, cluster, listed.weight or naming.weight, listed.rank)


def _cache(node: Node) -> str:
    """What no two nodes may share."""
    return node.address if node.rank is None else f"{node.address} with rank {node.rank}"


class FileSource(Reporting):
    """Looks at the file's status every `look_s`. One that changed is read when it stood still for a look: where it is
    written in place, half of it may be a whole list."""

    def __init__(self, path: Path, common: Common, *, names: bool = False, look_s: float = LOOK_S) -> None:
        if path.suffix not in _READERS:
            raise ValueError(f"{path}: the name has to end in {', '.join(_READERS)}")
        super().__init__(f"file {path}", common)
        self._path, self._names, self._look_s = path, names, look_s

    async def _follow(self) -> None:
        known: Stamp | None = None
        before: Stamp | None = None
        first = True
        while True:
            stamp = self._stamp()
            if stamp is None:
                known = None
            elif stamp != known and (first or stamp == before) and await self._read(stamp):
                known = stamp
            before, first = stamp, False
            await asyncio.sleep(self._look_s)

    def _stamp(self) -> Stamp | None:
        try:
            status = self._path.stat()
        except OSError as error:
            self._failed(error.strerror or type(error).__name__)
            return None
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino

    async def _read(self, stamp: Stamp) -> bool:
        """Say what is in it; False when it changed meanwhile."""
        try:
            nodes = await asyncio.to_thread(self._nodes_in)
            why = None
        except OSError as error:
            nodes, why = (), error.strerror or type(error).__name__
        except ValueError as error:
            nodes, why = (), f"the fleet stays as it was: {error}"
        if self._stamp() != stamp:
            return False
        if why is None:
            self._found(nodes)
        else:
            self._failed(why)
        return True

    def _nodes_in(self) -> tuple[Node, ...]:
        status = self._path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        with self._path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
        return parse(data, self._path.suffix, self._common.naming, names=self._names)
