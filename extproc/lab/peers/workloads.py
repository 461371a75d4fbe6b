"""What clients do in the comparison: seeded conversations, on time or as fast as answers come, and their replay."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from extproc.lab import load
from extproc.lab.demo import BLOCK_TOKENS, MODEL
from extproc.lab.engine import TOKEN_BYTES, BlockKey, answer_to, block_keys
from extproc.lab.load import Reply, Session, Shape
from extproc.lab.openai import ChatBody, Message

CHAT = Shape(groups=32, turns=4)
INSTANT_S = 1e-3  # between two turns, where nobody thinks


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations of one kind, and how clients hold them."""

    title: str
    sessions: Callable[[float, int], list[Session]]
    """Enough for so many seconds, by a seed."""
    users: int | None = None
    """So many at a time, each the next as soon as the last is over. None: each begins at its own time."""


def chat(seconds: float, seed: int) -> list[Session]:
    """The system prompts alone would fill most of four caches (98,000 tokens), what is said besides the rest.

    20 requests/s: with all that could be cached the nodes are busy for a third of the time; by random choice they
    cannot keep up.
    """
    return drawn(CHAT, seconds, seed, per_s=5.0)


def hot_prefix(seconds: float, seed: int) -> list[Session]:
    """Four of five single requests share a prompt of 4,000 tokens; what each adds keeps two nodes busy together."""
    single = Shape(turns=1, user_tokens=(400, 800), think_s=INSTANT_S)
    hot = drawn(replace(single, groups=1, system_tokens=(4000, 4000)), seconds, seed, per_s=20.0)
    rest = drawn(replace(single, groups=40, system_tokens=(800, 1200)), seconds, seed + 1_000_000, per_s=5.0)
    return sorted([*hot, *rest], key=lambda session: session.start_s)


def busy_chat(seconds: float, seed: int) -> list[Session]:
    """The conversations of `chat` without thinking, more than any router gets through."""
    return drawn(replace(CHAT, think_s=INSTANT_S), seconds, seed, per_s=50.0)


WORKLOADS = {
    "chat": Workload("5 new conversations/s of 4 turns share 32 system prompts", chat),
    "hot": Workload("80 % of 25 requests/s share one prompt of 4,000 tokens", hot_prefix),
    "busy": Workload("the same conversations, 32 at a time without a pause", busy_chat, users=32),
}


def drawn(shape: Shape, seconds: float, seed: int, *, per_s: float) -> list[Session]:
    """The sessions that begin within so many seconds, so many of them each second."""
    count = math.ceil((2 * seconds * per_s + 10) / shape.groups)  # by far enough; those that begin later are left out
    full = replace(shape, sessions_per_group=count, between_starts_s=1 / per_s)
    return [session for session in load.conversations(full, seed) if session.start_s < seconds]


def ideal_hit_ratio(sessions: Sequence[Session]) -> float:
    """What one endless cache would find of all their prompt tokens."""
    seen: set[BlockKey] = set()
    prompt_tokens = cached_tokens = 0
    for session in sessions:
        said = [Message("system", session.system)]
        for turn in session.turns:
            said.append(Message("user", turn.user))
            prompt = ChatBody(said).prompt_text()
            answer = answer_to(prompt, turn.answer_tokens)
            said.append(Message("assistant", answer.decode()))
            tokens = len(prompt) // TOKEN_BYTES
            keys = block_keys(prompt + answer[:-TOKEN_BYTES], block_tokens=BLOCK_TOKENS)
            findable = keys[: (tokens - 1) // BLOCK_TOKENS]  # the last token is always computed
            prompt_tokens += tokens
            cached_tokens += BLOCK_TOKENS * sum(1 for _ in itertools.takewhile(seen.__contains__, findable))
            seen.update(keys)
    return cached_tokens / prompt_tokens


async def held(url: str, workload: Workload, sessions: Sequence[Session], seconds: float) -> tuple[list[Reply], int]:
    """All replies, and how many came within so many seconds; a conversation that began by then is held to its end."""
    begun_at, in_time = time.perf_counter(), 0

    def on_reply() -> None:
        nonlocal in_time
        in_time += time.perf_counter() - begun_at <= seconds

    if workload.users is None:
        return await load.replay(url, MODEL, sessions, on_reply=on_reply), in_time
    replies: list[Reply] = []
    waiting = iter(sessions)

    async def user() -> None:
        for session in waiting:
            replies.extend(await load.replay(url, MODEL, [replace(session, start_s=0.0)], on_reply=on_reply))
            if time.perf_counter() - begun_at > seconds:
                return

    await asyncio.gather(*(user() for _ in range(workload.users)))
    return replies, in_time
