"""A pool with a tokenizer: requests come to the router in the engine's blocks, or are said not to be."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from datetime import datetime
from typing import Any

import pytest

from extproc.config import ModelConfig
from extproc.core.blocks import TOKEN_BYTES
from extproc.core.prompt import Chat
from extproc.core.types import HASH_BYTES, LoadSample, Reason
from extproc.models import load_encoder
from extproc.reading import Cause, Cut, Unkeyed
from extproc.tokens.encoder import Encoder
from extproc.tokens.memo import Memo
from tests.builders import Running, body, chat, headers, node_of, pool_of, prose, running, until
from tests.tokens import vocabularies

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    directory = vocabularies.make("qwen2", tmp_path_factory.mktemp("model"))
    model = ModelConfig(name="m", tokenizer=str(directory))
    return load_encoder(model, Memo(1 << 20), clock=time.monotonic, now=datetime.now)


@pytest.fixture
def encoder(loaded: Encoder) -> Encoder:
    """With an empty memo."""
    return Encoder(loaded.tokenizer, loaded.growth, Memo(8 << 20))


def exact_pool(*nodes: str, **more: Any) -> Any:
    return {"m": pool_of(*(nodes or ("n1", "n2")), exact=True, **more)}


def ids_of(encoder: Encoder, *texts: str) -> bytes:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    assert encoder.growth is not None
    return encoder.tokenizer.encode(encoder.growth.whole(Chat(messages, list, lambda _: [])))


async def test_a_chat_comes_in_the_engine_s_blocks_turn_after_turn(encoder: Encoder) -> None:
    async with running(exact_pool(), encoders={"m": encoder}) as server:
        texts = [prose(3000)]
        for turn in range(4):
            await server.ask(chat(*texts))
            request = server.seen.tickets[-1].request
            ids = ids_of(encoder, *texts)
            (salted,) = {request.chains[16][:HASH_BYTES]}
            assert request.exact
            assert request.prompt_tokens == len(ids) // TOKEN_BYTES
            assert len(request.chains[16]) == request.prompt_tokens // 16 * HASH_BYTES
            assert server.seen.tickets[0].request.chains[16][:HASH_BYTES] == salted
            server.clock.now_s += 60.0  # what was sent is done
            texts += [prose(200, about=f"yes{turn}"), prose(200, about=f"more{turn}")]
        first, *later = server.seen.tickets
        assert first.decision.reason is Reason.COLD
        assert {each.decision.reason for each in later} == {Reason.LOCALITY}
        await until(lambda: not server.ext_proc.reader.waiting_bytes)
        assert encoder.mismatches == 0


async def test_token_ids_and_their_text_have_the_same_blocks(encoder: Encoder) -> None:
    text = prose(3000)
    ids = memoryview(encoder.tokenizer.encode(text)).cast("I").tolist()
    async with running(exact_pool(), encoders={"m": encoder}) as server:
        for prompt in (text, ids):
            data = json.dumps({"model": "m", "prompt": prompt, "add_special_tokens": False}).encode()
            await server.ask(data, path=COMPLETIONS)
        one, two = (each.request for each in server.seen.tickets)
        assert one.chains == two.chains
        assert (one.exact, two.exact) == (True, True)
        assert one.prompt_tokens == two.prompt_tokens == len(ids)


async def test_each_block_size_of_a_pool_has_its_own_chain(encoder: Encoder) -> None:
    pools = exact_pool("n1", "n2")
    async with running(pools, encoders={"m": encoder}) as server:
        pools["m"].observe("n1", LoadSample(server.clock(), block_tokens=32))
        data = chat(prose(3000))
        first = await server.ask(data)
        server.clock.now_s += 2.0  # what was sent is done
        second = await server.ask(data)
        assert node_of(first) == node_of(second)
        request = server.seen.tickets[1].request
        assert set(request.chains) == {16, 32}
        size = 32 if node_of(first) == "n1" else 16
        matched = server.seen.tickets[1].decision.chosen.matched_tokens
        assert matched == (request.prompt_tokens - 1) // size * size


UNKEYED: dict[str, tuple[str, bytes, Unkeyed]] = {
    "an option that changes tokens": ("/v1/chat/completions", chat("a", chat_template="{{ 1 }}"), Unkeyed.OPTION),
    "a message that is no object": ("/v1/chat/completions", b'{"model":"m","messages":[5]}', Unkeyed.OPTION),
    "a message without a role": ("/v1/chat/completions", b'{"model":"m","messages":[{}]}', Unkeyed.OPTION),
    "content that is a number": (
        "/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":5}]}', Unkeyed.OPTION,
    ),
    "an item that is none": ("/v1/responses", b'{"model":"m","input":[{"role":"user","content":7}]}', Unkeyed.OPTION),
    "truncation": (COMPLETIONS, b'{"model":"m","prompt":"a","truncate_prompt_tokens":3}', Unkeyed.OPTION),
    "an API that is rendered elsewhere": (
        "/api/chat", b'{"model":"m","messages":[{"role":"user","content":"a"}]}', Unkeyed.API,
    ),
    "what the template refuses": (
        "/v1/chat/completions", b'{"model":"m","messages":[]}', Unkeyed.TEMPLATE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "data", "cause"), UNKEYED.values(), ids=UNKEYED)
async def test_what_cannot_be_keyed_is_routed_by_load_and_says_why(
    path: str, data: bytes, cause: Unkeyed, encoder: Encoder
) -> None:
    async with running(exact_pool(), encoders={"m": encoder}) as server:
        assert node_of(await server.ask(data, path=path))
        assert server.seen.unkeyed == [cause]
        (ticket,) = server.seen.tickets
        assert not ticket.request.matchable
        assert not ticket.request.exact
        assert ticket.decision.reason is Reason.FALLBACK


async def test_without_its_tokenizer_a_pool_is_routed_by_load_but_token_ids_are_keyed() -> None:
    async with running(exact_pool()) as server:
        await server.ask(chat(prose(3000)))
        await server.ask(json.dumps({"model": "m", "prompt": list(range(100))}).encode(), path=COMPLETIONS)
        assert server.seen.unkeyed == [Unkeyed.TOKENIZER, None]
        text, ids = (each.request for each in server.seen.tickets)
        assert (text.matchable, text.exact, text.prompt_tokens) == (False, False, pytest.approx(760, rel=0.05))
        assert (ids.matchable, ids.exact, ids.prompt_tokens) == (True, True, 100)


async def test_a_request_that_is_none_of_its_api_is_passed_on(encoder: Encoder) -> None:
    async with running(exact_pool(), encoders={"m": encoder}) as server:
        await server.ask(b'{"model":"m","messages":5}')
        await server.ask(b'{"model":"m"}', path=COMPLETIONS)
        assert server.seen.causes == [Cause.INVALID_BODY] * 2


async def test_a_cut_head_makes_no_blocks_of_the_engine_s(encoder: Encoder) -> None:
    data = chat(prose(40_000))
    async with running(exact_pool(), encoders={"m": encoder}, head_bytes=20_000) as server:
        for _ in range(2):
            await server.say_on(headers(("content-length", str(len(data)))), body(data[:20_000]))
            server.clock.now_s += 60.0
        first, second = server.seen.tickets
        assert not first.request.exact
        assert not any(first.request.chains.values())
        assert first.request.cut_chains is not None
        assert first.request.prompt_tokens == pytest.approx(10_000, rel=0.05)
        assert second.decision.reason is Reason.LOCALITY
        assert second.decision.node == first.decision.node


async def test_blocks_with_a_picture_in_them_are_ours_alone_and_those_before_it_are_the_engine_s(
    encoder: Encoder,
) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    system = {"role": "system", "content": prose(3000)}

    def asking(content: Any) -> bytes:
        return json.dumps({"model": "m", "messages": [system, {"role": "user", "content": content}]}).encode()

    async with running(exact_pool(), encoders={"m": encoder}) as server:
        other = {**picture, "image_url": {"url": "data:image/png;base64,BBBB"}}
        for content in ("what is it", [picture], [picture], [other]):
            await server.ask(asking(content))
        plain, one, again, two = (each.request for each in server.seen.tickets)
        assert [each.exact for each in (plain, one, again, two)] == [True, False, False, False]
        before = len(plain.chains[16]) - 2 * HASH_BYTES
        assert plain.chains[16][:before] == one.chains[16][:before] == two.chains[16][:before]
        assert one.chains == again.chains
        assert one.chains != two.chains


def slowly(server: Running) -> threading.Event:
    """Keep the tokenizer's thread busy until the event is set."""
    release = threading.Event()
    server.ext_proc.reader._tokenizers.submit(release.wait, 20)
    return release


async def test_at_the_decision_deadline_a_prompt_is_routed_on_what_is_known_and_the_rest_follows(
    encoder: Encoder,
) -> None:
    texts = [prose(3000), prose(100, about="yes"), prose(60_000, about="long")]
    async with running(
        exact_pool("n1"), encoders={"m": encoder}, clock=time.monotonic, decide_s=0.05, decide_s_per_16_kib=0.0
    ) as server:
        await server.ask(chat(*texts[:1]))
        release = slowly(server)
        await server.ask(chat(*texts))
        assert server.seen.cuts == [None, Cut.DECISION_DEADLINE]
        first, cut = server.seen.tickets
        known = len(cut.request.chains[16])
        assert cut.request.chains[16] == first.request.chains[16][:known]
        assert known >= len(first.request.chains[16]) - 2 * HASH_BYTES
        assert cut.request.prompt_tokens > 10_000
        release.set()
        await until(lambda: not server.ext_proc.reader.waiting_bytes)
        await server.ask(chat(*texts))
        whole = server.seen.tickets[2]
        assert whole.decision.chosen.matched_tokens == (whole.request.prompt_tokens - 1) // 16 * 16


async def test_what_goes_wrong_after_the_decision_is_logged(encoder: Encoder, caplog: pytest.LogCaptureFixture) -> None:
    async with running(exact_pool(), encoders={"m": encoder}, clock=time.monotonic, decide_s=0.05) as server:
        release = slowly(server)
        server.ext_proc.reader._in_thread(server.ext_proc.reader._tokenizers, lambda: 1 // 0, 10)
        release.set()
        await until(lambda: server.ext_proc.reader.waiting_bytes == 0)
        assert "request read in vain: ZeroDivisionError" in caplog.text


async def test_parsing_does_not_wait_for_the_tokenizer(encoder: Encoder) -> None:
    data = gzip.compress(chat(prose(3000)))
    pools = {**exact_pool(), "plain": pool_of("n3")}
    names = {"m": "m", "plain": "plain"}
    async with running(pools, encoders={"m": encoder}, pool_of=names) as server:
        release = slowly(server)
        await server.ask(chat(prose(400_000), model="plain"))
        await server.ask(data, ("content-encoding", "gzip"))
        assert [each.request.model for each in server.seen.tickets] == ["plain", "m"]
        assert all(each.request.matchable for each in server.seen.tickets)
        release.set()


async def test_a_head_that_is_not_parsed_in_time_is_routed_by_its_headers_or_said_to_be_late() -> None:
    data = json.dumps({"model": "m", "prompt": list(range(100_000))}).encode()
    for others in ([], ["o"]):
        pools = {name: pool_of("n1") for name in ["m", *others]}
        async with running(pools, pool_of={name: name for name in pools}, decide_s=0.02) as server:
            release = threading.Event()
            server.ext_proc.reader._parsers.submit(release.wait, 20)
            await server.ask(data, path=COMPLETIONS)
            assert server.seen.cuts == ([Cut.DECISION_DEADLINE] if len(pools) == 1 else [])
            assert server.seen.causes == ([] if len(pools) == 1 else [Cause.LATE])
            release.set()


async def test_more_brackets_than_any_prompt_has_are_not_parsed() -> None:
    data = b'{"model":"m","messages":[' + b"{}," * 300_000 + b"{}]}"
    async with running() as server:
        await server.ask(data, path=COMPLETIONS)
        assert server.seen.cuts == [Cut.DENSE]
        assert not server.seen.tickets[0].request.matchable


async def test_a_stretch_that_cannot_be_cut_is_matched_up_to_it(encoder: Encoder) -> None:
    async with running(exact_pool("n1"), encoders={"m": encoder}) as server:
        await server.ask(chat(prose(3000) + "x" * 200_000))
        assert server.seen.cuts == [Cut.UNBROKEN]
        (ticket,) = server.seen.tickets
        assert ticket.request.exact
        assert ticket.request.prompt_tokens > 10_000


@pytest.mark.parametrize("messages", [300, 20_000])
async def test_the_loop_is_not_kept_by_a_long_history_with_a_short_turn(encoder: Encoder, messages: int) -> None:
    parts = [{"type": "text", "text": "a"}] * messages
    turns = [{"role": "system", "content": parts}, {"role": "user", "content": "b"}]
    new = [{"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    async with running(exact_pool("n1"), encoders={"m": encoder}) as server:
        release = threading.Event()
        await server.ask(json.dumps({"model": "m", "messages": turns}).encode())
        server.ext_proc.reader._tokenizers.submit(release.wait, 20)
        asked = asyncio.create_task(server.ask(json.dumps({"model": "m", "messages": turns + new}).encode()))
        await until(lambda: server.ext_proc.reader.waiting_bytes > 0)
        assert not asked.done()  # it is for the thread
        release.set()
        await asked


async def test_more_than_the_tokenizer_may_put_off_is_routed_at_once_on_what_is_known(encoder: Encoder) -> None:
    async with running(exact_pool(), encoders={"m": encoder}, backlog_bytes=50_000, decide_s=0.05) as server:
        release = slowly(server)
        asked = [asyncio.create_task(server.ask(chat(prose(40_000, about=f"p{i}")))) for i in range(3)]
        await until(lambda: len(server.seen.tickets) == 2)
        assert server.seen.cuts == [Cut.BUSY] * 2
        assert not any(each.request.matchable for each in server.seen.tickets)
        release.set()
        await asyncio.gather(*asked)
        assert server.seen.cuts[2] is None
        assert server.ext_proc.reader.waiting_bytes == 0


async def test_a_client_that_leaves_while_its_prompt_is_read_leaves_nothing_behind(encoder: Encoder) -> None:
    async with running(exact_pool(), encoders={"m": encoder}) as server:
        release = slowly(server)
        call = server.open()
        await call.write(headers())
        await call.write(body(chat(prose(40_000)), end=True))
        await until(lambda: server.ext_proc.reader.waiting_bytes > 0)
        call.cancel()
        await server.idle()
        release.set()
        await until(lambda: server.ext_proc.reader.waiting_bytes == 0)
        assert server.seen.causes == [Cause.CLIENT_GONE]
        assert not server.seen.tickets
        assert server.ext_proc.held_bytes == 0


async def test_the_loop_goes_on_while_a_long_prompt_is_read(encoder: Encoder) -> None:
    async with running(exact_pool(), encoders={"m": encoder}) as server:
        asked = asyncio.create_task(server.ask(chat(prose(900_000))))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10
        assert server.seen.cuts == [None]


async def test_a_session_carries_what_cannot_be_keyed_and_nothing_else() -> None:
    async with running(exact_pool("n1", "n2", "n3")) as server:
        unkeyable = chat(prose(8000))
        homes = {}
        for name in ("one", "two", "three"):
            homes[name] = node_of(await server.ask(unkeyable, ("x-session-id", name)))
        for name, home in homes.items():
            assert node_of(await server.ask(unkeyable, ("x-session-id", name))) == home
            assert server.seen.tickets[-1].decision.reason is Reason.SESSION
        assert len(set(homes.values())) == 3
        assert len({each.request.session for each in server.seen.tickets}) == 3


async def test_a_tenant_s_header_keeps_prompts_apart_only_where_the_operator_wants_it(encoder: Encoder) -> None:
    for isolate, different in (("", 1), ("x-tenant", 2)):
        async with running(exact_pool(), encoders={"m": encoder}, isolate_by_header=isolate) as server:
            for tenant in ("a", "b", "a"):
                await server.ask(chat(prose(3000)), ("x-tenant", tenant))
            one, two, three = (each.request.chains[16] for each in server.seen.tickets)
            assert len({one, two}) == different
            assert one == three


async def test_an_adapter_shares_its_pool_and_no_blocks_and_an_alias_shares_both(encoder: Encoder) -> None:
    names = {"m": "m", "alias": "m", "adapter": "m"}
    async with running(exact_pool(), encoders={"m": encoder}, pool_of=names, adapters=frozenset({"adapter"})) as server:
        for model in names:
            await server.ask(chat(prose(3000), model=model))
        base, alias, adapter = (each.request for each in server.seen.tickets)
        assert base.model == alias.model == adapter.model == "m"
        assert base.chains == alias.chains
        assert base.chains[16][:HASH_BYTES] != adapter.chains[16][:HASH_BYTES]
        assert len(base.chains[16]) == len(adapter.chains[16])


async def test_the_salt_of_a_request_keeps_it_apart(encoder: Encoder) -> None:
    async with running(exact_pool(), encoders={"m": encoder}) as server:
        for salt in (None, "one", "two"):
            await server.ask(chat(prose(3000), **({} if salt is None else {"cache_salt": salt})))
        assert len({each.request.chains[16][:HASH_BYTES] for each in server.seen.tickets}) == 3
