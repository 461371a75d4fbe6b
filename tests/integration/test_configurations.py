"""What the shipped Envoy configurations promise by themselves, with the real Envoy and stubs at both ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import stubs
from running import CONFIGURATIONS, Envoy, StartEnvoy, until
from stubs import CLUSTER_HEADER, DESTINATION_HEADER, REQUEST_HEADER, RETRY_HEADER, StubNode, StubServer

from extproc.lab.envoy_config import BodyMode, Config, load_config, with_body_mode, with_buffer_limit, write_config
from extproc.lab.processes import Processes, accepts

FILES = ["cluster-header", "override-host"]
each_file = pytest.mark.parametrize("file", FILES)
Nodes = dict[str, StubNode]


def choose(file: str, envoy: Envoy, *numbers: int) -> dict[str, str]:
    """Request headers that make the stub server choose these nodes, first choice first."""
    if file == "cluster-header":
        return {"stub-set": f"{CLUSTER_HEADER}=node-{numbers[0]}"}
    return {"stub-set": f"{DESTINATION_HEADER}={','.join(envoy.address(number) for number in numbers)}"}


async def post(envoy: Envoy, headers: dict[str, str] | None = None, body: bytes = b"{}") -> dict[str, Any]:
    """The JSON answer to a POST; anything but 200 is an error."""
    async with envoy.http.post(f"{envoy.url}/v1/chat/completions", data=io.BytesIO(body), headers=headers) as answer:
        assert answer.status == 200, (answer.status, await answer.text())
        found: dict[str, Any] = await answer.json()
        return found


VARIANTS: dict[str, Callable[[Config], Config]] = {
    "as shipped": lambda config: config,
    "32 KiB buffers": lambda config: with_buffer_limit(config, 32768),
    "BUFFERED": lambda config: with_body_mode(config, "BUFFERED"),
    "FULL_DUPLEX_STREAMED": lambda config: with_body_mode(config, "FULL_DUPLEX_STREAMED"),
}


@each_file
@pytest.mark.parametrize("variant", VARIANTS)
def test_envoy_accepts_the_file_and_its_variants(envoy_command: str, file: str, variant: str, tmp_path: Path) -> None:
    config = VARIANTS[variant](load_config(CONFIGURATIONS / f"{file}.yaml", {}))
    path = write_config(config, tmp_path / "envoy.yaml")
    done = subprocess.run([envoy_command, "--mode", "validate", "-c", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@each_file
@pytest.mark.parametrize("mode", ["prompt-head", "BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_a_request_goes_to_the_node_that_the_server_names(
    file: str, mode: BodyMode, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file, lambda config: with_body_mode(config, mode))
    body = os.urandom(300_000)
    for number in [1, 2, 3, 4, 3, 3]:
        answer = await post(envoy, choose(file, envoy, number), body)
        assert answer["node"] == f"node-{number}"
        assert answer["sha256"] == hashlib.sha256(body).hexdigest()


@each_file
async def test_a_request_without_a_body_is_routed_too(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    async with envoy.http.get(f"{envoy.url}/v1/models", headers=choose(file, envoy, 2)) as answer:
        assert (await answer.json())["node"] == "node-2"


@each_file
@pytest.mark.parametrize("unknown", ["node-9", "127.0.0.1:9"])
async def test_a_choice_that_envoy_does_not_know_is_answered_by_the_pool(
    file: str, unknown: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    await post(envoy, {"stub-set": f"{CLUSTER_HEADER}={unknown};{DESTINATION_HEADER}={unknown}"})


@each_file
@pytest.mark.parametrize("server_up", [True, False], ids=["server up", "server down"])
async def test_a_client_cannot_steer(
    file: str, server_up: bool, start_envoy: StartEnvoy, nodes: Nodes, ports: dict[int, int]
) -> None:
    async with StubServer(ports[9002]) if server_up else contextlib.nullcontext():
        envoy = await start_envoy(file)
        steering = {CLUSTER_HEADER: "node-3", DESTINATION_HEADER: envoy.address(3)}
        served = {(await post(envoy, steering))["node"] for _ in range(12)}
    assert len(served) > 1  # left to itself, least request does not send 12 requests to one idle node of four


@each_file
async def test_the_server_is_not_shown_routing_headers_and_credentials_of_the_client(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    secrets = {"authorization": "Bearer secret", "x-api-key": "secret", "cookie": "a=secret"}
    await post(envoy, {CLUSTER_HEADER: "node-3", DESTINATION_HEADER: envoy.address(3), "x-session-id": "s", **secrets})
    [shown] = stub_server.asked
    assert shown["x-session-id"] == "s"
    assert not shown.keys() & {CLUSTER_HEADER, DESTINATION_HEADER, *secrets}
    [got] = [headers for node in nodes.values() for headers in node.seen]
    assert got.items() >= secrets.items()  # the node still gets them


@each_file
async def test_the_node_never_sees_the_routing_headers(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    client = {CLUSTER_HEADER: "node-3", DESTINATION_HEADER: envoy.address(3)}
    decided = {"stub-set": f"{CLUSTER_HEADER}=node-1;{DESTINATION_HEADER}={envoy.address(1)},{envoy.address(2)}"}
    nodes["node-1"].drop = 1  # the first attempt fails, so that a second one is looked at too
    for headers in (client, decided, client | decided):
        await post(envoy, headers)
    seen = [headers for node in nodes.values() for headers in node.seen]
    assert len(seen) == 4
    ours = {CLUSTER_HEADER, DESTINATION_HEADER, RETRY_HEADER, REQUEST_HEADER}
    assert not any(headers.keys() & ours for headers in seen)


@each_file
async def test_the_server_can_write_no_other_header(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    chosen = choose(file, envoy, 2)["stub-set"]
    answer = await post(envoy, {"stub-set": f"{chosen};x-other=1;authorization=forged;host=forged"})
    assert answer["node"] == "node-2"
    [got] = nodes["node-2"].seen
    assert "x-other" not in got
    assert "authorization" not in got
    assert got["host"] != "forged"


@each_file
async def test_the_server_can_reject_with_a_json_error(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    async with envoy.http.post(f"{envoy.url}/v1/chat/completions", data=b"{}", headers={"stub-reject": "1"}) as answer:
        assert (answer.status, answer.content_type) == (503, "application/json")
        assert await answer.json() == {"error": {}}


@each_file
async def test_the_access_log_tells_ticket_times_and_who_served(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    headers = choose(file, envoy, 2) | {"stub-ticket": "t1"}
    async with envoy.http.post(f"{envoy.url}/stream", data=b"{}", headers=headers) as answer:
        await answer.read()
    await until(lambda: len(stub_server.logged) == 1)
    [entry] = stub_server.logged
    common, tags = entry.common_properties, entry.common_properties.custom_tags
    assert dict(common.metadata.filter_metadata["kvaffinity"]) == {"ticket": "t1", "locality": 0.5}
    served = common.upstream_remote_address.socket_address
    assert f"{served.address}:{served.port_value}" == envoy.address(2)
    assert common.upstream_cluster == ("node-2-only" if file == "cluster-header" else "pool")
    assert common.upstream_request_attempt_count == 1
    assert entry.response.response_code.value == 200
    assert tags["content_type"] == "text/event-stream"
    waited_us = StubNode.FIRST_CHUNK_AFTER_S * 1e6
    assert waited_us * 0.9 <= int(tags["engine_ttft_us"]) <= int(tags["ttft_us"]) < waited_us * 3


@each_file
async def test_the_access_log_tells_when_the_client_left(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    await leave(envoy, {"stub-ticket": "t1"}, when=lambda: any(node.seen for node in nodes.values()))
    await until(lambda: len(stub_server.logged) == 1)
    common = stub_server.logged[0].common_properties
    assert common.response_flags.downstream_connection_termination
    assert common.metadata.filter_metadata["kvaffinity"]["ticket"] == "t1"
    assert common.custom_tags["ttft_us"] == ""


@each_file
async def test_a_request_has_a_name_that_the_client_did_not_choose_even_where_it_left_before_the_reply(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    for count in (1, 2):
        leaving = {"stub-silent": "1", REQUEST_HEADER: "mine"}
        await leave(envoy, leaving, when=lambda count=count: len(stub_server.asked) == count)  # type: ignore[misc]
    await until(lambda: len(stub_server.logged) == 2)
    shown = {headers[REQUEST_HEADER] for headers in stub_server.asked}
    assert len(shown - {"mine"}) == 2
    assert {entry.common_properties.custom_tags["request"] for entry in stub_server.logged} == shown
    assert not any(entry.common_properties.metadata.filter_metadata for entry in stub_server.logged)


async def leave(envoy: Envoy, headers: dict[str, str], *, when: Callable[[], bool]) -> None:
    """Ask for a streamed answer, and close the connection `when` it is time."""
    lines = ["POST /stream HTTP/1.1", "host: llm", "content-length: 2", *[f"{k}: {v}" for k, v in headers.items()]]
    _, writer = await asyncio.open_connection("127.0.0.1", envoy.ports[10000])
    writer.write("\r\n".join([*lines, "", "{}"]).encode())
    await until(when)
    writer.close()
    await writer.wait_closed()


@each_file
async def test_a_dead_first_choice_is_served_by_the_next(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    await nodes["node-1"].__aexit__()
    for _ in range(10):
        answer = await post(envoy, choose(file, envoy, 1, 3, 2))
        assert answer["node"] == "node-3" if file == "override-host" else answer["node"] != "node-1"
    await until(lambda: len(stub_server.logged) == 10)
    assert max(entry.common_properties.upstream_request_attempt_count for entry in stub_server.logged) > 1


@each_file
async def test_what_a_dying_node_had_in_flight_is_served_by_another(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    nodes["node-1"].drop = 100  # it never answers again
    body = os.urandom(60_000)
    answer = await post(envoy, choose(file, envoy, 1, 3), body)
    assert nodes["node-1"].seen
    assert answer["node"] != "node-1"
    assert answer["sha256"] == hashlib.sha256(body).hexdigest()


@each_file
async def test_a_body_that_the_server_has_not_seen_whole_is_sent_once(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    nodes["node-1"].drop = 1
    body = io.BytesIO(os.urandom(300_000))
    async with envoy.http.post(f"{envoy.url}/", data=body, headers=choose(file, envoy, 1, 3)) as answer:
        assert answer.status == 503
    assert sum(len(node.seen) for node in nodes.values()) == 1


@each_file
async def test_no_part_of_a_body_is_forwarded_twice_when_it_goes_on_after_the_decision(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    parts = [os.urandom(100_000), os.urandom(100_000)]

    async def upload() -> AsyncIterator[bytes]:
        yield parts[0]
        await until(lambda: stub_server.decided > 0)
        yield parts[1]

    async with envoy.http.post(f"{envoy.url}/", data=upload(), headers=choose(file, envoy, 2)) as reply:
        answer = await reply.json()
    assert answer == {"node": "node-2", "bytes": 200_000, "sha256": hashlib.sha256(b"".join(parts)).hexdigest()}


@each_file
async def test_a_body_of_40_mb_arrives_unchanged(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, stub_server: StubServer
) -> None:
    envoy = await start_envoy(file)
    body = os.urandom(40_000_000)
    answer = await post(envoy, choose(file, envoy, 4), body)
    assert answer == {"node": "node-4", "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}


@each_file
async def test_without_a_server_every_request_is_answered_by_the_pool(
    file: str, start_envoy: StartEnvoy, nodes: Nodes
) -> None:
    envoy = await start_envoy(file)
    body = os.urandom(3_000_000)
    answers = [await post(envoy, body=body) for _ in range(12)]
    assert {answer["sha256"] for answer in answers} == {hashlib.sha256(body).hexdigest()}
    assert len({answer["node"] for answer in answers}) > 1


@each_file
async def test_a_server_that_hangs_is_waited_for_then_ejected_then_taken_back(
    file: str, start_envoy: StartEnvoy, nodes: Nodes, processes: Processes, ports: dict[int, int]
) -> None:
    server = processes.start("stub-server", [sys.executable, stubs.__file__, str(ports[9002])])
    processes.wait_until(server, accepts(ports[9002]))
    envoy = await start_envoy(file)
    await until(envoy.server_is_healthy)
    assert (await post(envoy, choose(file, envoy, 2)))["node"] == "node-2"

    server.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    waits = []
    while await envoy.server_is_healthy():
        waits.append(await seconds(post(envoy, choose(file, envoy, 2))))
        assert time.monotonic() - stopped < 5
    assert waits
    assert max(waits) < 1  # message_timeout and what a busy machine adds
    for _ in range(3):
        assert await seconds(post(envoy, choose(file, envoy, 2))) < 0.2  # nobody is asked any more

    server.signal(signal.SIGCONT)

    async def routed() -> bool:
        return [(await post(envoy, choose(file, envoy, 2)))["node"] for _ in range(3)] == ["node-2"] * 3

    await until(routed)


async def seconds(work: Awaitable[object]) -> float:
    """How long it took."""
    started = time.monotonic()
    await work
    return time.monotonic() - started
