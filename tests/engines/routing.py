"""Our server in this process, behind a real Envoy, before real engines: what it decides, and what they had cached."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import corpus
import msgspec
from corpus import MODEL
from servers import BLOCK_TOKENS, Fleet

from extproc.app import App
from extproc.config import Config
from extproc.core.types import BlocksRemoved, CacheEvent, NodeId, Rung, Settled, Ticket
from extproc.lab.envoy_config import Config as EnvoyConfig
from extproc.lab.envoy_config import load_config, write_config
from extproc.lab.processes import Processes, envoy_binary, free_ports, http_ok
from extproc.reading import Phases
from extproc.wire.exchange import Exchange
from tests.builders import until
from tests.integration.running import CONFIGURATIONS, FILE_PORTS, OPTIONS

_SESSION = "x-session-id"


@dataclass(slots=True)
class Served:
    """One request: what we predicted when it was routed, and what the engine says. Tokens."""

    ticket: Ticket
    phases: Phases
    evicted_s: float | None = None
    """How long after the decision, and before its end, a removal of what it was predicted to find was told."""
    cached: int | None = None
    prompt_tokens: int = 0
    followed: bool = False
    """Envoy has told that it sent it there; not where the decision came too late, or its node did not answer."""
    routed_at_s: float = field(default_factory=time.monotonic)

    @property
    def evicted(self) -> bool:
        return self.evicted_s is not None

    @property
    def node(self) -> NodeId:
        return self.ticket.decision.node.id

    @property
    def predicted(self) -> int:
        return self.ticket.decision.chosen.matched_tokens

    @property
    def away(self) -> int:
        """How much more was predicted than there was."""
        assert self.cached is not None
        return self.predicted - self.cached


class Router:
    """Our server in this process, so that its decisions can be read, behind a real Envoy."""

    def __init__(self, app: App, url: str, http: aiohttp.ClientSession, words: list[int]) -> None:
        self.app = app
        self.routed: dict[str, Served] = {}
        """By the request's name."""
        self.failed: list[tuple[float, object]] = []
        """When, and what the client saw."""
        self._url, self._http, self._words = url, http, words
        self.passed: Counter[str] = Counter()
        """Requests that Envoy sent where it liked, by cause."""
        self._open: set[str] = set()
        self._note_decisions()
        self._note_removals()

    def served(self) -> list[Served]:
        """What was answered as it was decided, in the order of decisions."""
        return [each for each in self.routed.values() if each.cached is not None and each.followed]

    async def settled(self) -> None:
        """Wait until Envoy has told how everything ended; what it does not tell of is reported."""
        with suppress(TimeoutError):
            await until(lambda: not len(self.app.router), timeout_s=5)
        self.passed["never settled"] += len(self.app.router)

    def rung(self, node: NodeId) -> Rung:
        return self.app.router.pools[MODEL].rung(node)

    async def ask(self, name: str, messages: list[dict[str, str]], tokens: int) -> str | None:
        """The answer's text; None where it failed. `name`: no other request's, so that no session draws it anywhere."""
        # No seed: on a CPU, vLLM 0.32 dies of one when a prompt takes more than one step
        sampling = {"max_tokens": tokens, "ignore_eos": True, "allowed_token_ids": self._words}
        body = json.dumps({"model": MODEL, "messages": messages, **sampling}).encode()
        headers = {_SESSION: name, "content-type": "application/json"}
        self._open.add(name)
        try:
            async with self._http.post(f"{self._url}{corpus.CHAT}", data=body, headers=headers) as answer:
                status, page = answer.status, await answer.read()
        except aiohttp.ClientError as error:
            self.failed.append((time.monotonic(), error))
            return None
        finally:
            self._open.discard(name)
        if status != 200:
            self.failed.append((time.monotonic(), (status, page)))
            return None
        found = json.loads(page)
        if (served := self.routed.get(name)) is None:
            self.passed["undecided"] += 1
        else:
            served.prompt_tokens = found["usage"]["prompt_tokens"]
            served.cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return str(found["choices"][0]["message"]["content"])

    def _note_decisions(self) -> None:
        routed, settled = self.app.telemetry.routed, self.app.telemetry.settled
        by_ticket: dict[str, Served] = {}

        def note_end(ended: Settled) -> None:
            there = ended.outcome.served_by in (None, ended.ticket.decision.node.address)
            by_ticket[ended.ticket.id].followed = ended.outcome.routed and there
            settled(ended)

        def note(ticket: Ticket, exchange: Exchange, phases: Phases, metadata: Callable[[], Any]) -> None:
            served = Served(ticket, phases)
            self.routed[exchange.headers[_SESSION]] = by_ticket[ticket.id] = served
            routed(ticket, exchange, phases, metadata)

        self.app.telemetry.settled = note_end  # type: ignore[method-assign,assignment]
        self.app.telemetry.routed = note  # type: ignore[method-assign]
        self.app.telemetry.passed = lambda cause: self.passed.update([cause.value])  # type: ignore[method-assign]

    def _note_removals(self) -> None:
        router = self.app.router
        cache_events = router.cache_events

        def note(pool: str, node: NodeId, events: Sequence[CacheEvent], *, now: float) -> None:
            cache_events(pool, node, events, now=now)
            if not any(isinstance(each, BlocksRemoved) for each in events):
                return
            for name in self._open & self.routed.keys():
                served = self.routed[name]
                if served.node == node and not served.evicted:
                    held = router.pools[pool].matched(served.ticket.request).get(node, 0)
                    if held < served.predicted:
                        served.evicted_s = time.monotonic() - served.routed_at_s

        router.cache_events = note  # type: ignore[method-assign]


@asynccontextmanager
async def routing(fleet: Fleet, directory: Path, *, events: bool, haste: bool = True) -> AsyncIterator[Router]:
    """All engines empty, our server ready, Envoy in front. Without haste requests wait for decisions, however long."""
    ports = dict(zip(FILE_PORTS, free_ports(len(FILE_PORTS)), strict=True))
    ports |= {8001 + i: engine.port for i, engine in enumerate(fleet.engines.values())}
    app = App(_configuration(fleet, ports[9002], events=events, haste=haste), None)
    envoys = _with_nodes(load_config(CONFIGURATIONS / "cluster-header.yaml", ports), [*fleet.engines])
    if not haste:
        _without_haste(envoys)
    path = write_config(envoys, directory / "envoy.yaml")
    running = asyncio.create_task(app.run())
    try:
        with Processes(directory) as processes:
            envoy = processes.start("envoy", [envoy_binary(), "-c", str(path), *OPTIONS])
            admin = f"http://127.0.0.1:{ports[9901]}"
            await asyncio.to_thread(processes.wait_until, envoy, http_ok(f"{admin}/ready"))
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as http:
                for engine in fleet.engines.values():
                    async with http.post(f"http://127.0.0.1:{engine.port}/reset_prefix_cache") as answer:
                        assert answer.status == 200

                async def server_is_healthy() -> bool:
                    url = f"{admin}/stats?filter=^cluster.kvaffinity.membership_healthy$"
                    async with http.get(url) as answer:
                        return (await answer.text()).strip().endswith(": 1")

                await until(server_is_healthy)
                router = Router(app, f"http://127.0.0.1:{ports[10000]}", http, fleet.words)
                await until(lambda: not events or all(router.rung(node) is Rung.EVENTS for node in fleet.nodes))
                yield router
    finally:
        if not running.done():
            signal.raise_signal(signal.SIGTERM)  # which is what ends the server
        await running


def _configuration(fleet: Fleet, listen: int, *, events: bool, haste: bool) -> Config:
    nodes = []
    for name, engine in fleet.engines.items():
        node = {"name": name, "address": f"127.0.0.1:{engine.port}"}
        if events:
            feed = fleet.feeds[name]
            node |= {"events": f"tcp://127.0.0.1:{feed.events}", "replay": f"tcp://127.0.0.1:{feed.replay}"}
        nodes.append(node)
    model = {"name": MODEL, "tokenizer": str(fleet.model), "ranks": fleet.ranks, "nodes": nodes}
    server = {"listen": f"127.0.0.1:{listen}", "metrics": False, "drain_s": 0.1}
    if not haste:
        server |= {"collect_gap_s": 10, "collect_total_s": 10, "decide_s": 10}
    models = [model | ({"events": {}} if events else {})]
    control = {"control_percent": 0}  # nobody is routed as if nothing were cached
    return msgspec.convert({"models": models, "server": server, "policy": control}, Config)


def _with_nodes(config: EnvoyConfig, names: Sequence[str]) -> EnvoyConfig:
    """The same with the first nodes only, which have these names."""
    resources = config["static_resources"]
    kept = {"kvaffinity", "pool", *names, *(f"{name}-only" for name in names)}
    resources["clusters"] = [each for each in resources["clusters"] if each["name"] in kept]
    (pool,) = (each for each in resources["clusters"] if each["name"] == "pool")
    del pool["load_assignment"]["endpoints"][0]["lb_endpoints"][len(names) :]
    return config


def _without_haste(config: EnvoyConfig) -> None:
    """A server that is slow is waited for, and stays healthy."""
    (listener,), (server, *_) = (config["static_resources"][each] for each in ("listeners", "clusters"))
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"][0]["typed_config"]["message_timeout"] = "30s"
    server["health_checks"][0]["timeout"] = "30s"


@dataclass(frozen=True, slots=True)
class Talk:
    """What conversations are like."""

    turns: int
    systems: int
    """How many system prompts they share; the conversation of this number has that of `number % systems`."""
    system_words: int
    question_words: tuple[int, ...]
    answer_tokens: tuple[int, int]
    """The least and the most."""

    async def hold(self, router: Router, numbers: Iterator[int], left: Iterator[object]) -> None:
        """One conversation after the other, until there is no number or nothing left to ask."""
        for number in numbers:
            rng = random.Random(number)
            system = corpus.prose(random.Random(number % self.systems), self.system_words)
            messages = [{"role": "system", "content": system}]
            for turn in range(self.turns):
                if next(left, None) is None:
                    return
                messages.append({"role": "user", "content": corpus.prose(rng, rng.choice(self.question_words))})
                answer = await router.ask(name_of(number, turn), messages, rng.randint(*self.answer_tokens))
                messages.append({"role": "assistant", "content": answer or "?"})


def name_of(number: int, turn: int) -> str:
    """What this turn of that conversation is called."""
    return f"{number}.{turn}"


def within(served: Sequence[Served], blocks: int) -> float:
    """The share of them that was predicted so well."""
    return sum(abs(each.away) <= blocks * BLOCK_TOKENS for each in served) / len(served)


def figures(what: str, router: Router, blocks: int, began_s: float) -> str:
    """One line for the report: all that was served since."""
    served = router.served()
    spent_s = time.monotonic() - began_s
    over = sum(each.away > blocks * BLOCK_TOKENS for each in served) / len(served)
    under = sum(-each.away > blocks * BLOCK_TOKENS for each in served) / len(served)
    exact = sum(each.away == 0 for each in served) / len(served)
    cached, tokens = sum(each.cached or 0 for each in served), sum(each.prompt_tokens for each in served)
    read = sum(each.prompt_tokens == each.ticket.request.prompt_tokens for each in served) / len(served)
    return (
        f"{what}: {within(served, blocks):.1%} of {len(served)} requests within {blocks} blocks ({exact:.1%} exact; "
        f"{over:.1%} over, {under:.1%} under; {cached / tokens:.0%} of {tokens:,} tokens cached; {read:.1%} with the "
        f"engine's prompt length; {spent_s:.0f} s; {len(router.routed) - len(served)} not "
        f"sent as decided, {dict(router.passed)})"
    )


def worst(served: Sequence[Served]) -> list[tuple[object, ...]]:
    """Of those that are furthest away: what was predicted, what there was, and what may be why."""
    furthest = sorted(served, key=lambda each: -abs(each.away))[:12]
    return [
        (
            each.node,
            each.predicted,
            each.cached,
            each.prompt_tokens,
            each.ticket.request.prompt_tokens,
            None if each.evicted_s is None else round(each.evicted_s, 3),
            None if each.phases.cut is None else each.phases.cut.value,
            each.ticket.decision.reason.value,
        )
        for each in furthest
    ]
