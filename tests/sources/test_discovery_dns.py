"""Nodes from DNS, asked of a real resolver (unbound) whose records change."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from extproc.core.types import Node
from extproc.lab.processes import free_ports
from extproc.sources.discovery.dns import DnsQuery, DnsSource
from extproc.sources.discovery.source import Naming
from tests.builders import until
from tests.sources.discovering import common, following

CONFIG = """
server:
  interface: 127.0.0.1
  interface: ::1
  port: {port}
  do-daemonize: no
  use-syslog: no
  chroot: ""
  username: ""
  directory: "{folder}"
  pidfile: ""
  module-config: "iterator"
  do-not-query-localhost: no
  outbound-msg-retry: 1
  local-zone: "test." static
forward-zone:  # nobody is there, so that every other name is answered SERVFAIL
  name: "."
  forward-addr: 127.0.0.1@{dead}
remote-control:
  control-enable: yes
  control-interface: "{folder}/control"
  control-use-cert: no
"""


@dataclass(frozen=True, slots=True)
class Resolver:
    """A resolver of our own, with the names under `test.` that it is told."""

    address: str
    pid: int
    folder: Path

    def tell(self, *command: str) -> None:
        subprocess.run(
            [_binary("unbound-control"), "-c", str(self.folder / "conf"), *command],
            check=True,
            capture_output=True,
            timeout=10,
        )

    def put(self, *records: str) -> None:
        for record in records:
            self.tell("local_data", record)

    def remove(self, name: str) -> None:
        """Its records; the name is then not there."""
        self.tell("local_data_remove", name)


def _binary(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"no `{name}` command found: apt-get install unbound brings one")
    return found


@pytest.fixture
def resolver(tmp_path: Path) -> Iterator[Resolver]:
    binary = _binary("unbound")
    port, dead = free_ports(2)
    (tmp_path / "conf").write_text(CONFIG.format(port=port, dead=dead, folder=tmp_path), encoding="utf-8")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([binary, "-c", str(tmp_path / "conf")], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 10
        while not (tmp_path / "control").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield Resolver(f"127.0.0.1:{port}", process.pid, tmp_path)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(timeout=10)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that hold for 0 s are asked for ten times a second."""
    monkeypatch.setattr("extproc.sources.discovery.dns._LEAST_S", 0.1)


def source(resolver: Resolver, name: str, port: int | None = 8000, **options: object) -> DnsSource:
    keep_s = float(options.pop("keep_s", 300.0))  # type: ignore[arg-type]
    naming = Naming(str(options.pop("cluster", "{name}")))
    query = DnsQuery(name, port, resolvers=(resolver.address,), **options)  # type: ignore[arg-type]
    return DnsSource(query, common(keep_s=keep_s, naming=naming))


async def test_addresses_become_nodes_and_follow_the_records(resolver: Resolver, hasty: None) -> None:
    resolver.put("n.test. 0 IN A 10.0.0.2", "n.test. 0 IN A 10.0.0.1")
    async with following(source(resolver, "n.test")) as told:
        await told.until_nodes("10.0.0.1:8000", "10.0.0.2:8000")
        assert told.nodes[0] == Node("10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.1:8000")
        resolver.put("n.test. 0 IN A 10.0.0.3")
        await told.until_nodes("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
        resolver.remove("n.test")
        resolver.put("n.test. 0 IN A 10.0.0.3")
        await told.until_nodes("10.0.0.3:8000")
        # the moment between the two may have been seen: it is no reason to give up the fleet
        assert [len(each) for each in told.lists] == [2, 3, 1]


async def test_a_record_is_asked_for_again_when_its_time_is_over_and_not_before(resolver: Resolver) -> None:
    resolver.put("n.test. 3 IN A 10.0.0.1")
    async with following(source(resolver, "n.test")) as told:
        await told.until_nodes("10.0.0.1:8000")
        asked = time.monotonic()
        resolver.put("n.test. 3 IN A 10.0.0.2")
        await told.until_nodes("10.0.0.1:8000", "10.0.0.2:8000")
        assert 2.9 <= time.monotonic() - asked <= 4.0


async def test_a_record_without_time_is_asked_for_every_second(resolver: Resolver) -> None:
    resolver.put("n.test. 0 IN A 10.0.0.1")
    async with following(source(resolver, "n.test")) as told:
        await told.until_nodes("10.0.0.1:8000")
        asked = time.monotonic()
        resolver.put("n.test. 0 IN A 10.0.0.2")
        await told.until_nodes("10.0.0.1:8000", "10.0.0.2:8000")
        assert 0.9 <= time.monotonic() - asked <= 1.6


@pytest.mark.parametrize(
    ("family", "addresses"),
    [("any", ["10.0.0.1:80"]), ("ipv4", ["10.0.0.1:80"]), ("ipv6", ["[fd00::1]:80"])],
)
async def test_a_name_with_both_families_is_one_engine(
    resolver: Resolver, hasty: None, family: str, addresses: list[str]
) -> None:
    resolver.put("n.test. 0 IN A 10.0.0.1", "n.test. 0 IN AAAA fd00::1")
    async with following(source(resolver, "n.test", 80, family=family)) as told:
        await told.until_nodes(*addresses)


async def test_a_name_with_ipv6_alone_is_found(resolver: Resolver, hasty: None) -> None:
    resolver.put("n.test. 0 IN AAAA fd00::1", "n.test. 0 IN AAAA fd00::2")
    async with following(source(resolver, "n.test", 80)) as told:
        await told.until_nodes("[fd00::1]:80", "[fd00::2]:80")


async def test_a_fleet_that_does_not_fit_in_one_packet_is_whole(resolver: Resolver, hasty: None) -> None:
    resolver.put(*(f"n.test. 60 IN A 10.0.1.{i}" for i in range(200)))
    async with following(source(resolver, "n.test", 80)) as told:
        await told.until_nodes(*(f"10.0.1.{i}:80" for i in range(200)))
        assert len(told.lists) == 1


async def test_services_bring_their_ports_and_names(resolver: Resolver, hasty: None) -> None:
    resolver.put(
        "_http._tcp.s.test. 0 IN SRV 10 50 8000 a.test.",
        "_http._tcp.s.test. 0 IN SRV 10 0 8001 a.test.",
        "_http._tcp.s.test. 0 IN SRV 10 50 9000 b.test.",
        "_http._tcp.s.test. 0 IN SRV 20 50 9000 spare.test.",
        "a.test. 0 IN A 10.0.0.1",
        "b.test. 0 IN AAAA fd00::2",
        "spare.test. 0 IN A 10.0.0.9",
    )
    async with following(source(resolver, "_http._tcp.s.test", None, cluster="c-{name}-{port}")) as told:
        await told.until_nodes("10.0.0.1:8000", "10.0.0.1:8001", "[fd00::2]:9000")
        assert [each.cluster for each in told.nodes] == ["c-a.test-8000", "c-a.test-8001", "c-b.test-9000"]
        resolver.remove("b.test")
        await told.until_nodes("10.0.0.1:8000", "10.0.0.1:8001")
        resolver.put("b.test. 0 IN A 10.0.0.2")
        await told.until_nodes("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:9000")


async def test_a_target_that_cannot_be_looked_up_costs_no_other_node_and_stays_for_a_while(
    resolver: Resolver, hasty: None
) -> None:
    resolver.put(
        "_http._tcp.s.test. 0 IN SRV 0 0 80 a.test.",
        "_http._tcp.s.test. 0 IN SRV 0 0 80 b.test.",
        "_http._tcp.s.test. 0 IN SRV 0 0 80 c.elsewhere.",
        "a.test. 0 IN A 10.0.0.1",
        "b.test. 0 IN A 10.0.0.2",
    )
    resolver.tell("local_zone", "elsewhere.", "static")
    resolver.put("c.elsewhere. 0 IN A 10.0.0.3")
    async with following(source(resolver, "_http._tcp.s.test", None, keep_s=1.5)) as told:
        await told.until_nodes("10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80")
        resolver.tell("local_zone_remove", "elsewhere.")
        resolver.remove("b.test")
        await told.until_nodes("10.0.0.1:80", "10.0.0.3:80")
        await told.until_nodes("10.0.0.1:80")
        assert told.error is None


async def test_services_that_are_none_are_a_failure(resolver: Resolver, hasty: None) -> None:
    resolver.put("_http._tcp.s.test. 0 IN SRV 0 0 0 .")
    async with following(source(resolver, "_http._tcp.s.test", None)) as told:
        await told.until_error("leads to no address")


@pytest.mark.parametrize("how", ["absent", "empty", "servfail", "silent"])
async def test_what_is_no_answer_keeps_the_fleet_for_the_time_set(resolver: Resolver, hasty: None, how: str) -> None:
    name = "n.gone." if how == "servfail" else "n.test."
    if how == "servfail":
        resolver.tell("local_zone", "gone.", "static")
    resolver.put(f"{name} 0 IN A 10.0.0.1")
    async with following(source(resolver, name, 80, keep_s=1.5, timeout_s=0.5)) as told:
        await told.until_nodes("10.0.0.1:80")
        began = time.monotonic()
        if how == "silent":
            os.kill(resolver.pid, signal.SIGSTOP)
        elif how == "servfail":
            resolver.tell("local_zone_remove", "gone.")
        else:
            resolver.remove(name)
            if how == "empty":
                resolver.put(f"{name} 0 IN TXT nothing")
        words = {
            "absent": "does not exist",
            "empty": "no address",
            "servfail": "SERVFAIL|in 0.5 s",
            "silent": "in 0.5 s",
        }
        await until(lambda: any(word in (told.error or "") for word in words[how].split("|")))
        failed = time.monotonic()
        assert failed - began < 3.0
        assert told.nodes, "one bad answer is no reason to drop a fleet"
        await told.until_nodes()
        assert 1.0 <= time.monotonic() - failed <= 3.0
        if how == "silent":
            os.kill(resolver.pid, signal.SIGCONT)
        elif how == "servfail":
            resolver.tell("local_zone", "gone.", "static")
        resolver.put(f"{name} 0 IN A 10.0.0.1")
        await told.until_nodes("10.0.0.1:80")
        assert told.error is None


async def test_a_resolver_that_is_not_there_is_given_up_for_the_next(resolver: Resolver) -> None:
    (dead,) = free_ports(1)
    resolver.put("n.test. 1 IN A 10.0.0.1")
    query = DnsQuery("n.test", 80, resolvers=(f"127.0.0.1:{dead}", resolver.address.replace("127.0.0.1", "[::1]")))
    async with following(DnsSource(query, common())) as told:
        await told.until_nodes("10.0.0.1:80")


async def test_cancelled_in_the_middle_of_a_question_it_leaves_nothing(resolver: Resolver) -> None:
    os.kill(resolver.pid, signal.SIGSTOP)
    async with following(source(resolver, "n.test")) as told:
        before = _sockets()
        await until(lambda: _sockets() > before)
        assert not told.lists
    await until(lambda: _sockets() <= before)


def _sockets() -> int:
    links = (os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("text", ["resolver", "10.0.0.1:0", "10.0.0.1:x", ""])
def test_a_resolver_needs_an_address(text: str) -> None:
    with pytest.raises(ValueError, match="not of the form"):
        DnsSource(DnsQuery("n.test", 80, resolvers=(text,)), common())


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:53", "fd00::1", "[fd00::1]", "[fd00::1]:53"])
def test_a_resolver_may_have_a_port(text: str) -> None:
    DnsSource(DnsQuery("n.test", 80, resolvers=(text,)), common())
