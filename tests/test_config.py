"""The configuration: what is refused and where, and what stands there when nothing is said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from extproc.config import (
    Config,
    ConfigError,
    ModelConfig,
    NodeConfig,
    TelemetryConfig,
    load,
    parse,
    traces_wanted,
)

LEAST = '[[models]]\nname = "m"\n'
NODE = '[[models.nodes]]\nname = "n1"\naddress = "10.0.0.1:8000"\n'


def test_a_model_is_all_that_has_to_be_said() -> None:
    assert parse(LEAST) == Config(models=(ModelConfig(name="m"),))


def test_what_is_left_out_has_the_documented_default() -> None:
    config = parse(LEAST + NODE)
    server = config.server
    assert (server.head_bytes, server.max_held_bytes) == (1 << 20, 256 << 20)
    assert (server.collect_gap_s, server.collect_total_s) == (0.15, 1.0)
    assert (server.decide_s, server.decide_s_per_16_kib) == (0.02, 0.001)
    assert (server.destination, server.when_empty) == ("cluster-header", "fallback")
    assert (server.cluster_header, server.destination_header) == (
        "x-upstream-cluster",
        "x-gateway-destination-endpoint",
    )
    assert config.models[0].nodes == (NodeConfig(name="n1", address="10.0.0.1:8000", cluster=None, weight=1.0),)
    assert config.salt is None


def test_everything_can_be_said() -> None:
    config = parse(
        """
        salt = "s"
        [server]
        listen = "unix:/run/kvaffinity.sock"
        metrics_listen = "[::1]:9090"
        metrics = false
        head_bytes = 65536
        max_held_bytes = 65536
        max_message_bytes = 1048576
        max_streams = 1
        collect_gap_s = 0.1
        collect_total_s = 2
        decide_s = 0.5
        decide_s_per_16_kib = 0
        destination = "both"
        cluster_header = "x-a"
        destination_header = "x-b"
        when_empty = "reject"
        ticket_ttl_s = 60
        drain_s = 0
        [policy]
        price_weight = 0
        load_bound = 1
        load_slack_s = 0
        margin_s = 0
        margin_ratio = 1
        fallbacks = 0
        max_waiting = 1
        max_kv_usage = 1
        [scrape]
        enabled = false
        interval_s = 0.1
        timeout_s = 0.1
        stale_after_s = 1
        path = "/stats"
        [telemetry]
        traces = true
        [[models]]
        name = "m"
        aliases = ["a", "*"]
        block_tokens = 1
        cache_tokens = 1
        prefill_tokens_per_s = 0.5
        [[models.nodes]]
        name = "n1"
        address = "[fd00::1]:8000"
        cluster = "c"
        weight = 0.5
        [[models]]
        name = "other"
        """
    )
    assert config.server.destination == "both"
    assert config.models[0].nodes[0].address == "[fd00::1]:8000"
    assert config.models[0].aliases == ("a", "*")
    for part in (config, config.server, config.policy, config.scrape, config.telemetry, config.models[0]):
        written = msgspec.structs.asdict(part)
        assert written.keys() == {each.name for each in msgspec.structs.fields(part)}


UNKNOWN = {
    "at the top": ('port = 1\n' + LEAST, "`port`", "$"),
    "server": (LEAST + "[server]\nlisten_on = 1\n", "`listen_on`", "$.server"),
    "policy": (LEAST + "[policy]\nx = 1\n", "`x`", "$.policy"),
    "scrape": (LEAST + "[scrape]\nintervall_s = 1\n", "`intervall_s`", "$.scrape"),
    "telemetry": (LEAST + "[telemetry]\ntrace = true\n", "`trace`", "$.telemetry"),
    "second model": (LEAST + LEAST.replace('"m"', '"o"') + "weight = 1\n", "`weight`", "$.models[1]"),
    "node": (LEAST + NODE + "adress = 1\n", "`adress`", "$.models[0].nodes[0]"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "key", "path"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_key_is_refused_with_its_path(text: str, key: str, path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert key in str(refused.value)
    assert path == "$" or f"`{path}`" in str(refused.value)


WRONG = {
    "no model": ("", "`models`"),
    "empty list of models": ("models = []", "$.models"),
    "model without a name": ("[[models]]\n", "`name`"),
    "empty name": ('[[models]]\nname = ""\n', "$.models[0].name"),
    "text for a number": (LEAST + '[server]\nhead_bytes = "1"\n', "$.server.head_bytes"),
    "fraction of a byte": (LEAST + "[server]\nhead_bytes = 2048.5\n", "$.server.head_bytes"),
    "number for a text": (LEAST + "salt = 1\n", "$.models[0]"),
    "head too small": (LEAST + "[server]\nhead_bytes = 10\n", "$.server.head_bytes"),
    "time of nothing": (LEAST + "[server]\ncollect_gap_s = 0\n", "$.server.collect_gap_s"),
    "negative time": (LEAST + "[server]\ndrain_s = -1\n", "$.server.drain_s"),
    "time that is no number": (LEAST + "[server]\ncollect_gap_s = nan\n", "$.server.collect_gap_s"),
    "time without end": (LEAST + "[server]\ncollect_total_s = inf\n", "$.server.collect_total_s"),
    "no number where zero may be": (LEAST + "[server]\ndrain_s = nan\n", "$.server.drain_s"),
    "ratio above one": (LEAST + "[policy]\nmargin_ratio = 1.5\n", "$.policy.margin_ratio"),
    "no such destination": (LEAST + '[server]\ndestination = "ip"\n', "$.server.destination"),
    "header in capitals": (LEAST + '[server]\ncluster_header = "X-A"\n', "$.server.cluster_header"),
    "pseudo-header": (LEAST + '[server]\ncluster_header = ":path"\n', "$.server.cluster_header"),
    "listen without a port": (LEAST + '[server]\nlisten = "localhost"\n', "$.server.listen"),
    "port out of range": (LEAST + '[server]\nlisten = "0.0.0.0:70000"\n', "$.server.listen"),
    "metrics port out of range": (LEAST + '[server]\nmetrics_listen = "0.0.0.0:70000"\n', "$.server.metrics_listen"),
    "node port out of range": (LEAST + NODE.replace("8000", "70000"), "$.models[0].nodes[0].address"),
    "address with a scheme": (LEAST + NODE.replace("10.0", "http://10.0"), "$.models[0].nodes[0].address"),
    "address without a port": (LEAST + NODE.replace(":8000", ""), "$.models[0].nodes[0].address"),
    "IPv6 without brackets": (LEAST + NODE.replace("10.0.0.1", "fd00::1"), "$.models[0].nodes[0].address"),
    "name for an override host": (
        LEAST + NODE.replace("10.0.0.1", "node-1") + '[server]\ndestination = "both"\n',
        "node-1 is not an IP address",
    ),
    "no IP address": (LEAST + NODE.replace("10.0.0.1", "10.0.0.256"), "10.0.0.256 is not an IP address"),
    "IPv6 at length": (LEAST + NODE.replace("10.0.0.1", "[FD00:0::1]"), "FD00:0::1 has to be written as fd00::1"),
    "weight of nothing": (LEAST + NODE + "weight = 0\n", "$.models[0].nodes[0].weight"),
    "weight that is no number": (LEAST + NODE + "weight = nan\n", "$.models[0].nodes[0].weight"),
    "scrape path": (LEAST + '[scrape]\npath = "metrics"\n', "$.scrape.path"),
    "the same model twice": (LEAST + LEAST, "given twice: m"),
    "alias of another model": (LEAST + '[[models]]\nname = "o"\naliases = ["m"]\n', "given twice: m"),
    "the star twice": (LEAST + 'aliases = ["*"]\n[[models]]\nname = "o"\naliases = ["*"]\n', "given twice: *"),
    "the same node twice": (LEAST + NODE + NODE.replace("8000", "8001"), "node name in $.models[0] given twice: n1"),
    "the same address twice": (LEAST + NODE + NODE.replace("n1", "n2"), "node address in $.models[0] given twice: 10."),
    "a source of no kind": (LEAST + '[[models.sources]]\nfrom = "hats"\n', "$.models[0].sources[0]"),
    "a file of no kind": (LEAST + '[[models.sources]]\nfrom = "file"\npath = "a.txt"\n', "sources[0].path"),
    "a cluster that is no template": (
        LEAST + '[[models.sources]]\nfrom = "dns"\nname = "a"\ncluster = "{nobody}"\n',
        "$.models[0].sources[0].cluster",
    ),
    "neither pool nor service": (
        LEAST + '[[models.sources]]\nfrom = "kubernetes"\nnamespace = "a"\n',
        "either a pool, or a service or selector",
    ),
    "the same source twice": (LEAST + '[[models.sources]]\nfrom = "dns"\nname = "a"\n' * 2, "the same source twice"),
    "events without a tokenizer": (LEAST + "[models.events]\n", "only a pool with a tokenizer"),
    "events of nobody's host": (
        LEAST + 'tokenizer = "t"\n[models.events]\nendpoint = "tcp://{name}:1"\n',
        "no template of {host}",
    ),
    "one header for both": (LEAST + '[server]\ncluster_header = "x-gateway-destination-endpoint"\n', "must differ"),
    "not TOML": (LEAST + "[server\n", "line 3"),
}


@pytest.mark.parametrize(("text", "says"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_meant_is_refused_and_the_place_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert says in str(refused.value)


def test_the_same_node_may_serve_two_models() -> None:
    config = parse(LEAST + NODE + '[[models]]\nname = "o"\n' + NODE)
    assert [len(model.nodes) for model in config.models] == [1, 1]


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x = 1\n"], ids=["absent", "not UTF-8", "wrong"])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "kvaffinity.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("said", "environment", "wanted"),
    [
        (None, {}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4317"}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        (False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}, False),
        (True, {}, True),
    ],
)
def test_spans_are_on_where_the_environment_names_a_receiver_unless_the_file_says_otherwise(
    said: bool | None, environment: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert traces_wanted(TelemetryConfig(traces=said)) is wanted


def test_where_envoy_takes_the_cluster_a_node_may_be_known_by_name() -> None:
    config = parse(LEAST + NODE.replace("10.0.0.1", "llm-0.llm.svc"))
    assert config.models[0].nodes[0].address == "llm-0.llm.svc:8000"
