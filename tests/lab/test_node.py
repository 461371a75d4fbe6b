"""The simulated node over HTTP: OpenAI's shapes, headers before prefill, vLLM's metrics, aborts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import random
import socket
import sys
from array import array
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from extproc.lab import node as module
from extproc.lab.kv_publisher import Feed
from extproc.lab.node import Node, NodeSettings
from extproc.lab.processes import Processes, free_ports, http_ok
from tests.lab.subscriber import Cached, Frames, Subscriber
from tests.tokens import vocabularies

PATIENCE_S = 10.0
CHAT = "/v1/chat/completions"
FOREVER = 1e-3  # tokens/s: a prompt that is never computed


@asynccontextmanager
async def serving(**changes: Any) -> AsyncGenerator[TestClient]:
    """A client of a node on a free port; the node is quick unless told otherwise."""
    settings = {"prefill_tokens_per_s": 1e9, "decode_s": 0.0, **changes}
    node = Node(NodeSettings(name="n1", host="127.0.0.1", port=0, model="tiny", **settings))
    # it cancels the handlers of clients that left, as run_node does
    async with asyncio.timeout(PATIENCE_S), TestClient(TestServer(node.application())) as client:
        yield client


COMPLETIONS = "/v1/completions"
BLOCK_TOKENS = 4


def a_feed(ranks: int = 1) -> Feed:
    """Ports that were free a moment ago; those of a second rank are the next ones."""
    while True:
        events, replay = free_ports(2)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in (events + 1, replay + 1)[: 2 * (ranks - 1)]:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            if abs(events - replay) > 1:
                return Feed(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}", "kv@n1@tiny")


class Reader:
    """Follows the feed of one rank, and knows what it holds."""

    def __init__(self, feed: Feed) -> None:
        self._subscriber = Subscriber(feed)
        self.next_seq = 0
        self.cached = Cached(BLOCK_TOKENS)
        self.batches: list[Frames] = []
        self.replays = 0

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self._subscriber.__aexit__(*rest)

    async def catch_up(self) -> None:
        """Know all there is: what comes by itself, then a replay of what did not."""
        while (message := await self._subscriber.next(0.005)) is not None:
            self._take(message)
        for _, *message in await self._subscriber.replay(self.next_seq):
            self.replays += 1
            self._take(message)

    def _take(self, message: Frames) -> None:
        """Again what it has: nothing. What has a gap before it: left to the replay."""
        if int.from_bytes(message[1], "big") == self.next_seq:
            self.next_seq += 1
            self.batches.append(message)
            self.cached.take(message[2])


async def ask(client: TestClient, prompt: list[int], rank: int | None = None, **body: Any) -> tuple[int, list[int]]:
    """How many tokens of the prompt were cached, and the answer's tokens."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    async with client.post(COMPLETIONS, json={"prompt": prompt, **body}, headers=headers) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    tokens = array("I", answer["choices"][0]["text"].encode()).tolist()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], tokens


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


async def events(response: aiohttp.ClientResponse) -> list[str]:
    """The data of each server-sent event."""
    lines = (await response.text()).split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def metrics(client: TestClient) -> dict[tuple[str, ...], float]:
    """Samples by name and label values."""
    async with client.get("/metrics") as response:
        text = await response.text()
    return {
        (
            sample.name,
            *(value for key, value in sorted(sample.labels.items()) if key not in ("engine", "model_name")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_chat_answer_has_openais_shape_and_counts_cached_tokens() -> None:
    async with serving() as client:
        for cached_tokens in (0, 96):
            async with client.post(CHAT, json=chat("a" * 400, max_tokens=3)) as response:
                assert response.status == 200
                assert response.headers["x-kvaffinity-node"] == "n1"
                body = await response.json()
            # "<|user|>" is 2 tokens, the text 100, "<|assistant|>" 4
            assert body["usage"] == {
                "prompt_tokens": 106,
                "completion_tokens": 3,
                "total_tokens": 109,
                "prompt_tokens_details": {"cached_tokens": cached_tokens},
            }
            assert (body["object"], body["model"]) == ("chat.completion", "tiny")
            [choice] = body["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["message"]["role"] == "assistant"
            assert len(choice["message"]["content"]) == 12


async def test_a_completion_takes_text_or_token_ids() -> None:
    async with serving() as client:
        for prompt, tokens in (("abcde", 2), ([1, 2, 3], 3)):
            async with client.post("/v1/completions", json={"prompt": prompt}) as response:
                body = await response.json()
            assert body["object"] == "text_completion"
            assert body["usage"]["prompt_tokens"] == tokens
            assert len(body["choices"][0]["text"]) == 4 * 16  # 16 tokens unless told otherwise


async def test_a_rendered_chat_is_the_prompt_that_a_request_has() -> None:
    async with serving() as client:
        async with client.post(f"{CHAT}/render", json=chat("a" * 64)) as response:
            tokens = (await response.json())["token_ids"]
        async with client.post(CHAT, json=chat("a" * 64)) as response:
            assert (await response.json())["usage"]["prompt_tokens"] == len(tokens)
        assert (await ask(client, tokens))[0] == 16  # the same 16 tokens come first
        async with client.post(f"{CHAT}/render", json={"messages": []}) as response:
            assert response.status == 400


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_stream_carries_the_same_text_then_usage_then_done(path: str) -> None:
    body = {**chat("hello"), "prompt": "hello", "max_tokens": 4}
    async with serving() as client:
        async with client.post(path, json=body) as response:
            whole = (await response.json())["choices"][0]
        async with client.post(
            path, json={**body, "stream": True, "stream_options": {"include_usage": True}}
        ) as response:
            assert response.content_type == "text/event-stream"
            *chunks, done = await events(response)
        async with client.post(path, json={**body, "stream": True}) as response:
            without_usage = await events(response)
    assert done == "[DONE]"
    *chunks, usage = map(json.loads, chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in choices) == whole["message"]["content"]
        assert chunks[0]["object"] == "chat.completion.chunk"
    else:
        assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert len(without_usage) == len(chunks) + 1


async def test_the_role_comes_together_with_the_first_token() -> None:
    async with serving(decode_s=60.0) as client, client.post(CHAT, json=chat("x", stream=True)) as response:
        first, _ = await response.content.readchunk()
    assert [
        json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"] for event in first.split(b"\n\n")[:-1]
    ] == [
        {"role": "assistant", "content": ""},
        {"content": first.split(b'"content":"')[2][:4].decode()},
    ]


async def test_headers_of_a_stream_come_before_prefill() -> None:
    async with (
        serving(prefill_tokens_per_s=FOREVER) as client,
        client.post(CHAT, json=chat("x", stream=True)) as response,
    ):
        assert response.status == 200
        seen = await metrics(client)
    assert seen[("vllm:num_requests_running",)] == 1
    assert seen[("vllm:time_to_first_token_seconds_count",)] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_only_slot(stream: bool) -> None:
    async with serving(prefill_tokens_per_s=50.0, max_running=1) as client:
        leaving = asyncio.create_task(client.session.post(client.make_url(CHAT), json=chat("x" * 4000, stream=stream)))
        if stream:
            (await leaving).close()
        else:
            await until_running(client)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        async with client.post(CHAT, json=chat("y", max_tokens=1)) as response:
            assert response.status == 200
        seen = await metrics(client)
    assert seen[("vllm:num_requests_running",)] == 0
    assert seen[("vllm:request_success_total", "abort")] == 1
    assert seen[("vllm:request_success_total", "length")] == 1


async def until_running(client: TestClient) -> None:
    while (await metrics(client))[("vllm:num_requests_running",)] == 0:
        pass


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue() -> None:
    async with serving(prefill_tokens_per_s=FOREVER) as client, client.post(CHAT, json=chat("x", stream=True)):
        async with client.post(CHAT, json=chat("y", stream=True)):
            assert (await metrics(client))[("vllm:num_requests_waiting",)] == 1
        while (seen := await metrics(client))[("vllm:num_requests_waiting",)]:
            pass
        assert seen[("vllm:num_requests_running",)] == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (CHAT, b"{", 400, "BadRequestError"),
        (CHAT, b"", 400, "BadRequestError"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, "BadRequestError"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "BadRequestError"),
        (CHAT, b"[]", 400, "BadRequestError"),
        (CHAT, b'{"messages": []}', 400, "BadRequestError"),
        (CHAT, json.dumps(chat("x", max_tokens=0)).encode(), 400, "BadRequestError"),
        (CHAT, json.dumps(chat("x" * 4 * 16 * 16)).encode(), 400, "BadRequestError"),
        (CHAT, json.dumps({**chat("x"), "model": "huge"}).encode(), 404, "NotFoundError"),
        ("/v1/completions", b'{"prompt": []}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": [-1]}', 400, "BadRequestError"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_openais_shape(
    path: str, body: bytes, status: int, kind: str
) -> None:
    async with serving(blocks=16) as client, client.post(path, data=body) as response:
        assert response.status == status
        assert response.headers["x-body-sha256"] == hashlib.sha256(body).hexdigest()
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == (kind, status)
    assert error["message"]


async def test_a_full_queue_answers_503_before_any_header_of_a_stream() -> None:
    async with (
        serving(prefill_tokens_per_s=FOREVER, max_queue=1) as client,
        client.post(CHAT, json=chat("a", stream=True)),
        client.post(CHAT, json=chat("b", stream=True)),
        client.post(CHAT, json=chat("c", stream=True)) as response,
    ):
        assert response.status == 503
        assert (await response.json())["error"]["type"] == "ServiceUnavailableError"


async def test_a_body_of_40_mb_arrives_whole() -> None:
    body = json.dumps(chat("x" * 40_000_000)).encode()
    async with serving(blocks=800_000) as client, client.post(CHAT, data=io.BytesIO(body)) as response:
        assert response.status == 200
        assert response.headers["x-body-sha256"] == hashlib.sha256(body).hexdigest()
        assert (await response.json())["usage"]["prompt_tokens"] == 10_000_006


async def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    messages = [{"role": "system", "content": "s" * 320}, {"role": "user", "content": "u" * 80}]
    async with serving() as client:
        async with client.post(CHAT, json={"messages": messages, "max_tokens": 32}) as response:
            answer = (await response.json())["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "and then?"}]
        async with client.post(CHAT, json={"messages": messages}) as response:
            usage = (await response.json())["usage"]
    # 3 + 80 + 2 + 20 + 4 tokens of prompt and 31 of the answer: 140, so 8 full blocks
    assert usage["prompt_tokens_details"]["cached_tokens"] == 128


async def test_tools_come_first_and_content_parts_read_as_text() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 200}}]
    parts = [{"type": "text", "text": "a" * 100}, {"type": "text", "text": "b" * 100}]
    async with serving() as client:
        async with client.post(CHAT, json=chat("a" * 100 + "b" * 100, max_tokens=1)):
            pass
        async with client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}) as response:
            same = (await response.json())["usage"]
        async with client.post(CHAT, json=chat("a" * 100 + "b" * 100, tools=tools)) as response:
            other = (await response.json())["usage"]
    assert same["prompt_tokens_details"]["cached_tokens"] == 48
    assert other["prompt_tokens_details"]["cached_tokens"] == 0
    assert other["prompt_tokens"] > same["prompt_tokens"] + 50


@pytest.mark.parametrize(("salt", "cached_tokens"), [("mine", 96), ("other", 0), (None, 0)])
async def test_a_salted_prompt_is_found_under_its_salt_alone(salt: str | None, cached_tokens: int) -> None:
    async with serving() as client:
        async with client.post(CHAT, json=chat("a" * 400, cache_salt="mine")):
            pass
        async with client.post(CHAT, json=chat("a" * 400, cache_salt=salt)) as response:
            usage = (await response.json())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached_tokens


async def test_max_completion_tokens_goes_before_max_tokens() -> None:
    body = chat("a", max_tokens=9, max_completion_tokens=3)
    async with serving() as client, client.post(CHAT, json=body) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 3


async def test_metrics_have_vllms_names_and_count_tokens() -> None:
    async with serving(blocks=100) as client:
        for _ in range(2):
            async with client.post(CHAT, json=chat("a" * 400, max_tokens=3)):
                pass
        seen = await metrics(client)
        async with client.get("/metrics") as response:
            text = await response.text()
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prefix_cache_queries_total": 212,
        "vllm:prefix_cache_hits_total": 96,
        "vllm:prompt_tokens_total": 212,
        "vllm:prompt_tokens_cached_total": 96,
        "vllm:generation_tokens_total": 6,
        "vllm:time_to_first_token_seconds_count": 2,
    }
    assert {name: seen[(name,)] for name in expected} == expected
    assert seen[("vllm:request_success_total", "length")] == 2
    assert seen[("process_start_time_seconds",)] > 1.7e9
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text
    [info] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in info
    assert 'num_gpu_blocks="100"' in info
    assert info.endswith(" 1.0")


async def test_kv_usage_counts_the_blocks_of_running_requests() -> None:
    body = chat("x" * 4 * 58, stream=True, max_tokens=1)  # 64 tokens: 4 of 10 blocks
    async with serving(blocks=11, prefill_tokens_per_s=FOREVER) as client, client.post(CHAT, json=body):
        assert (await metrics(client))[("vllm:kv_cache_usage_perc",)] == 0.4


async def test_the_prefix_cache_can_be_reset_when_nothing_runs() -> None:
    async with serving() as client:
        for _ in range(2):
            async with client.post(CHAT, json=chat("a" * 400)) as response:
                assert (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            async with client.post("/reset_prefix_cache") as response:
                assert response.status == 200
    async with (
        serving(prefill_tokens_per_s=FOREVER) as client,
        client.post(CHAT, json=chat("x", stream=True)),
        client.post("/reset_prefix_cache") as response,
    ):
        assert response.status == 409


async def test_the_small_pages_answer() -> None:
    async with serving(blocks=11) as client:
        async with client.get("/health") as response:
            assert (response.status, await response.read()) == (200, b"")
        async with client.get("/version") as response:
            assert "version" in await response.json()
        async with client.get("/v1/models") as response:
            [card] = (await response.json())["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 160)


async def test_the_process_frees_the_slot_of_a_client_that_leaves_and_ends_on_sigterm(tmp_path: Path) -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = f"--port {port} --prefill-rate 50 --decode-ms 0 --max-running 1"
    with Processes(tmp_path) as processes:
        child = processes.start("node", [sys.executable, "-m", "extproc.lab.node", *options.split()])
        processes.wait_until(child, http_ok(f"{url}/health"))
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            async with session.post(url + CHAT, json=chat("x" * 4000, stream=True)) as response:
                assert response.status == 200
            async with session.post(url + CHAT, json=chat("y", max_tokens=1)) as response:
                assert response.headers["x-kvaffinity-node"] == "node"
                assert response.status == 200
        assert processes.stop(child) == 0, child.tail()


def test_the_command_passes_every_option_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[NodeSettings] = []
    monkeypatch.setattr(module, "run_node", ran.append)
    options = "--name n2 --host ::1 --port 8001 --model m --blocks 2 --block-tokens 3 --prefill-rate 4 --decode-ms 5 "
    options += "--max-running 6 --max-queue 7 --kv-events tcp://*:1 --kv-replay tcp://*:2 --kv-topic t --kv-connect "
    options += f"--data-parallel-size 8 --adapter a --adapter b --max-loras 9 --tokenizer {tmp_path}"
    result = CliRunner().invoke(module.node, options.split())
    assert result.exit_code == 0, result.output
    feed = Feed("tcp://*:1", "tcp://*:2", "t", connect=True)
    expected = NodeSettings("n2", "::1", 8001, "m", 2, 3, 4.0, 0.005, 6, 7, feed, 8, ("a", "b"), 9, str(tmp_path))
    assert ran == [expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kv-replay tcp://127.0.0.1:1", "--kv-replay needs --kv-events"),
        ("--kv-events 127.0.0.1:1", "cannot bind 127.0.0.1:1"),
        ("--kv-events ipc:///tmp/kv --data-parallel-size 2", "only a TCP port"),
    ],
)
def test_a_feed_that_cannot_be_is_refused_at_the_start(options: str, message: str) -> None:
    result = CliRunner().invoke(module.node, f"--port {free_ports(1)[0]} {options}".split())
    assert result.exit_code
    assert message in result.output


def test_a_directory_without_a_tokenizer_is_refused_at_the_start(tmp_path: Path) -> None:
    result = CliRunner().invoke(module.node, ["--port", "1", "--tokenizer", str(tmp_path)])
    assert result.exit_code
    assert "no tokenizer at" in result.output


APART: list[dict[str, Any]] = [{}, {"cache_salt": "s"}, {"model": "a"}, {"model": "b", "cache_salt": "s"}]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_events_alone_tell_how_much_of_each_prompt_is_cached(ranks: int) -> None:
    """Turns of conversations, with adapters, salts, resets and restarts, on a cache that evicts all the time."""
    rng, feed = random.Random(ranks), a_feed(ranks)
    settings = {"blocks": 48, "block_tokens": BLOCK_TOKENS, "adapters": ("a", "b"), "data_parallel_size": ranks}
    sure = hits = removed = cleared = 0
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(serving(feed=feed, **settings))
        following: list[Reader] = []
        conversations: list[list[int]] = [[]] * 8
        for turn in range(300):
            if turn % 100 == 99:
                async with client.post("/restart") as response:
                    assert response.status == 200
            if turn % 100 in (0, 99):
                removed += sum(reader.cached.removed for reader in following)
                cleared += sum(reader.cached.cleared for reader in following)
                # who read on would have to find out that there was a restart
                following = [await stack.enter_async_context(Reader(feed.of_rank(rank))) for rank in range(ranks)]
            if turn % 40 == 39:
                async with client.post("/reset_prefix_cache") as response:
                    assert response.status == 200
                for rank in range(ranks):
                    await ask(client, [0], rank)  # a reset is told with the next step
            which = rng.randrange(len(conversations))
            rank, apart = which % ranks, APART[which % len(APART)]
            reader, prompt = following[rank], conversations[which]
            if not prompt or rng.random() < 0.8:  # else the same again
                prompt = prompt + rng.choices(range(1000), k=rng.randint(1, 9))
            await reader.catch_up()
            expected, no_more = reader.cached.expect(prompt, salt=apart.get("cache_salt"), lora=apart.get("model"))
            cached, answer = await ask(client, prompt, rank, max_tokens=rng.randint(1, 9), **apart)
            assert cached == expected or (cached > expected and not no_more)
            sure, hits = sure + no_more, hits + (cached > 0)
            conversations[which] = [] if len(prompt) > 60 else prompt + answer if rng.random() < 0.8 else prompt
    assert sure >= 290  # of 300
    assert min(hits, removed) >= 100
    assert cleared >= 5


async def test_a_restart_begins_anew() -> None:
    feed = a_feed()
    prompt = list(range(13))
    async with (
        serving(feed=feed, block_tokens=BLOCK_TOKENS) as client,
        Reader(feed) as before,
    ):
        await ask(client, prompt)
        await ask(client, prompt)
        await before.catch_up()
        started_at_s = (await metrics(client))[("process_start_time_seconds",)]
        async with client.post("/restart") as response:
            assert response.status == 200
        seen = await metrics(client)
        assert seen[("process_start_time_seconds",)] > started_at_s
        assert seen[("vllm:prompt_tokens_total",)] == 0
        assert (await ask(client, prompt))[0] == 0
        async with Reader(feed) as after:
            await after.catch_up()
    assert after.next_seq
    for old, new in zip(before.batches, after.batches, strict=False):
        assert old[1] == new[1]
        assert msgspec.msgpack.decode(old[2])[1] == msgspec.msgpack.decode(new[2])[1]  # the same hashes
        assert old[2] != new[2]  # at another time


@pytest.mark.parametrize("stream", [True, False])
async def test_a_restart_cuts_off_who_is_waiting(stream: bool) -> None:
    async with serving(prefill_tokens_per_s=FOREVER) as client:
        body = chat("x", stream=stream)
        waiting = asyncio.create_task(whole(client, body))
        await until_running(client)
        async with client.post("/restart") as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await waiting
        assert (await metrics(client))[("vllm:num_requests_running",)] == 0


async def whole(client: TestClient, body: dict[str, Any]) -> bytes:
    """An answer to its end; of its own session, which does not ask again."""
    async with aiohttp.ClientSession() as session, session.post(client.make_url(CHAT), json=body) as response:
        return await response.read()


async def test_what_was_announced_is_where_the_events_are() -> None:
    feed = a_feed(2)
    async with serving(feed=feed, data_parallel_size=2) as client, client.get("/kv_event_sources") as response:
        sources = await response.json()
    assert {rank: (each["endpoint"], each["replay_endpoint"]) for rank, each in sources.items()} == {
        str(rank): (feed.of_rank(rank).endpoint, feed.of_rank(rank).replay_endpoint) for rank in range(2)
    }
    assert (sources["0"]["topic"], sources["0"]["buffer_steps"]) == ("kv@n1@tiny", 10_000)
    async with serving() as client, client.get("/kv_event_sources") as response:
        assert await response.json() == {}


async def of_rank(client: TestClient, name: str) -> list[float]:
    """The value of a metric for each rank."""
    async with client.get("/metrics") as response:
        text = await response.text()
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in sorted(family.samples, key=lambda sample: sample.labels.get("engine", ""))
        if sample.name == name
    ]


async def test_a_header_chooses_the_rank_and_others_go_to_each_in_turn() -> None:
    feed, prompt = a_feed(2), list(range(13))
    async with (
        serving(feed=feed, block_tokens=BLOCK_TOKENS, data_parallel_size=2) as client,
        Reader(feed.of_rank(0)) as first,
        Reader(feed.of_rank(1)) as second,
    ):
        assert [(await ask(client, prompt, rank=1))[0] for _ in range(2)] == [0, 12]
        assert await of_rank(client, "vllm:prompt_tokens_total") == [0, 26]
        assert await of_rank(client, "vllm:prefix_cache_hits_total") == [0, 12]
        assert (await ask(client, prompt, rank=0))[0] == 0
        for _ in range(4):
            await ask(client, prompt)
        assert await of_rank(client, "vllm:prompt_tokens_total") == [39, 52]
        await first.catch_up()
        await second.catch_up()
        for pinned, status in (("2", 400), ("-1", 400), ("x", 200)):
            headers = {"X-data-parallel-rank": pinned}
            async with client.post(COMPLETIONS, json={"prompt": prompt}, headers=headers) as response:
                assert response.status == status
        assert await of_rank(client, "vllm:num_requests_running") == [0, 0]
        assert len(await of_rank(client, "vllm:cache_config_info")) == 2
    for rank, reader in enumerate((first, second)):
        assert reader.next_seq
        assert {msgspec.msgpack.decode(batch[2])[2] for batch in reader.batches} == {rank}


async def test_what_runs_and_waits_is_counted_for_each_rank() -> None:
    async with serving(prefill_tokens_per_s=FOREVER, data_parallel_size=2) as client:
        headers, body = {"X-data-parallel-rank": "1"}, chat("x", stream=True)
        async with client.post(CHAT, json=body, headers=headers), client.post(CHAT, json=body, headers=headers):
            assert await of_rank(client, "vllm:num_requests_running") == [0, 1]
            assert await of_rank(client, "vllm:num_requests_waiting") == [0, 1]


async def test_an_adapter_is_a_model_of_its_own_that_shares_no_blocks() -> None:
    body = chat("a" * 400, max_tokens=1)
    async with serving(adapters=("sqlbot",)) as client:
        async with client.post(CHAT, json=body):
            pass
        for cached_tokens in (0, 96):
            async with client.post(CHAT, json={**body, "model": "sqlbot"}) as response:
                answer = await response.json()
            assert answer["model"] == "sqlbot"
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached_tokens
        async with client.get("/v1/models") as response:
            cards = (await response.json())["data"]
        async with client.post(CHAT, json={**body, "model": "other"}) as response:
            assert response.status == 404
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("sqlbot", "tiny")]


async def test_of_the_adapters_in_use_the_latest_value_tells() -> None:
    async with serving(prefill_tokens_per_s=FOREVER, adapters=("a", "b"), max_loras=2) as client:
        idle = await loras(client)
        async with (
            client.post(CHAT, json=chat("x", stream=True, model="b")),
            client.post(CHAT, json=chat("x", stream=True, model="a")),
            client.post(CHAT, json=chat("x", stream=True)),
        ):
            busy = await loras(client)
    assert idle.keys() == {("2", "", "")}
    assert busy.keys() == {("2", "", ""), ("2", "b", "a")}
    assert max(busy, key=busy.__getitem__) == ("2", "b", "a")
    async with serving() as client:
        assert await loras(client) == {}


async def loras(client: TestClient) -> dict[tuple[str, ...], float]:
    seen = await metrics(client)
    return {tuple(values): value for (name, *values), value in seen.items() if name == "vllm:lora_requests_info"}


async def test_the_feed_is_broken_and_mended_from_outside() -> None:
    feed = a_feed()
    async with serving(feed=feed, block_tokens=BLOCK_TOKENS) as client, Subscriber(feed) as subscriber:

        async def fault(**body: Any) -> int:
            async with client.post("/fault", json=body) as response:
                return response.status

        assert await fault(events="cut", replay="gap") == 200
        await ask(client, list(range(9)), max_tokens=1)
        assert await subscriber.replay(0) == []
        assert await fault(replay="refuse", rank=0) == 200
        with pytest.raises(TimeoutError):
            await subscriber.replay(0, within_s=0.1)
        async with client.post("/restart") as response:
            assert response.status == 200
        with pytest.raises(TimeoutError):  # a fault is none of the process's
            await subscriber.replay(0, within_s=0.1)
        assert await fault() == 200
        await ask(client, list(range(9)), max_tokens=1)
        assert len(await subscriber.replay(0)) == 1
        for wrong in ({"events": "lost"}, {"rank": 1}, {"rank": -2}, {"event": "cut"}):
            assert await fault(**wrong) == 400


@pytest.mark.parametrize("kind", ["qwen2", "llama3"])  # the second puts a token before each text
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_with_a_tokenizer_blocks_are_those_of_its_token_ids(path: str, kind: str, tmp_path: Path) -> None:
    directory, feed = vocabularies.make(kind, tmp_path), a_feed()
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    said = "def double(x: int) -> int: return 2 * x"
    if path == CHAT:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": said}]}
        text = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    else:
        body, text = {"prompt": said}, said
    ids = library.encode(text, add_special_tokens=path == COMPLETIONS).ids
    async with (
        serving(feed=feed, block_tokens=BLOCK_TOKENS, tokenizer=str(directory)) as client,
        Reader(feed) as reader,
    ):
        async with client.post(path, json={**body, "max_tokens": 9}) as response:
            answered = await response.json()
        choice = answered["choices"][0]
        answer = choice["message"]["content"] if path == CHAT else choice["text"]
        if path == CHAT:
            more = [*body["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": "More."}]
            longer: dict[str, Any] = {"messages": more}
        else:
            longer = {"prompt": said + answer + " More."}
        async with client.post(path, json={**longer, "max_tokens": 1}) as response:
            usage = (await response.json())["usage"]
        await reader.catch_up()
    assert answered["usage"]["prompt_tokens"] == len(ids)
    known = ids + library.encode(answer, add_special_tokens=False).ids[:-1] if path == CHAT else ids
    events = [event for batch in reader.batches for event in msgspec.msgpack.decode(batch[2])[1]]
    told = [token for event in events for token in event["token_ids"]]
    full = len(known) // BLOCK_TOKENS * BLOCK_TOKENS
    assert told[:full] == known[:full]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= full


async def test_with_a_tokenizer_what_the_template_refuses_is_refused(tmp_path: Path) -> None:
    directory = vocabularies.make("qwen2", tmp_path)
    async with serving(tokenizer=str(directory)) as client:
        for path, body in ((COMPLETIONS, {"prompt": ""}), (CHAT, chat("x", continue_final_message=True))):
            async with client.post(path, json=body) as response:
                assert response.status == 400, path
