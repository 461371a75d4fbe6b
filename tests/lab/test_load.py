"""The demo's load: reproducible, shared where it should be, measured at the first content."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from extproc.lab.load import Reply, Session, Shape, Turn, conversations, replay, summarize
from extproc.lab.node import Node, NodeSettings

PATIENCE_S = 10.0
SMALL = Shape(
    groups=2,
    sessions_per_group=3,
    turns=2,
    system_tokens=(50, 90),
    user_tokens=(5, 9),
    answer_tokens=(2, 6),
    between_starts_s=0.001,
    think_s=0.001,
)


def test_the_same_seed_gives_the_same_load_and_another_seed_another() -> None:
    assert conversations(SMALL, 1) == conversations(SMALL, 1)
    assert conversations(SMALL, 1) != conversations(SMALL, 2)


def test_the_load_has_the_shape_that_was_asked_for() -> None:
    sessions = conversations(SMALL, 1)
    assert len(sessions) == 6
    systems = [session.system for session in sessions]
    assert sorted(systems.count(system) for system in set(systems)) == [3, 3]
    assert [session.start_s for session in sessions] == sorted(session.start_s for session in sessions)
    for session in sessions:
        assert 50 * 4 <= len(session.system) <= 90 * 4
        assert len(session.turns) == 2
        for turn in session.turns:
            assert 5 * 4 <= len(turn.user) <= 9 * 4
            assert 2 <= turn.answer_tokens <= 6
    turns = [turn.user for session in sessions for turn in session.turns]
    assert len(set(turns)) == len(turns)


def test_the_groups_come_mixed() -> None:
    systems = [session.system for session in conversations(Shape(), 1)]
    assert sum(one != following for one, following in pairwise(systems)) > 24  # one after another it would be 7


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncGenerator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    async with asyncio.timeout(PATIENCE_S), TestServer(app) as server:
        yield str(server.make_url("/"))


async def test_a_replay_on_one_node_reuses_what_earlier_turns_and_sessions_said() -> None:
    sessions = conversations(SMALL, 1)
    settings = NodeSettings("n1", "127.0.0.1", 0, "tiny", block_tokens=1, prefill_tokens_per_s=1e9, decode_s=0.0)
    seen: list[int] = []
    async with asyncio.timeout(PATIENCE_S), TestServer(Node(settings).application()) as server:
        replies = await replay(str(server.make_url("/")), "tiny", sessions, on_reply=lambda: seen.append(1))
    assert len(replies) == len(seen) == 12
    assert {reply.node for reply in replies} == {"n1"}
    assert all(reply.error is None and reply.ttft_s is not None and reply.ttft_s <= reply.total_s for reply in replies)
    summary = summarize(replies, nodes=1)
    # With blocks of one token, each token is computed once: a system fence (3 tokens) for all; for each group its
    # system prompt and a user fence (2); for each session what its users said, an assistant fence (4) in each turn,
    # and between its turns the last token of the answer and a user fence.
    systems = sum(len(system) // 4 + 2 for system in {session.system for session in sessions})
    users = sum(len(turn.user) // 4 + 4 for session in sessions for turn in session.turns)
    assert summary.prompt_tokens - summary.cached_tokens == 3 + systems + users + len(sessions) * (1 + 2)
    assert summary.errors == 0


async def test_the_next_turn_carries_the_real_answer() -> None:
    asked: list[list[dict[str, str]]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["messages"])
        return await streamed(request, f"answer {len(asked)}")

    session = Session(0.0, "S", (Turn("one", 3, 0.0), Turn("two", 3, 0.0)))
    async with serving(handler) as url:
        await replay(url, "tiny", [session])
    assert [message["content"] for message in asked[1]] == ["S", "one", "answer 1", "two"]
    assert [message["role"] for message in asked[1]] == ["system", "user", "assistant", "user"]


async def test_a_session_starts_at_its_time_and_thinks_between_turns() -> None:
    arrived_at_s: list[float] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        arrived_at_s.append(asyncio.get_running_loop().time() - begin_s)
        return await streamed(request, "x")

    session = Session(0.2, "S", (Turn("one", 3, 0.1), Turn("two", 3, 0.0)))
    async with serving(handler) as url:
        begin_s = asyncio.get_running_loop().time()
        await replay(url, "tiny", [session])
    assert arrived_at_s[0] >= 0.2
    assert arrived_at_s[1] >= arrived_at_s[0] + 0.1


async def streamed(
    request: web.Request, text: str, *, first: asyncio.Event | None = None, done: bool = True
) -> web.StreamResponse:
    """A stream whose role chunk comes at once and whose text comes after `first`."""
    response = web.StreamResponse(headers={"x-kvaffinity-node": "n1"})
    await response.prepare(request)
    usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
    await response.write(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    if first is not None:
        await first.wait()
    await response.write(event({"choices": [{"delta": {"content": text}}]}))
    await response.write(event({"choices": [], "usage": usage}))
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


def event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def test_ttft_ends_at_the_first_content_not_at_headers_or_role() -> None:
    wait_s = 0.2

    async def handler(request: web.Request) -> web.StreamResponse:
        first = asyncio.Event()
        asyncio.get_running_loop().call_later(wait_s, first.set)
        return await streamed(request, "x", first=first)

    async with serving(handler) as url:
        [reply] = await replay(url, "tiny", [Session(0.0, "S", (Turn("one", 3, 0.0),))])
    assert reply.ttft_s is not None
    assert reply.ttft_s >= wait_s
    assert (reply.prompt_tokens, reply.cached_tokens, reply.node, reply.error) == (10, 4, "n1", None)


async def refusing(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503)


async def breaking_off(request: web.Request) -> web.StreamResponse:
    return await streamed(request, "x", done=False)


async def hanging_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (refusing, "status 503"),
        (breaking_off, "the stream ended early"),
        (hanging_up, "ServerDisconnectedError"),
    ],
)
async def test_a_failed_turn_is_an_error_and_the_session_goes_on(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], error: str
) -> None:
    session = Session(0.0, "S", (Turn("one", 3, 0.0), Turn("two", 3, 0.0)))
    async with serving(handler) as url:
        replies = await replay(url, "tiny", [session])
    assert [reply.error for reply in replies] == [error, error]
    summary = summarize(replies, nodes=1)
    assert (summary.requests, summary.errors, summary.prompt_tokens, summary.ttft_p50_s) == (2, 2, 0, None)


def reply(node: str, ttft_s: float, prompt: int, cached: int, error: str | None = None) -> Reply:
    return Reply(node, ttft_s, ttft_s + 1, prompt, cached, error)


def test_the_summary_counts_what_was_served() -> None:
    replies = [
        *(reply("n1", index / 100, 100, 75) for index in range(1, 91)),
        *(reply("n2", index / 100, 100, 25) for index in range(91, 101)),
        reply("n2", 99.0, 100, 0, "the stream ended early"),
    ]
    summary = summarize(replies, nodes=4)
    assert (summary.requests, summary.errors) == (101, 1)
    assert (summary.prompt_tokens, summary.cached_tokens) == (10000, 7000)
    assert summary.hit_ratio == 0.7
    assert (summary.ttft_p50_s, summary.ttft_p95_s, summary.ttft_p99_s) == (0.5, 0.95, 0.99)
    assert summary.node_skew == pytest.approx(2250 / (3000 / 4))  # two nodes of four did nothing


def test_an_even_fleet_has_a_skew_of_one_and_an_idle_one_has_none() -> None:
    assert summarize([reply(node, 1.0, 9, 4) for node in ("n1", "n2")], nodes=2).node_skew == 1.0
    assert summarize([], nodes=2).node_skew is None
