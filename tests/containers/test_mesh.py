"""Envoy, the server and two nodes in containers: conversations keep their node; Envoy answers without the server."""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network
from testcontainers.core.wait_strategies import HttpWaitStrategy

ENVOY_CONFIG = Path(__file__).parents[2] / "envoy/cluster-header.yaml"
# where its ports on 127.0.0.1 are found on the containers' network
HOSTS = {9002: ("server", 9002), 8001: ("node-1", 8000), 8002: ("node-2", 8000)}

CONVERSATIONS = 8
TURNS = 4


def envoy_config() -> str:
    """The shipped configuration with host names for addresses, and without the nodes that are not there."""
    config = yaml.safe_load(ENVOY_CONFIG.read_text())
    resources = config["static_resources"]
    resources["clusters"] = [
        each for each in resources["clusters"] if not each["name"].startswith(("node-3", "node-4"))
    ]
    for cluster in resources["clusters"]:
        if "load_assignment" in cluster:
            cluster["type"] = "STRICT_DNS"
            [locality] = cluster["load_assignment"]["endpoints"]
            addresses = [each["endpoint"]["address"]["socket_address"] for each in locality["lb_endpoints"]]
            hosts = [HOSTS[each["port_value"]] for each in addresses if each["port_value"] in HOSTS]
            locality["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {"address": name, "port_value": port}}}}
                for name, port in hosts
            ]
    return yaml.safe_dump(config)


def server_config(addresses: dict[str, str]) -> str:
    """Nodes by their ip:port, which is what Envoy's access log calls them."""
    nodes = [
        f'[[models.nodes]]\nname = "{name}"\naddress = "{address}"\ncluster = "{name}"\n'
        for name, address in addresses.items()
    ]
    server = '[server]\nlisten = "0.0.0.0:9002"\nmetrics_listen = "0.0.0.0:9090"\n'
    return server + '[policy]\ncontrol_percent = 0\n[[models]]\nname = "tiny"\n' + "".join(nodes)


@dataclass(frozen=True, slots=True)
class Mesh:
    url: str  # Envoy's
    server: DockerContainer

    def ask(self, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
        """The node that answered, and its answer; anything but 200 raises."""
        body = json.dumps({"model": "tiny", "messages": messages, "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", body, {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.headers["x-kvaffinity-node"], json.load(answer)


@pytest.fixture
def mesh(images: Any) -> Iterator[Mesh]:
    testcontainers_config.ryuk_disabled = True  # its image would have to be pulled; the ExitStack removes everything
    with ExitStack() as stack:
        network = stack.enter_context(Network())

        def start(
            image: str, name: str, command: str, ready: tuple[int, str], *files: tuple[bytes, str]
        ) -> DockerContainer:
            """A container on the network that answers a GET of `ready` (port, path) with 200."""
            container = DockerContainer(image, command=command, ports=[ready[0]], transferables=[*files])
            container.with_network(network).with_network_aliases(name)
            container.waiting_for(HttpWaitStrategy(*ready).with_startup_timeout(30).with_poll_interval(0.1))
            return stack.enter_context(container)

        addresses = {}
        for name in ("node-1", "node-2"):
            command = f"node --name {name} --host 0.0.0.0 --port 8000 --model tiny"
            node = start(images.kvaffinity, name, command, (8000, "/health"))
            addresses[name] = f"{node.get_docker_client().bridge_ip(node.get_container_id())}:8000"
        path = "/etc/kvaffinity/kvaffinity.toml"
        file = (server_config(addresses).encode(), path)
        server = start(images.kvaffinity, "server", f"serve --config {path}", (9090, "/metrics"), file)
        path = "/etc/envoy/envoy.yaml"
        file = (envoy_config().encode(), path)
        envoy = start(images.envoy, "envoy", f"-c {path}", (10000, "/v1/models"), file)
        yield Mesh(f"http://{envoy.get_container_host_ip()}:{envoy.get_exposed_port(10000)}", server)


def test_turns_stay_on_their_node_and_a_stopped_server_costs_no_request(mesh: Mesh) -> None:
    # different from the first word on, and 1,000 tokens each: worth staying for
    conversations = [[{"role": "system", "content": f"{i} is your number. " * 200}] for i in range(CONVERSATIONS)]

    def turn(i: int) -> tuple[str, int]:
        """Ask this conversation's next question: the node that answered and how many tokens it had cached."""
        conversations[i].append({"role": "user", "content": f"Question {len(conversations[i])}?"})
        node, answer = mesh.ask(conversations[i])
        conversations[i].append(answer["choices"][0]["message"])
        return node, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(CONVERSATIONS) as together:  # what is in flight spreads the first turns
        homes = [node for node, _ in together.map(turn, range(CONVERSATIONS))]
    assert set(homes) == {"node-1", "node-2"}
    for _ in range(TURNS - 1):
        for i, home in enumerate(homes):
            node, cached_tokens = turn(i)
            assert node == home
            assert cached_tokens > 500

    server = mesh.server.get_wrapped_container()
    server.stop()
    assert server.wait()["StatusCode"] == 0, server.logs().decode()
    assert {turn(i)[0] for i in range(CONVERSATIONS)} <= {"node-1", "node-2"}
