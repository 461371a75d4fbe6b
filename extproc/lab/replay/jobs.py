"""A call on a simulated node, and what the node tells: of a step, of itself, of how it spends its time."""

from __future__ import annotations

from typing import NamedTuple

from extproc.core.types import Chain
from extproc.lab.replay.block_cache import Segment
from extproc.lab.replay.types import Call


class Scrape(NamedTuple):
    """What the node's metrics said at a time."""

    waiting: int
    running: int
    kv_usage: float
    prefix_queries: int
    """Counters, as in LoadSample."""
    prefix_hits: int


class Job:
    """One call on one node."""

    __slots__ = (
        "begun_at",
        "cached_tokens",
        "call",
        "chain",
        "computed",
        "end_at",
        "estimate_s",
        "first_token_s",
        "generated",
        "held",
        "held_blocks",
        "number",
        "planned",
        "private",
        "tokens",
    )

    def __init__(self, number: int, call: Call) -> None:
        self.number = number
        self.call = call
        self.chain: Chain = call.chain + call.answer
        self.tokens = call.prompt_tokens
        """To be prefilled: the prompt, and what was generated before it had to give way."""
        self.computed = 0
        """Of those, the ones that were found included."""
        self.generated = 0
        self.held: Segment
        self.held_blocks = 0
        self.private = 0
        """Blocks that cannot be found yet: those that are not computed, the unfinished one, and those of the answer."""
        self.begun_at = self.end_at = 0
        """Steps of the node: when decoding began, and when it will end."""
        self.cached_tokens: int | None = None
        self.first_token_s: float | None = None
        self.estimate_s = 0.0
        self.planned: Segment | None = None


class Step(NamedTuple):
    """What came of a step: first tokens, and ends of answers."""

    first: list[Job]
    ended: list[Job]


class Effort(NamedTuple):
    """What a node has done in the steps that are over, and how long that took."""

    prompts: int = 0
    tokens: int = 0
    """Of answers, after the first of each, which comes of the prefill."""
    prefill_s: float = 0.0
    busy_s: float = 0.0
    """With prefill_s; decoding took the rest."""
