"""What an operator sees: one table of metrics, and one span per decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from extproc.core.router import Router
from extproc.core.types import Settled, Ticket
from extproc.gauges import State
from extproc.reading import Cause, Phases
from extproc.recording import Recorder
from extproc.server import ExtProc
from extproc.sources.kv_events import KvFeed
from extproc.sources.scraper import Scraper
from extproc.wire.exchange import Exchange

_COUNTED_AT_ONCE = 64
_EXACT = ("approximate", "exact")

_MS = 0.001
_PHASE_BUCKETS = tuple(n * _MS for n in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 250, 1000))
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHARE_BUCKETS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_DELAY_BUCKETS = tuple(n * _MS for n in (1, 2, 3, 5, 7.5, 10, 15, 20, 25, 35, 50, 75, 100, 250, 1000))
_BYTES_BUCKETS = tuple(float(1 << n) for n in (10, 12, 14, 16, 18, 20, 22))

COUNTED: dict[str, tuple[Callable[..., Any], tuple[str, ...], str, tuple[float, ...]]] = {
    "kvaffinity_requests": (Counter, ("pool", "reason", "tokens"), "Requests routed, by reason of the choice.", ()),
    "kvaffinity_passed": (Counter, ("cause",), "Requests passed on to Envoy's fallback route, by cause.", ()),
    "kvaffinity_unkeyed": (
        Counter,
        ("pool", "cause"),
        "Requests whose prompt could not be turned into the engine's blocks, routed by load, by cause.",
        (),
    ),
    "kvaffinity_cut": (Counter, ("cut",), "Decisions made on less than the whole prompt, by what cut it.", ()),
    "kvaffinity_prompt_tokens": (Counter, ("pool", "reason", "tokens"), "Prompt tokens of routed requests.", ()),
    "kvaffinity_matched_tokens": (
        Counter,
        ("pool", "reason", "tokens"),
        "Prompt tokens that the chosen node was predicted to hold (prefill avoided).",
        (),
    ),
    "kvaffinity_missed_tokens": (
        Counter,
        ("pool", "tokens"),
        "Prompt tokens that another node was predicted to hold and the chosen one not.",
        (),
    ),
    "kvaffinity_node_requests": (Counter, ("pool", "node"), "Requests routed to a node.", ()),
    "kvaffinity_node_uncached_tokens": (Counter, ("pool", "node"), "Uncached prompt tokens routed to a node.", ()),
    "kvaffinity_outcomes": (Counter, ("pool", "end"), "How routed requests ended.", ()),
    "kvaffinity_retried_elsewhere": (Counter, ("pool",), "Requests that another node served than the chosen one.", ()),
    "kvaffinity_unknown_tickets": (Counter, (), "Access-log entries whose ticket is not ours or was settled.", ()),
    "kvaffinity_locality": (
        Histogram,
        ("pool", "tokens"),
        "Share of the prompt matched on the chosen node.",
        _SHARE_BUCKETS,
    ),
    "kvaffinity_ttft_seconds": (
        Histogram,
        ("pool", "reason", "tokens"),
        "Time to first token that the client waited, upload included; whole answers where not streamed.",
        _TTFT_BUCKETS,
    ),
    "kvaffinity_engine_ttft_seconds": (
        Histogram,
        ("pool", "reason", "tokens"),
        "Time to first token of the engine; streamed answers only.",
        _TTFT_BUCKETS,
    ),
    "kvaffinity_phase_seconds": (
        Histogram,
        ("phase",),
        "Time of each step of a decision: parse, hash, route.",
        _PHASE_BUCKETS,
    ),
    "kvaffinity_head_bytes": (Histogram, (), "Size of the heads that were decided on.", _BYTES_BUCKETS),
    "kvaffinity_loop_delay_seconds": (Histogram, (), "How late the event loop wakes a sleeper.", _DELAY_BUCKETS),
}
"""Name: (kind, labels, description, buckets). Counters get `_total` at their end when they are shown.

`tokens` is `exact` where they are the engine's, else `approximate`.
"""


class Telemetry:
    """The observer of the server; decisions are put aside and counted many at a time. What is settled goes on to the
    recorder, where there is one."""

    def __init__(self, router: Router, tracer: Tracer | None, recorder: Recorder | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a line more for each counter that nobody plots
        self.registry = CollectorRegistry()
        self._router = router
        self._tracer = tracer
        self._recorder = recorder
        self._propagator = TraceContextTextMapPropagator()
        made: dict[str, Any] = {}
        for name, (kind, labels, description, buckets) in COUNTED.items():
            extra: dict[str, Any] = {"buckets": buckets} if buckets else {}
            made[name.removeprefix("kvaffinity_")] = kind(name, description, labels, registry=self.registry, **extra)
        self._made = made
        self._routed: list[tuple[Ticket, int, Phases]] = []
        self._bound: dict[tuple[str, ...], tuple[Any, ...]] = {}
        self._parse, self._hash, self._route = (made["phase_seconds"].labels(p) for p in ("parse", "hash", "route"))
        self._head_bytes, self._loop_delay = made["head_bytes"], made["loop_delay_seconds"]

    def watch(
        self,
        ext_proc: ExtProc,
        clock: Callable[[], float],
        scraper: Scraper | None = None,
        feeds: KvFeed | None = None,
    ) -> None:
        """Show the state of the fleet, of the server and of the sources as well."""
        self.registry.register(State(self._router, ext_proc, clock, scraper, feeds, self._recorder))

    def page(self) -> bytes:
        """The Prometheus page."""
        return self.collect()()

    def collect(self) -> Callable[[], bytes]:
        """Everything as it stands now; calling what is returned writes the page, in any thread."""
        self._count()
        self._forget()
        families = _Collected(list(self.registry.collect()))
        return lambda: generate_latest(families)

    def _forget(self) -> None:
        """Drop the counters of nodes that left: names of pods are without end."""
        for kind, *labels in [key for key in self._bound if key[0] == "node"]:
            pool = self._router.pools.get(labels[0])
            if pool is None or not pool.fleet.knows(labels[1]):
                del self._bound[(kind, *labels)]
                for name in ("node_requests", "node_uncached_tokens"):
                    self._made[name].remove(*labels)

    def _children(self, *key: str) -> tuple[Any, ...]:
        """Metrics bound to their labels: looking them up once costs more than counting."""
        bound = self._bound.get(key)
        if bound is None:
            names = {
                "reason": ("requests", "prompt_tokens", "matched_tokens", "ttft_seconds", "engine_ttft_seconds"),
                "node": ("node_requests", "node_uncached_tokens"),
                "tokens": ("missed_tokens", "locality"),
            }[key[0]]
            bound = self._bound[key] = tuple(self._made[name].labels(*key[1:]) for name in names)
        return bound

    def routed(self, ticket: Ticket, exchange: Exchange, phases: Phases, metadata: Callable[[], Any]) -> None:
        self._routed.append((ticket, exchange.held, phases))
        if len(self._routed) >= _COUNTED_AT_ONCE:
            self._count()
        if self._tracer is not None:
            self._span(self._tracer, ticket, exchange, phases, metadata)

    def _count(self) -> None:
        """Count the decisions that were put aside, so that no request waits for its own to be counted."""
        routed, self._routed = self._routed, []
        for each in routed:
            self._count_one(*each)

    def _count_one(self, ticket: Ticket, head_bytes: int, phases: Phases) -> None:
        pool, decision, request = ticket.request.model, ticket.decision, ticket.request
        chosen = decision.chosen
        tokens = _EXACT[request.exact]
        requests, prompt, matched, _, _ = self._children("reason", pool, decision.reason, tokens)
        requests.inc()
        prompt.inc(request.prompt_tokens)
        matched.inc(chosen.matched_tokens)
        node_requests, uncached = self._children("node", pool, decision.node.id)
        node_requests.inc()
        uncached.inc(chosen.uncached_tokens)
        missed, locality = self._children("tokens", pool, tokens)
        if decision.best_matched_tokens > chosen.matched_tokens:
            missed.inc(decision.best_matched_tokens - chosen.matched_tokens)
        locality.observe(ticket.locality)
        self._parse.observe(phases.parsed_s - phases.collected_s)
        self._hash.observe(phases.hashed_s - phases.parsed_s)
        self._route.observe(phases.routed_s - phases.hashed_s)
        self._head_bytes.observe(head_bytes)
        if phases.cut is not None:
            self._made["cut"].labels(phases.cut).inc()
        if phases.unkeyed is not None:
            self._made["unkeyed"].labels(pool, phases.unkeyed).inc()

    def passed(self, cause: Cause) -> None:
        self._made["passed"].labels(cause).inc()

    def settled(self, settled: Settled) -> None:
        ticket, outcome = settled.ticket, settled.outcome
        pool = ticket.request.model
        self._made["outcomes"].labels(pool, outcome.end).inc()
        if settled.retried_elsewhere:
            self._made["retried_elsewhere"].labels(pool).inc()
        key = (pool, ticket.decision.reason, _EXACT[ticket.request.exact])
        _, _, _, ttft, engine_ttft = self._children("reason", *key)
        if outcome.client_ttft_s is not None and outcome.answered:
            ttft.observe(outcome.client_ttft_s)
        if outcome.engine_ttft_s is not None and outcome.answered:
            engine_ttft.observe(outcome.engine_ttft_s)
        if self._recorder is not None:
            self._recorder.settled(settled)

    def unknown_ticket(self) -> None:
        self._made["unknown_tickets"].inc()

    def loop_delay(self, seconds: float) -> None:
        """How late the loop woke a sleeper."""
        self._loop_delay.observe(seconds)

    def _span(
        self, tracer: Tracer, ticket: Ticket, exchange: Exchange, phases: Phases, metadata: Callable[[], Any]
    ) -> None:
        """Child of Envoy's span (in the stream's metadata), else of the client's (in its headers), else a root."""
        sent = {key: value for key, value in metadata() or () if key in ("traceparent", "tracestate")}
        parent: Context = self._propagator.extract(sent if "traceparent" in sent else exchange.headers)
        request, decision = ticket.request, ticket.decision
        span = tracer.start_span(
            "kvaffinity.route",
            context=parent,
            kind=SpanKind.INTERNAL,
            attributes={
                "kvaffinity.pool": request.model,
                "kvaffinity.node": decision.node.id,
                "kvaffinity.reason": decision.reason.value,
                "kvaffinity.prompt_tokens": request.prompt_tokens,
                "kvaffinity.tokens": _EXACT[request.exact],
                "kvaffinity.unkeyed": "" if phases.unkeyed is None else phases.unkeyed.value,
                "kvaffinity.matched_tokens": decision.chosen.matched_tokens,
                "kvaffinity.locality": ticket.locality,
                "kvaffinity.price": decision.price,
                "kvaffinity.cut": "" if phases.cut is None else phases.cut.value,
                "kvaffinity.parse_s": phases.parsed_s - phases.collected_s,
                "kvaffinity.hash_s": phases.hashed_s - phases.parsed_s,
                "kvaffinity.route_s": phases.routed_s - phases.hashed_s,
            },
        )
        for each, cost_s in zip(decision.ranked, decision.costs or (0.0,) * len(decision.ranked), strict=True):
            span.add_event(
                "kvaffinity.candidate",
                {
                    "kvaffinity.node": each.node.id,
                    "kvaffinity.matched_tokens": each.matched_tokens,
                    "kvaffinity.locality": each.matched_tokens / max(request.prompt_tokens, 1),
                    "kvaffinity.wait_s": each.wait_s,
                    "kvaffinity.prefill_s": each.prefill_s,
                    "kvaffinity.cost_s": cost_s,
                    "kvaffinity.in_flight": each.in_flight,
                },
            )
        span.end()


class _Collected(Collector):
    """What was read before."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def span_exporting(exporter: SpanExporter | None = None) -> TracerProvider:
    """A provider that exports in batches, over OTLP as the OTEL_* environment says unless told otherwise."""
    # shut down by the application, which does not wait for ever as the one at exit would
    provider = TracerProvider(resource=Resource.create({"service.name": "kvaffinity"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
    return provider
