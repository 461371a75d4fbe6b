"""The configuration: the only reader of the file and the environment; typed, unknown keys refused with their path."""

from __future__ import annotations

import os
import re
import tomllib
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from extproc.sources.discovery.source import Naming

_PORT = r"(?:6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Address = Annotated[str, msgspec.Meta(pattern=rf"^(?:[^\s:/]+|\[[0-9a-fA-F:]+\]):{_PORT}$")]
Name = Annotated[str, msgspec.Meta(min_length=1)]
HeaderName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]*$")]


ZmqEndpoint = Annotated[str, msgspec.Meta(pattern=r"^(tcp|ipc)://.+")]


class ConfigError(ValueError):
    """The configuration cannot be used; the message says where and why."""


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the server listens, how long it waits, and what it tells Envoy."""

    listen: Annotated[str, msgspec.Meta(pattern=rf"^unix:.+|^.+:{_PORT}$")] = "127.0.0.1:9002"
    """ext_proc, access log and health; `host:port` or `unix:/path`."""
    metrics_listen: Address = "127.0.0.1:9090"
    """/metrics and /healthz."""
    metrics: bool = True
    """Serve metrics_listen at all?"""
    head_bytes: Annotated[int, msgspec.Meta(ge=1024, le=64 << 20)] = 1 << 20
    """Read this much of a body at most. Envoy's default buffers hold about 1 MiB."""
    max_held_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 256 << 20
    """All heads together; beyond it requests are decided on their headers."""
    max_message_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 64 << 20
    """Largest gRPC message; matters to BUFFERED mode, where a body is one message."""
    max_streams: Count = 10_000
    """Requests in hand at once; more are refused, and Envoy lets them through."""
    collect_gap_s: Seconds = 0.15
    """Decide on what has arrived after this long without a new chunk; keep it under Envoy's `message_timeout`."""
    collect_total_s: Seconds = 1.0
    """... and after this long in all."""
    decide_s: Seconds = 0.02
    """From the complete head to the decision; then it is made on the blocks hashed so far."""
    decide_s_per_16_kib: Annotated[float, msgspec.Meta(ge=0)] = 0.001
    destination: Literal["cluster-header", "override-host", "both"] = "cluster-header"
    cluster_header: HeaderName = "x-upstream-cluster"
    destination_header: HeaderName = "x-gateway-destination-endpoint"
    retry_on: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9,-]*$")] = (
        "connect-failure,refused-stream,reset-before-request,reset"
    )
    """When Envoy repeats a request that it can repeat whole (`x-envoy-retry-on`); "" takes the header away only."""
    when_empty: Literal["fallback", "reject"] = "fallback"
    """No node in the pool: pass on to Envoy's fallback route, or answer 503."""
    ticket_ttl_s: Seconds = 600.0
    """Release a request's load after this long when no access log came for it."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """After SIGTERM, how long open streams may take."""
    session_hints: tuple[Name, ...] = ("x-session-id", "prompt_cache_key", "user", "previous_response_id")
    """Request headers or fields of the body (`metadata.user_id` is a field in a field) that name a session; the first
    that is there counts."""
    isolate_by_header: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]*$")] = ""
    """Requests that differ in this header share no blocks, although they do in the engine."""
    tokenizer_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """For prompts that take more than a millisecond to read."""
    tokenizer_backlog_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 16 << 20
    """Of text that may wait for these threads; beyond it requests are decided on what was read before."""
    memo_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 256 << 20
    """Block hashes of prompts that were read before, for all models."""


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The default policy; see the README for what each does."""

    objective: Literal["ttft", "throughput", "blend"] = "ttft"
    blend: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    price_weight: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    load_bound: Annotated[float, msgspec.Meta(ge=1)] = 1.25
    load_slack_s: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    saved_slack: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    crowding: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    margin_s: Annotated[float, msgspec.Meta(ge=0)] = 0.005
    margin_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.02
    fallbacks: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    control_percent: Annotated[float, msgspec.Meta(ge=0, le=50)] = 0.0
    shadow: Literal["", "latency", "locality"] = ""
    max_waiting: Count = 8
    max_kv_usage: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95


class ScrapeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the nodes' load is read."""

    enabled: bool = True
    interval_s: Seconds = 0.2
    """It grows where scraping takes more than 40 % of a core, up to `stale_after_s` / 2.5."""
    timeout_s: Seconds = 1.0
    stale_after_s: Seconds = 5.0
    """An older sample is not believed; what we sent ourselves still counts."""
    path: Annotated[str, msgspec.Meta(pattern="^/")] = "/metrics"


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node of a pool."""

    name: Name
    address: Address
    """ip:port of its HTTP server; name:port will do where `destination` is "cluster-header"."""
    cluster: Name | None = None
    """Its Envoy cluster; the name when left out."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Prefill speed relative to the others."""
    events: ZmqEndpoint | None = None
    replay: ZmqEndpoint | None = None
    """Where its KV events come from, if not from where those of the pool do."""


class SourceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all sources of nodes have; which of them it is says `from`."""

    cluster: Name = "{name}"
    """What Envoy calls a node, of {name}, {address}, {ip}, {port}, {zone} and {host}."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    keep_s: Seconds = 300.0
    """How long its nodes stay while it fails."""


Family = Literal["any", "ipv4", "ipv6"]


class FileConfig(SourceConfig, tag="file", tag_field="from", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file that lists nodes; watched for change."""

    path: Annotated[str, msgspec.Meta(pattern=r"\.(toml|ya?ml|json)$")]


class DnsConfig(SourceConfig, tag="dns", tag_field="from", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The addresses of a name, or an SRV record."""

    name: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    """Of every address; left out: `name` is that of an SRV record."""
    family: Family = "any"
    resolvers: tuple[Name, ...] = ()
    """Left out: those of the machine."""
    timeout_s: Seconds = 5.0


class KubernetesConfig(
    SourceConfig, tag="kubernetes", tag_field="from", frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """The ready endpoints of a service or of a label selector, or the pods of an InferencePool."""

    namespace: Name
    service: Name | None = None
    selector: str = ""
    pool: Name | None = None
    port: str | int | None = None
    family: Family = "any"
    api: str | None = None
    """Left out: that of the cluster we run in."""
    token: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    ca: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"


AnySource = FileConfig | DnsConfig | KubernetesConfig


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the nodes of a pool publish what they cache: vLLM's and SGLang's KV events over ZMQ."""

    endpoint: ZmqEndpoint = "tcp://{host}:5557"
    """{host} is that of the node's address."""
    replay: Annotated[str, msgspec.Meta(pattern=r"^$|^(tcp|ipc)://.+")] = "tcp://{host}:5558"
    """Where missed ones are asked for; "": nowhere."""
    topic: str = ""
    """Only topics that begin so."""
    bind: bool = False
    """The engines connect to us: vLLM does unless its own endpoint has a wildcard or is ipc."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pool: the nodes that serve one model."""

    name: Name
    aliases: tuple[Name, ...] = ()
    """Other values of `model` that this pool serves; "*" takes every name that no pool has."""
    adapters: tuple[Name, ...] = ()
    """LoRA adapters: other values of `model` that this pool serves, and that share no blocks with it."""
    tokenizer: Name | None = None
    """Directory or Hugging Face hub id with `tokenizer.json`; None: 4 bytes count as a token, approximately."""
    tokenizer_revision: Name | None = None
    follow_tokenizer_class: bool = True
    """Parts of `tokenizer.json` give way to what its class brings, as in engines with transformers 5 (vLLM 0.32);
    false: they stand, as with transformers 4."""
    chat_template: Name | None = None
    """File with a chat template in place of the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """What the engine hands to the template when the request does not say otherwise."""
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Tokens in a block of the prefix map; with a tokenizer, until the nodes say how large theirs are."""
    cache_tokens: Count = 2_000_000
    """Size of a node's prefix cache until the node says so itself."""
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(gt=0)] = 10_000.0
    """Where the estimate starts; it is then learnt, within a factor of 16."""
    attention_tokens: Annotated[float, msgspec.Meta(gt=0)] = 100_000.0
    """Behind so much context a token costs twice what it costs at the start of a prompt."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Data-parallel ranks behind each address; each is a node with a cache of its own."""
    predict_answers: bool = True
    """Where no events tell, what a node answered is taken to be in its cache when the conversation goes on."""
    lora_load_s: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    """What it costs a node to load an adapter that it has not."""
    events: EventsConfig | None = None
    sources: tuple[AnySource, ...] = ()
    """Where more nodes are found, after `nodes`; of one address the first counts."""
    nodes: tuple[NodeConfig, ...] = ()


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Spans; everything else of OpenTelemetry is set by its own environment variables."""

    traces: bool | None = None
    """Left out: on when the environment names an OTLP endpoint."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    models: Annotated[tuple[ModelConfig, ...], msgspec.Meta(min_length=1)]
    server: ServerConfig = ServerConfig()
    policy: PolicyConfig = PolicyConfig()
    scrape: ScrapeConfig = ScrapeConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    salt: str | None = None
    """Secret that the block hashes are made with; random at each start when left out."""


def parse(text: str) -> Config:
    """A configuration from TOML; ConfigError names the place and the reason."""
    try:
        config = msgspec.convert(tomllib.loads(text), Config)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(str(error)) from error
    names = [name for model in config.models for name in (model.name, *model.aliases, *model.adapters)]
    _refuse_twice("model name, alias or adapter", names)
    for i, model in enumerate(config.models):
        _refuse_twice(f"node name in $.models[{i}]", [node.name for node in model.nodes])
        _refuse_twice(f"node address in $.models[{i}]", [node.address for node in model.nodes])
        for j, node in enumerate(model.nodes):
            named = config.server.destination == "cluster-header"
            _check_address(f"$.models[{i}].nodes[{j}].address", node.address, names=named)
    for i, model in enumerate(config.models):
        _check_events(f"$.models[{i}].events", model)
        for j, source in enumerate(model.sources):
            _check_source(f"$.models[{i}].sources[{j}]", source, model.sources[:j])
    if config.server.cluster_header == config.server.destination_header:
        raise ConfigError("$.server.cluster_header and $.server.destination_header must differ")
    return config


def load(path: Path) -> Config:
    """Read `path`; ConfigError when it cannot be read or used."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def traces_wanted(config: TelemetryConfig) -> bool:
    """Are spans to be exported?"""
    if config.traces is not None:
        return config.traces
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return any(os.environ.get(name) for name in names)


def kubernetes_api() -> str:
    """Where the API of the cluster is that we run in."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def settle_environment() -> None:
    """What libraries read there when they are first used: `tokenizers` starts threads of its own unless told."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _check_address(path: str, address: str, *, names: bool) -> None:
    """An IP address in the form in which Envoy writes it, or a name where Envoy never has to take it as an address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        shortest = ip_address(host).compressed
    except ValueError as error:
        if names and not re.fullmatch(r"[\d.]+", host):
            return
        hint = "a name will do where the destination is the cluster header alone"
        raise ConfigError(f"{host} is not an IP address ({hint}) - at `{path}`") from error
    if host != shortest:
        raise ConfigError(f"{host} has to be written as {shortest} - at `{path}`")


def _check_source(path: str, source: AnySource, before: tuple[AnySource, ...]) -> None:
    if source in before:
        raise ConfigError(f"the same source twice - at `{path}`")
    try:
        Naming(source.cluster, source.weight)
    except ValueError as error:
        raise ConfigError(f"{error} - at `{path}.cluster`") from error
    if isinstance(source, KubernetesConfig) and bool(source.pool) == bool(source.service or source.selector):
        raise ConfigError(f"either a pool, or a service or selector - at `{path}`")


def _check_events(path: str, model: ModelConfig) -> None:
    events = model.events
    if events is None:
        if any(node.events or node.replay for node in model.nodes):
            raise ConfigError(f"endpoints of events without [models.events] - at `{path}`")
        return
    if model.tokenizer is None:
        raise ConfigError(f"events tell token ids, which only a pool with a tokenizer has - at `{path}`")
    for text in (events.endpoint, events.replay):
        try:
            text.format(host="h")
        except (AttributeError, LookupError, ValueError) as error:
            raise ConfigError(f"{text!r} is no template of {{host}} - at `{path}`") from error
    shared = [node for node in model.nodes if node.events is None]
    if events.bind and (model.sources or len(shared) > 1 or (shared and "{host}" in events.endpoint)):
        raise ConfigError(f"each node needs an endpoint of its own that we can bind: `events` there - at `{path}`")


def _refuse_twice(what: str, names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"{what} given twice: {', '.join(sorted(twice))}")
