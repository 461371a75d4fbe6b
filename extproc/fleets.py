"""Who is there, handed on: a pool's nodes to the core, to the scraper and to the feeds of KV events."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from extproc.config import (
    AnySource,
    Config,
    ConfigError,
    DnsConfig,
    EventsConfig,
    FileConfig,
    ModelConfig,
    NodeConfig,
    SourceConfig,
    kubernetes_api,
)
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

log = logging.getLogger(__name__)


def static_nodes(model: ModelConfig) -> tuple[Node, ...]:
    """The nodes that the configuration itself names."""
    return tuple(Node(each.name, each.address, each.cluster or each.name, each.weight) for each in model.nodes)


def each_rank(nodes: Iterable[Node], ranks: int) -> list[Node]:
    """One node for each data-parallel rank behind an address, since each has a cache of its own. Of two that are the
    same, or are called the same, the first counts."""
    expanded = (
        replace(node, id=f"{node.id}/{rank}", rank=rank) if node.rank is None and ranks > 1 else node
        for node in nodes
        for rank in (range(ranks) if node.rank is None else (node.rank,))
    )
    by_place: dict[tuple[str, int | None], Node] = {}
    for node in expanded:
        by_place.setdefault((node.address, node.rank), node)
    return list({node.id: node for node in reversed(by_place.values())}.values())[::-1]


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


def check(config: Config) -> None:
    """ConfigError where a source of nodes, or the endpoint of a node's events, cannot be made."""
    for i, model in enumerate(config.models):
        try:
            for each in model.sources:
                source(each, float, names=True)
            if model.events is not None:
                own = _own(model)
                for node in each_rank(static_nodes(model), model.ranks):
                    endpoint(model.name, node, own.get(node.address), model.events, generation=0)
        except ValueError as error:
            raise ConfigError(f"{error} - at `$.models[{i}]`") from error


def endpoint(pool: str, node: Node, own: NodeConfig | None, events: EventsConfig, *, generation: int) -> Endpoint:
    """Where the events of `node` come from. ValueError: its rank has none."""
    host = node.address.rpartition(":")[0]
    found = Endpoint(
        pool,
        node.id,
        (own and own.events) or events.endpoint.format(host=host),
        (own and own.replay) or events.replay.format(host=host) or None,
        events.topic,
        events.bind,
        generation=generation,
    )
    return found if node.rank is None else found.of_rank(node.rank, node=node.id)


def _own(model: ModelConfig) -> dict[str, NodeConfig]:
    """The nodes that the configuration names, by address."""
    return {each.address: each for each in model.nodes}


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
        self._replacing = False

    def follow(self, config: Config) -> None:
        """Find the nodes of this configuration from now on; what is known of those that stay is kept. On the loop."""
        self.config = config
        names = config.server.destination == "cluster-header"
        self._replacing = True
        self._discovery.replace(
            {
                model.name: Wanted(
                    static_nodes(model),
                    {(each, names): partial(source, each, self._clock, names=names) for each in model.sources},
                )
                for model in config.models
            }
        )
        self._replacing = False
        self._follow()

    def reread(self) -> None:
        """Read the events of those nodes anew that a scrape found restarted and their feeds did not."""
        if any(pool.rejoined for pool in self._router.pools.values()):
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
            if not self._replacing:
                self._follow()

    def _follow(self) -> None:
        self._scraper.replace(self._router.pools if self.config.scrape.enabled else {})
        self._feeds.replace(self._endpoints())

    def _endpoints(self) -> list[Endpoint]:
        found = []
        for model in self.config.models:
            pool = self._router.pools[model.name]
            pool.rejoined = False
            if model.events is None or pool.seed is None:
                continue
            own = _own(model)
            for node in pool.fleet.nodes():
                generation, named = pool.generation(node.id), own.get(node.address)
                try:
                    found.append(endpoint(model.name, node, named, model.events, generation=generation))
                except ValueError as error:
                    log.warning("pool %s: node %s goes without events: %s", model.name, node.id, error)
        return found

    def _models(self) -> dict[str, ModelConfig]:
        return {model.name: model for model in self.config.models}
