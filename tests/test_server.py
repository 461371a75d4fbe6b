"""The server as Envoy meets it: a real grpc.aio server and client, scripts of messages, and what comes of them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.core.types import HASH_BYTES, Candidate, Decision, End, InferenceRequest, Reason
from extproc.listening import EXT_PROC
from extproc.reading import Cause, Cut
from extproc.wire import messages
from extproc.wire.envoy_pb2 import ProcessingRequest, ProcessingResponse
from extproc.wire.exchange import BodyMode
from extproc.wire.messages import NAME_HEADER
from tests.builders import (
    CHAT,
    CLUSTER,
    DESTINATION,
    Clock,
    Running,
    Seen,
    body,
    chat,
    entry,
    headers,
    mutated,
    pool_of,
    prose,
    removed,
    retries,
    running,
    ticket_of,
    trailers,
    until,
)

HEAD, BUFFERED, DUPLEX = BodyMode.HEAD, BodyMode.BUFFERED, BodyMode.DUPLEX
PROMPT = prose(4000)
CANARY = "xyzzy-canary-4711"


async def converse(server: Running, mode: BodyMode, data: bytes, *extra: tuple[str, str]) -> list[ProcessingResponse]:
    """A whole request in one message; the replies without BUFFERED's first, which only lets the headers go on."""
    replies = await server.say_on(headers(*extra, mode=mode), body(data, end=True))
    if mode is BUFFERED:
        assert replies[0] == ProcessingResponse(request_headers={})
        return replies[1:]
    return replies


def echoed(replies: Sequence[ProcessingResponse]) -> bytes:
    return b"".join(each.request_body.response.body_mutation.streamed_response.body for each in replies)


def ends(replies: Sequence[ProcessingResponse]) -> list[bool]:
    """end_of_stream of each reply; a trailers reply is an end as well."""
    return [
        each.HasField("request_trailers") or each.request_body.response.body_mutation.streamed_response.end_of_stream
        for each in replies
    ]


def is_passed_on(reply: ProcessingResponse) -> bool:
    common = (reply.request_body if reply.HasField("request_body") else reply.request_headers).response
    return (
        not mutated(reply)
        and removed(reply) == {CLUSTER, DESTINATION}
        and common.clear_route_cache
        and not reply.HasField("dynamic_metadata")
        and not reply.HasField("immediate_response")
    )


class _Script:
    """The server's side of a stream without a network; writing fails with `error`."""

    def __init__(self, *messages: ProcessingRequest, error: BaseException | None = None) -> None:
        self._messages = list(messages)
        self._error = error

    async def read(self) -> ProcessingRequest:
        return self._messages.pop(0)

    async def write(self, _: bytes) -> None:
        if self._error is not None:
            raise self._error

    def invocation_metadata(self) -> tuple[()]:
        return ()


# ---- a decision ----


@pytest.mark.parametrize("mode", BodyMode)
@pytest.mark.parametrize(
    ("set_cluster", "set_destination"), [(True, False), (False, True), (True, True)], ids=["cluster", "list", "both"]
)
async def test_a_decision_sets_its_headers_removes_the_client_s_and_hands_the_ticket_to_the_access_log(
    mode: BodyMode, set_cluster: bool, set_destination: bool
) -> None:
    async with running(
        {"m": pool_of("n1", "n2", "n3", "n4")}, set_cluster=set_cluster, set_destination=set_destination
    ) as server:
        reply, *rest = await converse(server, mode, chat(PROMPT), (CLUSTER, "mine"), (DESTINATION, "6.6.6.6:1"))
        (ticket,) = server.seen.tickets
        ranked = [each.node for each in ticket.decision.ranked]
        assert len(ranked) == 3
        expected = {
            CLUSTER: ranked[0].cluster if set_cluster else None,
            DESTINATION: ",".join(each.address for each in ranked) if set_destination else None,
        }
        assert mutated(reply) == {key: value for key, value in expected.items() if value is not None}
        assert removed(reply) == {key for key, value in expected.items() if value is None}
        assert reply.HasField("request_body") == (mode is BUFFERED)
        common = (reply.request_body if mode is BUFFERED else reply.request_headers).response
        assert common.clear_route_cache
        assert dict(reply.dynamic_metadata["kvaffinity"]) == {
            "ticket": ticket.id,
            "locality": 0.0,
        }
        assert ticket.decision.reason is Reason.COLD
        assert not common.HasField("body_mutation")
        assert echoed(rest) == (chat(PROMPT) if mode is DUPLEX else b"")
        assert server.seen.causes == []


@pytest.mark.parametrize("mode", BodyMode)
async def test_a_request_may_be_repeated_once_all_of_its_body_was_seen(mode: BodyMode) -> None:
    async with running({"m": pool_of("n1")}) as server:
        routed, *_ = await converse(server, mode, chat(PROMPT))
        passed, *_ = await converse(server, mode, b"no JSON")
        assert retries(routed) == retries(passed) == "connect-failure,reset"


async def test_a_request_whose_end_was_not_seen_must_not_be_repeated() -> None:
    async with running({"m": pool_of("n1")}, head_bytes=1024, collect_gap_s=0.05) as server:
        too_long, *_ = await server.say_on(headers(), body(chat(PROMPT * 100)))
        too_slow, *_ = await server.say_on(headers(), body(chat(PROMPT)[:100]))
        behind, *_ = await server.say_on(headers(), body(chat(PROMPT)[:500]), trailers())
        assert retries(too_long) is retries(too_slow) is retries(behind) is None


@pytest.mark.parametrize("mode", BodyMode)
async def test_envoy_s_name_of_a_request_is_its_ticket_and_a_name_in_use_is_not(mode: BodyMode) -> None:
    async with running({"m": pool_of("n1")}) as server:
        first, *_ = await converse(server, mode, chat(PROMPT), (NAME_HEADER, "name-1"))
        second, *_ = await converse(server, mode, chat(PROMPT), (NAME_HEADER, "name-1"))
        assert ticket_of(first) == "name-1" != ticket_of(second)
        assert len(server.router) == 2


@pytest.mark.parametrize("mode", BodyMode)
async def test_the_next_turn_goes_where_the_last_one_went_and_its_metadata_says_how_much_is_there(
    mode: BodyMode,
) -> None:
    async with running({"m": pool_of("n1", "n2", "n3")}) as server:
        first, *_ = await converse(server, mode, chat(PROMPT))
        server.clock.now_s += 1.0
        second, *_ = await converse(server, mode, chat(PROMPT, "yes", "and then?"))
        assert mutated(first)[CLUSTER] == mutated(second)[CLUSTER]
        assert server.seen.tickets[1].decision.reason is Reason.LOCALITY
        assert second.dynamic_metadata["kvaffinity"]["locality"] > 0.9


async def test_a_body_in_many_chunks_is_the_body_in_one() -> None:
    data = chat(PROMPT)
    async with running() as server:
        await server.ask(data)
        for size in (1, 7, 1000):
            chunks = [body(data[at : at + size]) for at in range(0, len(data), size)]
            await server.say_on(headers(), *chunks, body(b"", end=True))
        chains = {each.request.chains[16] for each in server.seen.tickets}
        assert len(server.seen.tickets) == 4
        assert len(chains) == 1
        assert server.seen.cuts == [None] * 4
        assert server.ext_proc.held_bytes == 0


async def test_trailers_end_the_body() -> None:
    async with running() as server:
        (reply,) = await server.say_on(headers(), body(chat(PROMPT)), trailers())
        assert mutated(reply)
        assert server.seen.cuts == [None]


async def test_a_buffered_body_with_trailers_behind_it_is_decided_on() -> None:
    """Envoy 1.40 sends such a body without end_of_stream, and then waits for its reply."""
    async with running() as server:
        replies = await server.say_on(headers(mode=BUFFERED), body(chat(PROMPT)))
        assert mutated(replies[1])
        assert server.seen.cuts == [None]


async def test_buffered_trailers_without_a_body_are_let_go_on() -> None:
    async with running() as server:
        replies = await server.say_on(headers(mode=BUFFERED), trailers())
        assert replies == [ProcessingResponse(request_headers={}), ProcessingResponse(request_trailers={})]
        assert server.seen.causes == [Cause.EMPTY_BODY]


async def test_a_buffered_body_may_take_longer_than_any_collection_deadline() -> None:
    async with running(collect_gap_s=0.01, collect_total_s=0.02) as server:
        call = server.open()
        await call.write(headers(mode=BUFFERED))
        assert await call.read() == ProcessingResponse(request_headers={})
        server.clock.now_s += 100.0
        await asyncio.sleep(0.05)  # what must not happen has no event to wait for
        await call.write(body(chat(PROMPT), end=True))
        assert mutated(await call.read())
        assert server.seen.cuts == [None]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/prefix/v1/chat/completions/?api-version=1"])
async def test_the_end_of_the_path_says_which_api_it_is(path: str) -> None:
    async with running() as server:
        data = json.dumps({"model": "m", "prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}]})
        assert mutated(await server.ask(data.encode(), path=path))


async def test_of_duplicate_headers_the_first_counts() -> None:
    async with running() as server:
        message = headers((":path", "/v1/models"), ("content-length", "4000"), ("content-length", "8"))
        (reply,) = await server.say_on(message, body(chat("short"), end=True))
        assert mutated(reply)
        (reply,) = await server.say_on(headers((":path", CHAT), path="/v1/models"), body(chat("short"), end=True))
        assert is_passed_on(reply)


# ---- nothing to decide on ----


@pytest.mark.parametrize("mode", BodyMode)
async def test_a_request_without_a_body_is_passed_on_by_its_headers(mode: BodyMode) -> None:
    async with running() as server:
        message = headers((CLUSTER, "mine"), path="/v1/models", method="GET", mode=mode, end=True)
        (reply,) = await server.say_on(message)
        assert is_passed_on(reply)
        assert reply.HasField("request_headers")
        assert server.seen.causes == [Cause.UNKNOWN_PATH]


NOT_OURS = {
    "unknown path": ("/v1/models", chat(PROMPT), Cause.UNKNOWN_PATH),
    "path within a word": ("/v1/mycompletions", chat(PROMPT), Cause.UNKNOWN_PATH),
    "no path": ("", chat(PROMPT), Cause.UNKNOWN_PATH),
    "empty": (CHAT, b"", Cause.EMPTY_BODY),
    "not JSON": (CHAT, b"hello", Cause.INVALID_BODY),
    "unfinished": (CHAT, chat(PROMPT)[:-1], Cause.INVALID_BODY),
    "two values": (CHAT, chat(PROMPT) + b"{}", Cause.INVALID_BODY),
    "not UTF-8": (CHAT, chat(PROMPT + "é").replace("é".encode(), b"\xe9"), Cause.INVALID_BODY),
    "UTF-16": (CHAT, chat(PROMPT).decode().encode("utf-16"), Cause.INVALID_BODY),
    "a list": (CHAT, b"[1]", Cause.INVALID_BODY),
    "null": (CHAT, b"null", Cause.INVALID_BODY),
    "no messages": (CHAT, b'{"model":"m"}', Cause.INVALID_BODY),
    "messages of another kind": (CHAT, b'{"model":"m","messages":"hi"}', Cause.INVALID_BODY),
    "a message of another kind": (CHAT, b'{"model":"m","messages":["hi"]}', Cause.INVALID_BODY),
    "nested too deep": (CHAT, b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}", Cause.INVALID_BODY),
    "no prompt": ("/v1/completions", b'{"model":"m"}', Cause.INVALID_BODY),
    "a token id that is none": ("/v1/completions", b'{"model":"m","prompt":[1,-2]}', Cause.INVALID_BODY),
    "a fraction of a token": ("/v1/completions", b'{"model":"m","prompt":[1.5]}', Cause.INVALID_BODY),
    "a prompt of two kinds": ("/v1/completions", b'{"model":"m","prompt":["a",2]}', Cause.INVALID_BODY),
}


@pytest.mark.parametrize("mode", BodyMode)
@pytest.mark.parametrize(("path", "data", "cause"), NOT_OURS.values(), ids=NOT_OURS)
async def test_what_cannot_be_read_is_passed_on_with_its_cause(
    mode: BodyMode, path: str, data: bytes, cause: Cause
) -> None:
    async with running() as server:
        replies = await server.say_on(headers(path=path, mode=mode), body(data, end=True))
        reply = replies[1 if mode is BUFFERED else 0]
        assert is_passed_on(reply)
        assert reply.HasField("request_body") == (mode is BUFFERED)
        assert server.seen.causes == [cause]
        assert server.in_flight() == 0
        if mode is DUPLEX:
            assert echoed(replies[1:]) == data
            assert ends(replies[1:])[-1]


ODD = {
    "unpaired surrogate in a text": b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
    "unpaired surrogate in a tool": b'{"model":"m","messages":[],"tools":["\\ud800"]}',
    "number beyond 64 bits": b'{"model":"m","messages":[],"tools":[{"maximum":18446744073709551616000}]}',
    "not a number": b'{"model":"m","messages":[],"tools":[NaN, 1e999]}',
    "content of another kind": b'{"model":"m","messages":[{"role":7,"content":{"a":[1]}}]}',
    "null content": b'{"model":"m","messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]}]}',
    "parts of another kind": b'{"model":"m","messages":[{"role":"user","content":["a",1,null,{"type":"image_url"}]}]}',
    "model of another kind": b'{"model":7,"messages":[{"role":"user","content":"a"}]}',
    "no turns": b'{"model":"m","messages":[]}',
    "key given twice": b'{"model":"m","messages":[{"role":"user","content":"a"}],"messages":[]}',
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
async def test_odd_but_valid_json_is_no_error_of_ours(data: bytes) -> None:
    async with running() as server:
        await server.ask(data)
        assert Cause.ERROR not in server.seen.causes


# ---- cut heads ----

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"maximum": 1.5e3, "minimum": -12}}}]
TWO_KB = (
    json.dumps(
        {
            "stream": True,
            "messages": [
                {"role": "system", "content": prose(600, about="s") + "äß漢字🙂"},
                {"role": "user", "content": [{"type": "text", "text": prose(700, about="u") + '"\\\n\t'}]},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "arguments": '{"q": "漢"}'}]},
            ],
            "temperature": 0.25,
            "cache_salt": "pepper",
            "model": "m",
            "tools": TOOLS,
        },
        ensure_ascii=False,
    ).encode()
    + json.dumps({"escaped": "漢🙂"}).encode()
)
TWO_KB = TWO_KB.replace(b"}{", b",")
TWO_KB = TWO_KB[:-1] + b', "rest": "' + b"r" * (2047 - len(TWO_KB) - 11) + b'"}'


async def all_of(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of many small calls, 64 at a time."""
    done = []
    for at in range(0, len(tasks), 64):
        done += await asyncio.gather(*(task() for task in tasks[at : at + 64]))
    return done


def test_the_body_that_is_cut_is_valid_and_has_2_kb() -> None:
    assert 2000 <= len(TWO_KB) <= 2048
    assert json.loads(TWO_KB)["model"] == "m"


async def test_json_that_ends_at_any_byte_is_passed_on_as_invalid() -> None:
    async with running() as server:
        replies = await all_of([lambda n=n: server.ask(TWO_KB[:n]) for n in range(len(TWO_KB))])
        assert all(is_passed_on(each) for each in replies)
        assert sorted(server.seen.causes) == [Cause.EMPTY_BODY] + [Cause.INVALID_BODY] * (len(TWO_KB) - 1)
        assert server.in_flight() == 0


async def _deadline(server: Running, n: int) -> list[ProcessingResponse]:
    # the clock is far beyond the deadline when the first chunk has been read
    return await server.say_on(headers(), body(TWO_KB[:n]))


async def _head_bytes(server: Running, n: int) -> list[ProcessingResponse]:
    server.ext_proc.settings = replace(server.ext_proc.settings, head_bytes=n)
    return await server.say_on(headers(), body(TWO_KB[: n // 2]), body(TWO_KB[n // 2 :]))


@pytest.mark.parametrize(
    ("send", "cut", "at_once", "step_s"),
    [(_deadline, Cut.COLLECTION_DEADLINE, True, 100.0), (_head_bytes, Cut.HEAD_BYTES, False, 0.0)],
    ids=["collection deadline", "head_bytes"],
)
async def test_a_head_cut_at_any_byte_is_decided_on_and_leaves_no_exact_entry_behind(
    send: Any, cut: Cut, at_once: bool, step_s: float
) -> None:
    pool = pool_of("n1", "n2", "n3")
    async with running({"m": pool}, clock=Clock(step_s=step_s)) as server:
        sizes = range(1, len(TWO_KB))
        if at_once:
            replies = await all_of([lambda n=n: send(server, n) for n in sizes])
        else:
            replies = [await send(server, n) for n in sizes]
        assert all(mutated(reply)[CLUSTER] for (reply,) in replies)
        assert server.seen.causes == []
        assert server.seen.cuts == [cut] * len(sizes)
        assert sum(map(pool.blocks, ("n1", "n2", "n3"))) > 0
        server.clock.step_s = 0.0
        server.ext_proc.settings = replace(server.ext_proc.settings, head_bytes=1 << 20)
        for data in (TWO_KB, TWO_KB.replace(b', "cache_salt": "pepper"', b""), TWO_KB.replace(b'"tools"', b'"_tools"')):
            await server.ask(data)
            whole = server.seen.tickets[-1]
            assert len(whole.request.chains[16]) > 10 * HASH_BYTES
            assert whole.decision.best_matched_tokens == 0
            assert whole.decision.reason is Reason.COLD
        assert server.ext_proc.held_bytes == 0


async def test_a_cut_head_finds_the_node_of_the_whole_request_and_that_of_an_earlier_cut_head() -> None:
    async with running({"m": pool_of("n1", "n2", "n3")}, head_bytes=3000) as server:
        await server.ask(chat(PROMPT[:2500]))
        server.clock.now_s += 1.0
        await server.ask(chat(PROMPT))
        whole, cut = server.seen.tickets
        assert server.seen.cuts == [None, Cut.HEAD_BYTES]
        assert cut.decision.node == whole.decision.node
        assert cut.decision.reason is Reason.LOCALITY
        other = prose(4000, about="z")
        await server.ask(chat(other))
        server.clock.now_s += 1.0
        await server.ask(chat(other))
        assert server.seen.tickets[2].decision.reason is Reason.COLD
        assert server.seen.tickets[3].decision.reason is Reason.LOCALITY


async def test_a_cut_head_counts_as_work_what_the_client_declared() -> None:
    async with running(head_bytes=2000) as server:
        (reply,) = await server.say_on(headers(("content-length", "400000")), body(chat(PROMPT)))
        assert mutated(reply)
        assert 90_000 < server.seen.tickets[0].request.prompt_tokens <= 100_000


@pytest.mark.parametrize("data", [chat(PROMPT), b"x" * 3000], ids=["a prompt", "nothing to read"])
async def test_no_declared_length_counts_as_more_work_than_a_node_can_hold(data: bytes) -> None:
    async with running(head_bytes=2000) as server:
        (reply,) = await server.say_on(headers(("content-length", "99999999999")), body(data))
        assert mutated(reply)
        most = server.router.pools["m"].cache_tokens
        assert server.seen.tickets[0].request.prompt_tokens == most


async def test_a_picture_beyond_the_head_counts_for_as_little_as_one_within_it() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 60_000}}
    data = json.dumps({"model": "m", "messages": [{"role": "user", "content": [picture]}]}).encode()
    async with running(head_bytes=20_000) as server:
        await server.say_on(headers(("content-length", str(len(data)))), body(data))
        assert server.seen.tickets[0].request.prompt_tokens < 100


@pytest.mark.parametrize("declared", ["", "-1", "4e3", "9" * 40, "٣", "0x10"])
async def test_a_declared_length_that_is_none_is_not_believed(declared: str) -> None:
    async with running(head_bytes=2000) as server:
        (reply,) = await server.say_on(headers(("content-length", declared)), body(chat(PROMPT)))
        assert mutated(reply)
        assert 500 <= server.seen.tickets[0].request.prompt_tokens <= 1100


async def test_a_model_name_that_is_cut_is_not_taken_for_another_s() -> None:
    pools = {"m": pool_of("n1"), "m-large": pool_of("n2", first=2)}
    data = chat(PROMPT, model=None)[:-1] + b', "model": "m-large"}'
    async with running(pools, pool_of={"m": "m", "m-large": "m-large"}, clock=Clock(step_s=100.0)) as server:
        for n in range(len(data) - 12, len(data)):
            (reply,) = await server.say_on(headers(), body(data[:n]))
            assert mutated(reply).get(CLUSTER) in (None, "cluster-n2"), data[:n][-10:]
        assert len(server.seen.tickets) == 1  # behind the closing quote, and behind nothing less
        assert set(server.seen.causes) == {Cause.NO_MODEL}


# ---- deadlines ----


@pytest.mark.parametrize("mode", [HEAD, DUPLEX])
async def test_a_client_that_stops_sending_is_decided_on_after_the_gap(mode: BodyMode) -> None:
    async with running(collect_gap_s=0.05) as server:
        call = server.open()
        await call.write(headers(mode=mode))
        await call.write(body(chat(PROMPT)[:2000]))
        assert mutated(await call.read())
        assert server.seen.cuts == [Cut.COLLECTION_DEADLINE]
        assert 0 < len(server.seen.tickets[0].request.chains[16]) <= 2000 // 64 * HASH_BYTES
        call.cancel()
        await server.idle()


@pytest.mark.parametrize("mode", [HEAD, DUPLEX])
async def test_a_client_that_sends_nothing_is_decided_on_by_its_headers(mode: BodyMode) -> None:
    async with running(collect_gap_s=0.05) as server:
        call = server.open()
        await call.write(headers(("content-length", "40000"), mode=mode))
        assert mutated(await call.read())
        assert server.seen.tickets[0].decision.reason is Reason.FALLBACK
        assert server.seen.tickets[0].request.prompt_tokens == 10_000
        call.cancel()
        await server.idle()


@pytest.mark.parametrize("mode", [HEAD, DUPLEX])
async def test_a_client_that_drips_is_decided_on_when_the_total_time_is_up(mode: BodyMode) -> None:
    async with running(collect_gap_s=5.0, collect_total_s=10.0) as server:
        call = server.open()
        await call.write(headers(mode=mode))
        for at in range(0, 1000, 100):
            await call.write(body(chat(PROMPT)[at : at + 100]))
            await until(lambda at=at: server.ext_proc.held_bytes == at + 100)
            server.clock.now_s += 0.99
        assert server.seen.cuts == []
        server.clock.now_s += 0.11
        await call.write(body(chat(PROMPT)[1000:1100]))
        assert mutated(await call.read())
        assert server.seen.cuts == [Cut.COLLECTION_DEADLINE]
        call.cancel()
        await server.idle()
        assert server.ext_proc.held_bytes == 0


async def test_chunks_faster_than_the_gap_do_not_postpone_the_total_deadline_in_real_time() -> None:
    async with running(clock=time.monotonic, collect_gap_s=0.1, collect_total_s=0.3) as server:
        call = server.open()
        started = time.monotonic()
        await call.write(headers())

        async def drip() -> None:
            for at in range(2000):
                await call.write(body(chat(PROMPT)[at : at + 1]))
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert mutated(await call.read())
        assert 0.25 <= time.monotonic() - started < 2.0
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        assert server.seen.cuts == [Cut.COLLECTION_DEADLINE]


async def test_when_the_decision_s_time_is_up_it_is_made_on_the_blocks_hashed_so_far() -> None:
    data = chat(prose(900_000))
    async with running(decide_s=0.5, decide_s_per_16_kib=0.0) as server:
        await server.ask(data)
        server.clock.now_s += 60.0
        server.clock.step_s = 1.0
        await server.ask(data)
        whole, partial = server.seen.tickets
        assert server.seen.cuts == [None, Cut.DECISION_DEADLINE]
        assert len(partial.request.chains[16]) == 4096 * HASH_BYTES
        assert whole.request.chains[16].startswith(partial.request.chains[16])
        assert partial.request.prompt_tokens == whole.request.prompt_tokens
        assert partial.decision.reason is Reason.LOCALITY


async def test_a_long_prompt_leaves_the_loop_to_others_while_it_is_hashed() -> None:
    async with running() as server:
        turns = 0
        long = _Script(headers(), body(chat(prose(1_000_000)), end=True))
        deciding = asyncio.create_task(server.ext_proc.process(None, long))  # type: ignore[arg-type]
        while not deciding.done():
            turns += 1
            await asyncio.sleep(0)
        assert mutated(ProcessingResponse.FromString(await deciding))
        assert turns > 1_000_000 // 64 // 4096


# ---- bounds ----


async def test_beyond_the_bound_on_all_heads_requests_are_decided_on_their_headers() -> None:
    async with running(max_held_bytes=100_000) as server:
        waiting = []
        for _ in range(4):
            call = server.open()
            await call.write(headers())
            await call.write(body(b"x" * 25_000))
            waiting.append(call)
        await until(lambda: server.ext_proc.held_bytes == 100_000)
        assert server.seen.tickets == []
        (reply,) = await server.say_on(headers(("content-length", "8000")), body(chat(PROMPT)))
        assert mutated(reply)
        assert server.seen.cuts == [Cut.NO_ROOM]
        assert server.seen.tickets[0].decision.reason is Reason.FALLBACK
        assert server.seen.tickets[0].request.prompt_tokens == 2000
        assert server.ext_proc.held_bytes == 100_000
        for call in waiting:
            await call.write(body(b"", end=True))
            assert is_passed_on(await call.read())
        await server.idle()
        assert server.ext_proc.held_bytes == 0


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_the_bound_holds_in_the_modes_that_carry_whole_bodies(mode: BodyMode) -> None:
    data = chat(PROMPT)
    async with running(max_held_bytes=1000) as server:
        reply, *rest = await converse(server, mode, data)
        assert mutated(reply)
        assert server.seen.cuts == [Cut.NO_ROOM]
        assert server.seen.tickets[0].decision.reason is Reason.FALLBACK
        if mode is DUPLEX:
            assert echoed(rest) == data
        assert server.ext_proc.held_bytes == 0


@pytest.mark.parametrize("mode", BodyMode)
@pytest.mark.parametrize("leave", ["reset", "half-close"])
async def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(mode: BodyMode, leave: str) -> None:
    async with running() as server:
        calls = []
        for _ in range(20):
            call = server.open()
            await call.write(headers(mode=mode))
            if mode is not BUFFERED:
                await call.write(body(b"x" * 1000))
            calls.append(call)
        await until(lambda: server.ext_proc.streams == 20)
        if mode is not BUFFERED:
            await until(lambda: server.ext_proc.held_bytes == 20_000)
        for call in calls:
            if leave == "reset":
                call.cancel()
            else:
                await call.done_writing()
        await server.idle()
        assert server.ext_proc.held_bytes == 0
        assert server.seen.tickets == []
        assert server.seen.causes == [Cause.CLIENT_GONE] * 20


async def test_a_stream_that_says_nothing_is_a_client_that_left() -> None:
    async with running() as server:
        with pytest.raises(grpc.aio.AioRpcError, match="the request ended early"):
            await server.say()
        assert server.seen.causes == [Cause.CLIENT_GONE]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), grpc.aio.UsageError("closed")], ids=["cancel", "closed"])
async def test_a_decision_that_cannot_be_delivered_is_taken_back(error: BaseException) -> None:
    """No access log will ever name its ticket."""
    pool = pool_of("n1", "n2")
    async with running({"m": pool}) as server:
        with pytest.raises(type(error)):
            await server.ext_proc.process(
                None, _Script(headers(mode=DUPLEX), body(chat(PROMPT), end=True), error=error)
            )  # type: ignore[arg-type]
        (ticket,) = server.seen.tickets
        assert server.in_flight() == 0
        assert len(server.router) == 0
        assert pool.holders(ticket.request.chains) == {}
        assert [each.outcome.end for each in server.seen.ends] == [End.CUT]
        assert server.ext_proc.streams == server.ext_proc.held_bytes == 0


# ---- models and pools ----

TWO_POOLS = {"m": "m", "other": "other", "nickname": "other"}


@pytest.mark.parametrize(
    ("model", "names", "pool"),
    [
        ("m", TWO_POOLS, "m"),
        ("other", TWO_POOLS, "other"),
        ("nickname", TWO_POOLS, "other"),
        ("stranger", TWO_POOLS, Cause.UNKNOWN_MODEL),
        (None, TWO_POOLS, Cause.NO_MODEL),
        ("stranger", {**TWO_POOLS, "*": "m"}, "m"),
        (None, {**TWO_POOLS, "*": "m"}, "m"),
        ("nickname", {**TWO_POOLS, "*": "m"}, "other"),
    ],
)
async def test_the_model_of_the_body_chooses_the_pool(
    model: str | None, names: dict[str, str], pool: str | Cause
) -> None:
    pools = {"m": pool_of("n1"), "other": pool_of("n2", first=2)}
    async with running(pools, pool_of=names) as server:
        reply = await server.ask(chat(PROMPT, model=model))
        if isinstance(pool, Cause):
            assert is_passed_on(reply)
            assert server.seen.causes == [pool]
        else:
            assert server.seen.tickets[0].request.model == pool
            assert mutated(reply)[CLUSTER] == {"m": "cluster-n1", "other": "cluster-n2"}[pool]


@pytest.mark.parametrize("model", ["m", "stranger", None])
async def test_a_single_pool_serves_every_name(model: str | None) -> None:
    async with running() as server:
        assert mutated(await server.ask(chat(PROMPT, model=model)))


async def test_an_alias_shares_the_cache_of_its_model_and_a_name_under_the_star_has_its_own() -> None:
    async with running(pool_of={"m": "m", "nickname": "m", "*": "m"}) as server:
        for model in ("m", "nickname", None, "stranger", "stranger", "other stranger"):
            await server.ask(chat(PROMPT, model=model))
        matched = [bool(each.decision.best_matched_tokens) for each in server.seen.tickets]
        assert matched == [False, True, True, False, True, False]


@pytest.mark.parametrize("mode", BodyMode)
async def test_without_a_node_requests_are_passed_on(mode: BodyMode) -> None:
    async with running({"m": pool_of()}) as server:
        reply, *_ = await converse(server, mode, chat(PROMPT))
        assert is_passed_on(reply)
        assert server.seen.causes == [Cause.NO_NODE]


@pytest.mark.parametrize("mode", BodyMode)
async def test_without_a_node_requests_are_answered_in_openai_s_shape_where_that_is_wanted(mode: BodyMode) -> None:
    async with running({"m": pool_of()}, reject_when_empty=True) as server:
        (reply,) = await converse(server, mode, chat(PROMPT))
        answer = reply.immediate_response
        assert answer.status.code == 503
        error = json.loads(answer.body)["error"]
        assert (error["type"], error["code"], error["param"]) == ("server_error", 503, None)
        assert isinstance(error["message"], str)
        assert server.seen.causes == [Cause.NO_NODE]


async def test_rejecting_is_for_empty_pools_only() -> None:
    pools = {"m": pool_of("n1"), "other": pool_of("n2", first=2)}
    async with running(pools, pool_of={"m": "m", "other": "other"}, reject_when_empty=True) as server:
        assert is_passed_on(await server.ask(chat(PROMPT, model="stranger")))
        assert is_passed_on(await server.ask(b"{"))


async def test_a_pool_that_a_reload_took_away_meanwhile_is_an_unknown_model() -> None:
    # without room for the body the pool is first looked for when the request is routed
    async with running(pool_of={"*": "gone"}, reject_when_empty=True, max_held_bytes=10) as server:
        assert is_passed_on(await server.ask(chat(PROMPT)))
        assert server.seen.causes == [Cause.UNKNOWN_MODEL]


# ---- our own faults ----


def broken(request: InferenceRequest, candidates: Sequence[Candidate], *, price: float) -> Decision:
    raise RuntimeError(f"cannot choose for {CANARY}")


class _BrokenObserver(Seen):
    def routed(self, *_: Any) -> None:
        raise RuntimeError(f"cannot count {CANARY}")


@pytest.mark.parametrize("mode", BodyMode)
async def test_a_bug_in_the_decision_passes_the_request_on_and_says_where_but_not_what_the_prompt_was(
    mode: BodyMode, caplog: pytest.LogCaptureFixture
) -> None:
    async with running({"m": pool_of("n1", policy=broken)}) as server:
        for _ in range(3):
            reply, *_rest = await converse(server, mode, chat(f"{CANARY} {PROMPT}"))
            assert is_passed_on(reply)
        assert server.seen.causes == [Cause.ERROR] * 3
        assert server.in_flight() == len(server.router) == 0
        assert server.ext_proc.held_bytes == 0
    (line,) = [each for each in caplog.records if each.name == "extproc.server"]
    assert "RuntimeError" in line.getMessage()
    assert "in broken" in line.getMessage()
    assert CANARY not in caplog.text


async def test_a_bug_in_what_watches_the_decision_costs_neither_the_request_nor_its_reservation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(observer=lambda _: _BrokenObserver()) as server:
        reply = await server.ask(chat(f"{CANARY} {PROMPT}"))
        assert mutated(reply) or is_passed_on(reply)
        if mutated(reply):
            await server.log(entry(ticket_of(reply)))
        assert server.in_flight() == len(server.router) == 0
        assert CANARY not in caplog.text


async def test_what_cannot_be_read_is_not_quoted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "extproc")
    async with running(head_bytes=2000) as server:
        for data in (f'{{"{CANARY}": '.encode(), chat(CANARY)[:-4], chat(CANARY + PROMPT), chat(CANARY)):
            await server.ask(data)
    assert CANARY not in caplog.text


# ---- FULL_DUPLEX_STREAMED: the body comes back ----

SIZES = (0, 1, 62_000, 62_001, 200_000)


@pytest.mark.parametrize("with_trailers", [False, True])
@pytest.mark.parametrize("size", SIZES)
async def test_a_duplex_body_comes_back_byte_for_byte_and_ends_exactly_once(size: int, with_trailers: bool) -> None:
    data = bytes(i % 251 for i in range(size))
    async with running() as server:
        messages = [body(data[at : at + 16_384]) for at in range(0, size, 16_384)]
        if with_trailers:
            messages.append(trailers())
        elif messages:
            messages[-1].request_body.end_of_stream = True
        else:
            messages.append(body(b"", end=True))
        _, *rest = await server.say_on(headers(mode=DUPLEX), *messages)
        assert echoed(rest) == data
        assert ends(rest) == [False] * (len(rest) - 1) + [True]
        assert rest[-1].HasField("request_trailers") == with_trailers
        assert server.ext_proc.held_bytes == 0


@pytest.mark.parametrize("with_trailers", [False, True])
@pytest.mark.parametrize("size", SIZES)
async def test_a_duplex_body_whose_end_is_a_message_of_its_own_ends_exactly_once(
    size: int, with_trailers: bool
) -> None:
    data = bytes(i % 251 for i in range(size))
    async with running(head_bytes=62_000) as server:
        last = trailers() if with_trailers else body(b"", end=True)
        _, *rest = await server.say_on(headers(mode=DUPLEX), body(data), last)
        assert echoed(rest) == data
        assert ends(rest) == [False] * (len(rest) - 1) + [True]


@pytest.mark.parametrize("with_trailers", [False, True])
async def test_a_duplex_body_that_was_cut_by_the_deadline_comes_back_whole(with_trailers: bool) -> None:
    data = chat(PROMPT)
    async with running(collect_gap_s=0.05) as server:
        call = server.open()
        await call.write(headers(mode=DUPLEX))
        await call.write(body(data[:1000]))
        assert mutated(await call.read())
        replies = []
        for at in range(1000, len(data), 500):
            await call.write(body(data[at : at + 500]))
        await call.write(trailers() if with_trailers else body(b"", end=True))
        await call.done_writing()
        async with asyncio.timeout(10):
            while (reply := await call.read()) is not grpc.aio.EOF:
                replies.append(reply)
        assert echoed(replies) == data
        assert ends(replies) == [False] * (len(replies) - 1) + [True]
        assert await call.code() is grpc.StatusCode.OK
        await server.idle()
        assert server.ext_proc.held_bytes == 0


async def test_a_duplex_body_that_drips_loses_nothing_whenever_the_deadline_strikes() -> None:
    data = chat(prose(200))
    async with running(collect_gap_s=0.002, collect_total_s=0.5, clock=time.monotonic) as server:

        async def drip(pause_s: float) -> None:
            call = server.open()
            await call.write(headers(mode=DUPLEX))
            for at in range(0, len(data), 10):
                await call.write(body(data[at : at + 10], end=at + 10 >= len(data)))
                await asyncio.sleep(pause_s)
            replies = []
            while (reply := await call.read()) is not grpc.aio.EOF:
                replies.append(reply)
            assert mutated(replies[0])
            assert echoed(replies[1:]) == data
            assert sum(ends(replies[1:])) == 1

        async with asyncio.timeout(20):
            await asyncio.gather(*(drip(0.0005 * (1 + i % 8)) for i in range(40)))
        assert Cut.COLLECTION_DEADLINE in server.seen.cuts


async def test_a_duplex_client_that_leaves_after_the_decision_leaves_nothing_behind() -> None:
    async with running(head_bytes=1000) as server:
        call = server.open()
        await call.write(headers(mode=DUPLEX))
        await call.write(body(chat(PROMPT)))
        reply = await call.read()
        assert mutated(reply)
        call.cancel()
        await server.idle()
        assert server.ext_proc.held_bytes == 0
        await server.log(entry(ticket_of(reply), flags=["downstream_remote_reset"], ttft_us="-"))
        assert server.in_flight() == 0


# ---- what breaks the protocol ----


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([body(b"a")], "request_body before request_headers"),
        ([trailers()], "request_trailers before request_headers"),
        ([ProcessingRequest()], "an empty message before request_headers"),
        ([headers(), headers()], "request_headers where body or trailers belong"),
        ([headers(), ProcessingRequest(response_headers={})], "response_headers where body or trailers belong"),
        (
            [headers(mode=DUPLEX), body(b"a" * 2000), body(b"b"), headers()],
            "request_headers where body or trailers belong",
        ),
        ([ProcessingRequest(request_headers={})], "request_body_mode NONE is not supported: use STREAMED with "),
        (
            [ProcessingRequest(request_headers={}, protocol_config={"request_body_mode": "STREAMED"})],
            "request_body_mode STREAMED is not supported: use STREAMED with send_body_without_waiting_for_header_resp",
        ),
        (
            [ProcessingRequest(request_headers={}, protocol_config={"request_body_mode": "BUFFERED_PARTIAL"})],
            "request_body_mode BUFFERED_PARTIAL is not supported",
        ),
        (
            [ProcessingRequest(request_headers={}, protocol_config={"request_body_mode": "GRPC"})],
            "request_body_mode GRPC is not supported",
        ),
    ],
)
async def test_a_stream_that_breaks_the_protocol_ends_with_a_status_that_says_how(
    script: list[ProcessingRequest], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(head_bytes=1024) as server:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await server.say_on(*script)
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert ended.value.details().startswith(text)
        await server.idle()
        # a request that was routed before is not passed on
        assert server.seen.causes == ([] if server.seen.tickets else [Cause.PROTOCOL])
        assert server.ext_proc.held_bytes == 0
        assert text in caplog.text


# ---- the key of a request ----


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


SYSTEM = prose(1000, about="s")
BASE: dict[str, Any] = {"model": "m", "messages": turns(("system", SYSTEM), ("user", PROMPT + " é漢🙂"))}

SAME = {
    "white space": json.dumps(BASE, indent=4).encode(),
    "no white space": json.dumps(BASE, separators=(",", ":")).encode(),
    "escapes": json.dumps(BASE, ensure_ascii=False).encode(),
    "order of keys": json.dumps({key: BASE[key] for key in reversed(BASE)}).encode(),
    "order of a message's keys": json.dumps(
        {**BASE, "messages": [{"content": m["content"], "role": m["role"]} for m in BASE["messages"]]}
    ).encode(),
    "sampling": json.dumps({**BASE, "temperature": 0.1, "stream": True, "max_tokens": 3, "user": "u"}).encode(),
    "text in parts": json.dumps(
        {
            **BASE,
            "messages": turns(
                ("system", SYSTEM),
                ("user", [{"type": "text", "text": PROMPT}, {"type": "text", "text": " é漢🙂"}]),
            ),
        }
    ).encode(),
    "empty tools": json.dumps({**BASE, "tools": []}).encode(),
    "null fields": json.dumps({**BASE, "tools": None, "cache_salt": None}).encode(),
    "alias": json.dumps({**BASE, "model": "nickname"}).encode(),
}


@pytest.mark.parametrize("data", SAME.values(), ids=SAME)
async def test_how_a_conversation_is_written_does_not_change_its_key(data: bytes) -> None:
    async with running(pool_of={"m": "m", "nickname": "m"}) as server:
        await server.ask(json.dumps(BASE).encode(), ("user-agent", "openai-python"))
        await server.ask(data, ("user-agent", "curl"), ("x-request-id", "7"))
        one, two = (each.request for each in server.seen.tickets)
        assert len(one.chains[16]) > 70 * HASH_BYTES
        assert one.chains[16] == two.chains[16]


OTHER = {
    "model": {**BASE, "model": "stranger"},
    "cache_salt": {**BASE, "cache_salt": "pepper"},
    "tools": {**BASE, "tools": TOOLS},
    "functions": {**BASE, "functions": TOOLS},
    "role": {**BASE, "messages": [{**BASE["messages"][0], "role": "developer"}, BASE["messages"][1]]},
    "first word": {**BASE, "messages": [{**BASE["messages"][0], "content": "S" + SYSTEM}, BASE["messages"][1]]},
}


@pytest.mark.parametrize("data", OTHER.values(), ids=OTHER)
async def test_what_changes_the_prompt_from_its_start_shares_no_block(data: dict[str, Any]) -> None:
    async with running(pool_of={"m": "m", "*": "m"}) as server:
        await server.ask(json.dumps(BASE).encode())
        await server.ask(json.dumps(data).encode())
        one, two = (each.request.chains[16] for each in server.seen.tickets)
        assert len(two) > 70 * HASH_BYTES
        assert one[:HASH_BYTES] != two[:HASH_BYTES]
        assert server.seen.tickets[1].decision.best_matched_tokens == 0


LATER = {
    "last words": turns(("system", SYSTEM), ("user", PROMPT + prose(200, about="w"))),
    "later role": turns(("system", SYSTEM), ("assistant", PROMPT)),
    "turns moved": turns(("system", SYSTEM + PROMPT)),
    "image": turns(("system", SYSTEM), ("user", [{"type": "image_url", "image_url": {"url": "data:,a"}}])),
}


@pytest.mark.parametrize("messages", LATER.values(), ids=LATER)
async def test_what_changes_later_keeps_the_blocks_before_it(messages: list[dict[str, Any]]) -> None:
    async with running() as server:
        await server.ask(json.dumps(BASE).encode())
        await server.ask(json.dumps({**BASE, "messages": messages}).encode())
        one, two = (each.request.chains[16] for each in server.seen.tickets)
        shared = len(SYSTEM) // 64 * HASH_BYTES
        assert one[:shared] == two[:shared]
        assert one != two


async def test_a_salt_of_another_process_gives_other_hashes() -> None:
    async with running() as server:
        await server.ask(json.dumps(BASE).encode())
        server.ext_proc.reader.interpreter.settings = replace(server.ext_proc.reader.interpreter.settings, salt=2)
        await server.ask(json.dumps(BASE).encode())
        one, two = (each.request.chains[16] for each in server.seen.tickets)
        hashes = {one[at : at + HASH_BYTES] for at in range(0, len(one), HASH_BYTES)}
        assert not hashes & {two[at : at + HASH_BYTES] for at in range(0, len(two), HASH_BYTES)}


async def test_token_ids_are_tokens_and_further_prompts_are_work() -> None:
    async with running() as server:
        for prompt in ([7] * 64, [[7] * 64, [8] * 640], [7] * 64 + [9] * 64):
            await server.ask(json.dumps({"model": "m", "prompt": prompt}).encode(), path="/v1/completions")
        one, two, three = (each.request for each in server.seen.tickets)
        assert (one.prompt_tokens, two.prompt_tokens, three.prompt_tokens) == (64, 704, 128)
        assert len(one.chains[16]) == 4 * HASH_BYTES
        assert one.chains[16] == two.chains[16]
        assert three.chains[16].startswith(one.chains[16])


# ---- the access log ----

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"

ENDS = {
    "served": ({}, End.SERVED, "first", False),
    "served, not streamed": ({"content_type": "application/json"}, End.SERVED, "first", False),
    "served without a body": ({"ttft_us": "-", "engine_ttft_us": "-"}, End.SERVED, None, False),
    "refused by the node": ({"code": 429, "engine_ttft_us": "-"}, End.SERVED, None, False),
    "failed in the node": ({"code": 500}, End.FAILED, None, False),
    "no node reached": ({"code": 503, "served_by": None, "ttft_us": "-"}, End.FAILED, None, False),
    "connection refused": (
        {"code": 503, "ttft_us": "-", "flags": ["upstream_connection_failure"]}, End.FAILED, None, False,
    ),
    "left before the first token": (
        {"code": 0, "ttft_us": "-", "flags": ["downstream_remote_reset"]}, End.CUT, None, False,
    ),
    "left before a node was chosen": (
        {"code": 0, "ttft_us": "-", "served_by": None, "flags": ["downstream_connection_termination"]},
        End.CUT, None, False,
    ),
    "left after the first token": ({"flags": ["downstream_connection_termination"]}, End.CUT, "first", False),
    "retried elsewhere": ({"served_by": "second", "attempts": 2}, End.SERVED, "second", True),
    "retried elsewhere and failed": (
        {"served_by": "second", "attempts": 2, "code": 503, "ttft_us": "-"}, End.FAILED, None, True,
    ),
    "served by a stranger": ({"served_by": "10.9.9.9:8000"}, End.SERVED, None, True),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "end", "holder", "elsewhere"), ENDS.values(), ids=ENDS)
async def test_the_access_log_settles_a_ticket_exactly_once_and_corrects_who_holds_the_prompt(
    changes: dict[str, Any], end: End, holder: str | None, elsewhere: bool
) -> None:
    pool = pool_of("n1", "n2")
    async with running({"m": pool}) as server:
        reply = await server.ask(chat(PROMPT))
        assert server.in_flight() == len(server.router) == 1
        (ticket,) = server.seen.tickets
        first = ticket.decision.node
        second = next(each for each in pool.fleet.nodes() if each != first)
        addresses = {"first": first.address, "second": second.address}
        address = changes.get("served_by", "first")
        logged = {**changes, "served_by": addresses.get(address, address)}
        server.clock.now_s += 2.0
        await server.log(entry(ticket_of(reply), **logged), entry(ticket_of(reply), **logged))
        await server.log(entry(ticket_of(reply), **logged))
        assert server.in_flight() == len(server.router) == 0
        assert server.seen.unknown == 2
        (settled,) = server.seen.ends
        assert settled.ticket is ticket
        assert settled.outcome.end is end
        assert settled.retried_elsewhere is elsewhere
        held_by = {"first": {first.id}, "second": {second.id}, None: set()}[holder]
        assert set(pool.holders(ticket.request.chains)) == held_by


async def test_only_streamed_answers_tell_the_engine_s_time_to_first_token() -> None:
    async with running() as server:
        for content_type in ("text/event-stream", "text/event-stream; charset=utf-8", "application/json", "-"):
            reply = await server.ask(chat(PROMPT))
            await server.log(entry(ticket_of(reply), content_type=content_type))
        told = [(each.outcome.client_ttft_s, each.outcome.engine_ttft_s) for each in server.seen.ends]
        assert told == [(0.05, 0.04), (0.05, 0.04), (0.05, None), (0.05, None)]


@pytest.mark.parametrize("tag", ["-", "", "abc", "-5", "1.5", "²"])
async def test_a_time_that_envoy_did_not_measure_is_none(tag: str) -> None:
    async with running() as server:
        reply = await server.ask(chat(PROMPT))
        await server.log(entry(ticket_of(reply), ttft_us=tag, engine_ttft_us=tag))
        (settled,) = server.seen.ends
        assert settled.outcome.client_ttft_s is None
        assert settled.outcome.engine_ttft_s is None
        assert not settled.outcome.answered


async def test_entries_that_are_not_ours_change_nothing() -> None:
    async with running() as server:
        await server.ask(chat(PROMPT))
        await server.log(entry(None), entry("t-999"), entry(""))
        assert server.in_flight() == 1
        assert server.seen.ends == []
        assert server.seen.unknown == 2


async def test_one_batch_settles_many() -> None:
    async with running() as server:
        replies = await all_of([lambda i=i: server.ask(chat(f"{i} {PROMPT}")) for i in range(200)])
        assert server.in_flight() == 200
        await server.log(*(entry(ticket_of(each), served_by=None, code=0, flags=["downstream_remote_reset"])
                           for each in replies))  # fmt: skip
        assert server.in_flight() == len(server.router) == 0
        assert len(server.seen.ends) == 200


async def test_a_ticket_whose_log_never_comes_is_given_up_after_its_time_and_a_late_log_changes_nothing() -> None:
    pool = pool_of("n1", "n2")
    async with running({"m": pool}) as server:
        reply = await server.ask(chat(PROMPT))
        assert server.router.expire(now=server.clock() + 599.0) == []
        assert server.in_flight() == 1
        (lost,) = server.router.expire(now=server.clock() + 600.0)
        assert lost.outcome.end is End.LOST
        assert server.in_flight() == len(server.router) == 0
        assert pool.holders(lost.ticket.request.chains)
        await server.log(entry(ticket_of(reply)))
        assert server.in_flight() == 0
        assert server.seen.unknown == 1


# ---- health ----


async def test_health_is_serving_until_the_drain_and_liveness_even_then() -> None:
    async with running() as server:
        stub = health_pb2_grpc.HealthStub(server.channel)

        async def states() -> dict[str, int]:
            return {
                name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status
                for name in ("", EXT_PROC, "readiness", "liveness")
            }

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert set((await states()).values()) == {serving}
        await server.health.serving(False)
        assert await states() == {"": not_serving, EXT_PROC: not_serving, "readiness": not_serving, "liveness": serving}
        assert mutated(await server.ask(chat(PROMPT)))


async def test_beyond_the_bound_on_exchanges_more_are_refused_and_health_still_answers() -> None:
    async with running(max_streams=2) as server:
        held = [server.open() for _ in range(2)]
        for call in held:
            await call.write(headers(mode=BUFFERED))
            await call.read()
        refused = server.open()  # it is refused before it says anything
        async with asyncio.timeout(10):
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert server.seen.causes == [Cause.OVERLOADED]
        health = await health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(service=""))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        for call in held:
            call.cancel()
        await server.idle()
        assert mutated(await server.ask(chat(PROMPT)))


async def test_a_reply_that_cannot_be_made_leaves_no_load_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running({"m": pool_of("n1")}) as server:
        monkeypatch.setattr(messages, "metadata", lambda *_: 1 / 0)
        assert is_passed_on(await server.ask(chat(PROMPT)))
        assert server.seen.causes == [Cause.ERROR]
        assert server.in_flight() == 0
