"""The routers that are compared: what each is installed from, and how it is started before the nodes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from extproc.lab import demo
from extproc.lab.envoy_config import load_config
from extproc.lab.processes import Processes, free_ports, http_ok

Start = Callable[[Processes, Sequence[int], Path], AbstractContextManager[str]]
"""Starts it in front of the nodes at these ports, with the Python of its environment; the URL that clients call."""

# Some look for a tokenizer on a model hub; there is none for simulated nodes.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}


@dataclass(frozen=True, slots=True)
class Peer:
    """One router."""

    start: Start
    requirements: tuple[str, ...] = ()
    """None: it comes with the laboratory."""


@contextmanager
def kvaffinity(processes: Processes, nodes: Sequence[int], _: Path) -> Iterator[str]:
    """As in the demo: the shipped Envoy configuration and a server with the defaults."""
    server, listener, admin, metrics = free_ports(4)
    ports = {demo.EXT_PROC: server, demo.LISTENER: listener, demo.ADMIN: admin}
    ports |= dict(zip(demo.NODES, nodes, strict=True))
    demo.start_server(processes, server, metrics, nodes)
    with demo.running_envoy(processes, "envoy-kvaffinity", load_config(demo.ENVOY_CONFIG, ports), admin):
        yield url(listener)


@contextmanager
def envoy_least_request(processes: Processes, nodes: Sequence[int], _: Path) -> Iterator[str]:
    """Envoy alone: the less busy of two nodes drawn by lot."""
    listener, admin = free_ports(2)
    config = demo.round_robin_config(listener, admin, nodes)
    config["static_resources"]["clusters"][0]["lb_policy"] = "LEAST_REQUEST"
    with demo.running_envoy(processes, "envoy-least-request", config, admin):
        yield url(listener)


@contextmanager
def smg(processes: Processes, nodes: Sequence[int], python: Path) -> Iterator[str]:
    port, metrics = free_ports(2)
    """Without its warm-up: that sends a new node misses, and hits of others, for a minute; here all nodes are new, and
    it would find less. And without comments in a stream whose prompt is still computed."""
    off = "--worker-warmup-secs 0 --worker-warmup-thin-ratio 0 --worker-warmup-divert-every 0 --sse-keepalive-secs 0"
    command = [str(python.with_name("smg")), "launch", *options(nodes, port, metrics), "--log-level", "warn"]
    child = processes.start("smg", [*command, *off.split()], env=OFFLINE)
    processes.wait_until(child, workers(port, len(nodes)))
    yield url(port)


@contextmanager
def sglang_router(processes: Processes, nodes: Sequence[int], python: Path) -> Iterator[str]:
    port, metrics = free_ports(2)
    command = [str(python), "-m", "sglang_router.launch_router", *options(nodes, port, metrics), "--log-level", "error"]
    child = processes.start("sglang-router", [*command, "--worker-startup-check-interval", "1"], env=OFFLINE)
    processes.wait_until(child, workers(port, len(nodes)))
    yield url(port)


@contextmanager
def vllm_router(processes: Processes, nodes: Sequence[int], python: Path) -> Iterator[str]:
    port, metrics = free_ports(2)
    command = [str(python.with_name("vllm-router")), *options(nodes, port, metrics), "--log-level", "error"]
    child = processes.start("vllm-router", [*command, "--worker-startup-check-interval", "1"], env=OFFLINE)
    processes.wait_until(child, http_ok(f"{url(port)}/health"))  # it listens once all workers are healthy
    yield url(port)


@contextmanager
def dynamo(processes: Processes, nodes: Sequence[int], python: Path) -> Iterator[str]:
    """Dynamo's selection engine without events, as the other peers are: it remembers where it sent what."""
    (port,) = free_ports(1)
    sizes = (demo.MODEL, str(demo.BLOCK_TOKENS), str(demo.BLOCKS))
    command = [str(python), str(Path(__file__).with_name("dynamo_proxy.py")), str(port), *sizes, *map(url, nodes)]
    child = processes.start("dynamo", command, env={"DYN_LOG": "error", "DYN_ROUTER_USE_KV_EVENTS": "false"})
    processes.wait_until(child, http_ok(f"{url(port)}/health"))
    yield url(port)


PEERS: Mapping[str, Peer] = {
    "kvaffinity": Peer(kvaffinity),
    "smg": Peer(smg, ("smg==1.13.0",)),
    "sglang-router": Peer(sglang_router, ("sglang-router==0.3.2",)),
    "vllm-router": Peer(vllm_router, ("vllm-router==0.1.17",)),
    "dynamo": Peer(dynamo, ("ai-dynamo-runtime==1.6.1", "aiohttp>=3.10,<4")),
    "envoy-least-request": Peer(envoy_least_request),
}


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def options(nodes: Sequence[int], port: int, metrics: int) -> list[str]:
    """What the three routers of one family understand; all else is their default."""
    where = f"--host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 --prometheus-port {metrics}".split()
    return ["--policy", "cache_aware", *where, "--worker-urls", *map(url, nodes)]


def workers(port: int, count: int) -> Callable[[], bool]:
    """A `ready`: does the router list so many healthy workers? It listens before it knows them."""

    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"{url(port)}/workers", timeout=1.0) as answer:
                return sum(bool(each["is_healthy"]) for each in json.load(answer)["workers"]) == count
        except (OSError, ValueError, KeyError):
            return False

    return ready
