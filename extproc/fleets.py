"""Who is there, handed on: a pool's nodes to the core, to the scraper and to the feeds of KV events."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from extproc.config import (
    AnySource,
    Config,
    DnsConfig,
    EventsConfig,
    FileConfig,
    ModelConfig,
    SourceConfig,
    kubernetes_api,
)
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.types import Node
from extproc.sources.discovery.discovery import Discovery, Wanted
from extproc.sources.discovery.dns import DnsQuery, DnsSource
from extproc.sources.discovery.endpoint_slices import Endpoints, EndpointSlices
from extproc.sources.discovery.file import FileSource
from extproc.sources.discovery.inference_pool import InferencePool
from extproc.sources.discovery.kubernetes import ApiServer
from extproc.sources.discovery.source import Common, Naming, Source
from extproc.sources.kv_events import Endpoint, KvFeed
from extproc.sources.scraper import Scraper


def static_nodes(model: ModelConfig) -> tuple[Node, ...]:
    """The nodes that the configuration itself names."""
    return tuple(Node(each.name, each.address, each.cluster or each.name, each.weight) for each in model.nodes)


def each_rank(nodes: Iterable[Node], ranks: int) -> list[Node]:
    """One node for each data-parallel rank behind an address, since each has a cache of its own."""
    if ranks == 1:
        return [*nodes]
    return [
        node if node.rank is not None else replace(node, id=f"{node.id}/{rank}", rank=rank)
        for node in nodes
        for rank in (range(ranks) if node.rank is None else (node.rank,))
    ]


def source(config: AnySource, clock: Callable[[], float], *, names: bool) -> Source:
    """What finds nodes as `config` says. `names`: an address may be name:port."""
    common = Common(naming(config), config.keep_s, clock, random.Random())
    if isinstance(config, FileConfig):
        return FileSource(Path(config.path), common, names=names)
    if isinstance(config, DnsConfig):
        query = DnsQuery(config.name, config.port, config.family, config.resolvers, config.timeout_s)
        return DnsSource(query, common)
    api = ApiServer(config.api or kubernetes_api(), Path(config.token), Path(config.ca))
    if config.pool is not None:
        return InferencePool(api, config.namespace, config.pool, common, family=config.family)
    endpoints = Endpoints(config.namespace, config.service, config.selector, config.port, config.family)
    return EndpointSlices(api, endpoints, common)


def naming(config: SourceConfig) -> Naming:
    """How its nodes are called; ValueError where that is no template."""
    return Naming(config.cluster, config.weight)


def endpoint(pool: Pool, node: Node, model: ModelConfig, events: EventsConfig) -> Endpoint:
    """Where the events of `node` come from."""
    host = node.address.rpartition(":")[0]
    own = next((each for each in model.nodes if each.address == node.address), None)
    source, replayed = (None, None) if own is None else (own.events, own.replay)
    found = Endpoint(
        model.name,
        node.id,
        source or events.endpoint.format(host=host),
        replayed or events.replay.format(host=host) or None,
        events.topic,
        events.bind,
        generation=pool.generation(node.id),
    )
    return found if node.rank is None else found.of_rank(node.rank, node=node.id)


class Fleets:
    """Finds nodes, and keeps pools, scraper and feeds at them."""

    def __init__(
        self, router: Router, scraper: Scraper, feeds: KvFeed, config: Config, clock: Callable[[], float]
    ) -> None:
        self.config = config
        self._router = router
        self._scraper = scraper
        self._feeds = feeds
        self._clock = clock
        self._discovery = Discovery(self._apply)

    def follow(self, config: Config) -> None:
        """Find the nodes of this configuration from now on; what is known of those that stay is kept. On the loop."""
        self.config = config
        names = config.server.destination == "cluster-header"
        self._discovery.replace(
            {
                model.name: Wanted(
                    static_nodes(model),
                    {(each, names): partial(source, each, self._clock, names=names) for each in model.sources},
                )
                for model in config.models
            }
        )
        self._follow()

    def status(self) -> dict[str, list[dict[str, object]]]:
        """For the health page: how the sources of each pool are."""
        now = self._clock()
        return {
            name: [
                {
                    "source": each.name,
                    "nodes": each.nodes,
                    "error": each.error,
                    "age_s": None if each.last_good_s is None else round(now - each.last_good_s, 1),
                }
                for each in states
            ]
            for name, states in self._discovery.state().items()
        }

    async def close(self) -> None:
        """End every source, scrape and feed."""
        await self._discovery.close()
        await self._scraper.close()
        await self._feeds.close()

    def _apply(self, pool_name: str, nodes: Iterable[Node]) -> None:
        pool, model = self._router.pools.get(pool_name), self._models().get(pool_name)
        if pool is not None and model is not None:
            pool.replace(each_rank(nodes, model.ranks))
            self._follow()

    def _follow(self) -> None:
        self._scraper.replace(self._router.pools if self.config.scrape.enabled else {})
        models = self._models()
        self._feeds.replace(
            endpoint(pool, node, models[name], events)
            for name, pool in self._router.pools.items()
            if (events := models[name].events) is not None and pool.seed is not None
            for node in pool.fleet.nodes()
        )

    def _models(self) -> dict[str, ModelConfig]:
        return {model.name: model for model in self.config.models}
