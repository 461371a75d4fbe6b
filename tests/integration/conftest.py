"""Fixtures: the real Envoy with one of the shipped configurations, stub nodes, and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from running import CONFIGURATIONS, FILE_PORTS, OPTIONS, Envoy, StartEnvoy
from stubs import StubNode, StubServer

from extproc.lab.envoy_config import Config, load_config, write_config
from extproc.lab.processes import Processes, envoy_binary, free_ports, http_ok


@pytest.fixture(scope="session")
def envoy_command() -> str:
    try:
        return envoy_binary()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as running:
        yield running


@pytest.fixture
def ports() -> dict[int, int]:
    """The port in the file -> a free one for this test."""
    return dict(zip(FILE_PORTS, free_ports(len(FILE_PORTS)), strict=True))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


@pytest.fixture
def start_envoy(
    envoy_command: str, processes: Processes, ports: dict[int, int], http: aiohttp.ClientSession, tmp_path: Path
) -> StartEnvoy:
    async def start(name: str, edit: Callable[[Config], Config] = lambda config: config) -> Envoy:
        path = write_config(edit(load_config(CONFIGURATIONS / f"{name}.yaml", ports)), tmp_path / "envoy.yaml")
        child = processes.start("envoy", [envoy_command, "-c", str(path), *OPTIONS])
        admin = f"http://127.0.0.1:{ports[9901]}"
        # in a thread: the stubs answer Envoy's first health checks from this loop, and Envoy waits for them
        await asyncio.to_thread(processes.wait_until, child, http_ok(f"{admin}/ready"))
        return Envoy(child, f"http://127.0.0.1:{ports[10000]}", admin, ports, http)

    return start


@pytest.fixture
async def nodes(ports: dict[int, int]) -> AsyncIterator[dict[str, StubNode]]:
    """The four nodes of the files, by name, in this process."""
    async with AsyncExitStack() as stack:
        stubs = [StubNode(f"node-{number}", ports[8000 + number]) for number in range(1, 5)]
        yield {each.name: await stack.enter_async_context(each) for each in stubs}


@pytest.fixture
async def stub_server(ports: dict[int, int]) -> AsyncIterator[StubServer]:
    async with StubServer(ports[9002]) as server:
        yield server
