"""What an operator sees: each outcome on the metrics page, one span a decision, and never a word of a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from extproc.core.pool import Pool
from extproc.core.types import LoadSample
from extproc.telemetry import COUNTED, Telemetry
from tests.builders import (
    Clock,
    Running,
    body,
    chat,
    entry,
    headers,
    mutated,
    node_of,
    pool_of,
    prose,
    running,
    ticket_of,
)

PROMPT = prose(4000)
CANARY = "xyzzy-canary-4711"
FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"

Key = tuple[str, tuple[tuple[str, str], ...]]


@asynccontextmanager
async def watched(
    pools: dict[str, Pool] | None = None, *, exporter: InMemorySpanExporter | None = None, **changes: Any
) -> AsyncIterator[Running]:
    """A running server whose observer is the real telemetry."""
    provider = TracerProvider()
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = None if exporter is None else provider.get_tracer("kvaffinity")
    async with running(pools, observer=lambda router: Telemetry(router, tracer), **changes) as server:
        telemetry: Any = server.seen
        telemetry.watch(server.ext_proc, server.clock)
        yield server
    provider.shutdown()


def shown(server: Running) -> dict[Key, float]:
    """Every sample of the page."""
    telemetry: Any = server.seen
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(telemetry.page().decode())
        for sample in family.samples
    }


def value(server: Running, name: str, **labels: str) -> float | None:
    return shown(server).get((f"kvaffinity_{name}", tuple(sorted(labels.items()))))


async def test_each_outcome_is_counted_under_its_name() -> None:
    async with watched({"m": pool_of("n1", "n2")}, head_bytes=3000) as server:
        small = chat(PROMPT[:2000])
        first = await server.ask(small)
        tokens = value(server, "prompt_tokens_total", pool="m", reason="cold", tokens="approximate")
        assert tokens is not None
        server.clock.now_s += 1.0
        second = await server.ask(small)
        await server.ask(chat(PROMPT))
        await server.ask(b"{")
        await server.say_on(headers(path="/v1/models", end=True))
        node = node_of(first)
        other = {"n1": SECOND, "n2": FIRST}[node]
        await server.log(
            entry(ticket_of(first), served_by={"n1": FIRST, "n2": SECOND}[node]),
            entry(ticket_of(second), served_by=other, content_type="application/json"),
            entry("t-999"),
        )
        matched = second.dynamic_metadata["kvaffinity"]["locality"] * tokens
        assert value(server, "requests_total", pool="m", reason="cold", tokens="approximate") == 1
        assert value(server, "requests_total", pool="m", reason="locality", tokens="approximate") == 2
        assert value(server, "matched_tokens_total", pool="m", reason="cold", tokens="approximate") == 0
        assert (
            value(server, "matched_tokens_total", pool="m", reason="locality", tokens="approximate")
            > matched
            > 0.9 * tokens
        )
        assert value(server, "node_requests_total", pool="m", node=node) == 3
        assert value(server, "node_uncached_tokens_total", pool="m", node=node) >= tokens
        assert value(server, "passed_total", cause="invalid_body") == 1
        assert value(server, "passed_total", cause="unknown_path") == 1
        assert value(server, "cut_total", cut="head_bytes") == 1
        assert value(server, "outcomes_total", pool="m", end="served") == 2
        assert value(server, "retried_elsewhere_total", pool="m") == 1
        assert value(server, "unknown_tickets_total") == 1
        assert value(server, "locality_count", pool="m", tokens="approximate") == 3
        assert value(server, "ttft_seconds_count", pool="m", reason="cold", tokens="approximate") == 1
        assert value(server, "ttft_seconds_sum", pool="m", reason="cold", tokens="approximate") == 0.05
        assert value(server, "ttft_seconds_count", pool="m", reason="locality", tokens="approximate") == 1
        assert value(server, "engine_ttft_seconds_sum", pool="m", reason="cold", tokens="approximate") == 0.04
        assert value(server, "engine_ttft_seconds_count", pool="m", reason="locality", tokens="approximate") == 0
        assert value(server, "head_bytes_count") == 3
        for phase in ("parse", "hash", "route"):
            assert value(server, "phase_seconds_count", phase=phase) == 3


async def test_tokens_that_another_node_holds_are_missed() -> None:
    async with watched({"m": pool_of("n1", "n2")}) as server:
        reply = await server.ask(chat(PROMPT))
        node = node_of(reply)
        server.router.pools["m"].observe(node, LoadSample(server.clock(), waiting=50))
        reply = await server.ask(chat(PROMPT))
        assert node_of(reply) != node
        assert value(server, "requests_total", pool="m", reason="headroom", tokens="approximate") == 1
        assert value(server, "missed_tokens_total", pool="m", tokens="approximate") > 900


async def test_time_to_first_token_is_learnt_from_answers_only() -> None:
    async with watched() as server:
        for changes in (
            {"code": 500},
            {"code": 429},
            {"ttft_us": "-", "code": 0, "flags": ["downstream_remote_reset"]},
        ):
            reply = await server.ask(chat(PROMPT))
            server.clock.now_s += 1.0
            await server.log(entry(ticket_of(reply), **changes))
        counts = [count for (name, _), count in shown(server).items() if name.endswith("ttft_seconds_count")]
        assert sum(counts) == 0
        assert value(server, "outcomes_total", pool="m", end="failed") == 1
        assert value(server, "outcomes_total", pool="m", end="served") == 1
        assert value(server, "outcomes_total", pool="m", end="cut") == 1


async def test_the_state_of_the_fleet_is_what_it_is_when_the_page_is_asked_for() -> None:
    async with watched({"m": pool_of("n1", "n2"), "empty": pool_of()}, pool_of={"m": "m"}) as server:
        pool = server.router.pools["m"]
        pool.observe("n1", LoadSample(server.clock() - 2.0, waiting=3, kv_usage=0.25))
        call = server.open()
        await call.write(headers())
        reply = await server.ask(chat(PROMPT))
        node = node_of(reply)
        assert value(server, "in_flight_requests", pool="m", node=node) == 1
        assert value(server, "in_flight_tokens", pool="m", node=node) > 900
        assert value(server, "prefix_blocks", pool="m", node=node) > 50
        assert value(server, "waiting", pool="m", node="n1") == 3
        assert value(server, "kv_usage", pool="m", node="n1") == 0.25
        assert value(server, "running", pool="m", node="n1") is None  # the engine does not say
        assert value(server, "waiting", pool="m", node="n2") is None
        assert value(server, "sample_age_seconds", pool="m", node="n1") == 2.0
        assert value(server, "node_skew", pool="m") == 2.0
        assert value(server, "node_skew", pool="empty") is None
        assert value(server, "prefill_tokens_per_second", pool="m") == 10_000
        assert value(server, "tickets") == 1
        assert value(server, "streams") == 1
        call.cancel()
        await server.idle()
        await server.log(entry(ticket_of(reply)))
        for name in ("tickets", "streams", "held_bytes"):
            assert value(server, name) == 0
        assert value(server, "in_flight_requests", pool="m", node=node) == 0
        assert value(server, "in_flight_tokens", pool="m", node=node) == 0


def test_every_metric_has_a_description_and_a_name_of_ours() -> None:
    for name, (_, _, description, _) in COUNTED.items():
        assert name.startswith("kvaffinity_")
        assert description.endswith(".")


async def test_the_number_of_series_does_not_depend_on_what_clients_send() -> None:
    async with watched(pool_of={"m": "m", "*": "m"}) as server:
        for i in range(3):
            await server.ask(chat(PROMPT, model=f"model-{i}"), (f"x-{i}", "v"), path=f"/{i}/v1/chat/completions")
            await server.ask(b"{", path=f"/{i}/v1/chat/completions")
        before = len(shown(server))
        for i in range(3, 9):
            await server.ask(chat(PROMPT, model=f"model-{i}"), (f"x-{i}", "v"), path=f"/{i}/v1/chat/completions")
            await server.ask(b"{", path=f"/{i}/v1/chat/completions")
        assert len(shown(server)) == before


# ---- spans ----

ENVOY = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CLIENT = "00-11111111111111111111111111111111-2222222222222222-01"


@pytest.mark.parametrize(
    ("metadata", "header", "parent"),
    [
        ([("traceparent", ENVOY), ("tracestate", "a=b")], CLIENT, ENVOY),
        ([("traceparent", ENVOY)], None, ENVOY),
        ([], CLIENT, CLIENT),
        ([], None, None),
        ([], "garbage", None),
        ([("tracestate", "a=b")], CLIENT, CLIENT),
    ],
)
async def test_a_span_hangs_on_envoy_s_else_on_the_client_s_else_on_none(
    metadata: list[tuple[str, str]], header: str | None, parent: str | None
) -> None:
    exporter = InMemorySpanExporter()
    async with watched(exporter=exporter) as server:
        extra = [] if header is None else [("traceparent", header)]
        await server.ask(chat(PROMPT), *extra, metadata=metadata)
    (span,) = exporter.get_finished_spans()
    if parent is None:
        assert span.parent is None
    else:
        assert span.parent is not None
        assert f"00-{span.parent.trace_id:032x}-{span.parent.span_id:016x}-01" == parent


async def test_a_span_says_what_was_matched_on_whom_and_why() -> None:
    exporter = InMemorySpanExporter()
    async with watched({"m": pool_of("n1", "n2", "n3", "n4")}, exporter=exporter, head_bytes=2000) as server:
        await server.ask(chat(PROMPT[:1500]))
        server.clock.now_s += 1.0
        reply = await server.ask(chat(PROMPT[:1500]))
        await server.ask(chat(PROMPT))
    _, span, cut = exporter.get_finished_spans()
    assert span.name == "kvaffinity.route"
    assert span.attributes is not None
    given = reply.dynamic_metadata["kvaffinity"]
    assert span.attributes["kvaffinity.pool"] == "m"
    assert span.attributes["kvaffinity.node"] == node_of(reply)
    assert span.attributes["kvaffinity.reason"] == "locality"
    assert span.attributes["kvaffinity.locality"] == given["locality"]
    assert span.attributes["kvaffinity.cut"] == ""
    prompt, matched = (span.attributes[f"kvaffinity.{name}_tokens"] for name in ("prompt", "matched"))
    assert given["locality"] == matched / prompt > 0.9
    candidates = [event.attributes for event in span.events if event.name == "kvaffinity.candidate"]
    assert len(candidates) == 3
    assert candidates[0]["kvaffinity.node"] == node_of(reply)
    assert [each["kvaffinity.locality"] for each in candidates] == [given["locality"], 0.0, 0.0]
    assert [each["kvaffinity.matched_tokens"] for each in candidates] == [matched, 0, 0]
    assert candidates[0]["kvaffinity.cost_s"] < candidates[1]["kvaffinity.cost_s"]
    assert cut.attributes is not None
    assert cut.attributes["kvaffinity.cut"] == "head_bytes"


async def test_no_word_of_a_prompt_is_seen_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    exporter = InMemorySpanExporter()
    async with watched(exporter=exporter, head_bytes=3000) as server:
        for data in (
            chat(f"{CANARY} {PROMPT[:1000]}"),
            chat(f"{CANARY} {PROMPT}"),
            chat(CANARY)[:-3],
            chat("a", tools=[{"name": CANARY}], cache_salt=CANARY, user=CANARY),
        ):
            reply = await server.ask(data, ("authorization", f"Bearer {CANARY}"), ("cookie", CANARY))
            assert CANARY not in str(reply)
        telemetry: Any = server.seen
        page = telemetry.page().decode()
    assert len(exporter.get_finished_spans()) == 3
    for text in (page, caplog.text, *(each.to_json() for each in exporter.get_finished_spans())):
        assert CANARY not in text


async def test_requests_that_are_passed_on_make_no_span() -> None:
    exporter = InMemorySpanExporter()
    async with watched(exporter=exporter) as server:
        await server.ask(b"{")
    assert exporter.get_finished_spans() == ()


async def test_decisions_are_the_same_with_and_without_spans() -> None:
    replies = []
    for exporter in (None, InMemorySpanExporter()):
        async with watched(exporter=exporter, clock=Clock()) as server:
            replies.append([mutated(await server.ask(chat(PROMPT, str(i)))) for i in range(5)])
            await server.say_on(headers(), body(b"", end=True))
    assert replies[0] == replies[1]
