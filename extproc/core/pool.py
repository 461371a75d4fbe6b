"""The nodes that serve one model, and what each is believed to hold, in blocks of its own size."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from xxhash import xxh3_64_intdigest

from extproc.core.answers import HELD, REST, Answers, names
from extproc.core.cached_blocks import CachedBlocks, InFlight, Seed
from extproc.core.fleet import Fleet
from extproc.core.guard import Guard
from extproc.core.hot import HotPrefixes, nodes_needed
from extproc.core.prefix_map import PrefixMap
from extproc.core.sessions import Sessions
from extproc.core.shadow import Shadow
from extproc.core.trust import RUNGS, Trust
from extproc.core.types import (
    HASH_BYTES,
    Answered,
    BlocksStored,
    CacheEvent,
    Candidate,
    Chain,
    FeedState,
    InferenceRequest,
    LoadSample,
    Node,
    NodeId,
    Policy,
    Rung,
    RungChange,
    Stored,
)

MAX_BLOCK_SIZES = 4
"""Each size in use is one more chain to hash for every request."""

_SHARE, _AHEAD = 1.25, 8
"""A session speaks for a node that has had no more recent work than that factor of the mean (as in the load envelope)
and eight requests like this one: in an idle fleet a conversation of eight turns a minute can stay."""


_TIERS_BLOCKS = 2
"""A node's events may tell of as many times the blocks that its cache has room for: it may have a second tier."""

_HASHED_BLOCKS = 4
"""Prompts that begin with the same four blocks are taken to be of one family where nothing but hashing is left."""
_HASHED_LOAD = 1.25
"""And its node is the next one where it has that much more in flight than the mean (as in the load envelope)."""

_MAX_ADAPTERS = 256
"""Of those sent to one node lately as many are remembered; an engine has room for a few dozen."""

_MAX_CHANGES = 1024

_MOST_BLOCKS = 4_000_000
"""Of a node, whatever it says: with 16 tokens each 64 million tokens, and 0.8 GB of ours."""

_generations = count(1)
"""Of all pools together: one that is made anew under its old name has no generation in common with the old one."""


@dataclass(slots=True)
class _Known:
    """What is known of one node, from when it came, or was void, until it leaves, or is void."""

    size: int
    """Of its blocks, in tokens."""
    generation: int
    told_size: bool = False
    """Scrapes say so."""
    state: FeedState = FeedState.DOWN
    cached: CachedBlocks | None = None
    """What its events tell; None: there were none."""
    voided_at_s: float = -math.inf
    """When its feed last said that nothing is known."""
    in_flight: InFlight = field(default_factory=InFlight)
    trust: Trust = field(default_factory=Trust)
    adapters: dict[str, float] = field(default_factory=dict)
    """Those of requests sent there, and when the last one was."""

    @property
    def best(self) -> int:
        """The best rung there is data for, in RUNGS."""
        cached = self.cached
        usable = cached is not None and (cached.blocks > 0 or not cached.ignored)
        return 0 if usable and self.state is FeedState.LIVE else 1

    @property
    def rung(self) -> Rung:
        return RUNGS[max(self.best, self.trust.depth)]


class Pool:
    """A fleet, its policy, and a prefix map for each block size in use.

    A node is in the map of its block size: where the pool is `exact` (its requests carry the engine's tokens), the one
    that its engine tells, else `block_tokens`. Beyond MAX_BLOCK_SIZES, `block_tokens` counted in, a node with yet
    another size is in the map of `block_tokens`, where it is matched in steps that are not the engine's.

    Where a node's events are complete they are believed instead of the map, with what is in flight on top. What is sent
    there is recorded in the map all the same: prompts that are not exact are found nowhere else, and the map is ready
    when the events end.
    """

    def __init__(self, fleet: Fleet, policy: Policy, block_tokens: int, cache_tokens: int, exact: bool = False) -> None:
        self.fleet = fleet
        self.policy = policy
        self.block_tokens = block_tokens
        """Block size of a node until it says so itself."""
        self.cache_tokens = cache_tokens
        """Cache size of a node until it says so itself."""
        self.exact = exact
        self.seed: Seed | None = None
        """How prompts are salted; without it, and where the pool is not exact, events say nothing about prompts."""
        self.answers: Answers | None = Answers()
        """None: what was answered is not taken to be cached, unless events say so."""
        self.lora_load_s = 0.5
        """What it takes an engine to load an adapter."""
        self.guard: Guard | None = None
        self.shadow: Shadow | None = None
        self.sessions = Sessions()
        self.hot = HotPrefixes()
        self.prefix_maps: dict[int, PrefixMap] = {}
        """By block size, those in use. Only the pool adds and removes."""
        self._known: dict[NodeId, _Known] = {}
        self._block_sizes: tuple[int, ...] = (block_tokens,)
        self._live: dict[NodeId, _Known] = {}
        """Those whose events are believed."""
        self._doubted: dict[NodeId, _Known] = {}
        """Those of which not all is believed."""
        self._changes: list[RungChange] = []
        self._joined: dict[NodeId, int] = {}
        self.rejoined = False
        """A node's events are to be read anew from their start: see `generation`. Whoever does so takes it back."""

    # ---- nodes ----

    def replace(self, nodes: Iterable[Node]) -> None:
        """Make `nodes` the pool's fleet; what left is forgotten at once, and its tickets settle as any.

        A node of the same name that comes back, or that has another address or rank, is another one.
        """
        changes = self.fleet.replace(nodes)
        for node in changes.removed:
            self._leave(node.id)
            self._joined.pop(node.id, None)
        for node in changes.added:
            self._joined[node.id] = next(_generations)
        for node_id, sample in self.fleet.samples().items():
            self._place(node_id, None if sample is None else sample.block_tokens)
            self._resize(node_id)

    def observe(self, node: NodeId, sample: LoadSample) -> bool:
        """Take a scrape; True when the engine was restarted: what it held is forgotten. A stranger's: nothing."""
        if not self.fleet.knows(node):
            return False
        before = self.fleet.sample(node)
        restarted = self.fleet.observe(node, sample)
        if restarted:
            self._void(node, since_s=-math.inf if before is None else before.at_s)
        self._place(node, sample.block_tokens)
        known = self._known[node]
        rung = known.rung
        judged = known.trust.observe(sample, best=known.best, block_tokens=known.size)
        if judged or (
            sample.cache_tokens is not None and (before is None or before.cache_tokens != sample.cache_tokens)
        ):
            self._resize(node)
        self._note(node, rung)
        return restarted

    def feed(self, node: NodeId, state: FeedState, *, now: float) -> None:
        """How complete the node's events are from now on. A stranger's: nothing."""
        # a feed that ends is heard where events say nothing any more
        known = self._told(node) or self._known.get(node)
        if known is None or known.cached is None or (self.seed is None and state is FeedState.LIVE):
            return
        rung, before = known.rung, known.state
        known.state = state
        if state is FeedState.LOST:
            known.cached.clear()
            known.voided_at_s = now
        elif state is FeedState.LIVE and before is not FeedState.LIVE:
            known.trust.anew()
            self._resize(node)
        self._note(node, rung)

    def cache_events(self, node: NodeId, events: Sequence[CacheEvent], *, now: float) -> None:
        """What the node's engine says of its cache, in order. 2 us a block. A stranger's: nothing."""
        known = self._told(node)
        if known is None:
            return
        rung = known.rung
        if not known.told_size and known.cached is not None and not known.cached.blocks:
            told = next((each.block_tokens for each in events if isinstance(each, BlocksStored) and each.whole), None)
            if told is not None and told != known.size:
                self._place(node, told, scraped=False)
                known = self._known[node]
        assert known.cached is not None
        clears = known.cached.clears
        known.cached.apply(events)
        if known.cached.clears != clears:
            known.voided_at_s = now
        self._note(node, rung)

    def rung(self, node: NodeId) -> Rung:
        """What `node` is believed to hold is taken from that."""
        return self._known[node].rung

    def generation(self, node: NodeId) -> int:
        """Another number for each node that comes, and each time that its events have to be read anew."""
        return self._joined[node]

    def trust(self, node: NodeId) -> float:
        """What a token that it is taken to hold is worth, in [0, 1]."""
        return self._known[node].trust.value

    def changes(self) -> list[RungChange]:
        """The changes of rungs since this was asked last: at most the last 1,024."""
        found, self._changes = self._changes, []
        return found

    def block_sizes(self) -> tuple[int, ...]:
        """The sizes in use, in tokens, ascending; without nodes `block_tokens` alone. What a request is hashed in."""
        return self._block_sizes

    def blocks(self, node: NodeId) -> int:
        """How many blocks, of its own size, `node` is believed to hold."""
        known = self._known[node]
        if known.cached is not None and known.rung is Rung.EVENTS:
            return known.cached.blocks
        return self.prefix_maps[known.size].blocks(node)

    def segments(self) -> int:
        """How many segments all maps have; what memory is proportional to."""
        return sum(each.segments() for each in self.prefix_maps.values())

    def _place(self, node: NodeId, told: int | None, *, scraped: bool = True) -> None:
        """See to it that `node` is in the map of its size. Where that is another than it was, it holds nothing."""
        before = self._known.get(node)
        size = self.block_tokens if before is None else before.size
        if not self.exact:
            size = self.block_tokens
        elif told is not None:
            others = self.prefix_maps.keys() - {self.block_tokens}
            size = told if told in others or len(others) < MAX_BLOCK_SIZES - 1 else self.block_tokens
        if before is None or size != before.size:
            if before is not None:
                self._leave(node)
            if size not in self.prefix_maps:
                self.prefix_maps[size] = PrefixMap()
            self._known[node] = _Known(size, next(_generations))
            self._block_sizes = tuple(sorted(self.prefix_maps))
            self._resize(node)
            if before is not None and before.cached is not None:
                self._known[node].state = before.state
                self._told(node)
                self._note(node, self._known[node].rung)
        if scraped and told is not None:
            self._known[node].told_size = True

    def _told(self, node: NodeId) -> _Known | None:
        """What is known of a node that has events; None where they say nothing, or nobody knows it."""
        known = self._known.get(node)
        if known is None or self.seed is None or not self.exact:
            return None
        if known.cached is None:
            known.cached = CachedBlocks(known.size, self.seed, 0)
            self._resize(node)
        return known

    def _resize(self, node: NodeId) -> None:
        known, sample = self._known[node], self.fleet.sample(node)
        tokens = self.cache_tokens if sample is None or sample.cache_tokens is None else sample.cache_tokens
        blocks = min(max(1, tokens // known.size), _MOST_BLOCKS)
        self.prefix_maps[known.size].add_node(node, max(1, int(blocks * known.trust.capacity)))
        if known.cached is not None:
            known.cached.max_blocks = _TIERS_BLOCKS * blocks

    def _void(self, node: NodeId, *, since_s: float) -> None:
        """The node lost all that it held since then, where its events did not say so before."""
        known = self._known[node]
        self.prefix_maps[known.size].clear(node)
        self.sessions.void(node)
        known.generation = next(_generations)
        known.in_flight = InFlight()
        known.adapters.clear()
        known.trust.anew()
        if known.cached is not None and known.voided_at_s < since_s:
            known.cached.clear()
            # where its feed did not notice, only a new one tells what it holds
            self._joined[node], self.rejoined = next(_generations), True

    def _leave(self, node: NodeId) -> None:
        known = self._known.pop(node)
        self._live.pop(node, None)
        self._doubted.pop(node, None)
        self.prefix_maps[known.size].remove_node(node)
        self.sessions.void(node)
        if all(each.size != known.size for each in self._known.values()):
            del self.prefix_maps[known.size]
            self._block_sizes = tuple(sorted(self.prefix_maps)) or (self.block_tokens,)

    def _note(self, node: NodeId, before: Rung) -> None:
        """The node's rung may be another than it was, and so may its trust."""
        known = self._known[node]
        rung = known.rung
        for here, nodes in (
            (rung is Rung.EVENTS, self._live),
            (rung in (Rung.HASH, Rung.LOAD) or known.trust.value < 1.0, self._doubted),
        ):
            if here:
                nodes[node] = known
            else:
                nodes.pop(node, None)
        if rung is not before:
            self._changes = [*self._changes[1 - _MAX_CHANGES :], RungChange(node, before, rung)]

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
        """How many tokens of the prompt each node holds and can use, as far as it is known: by its events, or by what
        was sent there. Nodes that hold none are absent."""
        answered = self._answered(request)  # first: what is matched last, `store` goes on from
        held = self.holders(request.chains)
        if request.answered is not None and answered:
            self._with_answer(request.answered, answered, held)
        if self._live and request.exact:
            self._told_of(request.chains, held)
        if request.cut_chains is not None:
            for node, tokens in self.holders(request.cut_chains).items():
                held[node] = max(tokens, held.get(node, 0))
        if request.exact:
            # Engines use whole blocks, and never that of the last token, which is computed again for what follows it.
            most = max(request.prompt_tokens - 1, 0)
            for node, tokens in held.items():
                if tokens > most:
                    size = self._known[node].size
                    held[node] = most // size * size
        return held

    def _answered(self, request: InferenceRequest) -> set[NodeId]:
        """The nodes that are taken to hold what the turn before was answered."""
        if request.answered is None or self.answers is None:
            return set()
        first = names(request.answered.turn, HELD)
        return {node for each in self.prefix_maps.values() for node, held in each.match(first).items() if held == HELD}

    def _with_answer(self, answer: Answered, nodes: set[NodeId], held: dict[NodeId, int]) -> None:
        for node in nodes:
            size = self._known[node].size
            if held.get(node, 0) >= answer.begin // size * size:
                held[node] = max(held.get(node, 0), answer.end // size * size)

    def _told_of(self, chains: Mapping[int, Chain], held: dict[NodeId, int]) -> None:
        """Put what the events tell, and what is in flight, in place of what the maps say."""
        hashes = {size: array("Q", chain) for size, chain in chains.items()}
        guess = 0
        for node, known in self._live.items():
            own = hashes.get(known.size)
            blocks = 0
            if own is not None and known.cached is not None:
                guess = known.cached.match(own, guess)
                blocks = known.in_flight.match(own, guess)
            if blocks:
                held[node] = blocks * known.size
            else:
                held.pop(node, None)

    def candidates(self, request: InferenceRequest, *, now: float) -> Sequence[Candidate]:
        """The fleet as it stands for `request`, in id order; what its session tells is in its node's candidate."""
        matched = self.matched(request)
        for node, known in self._doubted.items():
            if known.rung in (Rung.HASH, Rung.LOAD):
                matched.pop(node, None)
        found: Sequence[Candidate] = self.fleet.candidates(matched, prompt_tokens=request.prompt_tokens, now=now)
        if self._too_hot(request, matched):
            most = max(matched.values())
            found = [self._repaid(each, most) for each in found]
        if self._doubted:
            found = self._as_believed(request, found)
        if request.adapter is not None:
            found = [each._replace(lora_s=self._lora_s(each.node.id, request.adapter)) for each in found]
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

    def _too_hot(self, request: InferenceRequest, matched: Mapping[NodeId, int]) -> bool:
        """Is the prefix that the request shares with others on fewer nodes than its share of the traffic needs?"""
        best = max(matched, key=matched.__getitem__, default=None)
        key = None
        if best is not None:
            end = matched[best] // self._known[best].size * HASH_BYTES
            hashed = request.chains.get(self._known[best].size, b"")[end - HASH_BYTES : end]
            key = int.from_bytes(hashed) if hashed else None
        share = self.hot.used(key)
        nodes = len(self.fleet)
        if best is None or share * nodes <= 1.0:
            return False
        holders = sum(tokens >= matched[best] for tokens in matched.values())
        return holders < nodes_needed(share, nodes)

    def _repaid(self, each: Candidate, most: int) -> Candidate:
        """What it lacks of a hot prefix is paid for once, by the request; those that follow find it there."""
        lacks = most - each.matched_tokens
        if lacks <= 0 or not each.uncached_tokens:
            return each
        return each._replace(repaid_s=each.prefill_s * min(lacks / each.uncached_tokens, 1.0))

    def _as_believed(self, request: InferenceRequest, found: Sequence[Candidate]) -> list[Candidate]:
        """With less hope of the nodes that promised too much, and hashing in place of maps that are wrong."""
        changed = list(found)
        hashed = None
        if any(known.rung is Rung.HASH for known in self._doubted.values()):
            hashed = self._hashed(request, found)
        for i, each in enumerate(found):
            known = self._doubted.get(each.node.id)
            if known is None or not each.uncached_tokens:
                continue
            believed = int(each.matched_tokens * known.trust.value)
            if known.rung is Rung.HASH and each.node.id == hashed:
                believed = int(known.trust.hits * request.prompt_tokens)
            uncached = max(request.prompt_tokens - believed, 1)
            prefill_s = each.prefill_s / each.uncached_tokens * uncached
            changed[i] = each._replace(uncached_tokens=uncached, prefill_s=prefill_s)
        return changed

    def _hashed(self, request: InferenceRequest, found: Sequence[Candidate]) -> NodeId | None:
        """Where prompts that begin like this one go, by rendezvous hashing with bounded load."""
        chain = next((each for _, each in sorted(request.chains.items()) if each), b"")
        if not chain:
            return None
        end = min(len(chain), _HASHED_BLOCKS * HASH_BYTES)
        key = int.from_bytes(chain[end - HASH_BYTES : end])
        limit = _HASHED_LOAD * sum(each.in_flight for each in found) / len(found) + 1.0
        able = [each for each in found if each.in_flight < limit and not each.suspect and not each.saturated]
        return max(
            (each.node.id for each in able), key=lambda node: xxh3_64_intdigest(node.encode(), key), default=None
        )

    def _lora_s(self, node: NodeId, adapter: str) -> float:
        """0.0 too where the engine does not say what it has loaded."""
        sample = self.fleet.sample(node)
        if sample is None or sample.loras is None or adapter in sample.loras:
            return 0.0
        sent_at_s = self._known[node].adapters.get(adapter, -math.inf)
        return 0.0 if sent_at_s >= sample.at_s else self.lora_load_s

    # ---- writing ----

    def store(self, node: NodeId, request: InferenceRequest, *, now: float) -> Stored:
        """`node` is about to hold the request's prompt, or holds it already: record the chain of its size."""
        known = self._known[node]
        prefix_map = self.prefix_maps[known.size]
        stored = prefix_map.store(node, self._recorded(known, request), now=now)
        stored = Stored(stored.chain, stored.from_block, stored.stamp, known.generation)
        if self.answers is None:
            return stored
        if request.answered is not None:  # now it is part of a prompt
            prefix_map.trim(node, names(request.answered.turn, HELD), REST)
        return self._expect(known, node, stored, request, now=now)

    def _expect(self, known: _Known, node: NodeId, stored: Stored, request: InferenceRequest, *, now: float) -> Stored:
        """Its answer will fill blocks as well."""
        if request.turn is None or self.answers is None:
            return stored
        answer = self.answers.chain(request.turn, request.prompt_tokens, known.size)
        self.prefix_maps[known.size].store(node, answer, now=now)
        return stored._replace(answer=answer)

    def send(self, node: NodeId, request: InferenceRequest, *, now: float) -> Stored:
        """The request is sent to `node`: `store`, and count as in flight, until `settle`, what it does not hold."""
        stored = self.store(node, request, now=now)
        known = self._known[node]
        if request.answered is not None and self.answers is not None:
            self.answers.saw(request.answered.end - request.answered.begin)
        known.trust.begun(request.prompt_tokens)
        if request.adapter is not None:
            known.adapters.pop(request.adapter, None)
            known.adapters[request.adapter] = now
            if len(known.adapters) > _MAX_ADAPTERS:
                del known.adapters[next(iter(known.adapters))]
        return self._fly(known, request, stored)

    def _fly(self, known: _Known, request: InferenceRequest, stored: Stored) -> Stored:
        cached = known.cached
        if cached is None or not request.exact or request.cut_chains is not None:
            return stored
        own = array("Q", stored.chain)
        begin = cached.match(own)
        new = own[begin:]
        if len(known.in_flight) + len(new) > cached.max_blocks:
            return stored
        known.in_flight.add(new)
        return stored._replace(ahead=begin)

    def extend(self, node: NodeId, stored: Stored, request: InferenceRequest, *, now: float) -> Stored:
        """What `send` recorded goes on as `request` knows now, or was wrong. Another generation's: nothing."""
        known = self._current(node, stored)
        if known is None:
            return stored
        self._land(known, stored)
        chain = self._recorded(known, request)
        if not chain.startswith(stored.chain):
            self.take_back(node, stored)
            longer = self.store(node, request, now=now)
        else:
            longer = self.prefix_maps[known.size].extend(node, stored, chain, now=now)
            longer = longer._replace(answer=stored.answer)
            if not stored.answer:
                longer = self._expect(known, node, longer, request, now=now)
        return self._fly(known, request, longer._replace(generation=known.generation, ahead=None))

    def settle(
        self, node: NodeId, stored: Stored, *, promised: int, prompt_tokens: int, computed: bool, now: float
    ) -> None:
        """The request that `send` counted as in flight is over; `promised` tokens of its prompt were taken to be there.

        `computed`: the node computed its prompt, and held it then. Another generation's: nothing.
        """
        known = self._current(node, stored)
        if known is None:
            return
        self._land(known, stored)
        known.trust.ended(prompt_tokens)
        if not computed:
            return
        # engines count a request's blocks as used when it ends, and what it computed last is the first to go
        prefix_map = self.prefix_maps[known.size]
        if stored.answer:
            prefix_map.store(node, stored.answer, now=now)
        prefix_map.store(node, stored.chain, now=now)
        if known.rung in (Rung.HASH, Rung.LOAD):  # then it is the map that is to prove itself
            promised = min(stored.from_block * known.size, max(prompt_tokens - 1, 0))
        if stored.chain:
            known.trust.sent(promised, prompt_tokens)
        if known.cached is not None and known.cached.orphans and known.state is FeedState.LIVE:
            known.cached.bind(array("Q", stored.chain))

    def take_back(self, node: NodeId, stored: Stored) -> None:
        """The request failed before `node` could cache it. Another generation's: nothing."""
        known = self._current(node, stored)
        if known is not None:
            self.prefix_maps[known.size].take_back(node, stored)
            if stored.answer:
                self.prefix_maps[known.size].trim(node, stored.answer, 0)

    def _land(self, known: _Known, stored: Stored) -> None:
        if stored.ahead is not None:
            known.in_flight.remove(array("Q", stored.chain)[stored.ahead :])

    def _current(self, node: NodeId, stored: Stored) -> _Known | None:
        known = self._known.get(node)
        return known if known is not None and known.generation == stored.generation else None

    def _recorded(self, known: _Known, request: InferenceRequest) -> Chain:
        chains = request.chains if request.cut_chains is None else request.cut_chains
        return chains.get(known.size, b"")
