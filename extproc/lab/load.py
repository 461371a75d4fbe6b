"""The demo's load: seeded multi-turn conversations that share system prompts, their replay and its summary."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from extproc.lab.wire_load import percentile

PATIENCE_S = 30.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Shape:
    """What conversations look like. Ranges are inclusive; times are means of exponential distributions."""

    groups: int = 8  # the sessions of a group share a system prompt
    sessions_per_group: int = 6
    turns: int = 5
    system_tokens: tuple[int, int] = (1000, 4000)
    user_tokens: tuple[int, int] = (50, 200)
    answer_tokens: tuple[int, int] = (16, 48)
    between_starts_s: float = 0.25
    think_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    user: str
    answer_tokens: int
    think_s: float  # from the end of the answer to the next turn


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. Each turn sends all that was said before, the node's real answers included."""

    start_s: float
    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the client saw of one request."""

    node: str | None
    ttft_s: float | None  # to the first content, not to the headers
    total_s: float
    prompt_tokens: int  # as the node counted them; 0 when it did not say
    cached_tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers. Times are None when nothing was served."""

    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    node_skew: float | None  # of uncached tokens: the busiest node over the mean; 1 is even

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def conversations(shape: Shape, seed: int) -> list[Session]:
    """The sessions in order of their start; the same seed gives the same load."""
    rng = random.Random(seed)
    systems = [_text(rng, shape.system_tokens) for _ in range(shape.groups)]
    order = [system for system in systems for _ in range(shape.sessions_per_group)]
    rng.shuffle(order)
    sessions, start_s = [], 0.0
    for system in order:
        turns = [
            Turn(_text(rng, shape.user_tokens), rng.randint(*shape.answer_tokens), rng.expovariate(1 / shape.think_s))
            for _ in range(shape.turns)
        ]
        sessions.append(Session(start_s, system, tuple(turns)))
        start_s += rng.expovariate(1 / shape.between_starts_s)
    return sessions


def _text(rng: random.Random, tokens: tuple[int, int]) -> str:
    """Made-up words of three letters; with the space before it, each is one token of the simulated node."""
    letters = "".join(rng.choices(LETTERS, k=3 * rng.randint(*tokens)))
    return "".join(" " + letters[start : start + 3] for start in range(0, len(letters), 3))


async def replay(
    base_url: str, model: str, sessions: Sequence[Session], *, on_reply: Callable[[], None] = lambda: None
) -> list[Reply]:
    """Run all sessions at their times; one reply for each turn. A turn that failed is left out of what follows it."""
    replies: list[Reply] = []

    async def converse(session: Session) -> None:
        await asyncio.sleep(session.start_s)
        said = [{"role": "system", "content": session.system}]
        for turn in session.turns:
            asked = [*said, {"role": "user", "content": turn.user}]
            reply, answer = await _ask(http, model, asked, turn.answer_tokens)
            replies.append(reply)
            on_reply()
            if reply.error is None:
                said = [*asked, {"role": "assistant", "content": answer}]
            await asyncio.sleep(turn.think_s)

    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with (
        aiohttp.ClientSession(base_url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as group,
    ):
        for session in sessions:
            group.create_task(converse(session))
    return replies


async def _ask(
    http: aiohttp.ClientSession, model: str, messages: list[dict[str, str]], max_tokens: int
) -> tuple[Reply, str]:
    """Send one streaming chat request; what came back, and the text of the answer."""
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True}
    sent_at = time.perf_counter()
    node: str | None = None
    ttft_s: float | None = None
    usage: dict[str, Any] | None = None
    words: list[str] = []
    error: str | None = "the stream ended early"
    try:
        async with http.post(
            "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}
        ) as response:
            node = response.headers.get("x-kvaffinity-node")
            if response.status != 200:
                error = f"status {response.status}"
            else:
                async for line in response.content:
                    data = line.strip().removeprefix(b"data: ")
                    if data == b"[DONE]":
                        error = None
                    elif data:
                        chunk = msgspec.json.decode(data)
                        usage = chunk.get("usage") or usage
                        text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                        if text and ttft_s is None:
                            ttft_s = time.perf_counter() - sent_at
                        words.append(text)
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as fault:
        error = type(fault).__name__
    if error is None and (usage is None or ttft_s is None):
        error = "no usage" if usage is None else "no content"
    reply = Reply(
        node=node,
        ttft_s=ttft_s,
        total_s=time.perf_counter() - sent_at,
        prompt_tokens=usage["prompt_tokens"] if usage else 0,
        cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0 if usage else 0,
        error=error,
    )
    return reply, "".join(words)


def summarize(replies: Sequence[Reply], *, nodes: int) -> Summary:
    """The run in numbers; `nodes` is the size of the fleet, so that a node that served nothing counts in the skew."""
    served = [reply for reply in replies if reply.error is None]
    ttft_s = [reply.ttft_s for reply in served if reply.ttft_s is not None]
    p50_s, p95_s, p99_s = (percentile(ttft_s, share) if ttft_s else None for share in (0.5, 0.95, 0.99))
    work: Counter[str | None] = Counter()
    for reply in served:
        work[reply.node] += reply.prompt_tokens - reply.cached_tokens
    return Summary(
        requests=len(replies),
        errors=len(replies) - len(served),
        prompt_tokens=sum(reply.prompt_tokens for reply in served),
        cached_tokens=sum(reply.cached_tokens for reply in served),
        ttft_p50_s=p50_s,
        ttft_p95_s=p95_s,
        ttft_p99_s=p99_s,
        node_skew=max(work.values()) * nodes / work.total() if work.total() else None,
    )
