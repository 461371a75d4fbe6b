"""Envoy's configuration for the bench: the shipped route three times (bare, trivial, ours), and instant upstreams."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

from extproc.lab.envoy_config import Config, load_config

SHIPPED = Path(__file__).parents[2] / "envoy" / "cluster-header.yaml"
NODE_PORTS = {"node-1": 8001, "node-2": 8002, "node-3": 8003, "node-4": 8004}  # in the shipped file
SERVER_PORT, ADMIN_PORT = 9002, 9901  # in the shipped file
VLLM_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="31250"} 1.0
"""


def gateway(nodes: Mapping[str, int], listeners: Mapping[str, int], servers: Mapping[str, int], admin: int) -> Config:
    """The Envoy under test: the shipped listener once for each of `listeners`; those in `servers` ask that port.

    A listener without a server loses the ext_proc filter and the access log, and nothing else. Each answer carries an
    `x-route` header, "cluster>node": "pool" is the fallback route, so no fail-open can pass for a decision.
    """
    config = load_config(SHIPPED, {ADMIN_PORT: admin, **{NODE_PORTS[name]: port for name, port in nodes.items()}})
    resources = config["static_resources"]
    listener, clusters = resources["listeners"][0], resources["clusters"]
    asked = next(each for each in clusters if each["name"] == "kvaffinity")
    resources["listeners"] = [_listener(listener, name, port, name in servers) for name, port in listeners.items()]
    resources["clusters"] = [each for each in clusters if each is not asked]
    resources["clusters"] += [_renamed(asked, name, port) for name, port in servers.items()]
    return config


def _listener(shipped: Config, name: str, port: int, asks: bool) -> Config:
    listener = copy.deepcopy(shipped) | {"name": name, "address": _address(port)}
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["stat_prefix"] = name
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        route["response_headers_to_add"] = [_header("x-route", "%UPSTREAM_CLUSTER_RAW%>%RESP(x-served-by)%")]
    filters, logs = manager["http_filters"], manager["access_log"]
    if asks:
        for service in (filters[0]["typed_config"], logs[0]["typed_config"]["common_config"]):
            service["grpc_service"]["envoy_grpc"]["cluster_name"] = name
    else:
        manager["http_filters"], manager["access_log"] = filters[1:], []
    return listener


def _renamed(cluster: Config, name: str, port: int) -> Config:
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}}]}]}
    return cluster | {"name": name, "load_assignment": assignment}


def upstreams(nodes: Mapping[str, int], admin: int) -> Config:
    """One process that is every node: it reads a request to the end of its body, then answers a constant JSON.

    The body is buffered because a direct response does not wait for it, after which HTTP/1.1 has to close.
    """
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {"listeners": [_upstream(name, port) for name, port in nodes.items()]},
    }


def _upstream(name: str, port: int) -> Config:
    message = {"role": "assistant", "content": name}
    answer = {"id": "chatcmpl-0", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}
    routes = [
        {"match": {"path": "/metrics"}, "direct_response": _direct(VLLM_METRICS)},
        {
            "match": {"prefix": "/"},
            "direct_response": _direct(json.dumps(answer)),
            "response_headers_to_add": [_header("content-type", "application/json"), _header("x-served-by", name)],
        },
    ]
    manager = {
        "stat_prefix": name,
        "http_filters": [
            _typed("http.buffer.v3.Buffer", {"max_request_bytes": 8 << 20}),
            _typed("http.router.v3.Router", {}),
        ],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
    }
    network = _typed("network.http_connection_manager.v3.HttpConnectionManager", manager)
    return {"name": name, "address": _address(port), "filter_chains": [{"filters": [network]}]}


def _typed(kind: str, config: Config) -> Config:
    return {
        "name": f"envoy.filters.{kind}",
        "typed_config": {"@type": f"type.googleapis.com/envoy.extensions.filters.{kind}", **config},
    }


def _direct(body: str) -> Config:
    return {"status": 200, "body": {"inline_string": body}}


def _address(port: int) -> Config:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _header(key: str, value: str) -> Config:
    return {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
