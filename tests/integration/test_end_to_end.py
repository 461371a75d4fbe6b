"""Everything together: the real Envoy, the real server, simulated nodes. Turns stay together, failures stay small."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from running import CONFIGURATIONS, FILE_PORTS, OPTIONS, Envoy, until
from stubs import CLUSTER_HEADER, DESTINATION_HEADER

from extproc.lab.envoy_config import Config, load_config, with_body_mode, with_buffer_limit, write_config
from extproc.lab.processes import Child, Processes, accepts, free_ports, http_ok

FILES = ["cluster-header", "override-host"]
VARIANTS: dict[str, Callable[[Config], Config]] = {
    "as shipped": lambda config: config,
    "32 KiB buffers": lambda config: with_buffer_limit(config, 32768),
    "BUFFERED": lambda config: with_body_mode(config, "BUFFERED"),
    "FULL_DUPLEX_STREAMED": lambda config: with_body_mode(config, "FULL_DUPLEX_STREAMED"),
}
NODES = (1, 2, 3, 4)
CHAT = "/v1/chat/completions"


class Stack:
    """Four nodes, one server, and an Envoy for each file and variant that a test asks for."""

    def __init__(self, processes: Processes, directory: Path, envoy_command: str) -> None:
        self.processes = processes
        self.directory = directory
        self.envoy_command = envoy_command
        self.nodes = dict(zip(NODES, free_ports(len(NODES)), strict=True))
        self.port, self.metrics_port = free_ports(2)
        self.children: dict[str, Child] = {}
        self.envoys: dict[tuple[str, str], tuple[Child, dict[int, int]]] = {}
        for number in NODES:
            self.start_node(number)
        for number in NODES:
            self.wait(f"node-{number}", f"http://127.0.0.1:{self.nodes[number]}/health")
        self.start_server()

    def wait(self, name: str, url: str) -> None:
        self.processes.wait_until(self.children[name], http_ok(url))

    def start_node(self, number: int) -> None:
        """A node that is quick enough for a test, and slow enough to die with requests in hand."""
        options = ["--blocks", "40000", "--prefill-rate", "200000", "--decode-ms", "5", "--max-running", "64"]
        command = [sys.executable, "-m", "extproc.lab.node", "--name", f"node-{number}", *options]
        name = f"node-{number}"
        self.children[name] = self.processes.start(name, [*command, "--port", str(self.nodes[number])])

    def start_server(self) -> None:
        lines = [
            "[server]",
            f'listen = "127.0.0.1:{self.port}"',
            f'metrics_listen = "127.0.0.1:{self.metrics_port}"',
            'destination = "both"',
            "[policy]",
            "control_percent = 0",
            "[[models]]",
            'name = "tiny"',
            "prefill_tokens_per_s = 200000",
        ]
        for number, port in self.nodes.items():
            lines += ["[[models.nodes]]", f'name = "node-{number}"', f'address = "127.0.0.1:{port}"']
            lines += [f'cluster = "node-{number}"']
        path = self.directory / "kvaffinity.toml"
        path.write_text("\n".join(lines))
        command = [sys.executable, "-m", "extproc", "serve", "--config", str(path)]
        self.children["server"] = self.processes.start("server", command)
        self.processes.wait_until(self.children["server"], accepts(self.port))
        self.wait("server", f"http://127.0.0.1:{self.metrics_port}/healthz")

    def envoy(self, file: str, variant: str, http: aiohttp.ClientSession) -> Envoy:
        """The Envoy of this file and variant; started when it is first asked for."""
        if (file, variant) not in self.envoys:
            theirs = {9002: self.port} | {8000 + number: port for number, port in self.nodes.items()}
            ports = dict(zip(FILE_PORTS, free_ports(len(FILE_PORTS)), strict=True)) | theirs
            name = f"envoy {file} {variant}"
            config = VARIANTS[variant](load_config(CONFIGURATIONS / f"{file}.yaml", ports))
            path = write_config(config, self.directory / f"{name}.yaml")
            self.children[name] = self.processes.start(name, [self.envoy_command, "-c", str(path), *OPTIONS])
            self.wait(name, f"http://127.0.0.1:{ports[9901]}/ready")
            self.envoys[file, variant] = self.children[name], ports
        child, ports = self.envoys[file, variant]
        return Envoy(child, f"http://127.0.0.1:{ports[10000]}", f"http://127.0.0.1:{ports[9901]}", ports, http)

    async def metric(self, http: aiohttp.ClientSession, name: str) -> float:
        """The server's metric, summed over its labels."""
        async with http.get(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    async def settled(self, http: aiohttp.ClientSession) -> None:
        """Wait until the access log has told the server how everything ended."""

        async def nothing_in_flight() -> bool:
            return await self.metric(http, "kvaffinity_in_flight_requests") == 0

        await until(nothing_in_flight)


@pytest.fixture(scope="module")
def stack(envoy_command: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with Processes(directory) as processes:
        yield Stack(processes, directory, envoy_command)


@pytest.fixture(params=FILES)
async def envoy(request: pytest.FixtureRequest, stack: Stack, http: aiohttp.ClientSession) -> Envoy:
    """The Envoy of each file as shipped, when it sees the server and all nodes."""
    found = stack.envoy(request.param, "as shipped", http)
    await until(found.server_is_healthy)
    await until(all_nodes_are_healthy(found))
    return found


def all_nodes_are_healthy(envoy: Envoy) -> Callable[[], Awaitable[bool]]:
    async def healthy() -> bool:
        return await envoy.stat("cluster.pool.membership_healthy") == len(NODES)

    return healthy


def chat(*turns: str, **extra: object) -> bytes:
    """A chat body: the user's and the assistant's texts by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return json.dumps({"model": "tiny", "max_tokens": 1, "messages": messages, **extra}).encode()


async def served_by(envoy: Envoy, body: bytes, headers: dict[str, str] | None = None) -> str:
    """The node that answered; the answer is 200 and the body arrived as it was sent."""
    async with envoy.http.post(f"{envoy.url}{CHAT}", data=io.BytesIO(body), headers=headers) as answer:
        assert answer.status == 200, (answer.status, await answer.text())
        assert answer.headers["x-body-sha256"] == hashlib.sha256(body).hexdigest()
        return answer.headers["x-kvaffinity-node"]


def text(length: int) -> str:
    """A text that no other request shares."""
    return os.urandom(length // 2).hex()


async def test_the_turns_of_a_conversation_stay_on_one_node(
    envoy: Envoy, stack: Stack, http: aiohttp.ClientSession
) -> None:
    conversations = [[text(8000)] for _ in range(6)]
    nodes: list[set[str]] = [set() for _ in conversations]
    for _ in range(4):
        for turns, seen in zip(conversations, nodes, strict=True):
            seen.add(await served_by(envoy, chat(*turns)))
            turns += ["Yes.", text(400)]
        await stack.settled(http)
    assert [len(seen) for seen in nodes] == [1] * len(conversations)
    assert len(set.union(*nodes)) > 1


async def test_a_body_of_40_mb_arrives_unchanged(envoy: Envoy) -> None:
    await served_by(envoy, chat(text(2000), metadata={"filler": "x" * 40_000_000}))


async def test_a_slow_upload_arrives_unchanged(envoy: Envoy) -> None:
    body = chat(text(200_000))

    async def upload() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]
            await asyncio.sleep(0.2)  # the client's pause, longer than the server waits for the next chunk

    async with envoy.http.post(f"{envoy.url}{CHAT}", data=upload()) as answer:
        assert answer.status == 200
        assert answer.headers["x-body-sha256"] == hashlib.sha256(body).hexdigest()


async def test_a_client_cannot_steer_while_the_server_is_up(envoy: Envoy) -> None:
    body = chat(text(80_000))  # worth more than being the first in a queue
    home = await served_by(envoy, body)
    for number in NODES:
        steering = {CLUSTER_HEADER: f"node-{number}", DESTINATION_HEADER: envoy.address(number)}
        assert await served_by(envoy, body, steering) == home


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("variant", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_the_other_body_modes_route_and_hand_the_body_on_unchanged(
    file: str, variant: str, stack: Stack, http: aiohttp.ClientSession
) -> None:
    envoy = stack.envoy(file, variant, http)
    await until(envoy.server_is_healthy)
    for length in (8000, 300_000):
        body, nodes = chat(text(length)), set()
        for _ in range(3):
            nodes.add(await served_by(envoy, body))
            await stack.settled(http)
        assert len(nodes) == 1, length


@pytest.mark.parametrize("file", FILES)
async def test_an_envoy_with_32_kib_buffers_gets_decisions_for_100_kb_bodies(
    file: str, stack: Stack, http: aiohttp.ClientSession
) -> None:
    envoy = stack.envoy(file, "32 KiB buffers", http)
    await until(envoy.server_is_healthy)
    routed = await stack.metric(http, "kvaffinity_requests_total")
    body, nodes = chat(text(100_000)), set()
    for _ in range(4):
        nodes.add(await served_by(envoy, body))
        await stack.settled(http)
    assert await stack.metric(http, "kvaffinity_requests_total") == routed + 4
    assert len(nodes) == 1


async def test_200_aborted_requests_leave_nothing_in_flight(
    envoy: Envoy, stack: Stack, http: aiohttp.ClientSession
) -> None:
    cut = await stack.metric(http, "kvaffinity_outcomes_total")

    async def leave_while_reading(_: int) -> None:
        body = json.loads(chat(text(2000))) | {"stream": True, "max_tokens": 1000}
        async with aiohttp.ClientSession() as client:
            answer = await client.post(f"{envoy.url}{CHAT}", json=body)
            await answer.content.readany()
            answer.close()

    async def leave_without_reading(number: int) -> None:
        body = chat(text(2000), max_tokens=1000)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: llm\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        _, writer = await asyncio.open_connection("127.0.0.1", envoy.ports[10000])
        writer.write(head + (body if number % 2 else body[:1000]))  # every other one leaves in the middle of the upload
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    for start in range(0, 200, 40):
        kinds = [leave_while_reading] * 20 + [leave_without_reading] * 20
        await asyncio.gather(*[leave(start + i) for i, leave in enumerate(kinds)])

    await stack.settled(http)
    assert await stack.metric(http, "kvaffinity_outcomes_total") >= cut + 100


async def test_a_node_killed_under_load_costs_no_client_an_error(envoy: Envoy, stack: Stack) -> None:
    served: Counter[str] = Counter()
    errors: list[object] = []
    killed_at = time.monotonic() + 1.0
    until_s = killed_at + 2.0

    async def client() -> None:
        while time.monotonic() < until_s:
            body = chat(text(8000), max_tokens=4)  # 20 ms in the node: each client has a request in some node's hands
            try:
                async with envoy.http.post(f"{envoy.url}{CHAT}", data=body) as answer:
                    await answer.read()
                    served[answer.headers.get("x-kvaffinity-node", "none")] += 1
                    if answer.status != 200:
                        errors.append(answer.status)
            except aiohttp.ClientError as error:
                errors.append(error)

    async def kill() -> int:
        await asyncio.sleep(killed_at - time.monotonic())
        busiest = served.most_common(1)[0][0]
        stack.children[busiest].process.kill()
        return int(busiest.removeprefix("node-"))

    killed, *_ = await asyncio.gather(kill(), *[client() for _ in range(16)])
    stack.start_node(killed)
    stack.wait(f"node-{killed}", f"http://127.0.0.1:{stack.nodes[killed]}/health")
    print(f"node-{killed} killed: {sum(served.values())} requests, {dict(served)}, {len(errors)} errors")
    assert not errors


async def test_a_server_that_hangs_costs_no_request_its_answer_and_is_ejected(envoy: Envoy, stack: Stack) -> None:
    body = chat(text(8000))
    await served_by(envoy, body)
    server = stack.children["server"]
    server.signal(signal.SIGSTOP)
    try:
        while await envoy.server_is_healthy():
            await served_by(envoy, body)
        async with asyncio.timeout(1):
            for _ in range(5):
                await served_by(envoy, body)
    finally:
        server.signal(signal.SIGCONT)
    await until(envoy.server_is_healthy)

    async def routed_again() -> bool:
        # by the server, and by what it knows: the fallback has spread the prompt, so it need not be the first node
        before = await stack.metric(envoy.http, "kvaffinity_matched_tokens_total")
        await served_by(envoy, body)
        return await stack.metric(envoy.http, "kvaffinity_matched_tokens_total") > before

    await until(routed_again)


async def test_a_server_that_is_killed_costs_no_request_its_answer(envoy: Envoy, stack: Stack) -> None:
    bodies = [chat(text(length)) for length in (8000, 300_000)]
    errors: list[BaseException] = []

    async def client(body: bytes) -> None:
        for _ in range(20):
            try:
                await served_by(envoy, body)
            except (AssertionError, aiohttp.ClientError) as error:
                errors.append(error)

    async def kill() -> None:
        await served_by(envoy, bodies[0])
        stack.children["server"].process.kill()

    await asyncio.gather(kill(), *[client(body) for body in bodies * 2])
    try:
        assert not errors
        steering = {CLUSTER_HEADER: "node-3", DESTINATION_HEADER: envoy.address(3)}
        served = {await served_by(envoy, chat(text(100)), steering) for _ in range(12)}
        assert len(served) > 1  # nobody steers a client's requests, and the client does not either
    finally:
        stack.start_server()
