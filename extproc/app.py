"""The application: builds everything from the configuration; owns tasks, clock, signals and drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from xxhash import xxh3_64_intdigest

from extproc.config import Config, ConfigError, ScrapeConfig, load, settle_environment, traces_wanted
from extproc.core.answers import Answers
from extproc.core.cost import PrefillRate
from extproc.core.fleet import Fleet, LoadLimits
from extproc.core.guard import Guard
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.shadow import Shadow
from extproc.fleets import Fleets, check, each_rank, static_nodes
from extproc.listening import Health, build
from extproc.models import Models
from extproc.policies.least_ttft import LeastTtft
from extproc.policies.second import SHADOWS, tightened
from extproc.reader import Reader
from extproc.reading import Interpreter, ReadingSettings
from extproc.recording import Recorder
from extproc.server import ExtProc, Settings
from extproc.sources.kv_events import KvFeed
from extproc.sources.scraper import Scraper, ScrapeSettings
from extproc.telemetry import Telemetry, span_exporting
from extproc.tokens.memo import Memo
from extproc.wire.exchange import HEADERS

log = logging.getLogger(__name__)

_PROBE_S = 0.01
SWITCH_S = 0.0005
_WATCH_S = 1.0
_FIXED = ("listen", "metrics_listen", "metrics", "max_message_bytes", "memo_bytes", "tokenizer_threads")
_LOAD_S = 60.0
"""To load tokenizers before the first request; those that take longer are missing until they are there."""
_LAST_S = 0.1
_LAST_SPANS_S = 2.0


def _limits(config: Config) -> LoadLimits:
    policy = config.policy
    return LoadLimits(config.scrape.stale_after_s, policy.max_waiting, policy.max_kv_usage)


def _policy(config: Config) -> LeastTtft:
    policy = config.policy
    return LeastTtft(
        load_bound=policy.load_bound,
        load_slack_s=policy.load_slack_s,
        margin_s=policy.margin_s,
        margin_ratio=policy.margin_ratio,
        fallbacks=policy.fallbacks,
        saved_slack=policy.saved_slack,
        crowding=policy.crowding,
        price_weight=policy.price_weight,
    )


def _guard(pool: Pool, policy: LeastTtft, config: Config) -> None:
    """The control group and the second policy; what was compared so far is kept."""
    share, shadow = config.policy.control_percent / 100.0, config.policy.shadow
    if not share:
        pool.guard = None
    elif pool.guard is None:
        pool.guard = Guard(share, tightened(policy))
    else:
        pool.guard.usual_share, pool.guard.tightened = share, tightened(policy)
    if not shadow:
        pool.shadow = None
    elif pool.shadow is None or pool.shadow.name != shadow:
        pool.shadow = Shadow(shadow, SHADOWS[shadow](policy))
    else:
        pool.shadow.policy = SHADOWS[shadow](policy)


def apply_pools(pools: dict[str, Pool], config: Config) -> None:
    """Make `pools` what the configuration says; pools and nodes that stay keep what is known of them."""
    for name in pools.keys() - {model.name for model in config.models}:
        del pools[name]
    for model in config.models:
        pool = pools.get(model.name)
        exact = model.tokenizer is not None
        made = pool is None or (pool.block_tokens, pool.exact) != (model.block_tokens, exact)
        if pool is None or made:
            fleet = Fleet(
                PrefillRate(model.prefill_tokens_per_s, attention_tokens=model.attention_tokens),
                limits=_limits(config),
                price_weight=config.policy.price_weight,
            )
            pool = pools[model.name] = Pool(fleet, _policy(config), model.block_tokens, model.cache_tokens, exact)
        policy = pool.policy = _policy(config)
        _guard(pool, policy, config)
        pool.cache_tokens = model.cache_tokens
        pool.fleet.limits = _limits(config)
        pool.fleet.price_weight = config.policy.price_weight
        pool.fleet.thrift = {"ttft": 0.0, "blend": config.policy.blend, "throughput": 1.0}[config.policy.objective]
        rate = pool.fleet.rate
        if (rate.configured, rate.attention_tokens) != (model.prefill_tokens_per_s, model.attention_tokens):
            pool.fleet.rate = PrefillRate(model.prefill_tokens_per_s, attention_tokens=model.attention_tokens)
        pool.lora_load_s = model.lora_load_s
        if not model.predict_answers:
            pool.answers = None
        elif pool.answers is None:
            pool.answers = Answers()
        if made or not model.sources:  # nodes that were found are not the configuration's to take away
            pool.replace(each_rank(static_nodes(model), model.ranks))


def _scrape_settings(scrape: ScrapeConfig) -> ScrapeSettings:
    return ScrapeSettings(scrape.interval_s, scrape.timeout_s, scrape.path, scrape.stale_after_s)


def settings_of(config: Config) -> Settings:
    """The server's part of the configuration."""
    server = config.server
    return Settings(
        max_streams=server.max_streams,
        head_bytes=server.head_bytes,
        headers=HEADERS | {name.lower() for name in (*server.session_hints, server.isolate_by_header)},
        max_held_bytes=server.max_held_bytes,
        collect_gap_s=server.collect_gap_s,
        collect_total_s=server.collect_total_s,
        cluster_header=server.cluster_header,
        destination_header=server.destination_header,
        set_cluster=server.destination in ("cluster-header", "both"),
        set_destination=server.destination in ("override-host", "both"),
        retry_on=server.retry_on,
        reject_when_empty=server.when_empty == "reject",
    )


def reading_settings_of(config: Config, *, salt: int) -> ReadingSettings:
    """What reading requests needs of it."""
    server, models = config.server, config.models
    return ReadingSettings(
        head_bytes=server.head_bytes,
        decide_s=server.decide_s,
        decide_s_per_16_kib=server.decide_s_per_16_kib,
        pool_of={name: model.name for model in models for name in (model.name, *model.aliases, *model.adapters)},
        adapters=frozenset(name for model in models for name in model.adapters),
        session_hints=server.session_hints,
        isolate_by_header=server.isolate_by_header,
        salt=salt,
        backlog_bytes=server.tokenizer_backlog_bytes,
    )


class App:
    """One process: `run` serves until SIGTERM or SIGINT, and returns when everything has ended."""

    def __init__(self, config: Config, path: Path | None, *, record: Path | None = None) -> None:
        """`record`: the file to record to, whatever later configurations say; RecordingError when it cannot be."""
        settle_environment()
        check(config)
        self.config = self._started_with = config
        self._path = path
        self._salt = secrets.randbits(64) if config.salt is None else xxh3_64_intdigest(config.salt.encode())
        pools: dict[str, Pool] = {}
        apply_pools(pools, config)
        self.router = Router(pools, ticket_ttl_s=config.server.ticket_ttl_s, ticket_prefix=f"{secrets.token_hex(4)}-")
        self._tracing: TracerProvider | None = span_exporting() if traces_wanted(config.telemetry) else None
        tracer = None if self._tracing is None else self._tracing.get_tracer("kvaffinity")
        self._recorder: Recorder | None = None
        if record is not None:
            self._recorder = Recorder(record, started_at_s=time.time(), now=time.monotonic())
            log.info("recording to %s", record)
        self.telemetry = Telemetry(self.router, tracer, self._recorder)
        self._parsers = ThreadPoolExecutor(1, thread_name_prefix="parse")
        self._threads = ThreadPoolExecutor(config.server.tokenizer_threads, thread_name_prefix="tokenize")
        memo = Memo(config.server.memo_bytes)
        interpreter = Interpreter(self.router.pools, reading_settings_of(config, salt=self._salt))
        reader = Reader(interpreter, self._parsers, self._threads, time.monotonic)
        self.models = Models(reader, memo, clock=time.monotonic, now=datetime.now)
        self.models.want(config)
        self.ext_proc = ExtProc(self.router, reader, settings_of(config), self.telemetry, time.monotonic)
        self._scraper = Scraper(_scrape_settings(config.scrape), time.monotonic, random.Random())
        self._feeds = KvFeed(self.router, time.monotonic)
        self._fleets = Fleets(self.router, self._scraper, self._feeds, config, time.monotonic)
        self._seed_pools()
        self.telemetry.watch(self.ext_proc, time.monotonic, self._scraper, self._feeds)
        self._ready = False

    async def run(self) -> None:
        """Serve until told to stop; OSError when a port cannot be had."""
        try:
            await self._serve()
        finally:
            if self._recorder is not None:
                await asyncio.to_thread(self._recorder.close)

    async def _serve(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        health = Health()
        server_config = self.config.server
        server = build(
            self.ext_proc,
            health,
            listen=server_config.listen,
            max_message_bytes=server_config.max_message_bytes,
        )
        await health.serving(True)
        pages = await self._serve_pages() if server_config.metrics else None
        self._fleets.follow(self.config)
        tasks = [
            asyncio.create_task(_forever(each), name=name)
            for name, each in (
                ("expire tickets", self._expire),
                ("probe the loop", self._probe),
                ("watch the configuration", self._watch),
                ("look after tokenizers", self.models.run),
            )
        ]
        await _either(stop.wait(), self.models.settled(_LOAD_S))
        # A thread that renders a template must not keep the loop from its turn for long (5 ms is what Python gives it).
        sys.setswitchinterval(SWITCH_S)
        await server.start()
        self._ready = True
        log.info("serving on %s: %s", server_config.listen, self._describe())
        # What exists now lives as long as the process: no collection has to walk it again. Frequent young collections
        # are cheap, but each costs the request it falls into.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        await stop.wait()
        self._ready = False
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # what it would start, nobody would end
        drain_s = self.config.server.drain_s
        log.info("draining for up to %.0f s", drain_s)
        await health.serving(False)
        await self._drain(drain_s)
        await server.stop(_LAST_S)  # an exchange that began just now may end; Envoy's access log never would
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for threads in (self._parsers, self._threads):
            threads.shutdown(wait=False, cancel_futures=True)
        await self._fleets.close()
        if pages is not None:
            await pages.cleanup()
        if self._tracing is not None:
            await _send_last_spans(self._tracing)

    async def _drain(self, seconds: float) -> None:
        """Let open exchanges finish. Envoy's access-log stream never ends by itself, so it is not waited for."""
        until = time.monotonic() + seconds
        while self.ext_proc.streams and time.monotonic() < until:  # noqa: ASYNC110 - happens once, at the end
            await asyncio.sleep(0.02)

    def reload(self) -> None:
        """Take the configuration file again; one that cannot be used changes nothing, and the log says why."""
        if self._path is None:
            return
        try:
            config = load(self._path)
            check(config)
        except ConfigError as error:
            log.error("configuration kept as it was: %s", error)
            return
        apply_pools(self.router.pools, config)
        self.router.ticket_ttl_s = config.server.ticket_ttl_s
        self.ext_proc.settings = settings_of(config)
        self.ext_proc.reader.interpreter.settings = reading_settings_of(config, salt=self._salt)
        self.models.want(config)
        self._scraper.settings = _scrape_settings(config.scrape)
        self._seed_pools()
        self._fleets.follow(config)
        fixed, started = _FIXED, self._started_with
        changed = [f"server.{key}" for key in fixed if getattr(config.server, key) != getattr(started.server, key)]
        changed += [key for key in ("salt", "telemetry") if getattr(config, key) != getattr(started, key)]
        self.config = config
        log.info("configuration reloaded: %s", self._describe())
        if changed:
            log.warning("takes effect at the next start only: %s", ", ".join(changed))

    def _seed_pools(self) -> None:
        """What blocks begin with in events. Where a header keeps tenants apart, engines cannot know whose they are."""
        interpreter = self.ext_proc.reader.interpreter
        for name, pool in self.router.pools.items():
            known = pool.exact and not interpreter.settings.isolate_by_header
            pool.seed = partial(interpreter.seed, name) if known else None
            if pool.guard is not None:
                pool.guard.salt = self._salt

    def _describe(self) -> str:
        return ", ".join(f"{name} on {len(pool.fleet)} nodes" for name, pool in self.router.pools.items())

    async def _expire(self) -> None:
        await asyncio.sleep(1.0)
        for settled in self.router.expire(now=time.monotonic()):
            self.telemetry.settled(settled)
        self._fleets.reread()
        for name, pool in self.router.pools.items():
            for change in pool.changes():
                what = "pool %s: what node %s holds is taken from %s, no longer from %s"
                log.info(what, name, change.node, change.after, change.before)
            if pool.guard is not None:
                for step in pool.guard.changes():
                    log.warning("pool %s: %s", name, step)

    async def _probe(self) -> None:
        before = time.monotonic()
        await asyncio.sleep(_PROBE_S)
        self.telemetry.loop_delay(max(time.monotonic() - before - _PROBE_S, 0.0))

    async def _watch(self) -> None:
        """Reload when the file changes. It is looked at by its status alone, so a replaced file is seen as well."""
        before = self._stamp()
        while True:
            await asyncio.sleep(_WATCH_S)
            now = self._stamp()
            if now is not None and now != before:
                before = now
                self.reload()

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)

    async def _serve_pages(self) -> web.AppRunner:
        async def metrics(_: web.Request) -> web.Response:
            # read here, in one step; written elsewhere, since 1,000 nodes make a page of 60 ms
            page = await asyncio.to_thread(self.telemetry.collect())
            return web.Response(body=page, content_type="text/plain", charset="utf-8")

        async def healthz(_: web.Request) -> web.Response:
            state = {"ready": self._ready, "models": self.models.status(), "sources": self._fleets.status()}
            state["recording"] = None if self._recorder is None else self._recorder.status()
            return web.json_response(state, status=200 if self._ready else 503)

        pages = web.Application()
        pages.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz)])
        runner = web.AppRunner(pages, access_log=None)
        await runner.setup()
        host, _, port = self.config.server.metrics_listen.rpartition(":")
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        return runner


async def _either(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one is over; the others are given up."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _send_last_spans(tracing: TracerProvider) -> None:
    """For `_LAST_SPANS_S` at most: one try at a receiver that is not there takes 10 s."""
    sending = threading.Thread(target=tracing.shutdown, name="send the last spans", daemon=True)
    sending.start()
    await asyncio.to_thread(sending.join, _LAST_SPANS_S)


async def _forever(step: Callable[[], Awaitable[None]]) -> None:
    """Run `step` again and again; what goes wrong in one is logged, and the next is tried a second later."""
    while True:
        try:
            await step()
        except Exception:
            log.exception("background task failed")
            await asyncio.sleep(1.0)
