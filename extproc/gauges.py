"""The metrics page's state of the fleet, the server and the sources: read when the page is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.core.guard import QUANTILES
from extproc.core.router import Router
from extproc.core.types import Rung
from extproc.recording import Recorder
from extproc.server import ExtProc
from extproc.sources.kv_events import KvFeed
from extproc.sources.scraper import Scraper

_RUNGS = {Rung.EVENTS: 3, Rung.PREDICTED: 2, Rung.HASH: 1, Rung.LOAD: 0}


class State(Collector):
    """What counters do not count. `clock` is the router's."""

    def __init__(
        self,
        router: Router,
        ext_proc: ExtProc,
        clock: Callable[[], float],
        scraper: Scraper | None,
        feeds: KvFeed | None,
        recorder: Recorder | None,
    ) -> None:
        self._router, self._ext_proc, self._clock = router, ext_proc, clock
        self._scraper, self._feeds, self._recorder = scraper, feeds, recorder

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        now = self._clock()
        per_node = {
            name: GaugeMetricFamily(f"kvaffinity_{name}", description, labels=("pool", "node"))
            for name, description in {
                "in_flight_requests": "Sent to a node and not settled.",
                "in_flight_tokens": "Uncached prompt tokens sent to a node and not settled.",
                "recent_work_seconds": "Uncached work sent to a node in the last minute (decayed).",
                "prefix_blocks": "Blocks that a node is believed to hold.",
                "waiting": "Requests waiting in the engine, as scraped.",
                "running": "Requests running in the engine, as scraped.",
                "kv_usage": "Share of the KV cache that running requests hold, as scraped.",
                "sample_age_seconds": "Age of the last scrape.",
                "rung": "What it is believed to hold is taken from: 3 events, 2 predictions, 1 hash, 0 nothing.",
                "trust": "What a token that it is believed to hold is worth, 0 to 1.",
            }.items()
        }
        skew = GaugeMetricFamily(
            "kvaffinity_node_skew", "Recent uncached work, busiest node over mean; 1 is even.", labels=("pool",)
        )
        rate = GaugeMetricFamily(
            "kvaffinity_prefill_tokens_per_second", "Learnt prefill rate of a node of weight 1.", labels=("pool",)
        )
        price = GaugeMetricFamily(
            "kvaffinity_price",
            "Factor on own prefill for what it costs the requests that come after.",
            labels=("pool",),
        )
        for name, pool in self._router.pools.items():
            fleet = pool.fleet
            work = fleet.work_s(now=now)
            if work and sum(work.values()) > 0:
                skew.add_metric((name,), max(work.values()) * len(work) / sum(work.values()))
            rate.add_metric((name,), fleet.rate.tokens_per_s)
            price.add_metric((name,), fleet.price(now=now))
            samples, in_flight = fleet.samples(), fleet.in_flight()
            for node, sample in samples.items():
                labels = (name, node)
                requests, tokens = in_flight[node]
                per_node["in_flight_requests"].add_metric(labels, requests)
                per_node["in_flight_tokens"].add_metric(labels, tokens)
                per_node["recent_work_seconds"].add_metric(labels, work[node])
                per_node["prefix_blocks"].add_metric(labels, pool.blocks(node))
                per_node["rung"].add_metric(labels, _RUNGS[pool.rung(node)])
                per_node["trust"].add_metric(labels, pool.trust(node))
                if sample is None:
                    continue
                per_node["sample_age_seconds"].add_metric(labels, now - sample.at_s)
                for key in ("waiting", "running", "kv_usage"):
                    value = getattr(sample, key)
                    if value is not None:
                        per_node[key].add_metric(labels, value)
        yield from per_node.values()
        yield from (skew, rate, price)
        reader = self._ext_proc.reader
        mismatches = GaugeMetricFamily(
            "kvaffinity_continuation_mismatches",
            "Continued conversations that were found to differ from what they are when read anew.",
            labels=("pool",),
        )
        faults = GaugeMetricFamily(
            "kvaffinity_pool_fault",
            "1 where a tokenizer could not be loaded or the self-test failed; /healthz says what it is.",
            labels=("pool",),
        )
        for name, encoder in reader.interpreter.encoders.items():
            mismatches.add_metric((name,), encoder.mismatches)
        for name in self._router.pools:
            faults.add_metric((name,), name in reader.faults)
        yield from (mismatches, faults)
        yield from self._compared()
        yield from self._sources()
        for key, description, value in (
            ("tickets", "Routed requests whose outcome is not known yet.", len(self._router)),
            ("streams", "Exchanges in hand.", self._ext_proc.streams),
            ("held_bytes", "Heads in hand.", self._ext_proc.held_bytes),
            ("tokenizer_backlog_bytes", "Text that waits for a thread to tokenize it.", reader.waiting_bytes),
        ):
            yield GaugeMetricFamily(f"kvaffinity_{key}", description, value=value)

    def _compared(self) -> Iterator[Metric]:
        """The guard's and the shadow's, where there are any."""
        guard = {
            name: GaugeMetricFamily(f"kvaffinity_guard_{name}", description, labels=("pool",))
            for name, description in {
                "tightness": "How far locality gives way: 0 not at all, 1 routed for latency alone.",
                "share": "The control group's share of the requests, now.",
                "evidence": "That locality harms the tail; at 22 it gives way by one step.",
            }.items()
        }
        answers = GaugeMetricFamily(
            "kvaffinity_guard_answers", "In the last hours (decayed), by group.", labels=("pool", "group")
        )
        ratio = GaugeMetricFamily(
            "kvaffinity_guard_ratio",
            "Locality's TTFT, normalised by prompt length, over the control group's; above 1 locality is slower.",
            labels=("pool", "quantile"),
        )
        shadow = {
            name: CounterMetricFamily(f"kvaffinity_shadow_{name}", description, labels=("pool", "policy"))
            for name, description in {
                "requests": "Requests that the second policy was asked about.",
                "disagreements": "Those for which it would have chosen another node.",
                "regret_seconds": "Predicted TTFT that it would have saved.",
                "gain_seconds": "Predicted TTFT that it would have cost.",
                "lost_tokens": "Cached tokens that it would have used and the choice did not.",
            }.items()
        }
        now = self._clock()
        for name, pool in self._router.pools.items():
            if pool.guard is not None:
                for key, family in guard.items():
                    family.add_metric((name,), getattr(pool.guard, key))
                for group, count in zip(("locality", "control"), pool.guard.counts(now=now), strict=True):
                    answers.add_metric((name, group), count)
                for quantile, value in zip(QUANTILES, pool.guard.ratios(), strict=True):
                    if value:
                        ratio.add_metric((name, str(quantile)), value)
            if pool.shadow is not None:
                for key, counter in shadow.items():
                    counter.add_metric((name, pool.shadow.name), getattr(pool.shadow, key))
        yield from (*guard.values(), answers, ratio, *shadow.values())

    def _sources(self) -> Iterator[Metric]:
        if self._scraper is not None:
            yield GaugeMetricFamily(
                "kvaffinity_scrape_interval_seconds", "How often nodes are scraped now.", value=self._scraper.interval_s
            )
            counts = self._scraper.counts
            failures = CounterMetricFamily(
                "kvaffinity_scrape_failures", "Scrapes in vain, by cause.", labels=("cause",)
            )
            for cause, number in counts.failures.items():
                failures.add_metric((cause,), number)
            yield failures
            for name, description, value in (
                ("scrapes", "Pages read.", counts.scrapes),
                ("unknown_pages", "Pages of no engine that is known.", counts.unknown_pages),
                ("engine_restarts", "Restarts of engines that scrapes noticed.", counts.restarts),
            ):
                yield CounterMetricFamily(f"kvaffinity_{name}", description, value=value)
        if self._feeds is not None:
            messages = CounterMetricFamily(
                "kvaffinity_kv_events", "KV event messages, by what came of them.", labels=("what",)
            )
            for what, number in self._feeds.counters().items():
                messages.add_metric((what,), number)
            lag = GaugeMetricFamily(
                "kvaffinity_kv_event_lag_seconds",
                "How late events come, against the promptest.",
                labels=("pool", "node"),
            )
            for endpoint, status in self._feeds.statuses().items():
                lag.add_metric((endpoint.pool, endpoint.node), status.lag_s)
            yield from (messages, lag)
        if self._recorder is not None:
            recorded = self._recorder.counts
            for name, description, value in (
                ("recorded_requests", "Settled requests that were written to the recording.", recorded.written),
                ("recording_dropped", "Settled requests that were to be recorded and were not.", recorded.dropped),
            ):
                yield CounterMetricFamily(f"kvaffinity_{name}", description, value=value)
            yield GaugeMetricFamily(
                "kvaffinity_recording_stopped",
                "1 where nothing is recorded any more; /healthz says why.",
                value=self._recorder.stopped is not None,
            )
