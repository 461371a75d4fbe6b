"""The nodes that serve one model, and what each is believed to hold, in blocks of its own size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from extproc.core.fleet import Fleet
from extproc.core.prefix_map import PrefixMap
from extproc.core.sessions import Sessions
from extproc.core.types import Candidate, Chain, InferenceRequest, LoadSample, Node, NodeId, Policy, Stored

MAX_BLOCK_SIZES = 4
"""Each size in use is one more chain to hash for every request."""

_SHARE, _AHEAD = 1.25, 8
"""A session speaks for a node that has had no more recent work than that factor of the mean (as in the load envelope)
and eight requests like this one: in an idle fleet a conversation of eight turns a minute can stay."""


class Pool:
    """A fleet, its policy, and a prefix map for each block size in use.

    A node is in the map of its block size: where the pool is `exact` (its requests carry the engine's tokens), the one
    that its engine tells, else `block_tokens`. Beyond MAX_BLOCK_SIZES, `block_tokens` counted in, a node with yet
    another size is in the map of `block_tokens`, where it is matched in steps that are not the engine's.
    """

    def __init__(self, fleet: Fleet, policy: Policy, block_tokens: int, cache_tokens: int, exact: bool = False) -> None:
        self.fleet = fleet
        self.policy = policy
        self.block_tokens = block_tokens
        """Block size of a node until it says so itself."""
        self.cache_tokens = cache_tokens
        """Cache size of a node until it says so itself."""
        self.exact = exact
        self.sessions = Sessions()
        self.prefix_maps: dict[int, PrefixMap] = {}
        """By block size, those in use. Only the pool adds and removes."""
        self._sizes: dict[NodeId, int] = {}
        self._block_sizes: tuple[int, ...] = (block_tokens,)

    # ---- nodes ----

    def replace(self, nodes: Iterable[Node]) -> None:
        """Make `nodes` the pool's fleet; what left is forgotten."""
        for node in self.fleet.replace(nodes).removed:
            self._leave(node.id)
        for node_id, sample in self.fleet.samples().items():
            self._place(node_id, None if sample is None else sample.block_tokens)
            told = None if sample is None else sample.cache_tokens
            self._resize(node_id, self.cache_tokens if told is None else told)

    def observe(self, node: NodeId, sample: LoadSample) -> bool:
        """Take a scrape; True when the engine was restarted: what it held is forgotten. A stranger's: nothing."""
        if not self.fleet.knows(node):
            return False
        restarted = self.fleet.observe(node, sample)
        if restarted:
            self.prefix_maps[self._sizes[node]].clear(node)
            self.sessions.void(node)
        self._place(node, sample.block_tokens)
        if sample.cache_tokens is not None:
            self._resize(node, sample.cache_tokens)
        return restarted

    def block_sizes(self) -> tuple[int, ...]:
        """The sizes in use, in tokens, ascending; without nodes `block_tokens` alone. What a request is hashed in."""
        return self._block_sizes

    def blocks(self, node: NodeId) -> int:
        """How many blocks, of its own size, `node` is believed to hold."""
        return self.prefix_maps[self._sizes[node]].blocks(node)

    def segments(self) -> int:
        """How many segments all maps have; what memory is proportional to."""
        return sum(each.segments() for each in self.prefix_maps.values())

    def _place(self, node: NodeId, told: int | None) -> None:
        """See to it that `node` is in the map of its size. Where that is another than it was, it holds nothing."""
        before = self._sizes.get(node)
        size = before or self.block_tokens
        if not self.exact:
            size = self.block_tokens
        elif told is not None:
            others = self.prefix_maps.keys() - {self.block_tokens}
            size = told if told in others or len(others) < MAX_BLOCK_SIZES - 1 else self.block_tokens
        if size == before:
            return
        if before is not None:
            self._leave(node)
        if size not in self.prefix_maps:
            self.prefix_maps[size] = PrefixMap()
        self._sizes[node] = size
        self._block_sizes = tuple(sorted(self.prefix_maps))
        self._resize(node, self.cache_tokens)

    def _resize(self, node: NodeId, cache_tokens: int) -> None:
        size = self._sizes[node]
        self.prefix_maps[size].add_node(node, max(1, cache_tokens // size))

    def _leave(self, node: NodeId) -> None:
        size = self._sizes.pop(node)
        self.prefix_maps[size].remove_node(node)
        self.sessions.void(node)
        if size not in self._sizes.values():
            del self.prefix_maps[size]
            self._block_sizes = tuple(sorted(self.prefix_maps)) or (self.block_tokens,)

    # ---- reading ----

    def holders(self, chains: Mapping[int, Chain]) -> dict[NodeId, int]:
        """How many leading tokens each node holds, by the chain of its size; nodes that hold none are absent."""
        held: dict[NodeId, int] = {}
        for size, prefix_map in self.prefix_maps.items():
            chain = chains.get(size)
            if chain:
                matched = prefix_map.match(chain)
                for node in matched:
                    held[node] = matched[node] * size
        return held

    def matched(self, request: InferenceRequest) -> dict[NodeId, int]:
        """How many tokens of the prompt each node holds and can use; nodes that hold none are absent."""
        held = self.holders(request.chains)
        if request.cut_chains is not None:
            for node, tokens in self.holders(request.cut_chains).items():
                held[node] = max(tokens, held.get(node, 0))
        if request.exact:
            # Engines use whole blocks, and never that of the last token, which is computed again for what follows it.
            most = max(request.prompt_tokens - 1, 0)
            for node, tokens in held.items():
                if tokens > most:
                    size = self._sizes[node]
                    held[node] = most // size * size
        return held

    def candidates(self, request: InferenceRequest, *, now: float) -> Sequence[Candidate]:
        """The fleet as it stands for `request`, in id order; what its session tells is in its node's candidate."""
        found = self.fleet.candidates(self.matched(request), prompt_tokens=request.prompt_tokens, now=now)
        home = None if request.session is None else self.sessions.find(request.session, now=now)
        if home is None:
            return found
        node, tokens = home
        at = next((i for i, each in enumerate(found) if each.node.id == node), None)
        if at is None:
            return found
        # One `user` may stand for everybody: a node that had more than its share of late is not spoken for.
        mean_s = sum(each.recent_work_s for each in found) / len(found)
        here = found[at]
        if here.recent_work_s > _SHARE * mean_s + _AHEAD * here.prefill_s:
            return found
        told = here._replace(session=True)
        unmatched = not request.matchable or request.cut_chains is not None
        estimate = min(tokens, request.prompt_tokens)
        if unmatched and estimate > here.matched_tokens and not here.suspect and not here.saturated:
            left = max(request.prompt_tokens - estimate, 1) / here.uncached_tokens
            told = told._replace(session_tokens=estimate, prefill_s=here.prefill_s * left)
        return *found[:at], told, *found[at + 1 :]

    # ---- writing ----

    def store(self, node: NodeId, request: InferenceRequest, *, now: float) -> Stored:
        """`node` is about to hold the request's prompt: record the chain of its size."""
        return self.prefix_maps[self._sizes[node]].store(node, self._recorded(node, request), now=now)

    def extend(self, node: NodeId, stored: Stored, request: InferenceRequest, *, now: float) -> Stored:
        """What `store` recorded goes on as `request` knows now, or was wrong. A stranger's: nothing."""
        if node not in self._sizes:
            return stored
        chain = self._recorded(node, request)
        if not chain.startswith(stored.chain):
            self.take_back(node, stored)
            return self.store(node, request, now=now)
        return self.prefix_maps[self._sizes[node]].extend(node, stored, chain, now=now)

    def take_back(self, node: NodeId, stored: Stored) -> None:
        """The request failed before `node` could cache it. A stranger's: nothing."""
        if node in self._sizes:
            self.prefix_maps[self._sizes[node]].take_back(node, stored)

    def _recorded(self, node: NodeId, request: InferenceRequest) -> Chain:
        chains = request.chains if request.cut_chains is None else request.cut_chains
        return chains.get(self._sizes[node], b"")
