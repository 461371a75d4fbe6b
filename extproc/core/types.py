"""The vocabulary of the core: what a node, a request, a candidate, a decision and an outcome are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

NodeId: TypeAlias = str
Chain: TypeAlias = bytes
"""Chained block hashes, HASH_BYTES each: block i's hash stands for blocks 0..i, so equal hash means equal prefix."""

HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Node:
    """One cache that the router may choose. `address` is ip:port, `cluster` what Envoy calls it."""

    id: NodeId
    address: str
    cluster: str
    weight: float = 1.0
    """Relative prefill speed, > 0; 1.0 is the pool's `prefill_tokens_per_s`."""
    rank: int | None = None
    """Which data-parallel rank of the engine at `address`, where each has a cache of its own."""


class Answered(NamedTuple):
    """What the model answered to the turn before, where it stands in this turn's prompt. Tokens."""

    turn: int
    """The name of the turn before: see InferenceRequest."""
    begin: int
    """The length of its prompt."""
    end: int
    """As much of this prompt its engine has computed."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What the router knows of one request: its prompt as block hashes, and how long it is."""

    model: str
    """The pool that serves it (not necessarily the name that the client wrote)."""
    prompt_tokens: int
    """Tokens of work the prompt may cost; of a cut head an estimate by the declared length; 0 when neither is known."""
    chains: Mapping[int, Chain] = field(default_factory=dict)
    """By block size in tokens; full blocks only. Without one it goes to the least predicted wait. Whoever passes a
    mapping leaves it as it is."""
    cut_chains: Mapping[int, Chain] | None = None
    """Not None: the head was cut. Then these (of cut heads only) are matched as well, and they alone are recorded."""
    exact: bool = False
    """Its tokens are the engine's."""
    session: int | None = None
    """Salted hash of what the client says its session is: a hint, never a replacement for the match."""
    adapter: str | None = None
    """The LoRA adapter that it asks for; None: the base model."""
    turn: int | None = None
    """Salted hash: a name for its prompt, by which the next turn tells what was answered. None: no turn will."""
    answered: Answered | None = None

    @property
    def matchable(self) -> bool:
        """Has it as much as one block?"""
        return any(self.chains.values()) or (self.cut_chains is not None and any(self.cut_chains.values()))

    @property
    def chain_bytes(self) -> int:
        """What its chains take."""
        taken = sum(map(len, self.chains.values()))
        return taken if self.cut_chains is None else taken + sum(map(len, self.cut_chains.values()))


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One scrape of a node. None: the engine does not say."""

    at_s: float
    waiting: int | None = None
    running: int | None = None
    kv_usage: float | None = None
    """Share of the KV cache that running requests hold, in [0, 1]."""
    cache_tokens: int | None = None
    """How many tokens the node's prefix cache can hold (block size times block count)."""
    started_at_s: float | None = None
    """The engine's own start time, wall clock: a change means that its cache is void."""
    block_tokens: int | None = None
    """Tokens of one block of its prefix cache, > 0."""
    prefix_queries: float | None = None
    """Counter: prompt tokens that were looked up in the prefix cache."""
    prefix_hits: float | None = None
    """Counter: those of them that were found."""
    prompt_tokens: float | None = None
    """Counter: tokens of all prompts."""
    loras: tuple[str, ...] | None = None
    """The adapters it has loaded, or is loading: those of running and of waiting requests."""
    max_loras: int | None = None
    """How many adapters it can have loaded at once."""


EngineHash: TypeAlias = int | bytes
"""What an engine calls a block: its own hash, which nothing but the same engine's other events can be held against."""


class BlocksStored(NamedTuple):
    """A node now holds these blocks, each the child of the one before."""

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    """What the first of them follows; None: it begins a prompt."""
    token_ids: bytes
    """4 bytes each, little-endian; `block_tokens` for each hash."""
    block_tokens: int
    lora: str | None
    salt: str | None
    """The request's cache_salt, which engines tell with a prompt's first block only; None elsewhere."""
    opaque: tuple[bytes, ...]
    """For each block a hash of what else it depends on (images), or b"". A block with one, and what follows it, equals
    no prompt's."""
    tier: str
    """"gpu", "cpu", "disk" or another name."""
    group: int
    """Which of the model's layer groups it is of (full attention, sliding window)."""
    whole: bool = True
    """False: its group looks back over a window only, so that what it holds is no prefix."""


class BlocksRemoved(NamedTuple):
    """A node no longer holds these blocks in one tier, for one layer group."""

    hashes: tuple[EngineHash, ...]
    tier: str
    group: int


class CacheCleared(NamedTuple):
    """A node holds nothing any more."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared


class FeedState(StrEnum):
    """How complete what a node's events told is."""

    LIVE = "live"
    """As far as anyone knows all of it."""
    LOST = "lost"
    """Some were missed for good: what they told is void, until the cache is known from its start again or cleared."""
    DOWN = "down"
    """No connection."""


class Rung(StrEnum):
    """What a node is believed to hold is taken from, best first."""

    EVENTS = "events"
    """Its engine's events, and the prompts in flight."""
    PREDICTED = "predicted"
    """What was sent there."""
    HASH = "hash"
    """Nothing but that prompts that begin alike are sent to the same node."""
    LOAD = "load"
    """Nothing."""


class RungChange(NamedTuple):
    """A node is believed more, or less, than before."""

    node: NodeId
    before: Rung
    after: Rung


class Candidate(NamedTuple):
    """A node as it stands for one request; a snapshot, later changes do not show in it. Seconds unless named."""

    node: Node
    matched_tokens: int
    """Of the prompt, by the node's events or the prefix map. What a session tells is not in it."""
    uncached_tokens: int
    """What is put on the node when it is chosen: the rest of the prompt, and of what is matched as much as is not
    believed."""
    wait_s: float
    """Predicted time until the node would start on this request."""
    prefill_s: float
    """Predicted prefill of the uncached tokens; where there are `session_tokens`, of what these leave."""
    in_flight: int
    recent_work_s: float
    """Uncached work sent there lately (exponentially decayed), in seconds of its prefill."""
    kv_usage: float
    """0.0 where the engine does not say."""
    sample_age_s: float
    """Infinity where there is no sample."""
    saturated: bool
    """Its engine says that it is full."""
    suspect: bool
    """What was sent there lately failed, or it stopped answering scrapes."""
    session: bool = False
    """The request's session was here last, and the node has had no more than its share of work since."""
    session_tokens: int = 0
    """An estimate: what it may hold of the prompt because of that. 0 unless that is more than can be matched."""
    lora_s: float = 0.0
    """Until it has loaded the request's adapter."""
    repaid_s: float = 0.0
    """Of `prefill_s`, what the requests that come after will save: that of a prefix which needs to be on more nodes."""


class Reason(StrEnum):
    """Why a node was chosen."""

    LOCALITY = "locality"
    """It holds as much of the prompt as any other."""
    HEADROOM = "headroom"
    """Another node holds more, but was too busy or not worth it."""
    COLD = "cold"
    """No node holds a block of it."""
    SESSION = "session"
    """Its session was there last, so that it is taken to hold more than can be matched: an estimate."""
    FALLBACK = "fallback"
    """Nothing to match: least predicted wait."""
    CONTROL = "control"
    """It is one of the guard's control group: routed as if nothing were cached."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen candidate, the next best ones in order, and why."""

    ranked: tuple[Candidate, ...]
    """At least one: the choice, then where a retry should go."""
    reason: Reason
    best_matched_tokens: int
    """The most that any node holds, by the prefix map."""
    price: float
    """Factor on own prefill: what extra work costs the requests that come after (1.0: an idle fleet)."""
    costs: tuple[float, ...] = ()
    """Of `ranked`, in seconds, by the policy; () where it does not compare costs."""

    @property
    def chosen(self) -> Candidate:
        return self.ranked[0]

    @property
    def node(self) -> Node:
        return self.ranked[0].node


class Stored(NamedTuple):
    """What one request added to a node's prefix map, in blocks of the node's size: enough to take it back."""

    chain: Chain
    from_block: int
    """Blocks before it were there already."""
    stamp: float
    generation: int = 0
    """What is known of the node was begun anew since where that is another now."""
    ahead: int | None = None
    """The blocks from there on count as in flight; None: none does."""
    answer: Chain = b""
    """What stands for the answer, until the next turn tells what it was."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One routed request, from the decision until its outcome is known."""

    id: str
    request: InferenceRequest
    decision: Decision
    stored: Stored
    received_at_s: float
    """When its headers came; Envoy's time to first token begins about there."""
    routed_at_s: float
    idle: bool
    """The node had nothing to do when this was sent: its TTFT tells the prefill rate."""

    @property
    def locality(self) -> float:
        """Share of the prompt that the chosen node is believed to hold, in [0, 1]; 0.0 when the prompt is unknown."""
        return self.decision.ranked[0].matched_tokens / max(self.request.prompt_tokens, 1)


class Refusal(StrEnum):
    """Why the router has no node to offer."""

    UNKNOWN_MODEL = "unknown_model"
    NO_NODE = "no_node"


@dataclass(frozen=True, slots=True)
class Rejection:
    """No node: the request goes on to Envoy's fallback route, or is answered 503, as configured."""

    refusal: Refusal


class End(StrEnum):
    """How a routed request ended."""

    SERVED = "served"
    """The node answered: teaches latency."""
    FAILED = "failed"
    """The node did not, or answered 5xx: teaches health."""
    CUT = "cut"
    """The client went away: teaches nothing."""
    LOST = "lost"
    """No access log came within the time limit."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the access log says of one routed request. None: not measured."""

    end: End
    served_by: str | None = None
    """ip:port of the upstream that answered, when one did."""
    answered: bool = False
    """The first byte of an answer's body was seen, so the prompt was computed."""
    client_ttft_s: float | None = None
    engine_ttft_s: float | None = None
    """From the last byte sent upstream to the first body byte; streaming answers only."""
    total_s: float | None = None
    attempts: int = 1
    routed: bool = True
    """Envoy had our decision; where it came too late, where the request went says nothing about it."""


class Settled(NamedTuple):
    """A ticket with its outcome; what telemetry is told."""

    ticket: Ticket
    outcome: Outcome
    retried_elsewhere: bool


class Policy(Protocol):
    """Chooses among at least one candidate; pure, never raises. `price`: see Decision."""

    def __call__(self, request: InferenceRequest, candidates: Sequence[Candidate], *, price: float) -> Decision: ...
