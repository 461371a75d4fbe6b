"""The shipped Envoy configurations on other ports and in variants, for the demo, the bench and the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

Config = dict[str, Any]
BodyMode = Literal["prompt-head", "BUFFERED", "FULL_DUPLEX_STREAMED"]

EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"


def load_config(path: Path, ports: Mapping[int, int]) -> Config:
    """The YAML file at `path` with every `port_value` replaced through `ports`; a port that is not in it stays."""

    def rebind(node: Config) -> Config:
        if "port_value" in node:
            node["port_value"] = ports.get(node["port_value"], node["port_value"])
        return node

    return _rewritten(yaml.safe_load(path.read_text()), rebind)


def with_buffer_limit(config: Config, limit_bytes: int) -> Config:
    """The same configuration with this buffer limit on listeners and clusters (Envoy Gateway's default is 32 KiB)."""
    resources = config["static_resources"]
    limit = {"per_connection_buffer_limit_bytes": limit_bytes}
    limited = {kind: [each | limit for each in resources[kind]] for kind in ("listeners", "clusters")}
    return config | {"static_resources": resources | limited}


def with_body_mode(config: Config, mode: BodyMode) -> Config:
    """The same configuration with every ext_proc filter in this body mode; full duplex needs the trailers as well."""

    def change(node: Config) -> Config:
        if node.get("@type") != EXT_PROC:
            return node
        node["send_body_without_waiting_for_header_response"] = mode == "prompt-head"
        node["processing_mode"] |= {
            "request_body_mode": "STREAMED" if mode == "prompt-head" else mode,
            "request_trailer_mode": "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP",
        }
        return node

    return _rewritten(config, change)


def write_config(config: Config, path: Path) -> Path:
    """Write `config` where `envoy -c` can read it; returns `path`."""
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def _rewritten(config: Config, change: Callable[[Config], Config]) -> Config:
    """A copy of a YAML tree with `change` applied to every mapping, innermost first (aliases become copies too)."""

    def copy(node: Any) -> Any:
        if isinstance(node, list):
            return [copy(each) for each in node]
        return _rewritten(node, change) if isinstance(node, dict) else node

    return change({key: copy(value) for key, value in config.items()})
