"""What the laboratory speaks of: a trace's calls, what the fleet is, a balancer, and what became of each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from extproc.core.types import HASH_BYTES, Chain


class Call(NamedTuple):
    """One request of a trace."""

    at_s: float
    """When it arrives, from the trace's start; of a call that waits for another: what would be its time if that had
    answered at once."""
    prompt_tokens: int
    answer_tokens: int
    """At least 1."""
    chain: Chain
    """The prompt's full blocks, in the trace's block size."""
    answer: Chain
    """The full blocks of prompt and answer that follow `chain`: what the next turn finds of the answer."""
    session: int | None = None
    tenant: int = 0
    after: int | None = None
    """The number of the call in the trace whose answer it waits for: it arrives `pause_s` after that one's end."""
    pause_s: float = 0.0

    @property
    def blocks(self) -> int:
        """Full blocks of the prompt."""
        return len(self.chain) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls in the order of `at_s`, from 0.0; `after` points backwards."""

    name: str
    block_tokens: int
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True)
class Machine:
    """What one simulated node is. Tokens and seconds."""

    name: str
    prefill_tokens_per_s: float = 10_000.0
    cache_tokens: int = 1_000_000
    """KV cache, shared by what runs and what is cached."""
    speed: float = 1.0
    """Factor on everything it does."""
    max_running: int = 256
    step_tokens: int = 8192
    """Token budget of one step: prefill in chunks, beside one token for each running answer."""


class NodeView(NamedTuple):
    """What a balancer may see of a node: the last scrape, and its own bookkeeping is its own affair."""

    name: str
    waiting: int
    running: int
    kv_usage: float
    """In [0, 1], of running requests."""
    age_s: float
    """Of the scrape."""
    up: bool


class Balancer(Protocol):
    """A policy as a router in front of a fleet; called in the order of virtual time. Deterministic by its seed."""

    def route(self, number: int, call: Call, nodes: Sequence[NodeView], now: float) -> int | None:
        """Which of `nodes` call `number` goes to (always all nodes in one order, those that are down too); None: shed
        it."""

    def first_token(self, number: int, call: Call, node: int, now: float) -> None:
        """The node began to answer: what a router in the stream of answers sees. Ours gets no such thing."""

    def done(self, number: int, call: Call, node: int, now: float, *, ok: bool) -> None:
        """It ended; False: the node failed."""

    def nodes_changed(self, names: Sequence[str], now: float) -> None:
        """Nodes came or went; the order of `nodes` from now on. Called once before the first call as well."""


class Result(NamedTuple):
    """What became of one call."""

    number: int
    node: str
    """"" where it was shed."""
    arrived_s: float
    ttft_s: float
    """Infinity where there was no answer."""
    done_s: float
    cached_tokens: int
    """Of its prompt, found in the node's cache."""
    prompt_tokens: int
    answer_tokens: int
    tenant: int = 0
    attempts: int = 1
