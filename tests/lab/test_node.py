"""The simulated node over HTTP: OpenAI's shapes, headers before prefill, vLLM's metrics, aborts."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from extproc.lab import node as module
from extproc.lab.node import Node, NodeSettings
from extproc.lab.processes import Processes, free_ports, http_ok

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
        ): (sample.value)
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


def test_the_command_passes_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[NodeSettings] = []
    monkeypatch.setattr(module, "run_node", ran.append)
    options = "--name n2 --host ::1 --port 8001 --model m --blocks 2 --block-tokens 3 --prefill-rate 4 --decode-ms 5 "
    result = CliRunner().invoke(module.node, (options + "--max-running 6 --max-queue 7").split())
    assert result.exit_code == 0, result.output
    assert ran == [NodeSettings("n2", "::1", 8001, "m", 2, 3, 4.0, 0.005, 6, 7)]
