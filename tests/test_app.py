"""The real process: `python -m extproc serve`, its signals, its pages, its sockets and its spans."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from extproc.listening import EXT_PROC
from extproc.wire.envoy_pb2 import ProcessingRequest, ProcessingResponse
from tests.builders import CLUSTER, body, chat, headers, mutated, node_of, prose, until
from tests.tokens import vocabularies

PROMPT = prose(4000)
CANARY = "xyzzy-canary-4711"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Served:
    """One process, its file and what it logs."""

    process: asyncio.subprocess.Process
    path: Path
    log_path: Path
    listen: str
    pages: str
    channel: grpc.aio.Channel
    http: aiohttp.ClientSession

    def log(self) -> str:
        return self.log_path.read_text()

    async def page(self, path: str = "/metrics") -> str:
        async with self.http.get(f"http://{self.pages}{path}") as answer:
            assert answer.status == 200
            return await answer.text()

    def open(self, metadata: Any = ()) -> grpc.aio.StreamStreamCall:
        return self.channel.stream_stream(
            f"/{EXT_PROC}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )(metadata=metadata)

    async def ask(self, data: bytes, *extra: tuple[str, str], metadata: Any = ()) -> ProcessingResponse:
        call = self.open(metadata)
        await call.write(headers(*extra))
        await call.write(body(data, end=True))
        reply = await call.read()
        assert await call.read() is grpc.aio.EOF
        return reply

    async def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=EXT_PROC))).status)

    async def ends(self, *, within_s: float = 10.0) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()


def config(listen: str, pages: str, *nodes: str, server: str = "", rest: str = "", model: str = "") -> str:
    listed = "".join(
        f'[[models.nodes]]\nname = "{name}"\naddress = "10.0.0.{i}:8000"\n' for i, name in enumerate(nodes, 1)
    )
    return (
        f'[server]\nlisten = "{listen}"\nmetrics_listen = "{pages}"\n{server}\n'
        f"[policy]\nmargin_s = 0\nmargin_ratio = 0\ncontrol_percent = 0\n[scrape]\nenabled = false\n{rest}\n"
        '[[models]]\nname = "m"\nblock_tokens = 16\n'
        # the first turn is soon done, and the difference that its cache makes still counts
        f"prefill_tokens_per_s = 1e6\n{model}{listed}"
    )


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}, **extra}


@asynccontextmanager
async def served(
    tmp_path: Path,
    *,
    listen: str | None = None,
    server: str = "",
    model: str = "",
    nodes: tuple[str, ...] = ("n1", "n2"),
    variables: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> AsyncIterator[Served]:
    listen = listen or f"127.0.0.1:{free_port()}"
    pages = f"127.0.0.1:{free_port()}"
    path, log_path = tmp_path / "kvaffinity.toml", tmp_path / "log"
    path.write_text(config(listen, pages, *nodes, server=server, model=model))
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "extproc", "serve", "--config", str(path), *options,
            stdout=log, stderr=log, env=environment(variables or {}),
        )  # fmt: skip
    try:
        async with grpc.aio.insecure_channel(listen) as channel, aiohttp.ClientSession() as http:
            made = Served(process, path, log_path, listen, pages, channel, http)
            await until(lambda: "serving on" in made.log() or process.returncode is not None, timeout_s=60)
            assert process.returncode is None, made.log()
            yield made
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_it_serves_decisions_health_and_pages_and_ends_with_0_when_told_to(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        assert json.loads(await app.page("/healthz"))["ready"] is True
        assert await app.health() == SERVING
        first = await app.ask(chat(PROMPT))
        second = await app.ask(chat(PROMPT, "yes", "more"))
        assert mutated(first)[CLUSTER] in ("n1", "n2")
        assert mutated(first) == mutated(second)
        page = await app.page()
        assert 'kvaffinity_requests_total{pool="m",reason="locality",tokens="approximate"} 1.0' in page
        assert "kvaffinity_loop_delay_seconds_count" in page
        app.process.send_signal(signal.SIGTERM)
        assert await app.ends() == 0


async def test_an_open_stream_finishes_while_health_says_not_serving(tmp_path: Path) -> None:
    async with served(tmp_path, server="collect_gap_s = 30\ncollect_total_s = 30\ndrain_s = 30") as app:
        call = app.open()
        await call.write(headers())
        await until(lambda: _has(app, "kvaffinity_streams 1.0"))
        app.process.send_signal(signal.SIGTERM)
        await until(lambda: _is_draining(app))
        async with app.http.get(f"http://{app.pages}/healthz") as answer:
            assert answer.status == 503
        await call.write(body(chat(PROMPT), end=True))
        assert mutated(await call.read())
        assert await call.code() is grpc.StatusCode.OK
        assert await app.ends() == 0


async def _has(app: Served, line: str) -> bool:
    return line in await app.page()


async def _is_draining(app: Served) -> bool:
    return await app.health() == NOT_SERVING


async def test_a_stream_that_does_not_finish_is_given_up_after_the_drain_time(tmp_path: Path) -> None:
    async with served(tmp_path, server="collect_gap_s = 30\ncollect_total_s = 30\ndrain_s = 0.5") as app:
        call = app.open()
        await call.write(headers())
        await until(lambda: _has(app, "kvaffinity_streams 1.0"))
        started = time.monotonic()
        app.process.send_signal(signal.SIGTERM)
        assert await app.ends() == 0
        assert 0.5 <= time.monotonic() - started < 5.0
        call.cancel()


async def test_an_access_log_stream_that_never_ends_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with served(tmp_path, server="drain_s = 30") as app:
        logs = app.channel.stream_unary("/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs")()
        await logs.write(b"")
        started = time.monotonic()
        app.process.send_signal(signal.SIGINT)
        assert await app.ends() == 0
        assert time.monotonic() - started < 5.0
        logs.cancel()


@pytest.mark.parametrize("how", ["SIGHUP", "changed file", "replaced file"])
async def test_a_new_configuration_is_taken_without_forgetting_what_is_known(tmp_path: Path, how: str) -> None:
    async with served(tmp_path) as app:
        reply = await app.ask(chat(PROMPT))
        written = config(app.listen, app.pages, "n1", "n2", "n3")
        if how == "replaced file":
            (tmp_path / "new").write_text(written)
            (tmp_path / "new").rename(app.path)
        else:
            app.path.write_text(written)
        if how == "SIGHUP":
            app.process.send_signal(signal.SIGHUP)
        await until(lambda: _has(app, 'kvaffinity_in_flight_requests{node="n3",pool="m"} 0.0'))
        node = node_of(reply)
        assert f'kvaffinity_in_flight_requests{{node="{node}",pool="m"}} 1.0' in await app.page()
        again = await app.ask(chat(PROMPT))
        assert node_of(again) == node
        assert "configuration reloaded: m on 3 nodes" in app.log()


async def test_a_bad_file_changes_nothing_and_the_log_says_why(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        good = app.path.read_text()
        for bad, why in (
            (good.replace("[scrape]", "[scrap]"), "unknown field `scrap`"),
            (good + "[unfinished", "kvaffinity.toml: Expected ']'"),
            ("", "missing required field `models`"),
        ):
            app.path.write_text(bad)
            app.process.send_signal(signal.SIGHUP)
            await until(lambda why=why: "configuration kept as it was" in app.log() and why in app.log())
            assert mutated(await app.ask(chat(PROMPT)))
        app.path.unlink()
        app.process.send_signal(signal.SIGHUP)
        await until(lambda: "No such file" in app.log())
        assert "n1" in await app.page()
        app.path.write_text(config(app.listen, app.pages, "n1", "n2", "n9"))
        app.process.send_signal(signal.SIGHUP)
        await until(lambda: _has(app, 'node="n9"'))


async def test_what_takes_effect_at_the_next_start_only_is_named(tmp_path: Path) -> None:
    async with served(tmp_path) as app:
        app.path.write_text(
            'salt = "other"\n' + config(app.listen, "127.0.0.1:1", "n1", "n2", rest="[telemetry]\ntraces = false")
        )
        app.process.send_signal(signal.SIGHUP)
        await until(lambda: "takes effect at the next start only" in app.log())
        (line,) = [line for line in app.log().splitlines() if "next start only" in line]
        assert line.endswith("server.metrics_listen, salt, telemetry")
        assert "n1" in await app.page()


@pytest.mark.parametrize("taken", ["listen", "metrics_listen"])
async def test_a_port_in_use_is_a_clear_error_and_not_a_trace(tmp_path: Path, taken: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ports = {"listen": free_port(), "metrics_listen": free_port(), taken: port}
        path = tmp_path / "kvaffinity.toml"
        path.write_text(config(f"127.0.0.1:{ports['listen']}", f"127.0.0.1:{ports['metrics_listen']}", "n1"))
        code, said = await run("serve", "--config", str(path))
    assert code == 1
    assert f"127.0.0.1:{port}" in said or f"'127.0.0.1', {port}" in said
    assert "Error: " in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ('[[models]]\nname = "m"\n', 0, "m: 0 nodes"),
        ('[[models]]\nnam = "m"\n', 1, "Error: .*: Object contains unknown field `nam` - at `\\$.models\\[0\\]`"),
        (None, 1, "Error: .*kvaffinity.toml: No such file or directory"),
    ],
)
async def test_a_file_can_be_checked_without_serving(tmp_path: Path, text: str | None, code: int, says: str) -> None:
    path = tmp_path / "kvaffinity.toml"
    if text is not None:
        path.write_text(text)
    checked, said = await run("check", str(path))
    assert checked == code
    assert re.search(says, said)
    if code:
        assert (await run("serve", "--config", str(path))) == (code, said)


async def run(*command: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc", *command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment({}),
    )  # fmt: skip
    async with asyncio.timeout(30):
        said, _ = await process.communicate()
    return process.returncode, said.decode()


async def test_it_listens_on_a_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    async with served(tmp_path, listen="unix:ext_proc.sock") as app:
        assert mutated(await app.ask(chat(PROMPT)))
        app.process.send_signal(signal.SIGTERM)
        assert await app.ends() == 0


# ---- OTLP ----


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP trace receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    async def Export(  # the name is the service's
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[Receiver, str]]:
    receiver = Receiver()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def attributes(holder: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}


ENVOY = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CLIENT = "00-11111111111111111111111111111111-2222222222222222-01"


async def test_spans_arrive_over_otlp_under_their_parents_and_without_a_word_of_the_prompt(tmp_path: Path) -> None:
    data = chat(f"{CANARY} {PROMPT}")
    async with receiving() as (receiver, endpoint):
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        async with served(tmp_path, variables=variables) as app:
            first = await app.ask(data, ("traceparent", CLIENT), metadata=(("traceparent", ENVOY),))
            await until(lambda: len(receiver.spans()) == 1)
            await app.ask(data, ("traceparent", CLIENT))
            await app.ask(chat(CANARY)[:-2])
            app.process.send_signal(signal.SIGTERM)  # what is not sent yet is sent at the end
            assert await app.ends() == 0
            assert CANARY not in app.log()
        by_envoy, by_client = receiver.spans()
        assert {each.name for each in receiver.spans()} == {"kvaffinity.route"}
        assert (by_envoy.trace_id.hex(), by_envoy.parent_span_id.hex()) == tuple(ENVOY.split("-")[1:3])
        assert (by_client.trace_id.hex(), by_client.parent_span_id.hex()) == tuple(CLIENT.split("-")[1:3])
        said = attributes(by_envoy)
        assert said["kvaffinity.node"] == node_of(first)
        assert said["kvaffinity.reason"] == "cold"
        assert said["kvaffinity.matched_tokens"] == 0
        assert said["kvaffinity.prompt_tokens"] > 900
        again = attributes(by_client)
        assert again["kvaffinity.reason"] == "locality"
        assert 0.9 < again["kvaffinity.locality"] <= 1.0
        assert 900 < again["kvaffinity.matched_tokens"] < again["kvaffinity.prompt_tokens"]
        candidates = [attributes(event) for event in by_client.events]
        assert [event.name for event in by_client.events] == ["kvaffinity.candidate"] * 2
        assert [each["kvaffinity.locality"] for each in candidates] == [again["kvaffinity.locality"], 0.0]
        assert {each["kvaffinity.node"] for each in candidates} == {"n1", "n2"}
        (resource,) = {
            attributes(each.resource)["service.name"] for r in receiver.requests for each in r.resource_spans
        }
        assert resource == "kvaffinity"
        assert not [r for r in receiver.requests if CANARY.encode() in r.SerializeToString()]


async def test_a_receiver_that_is_not_there_costs_neither_a_request_nor_the_end(tmp_path: Path) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    async with served(tmp_path, server="drain_s = 1", variables=variables) as app:
        for _ in range(20):
            assert mutated(await app.ask(chat(PROMPT)))
        await asyncio.sleep(0.3)  # an export has been tried by now
        started = time.monotonic()
        app.process.send_signal(signal.SIGTERM)
        assert await app.ends() == 0
        assert time.monotonic() - started < 5.0


async def test_it_ends_when_told_to_while_a_tokenizer_does_not_come(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "template")  # nobody writes to it
    vocabularies.make("gpt2", tmp_path / "model")
    path, pages = tmp_path / "kvaffinity.toml", f"127.0.0.1:{free_port()}"
    path.write_text(
        config(f"127.0.0.1:{free_port()}", pages, "n1")
        + f'[[models]]\nname = "o"\ntokenizer = "{tmp_path}/model"\nchat_template = "{tmp_path}/template"\n'
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc", "serve", "--config", str(path), env=environment({})
    )
    try:

        async def answers() -> bool:
            try:
                async with aiohttp.ClientSession() as http, http.get(f"http://{pages}/healthz") as answer:
                    return answer.status == 503
            except aiohttp.ClientError:
                return False

        await until(answers, timeout_s=60)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


async def test_a_model_with_a_tokenizer_is_keyed_and_said_to_be(tmp_path: Path) -> None:
    directory = vocabularies.make("qwen2", tmp_path / "model")
    async with served(tmp_path, model=f'tokenizer = "{directory}"\n') as app:
        for _ in range(2):
            await app.ask(chat(PROMPT))
        state = json.loads(await app.page("/healthz"))["models"]["m"]
        assert (state["tokens"], state["tokenizer"], state["fault"]) == ("exact", "fast", None)
        page = await app.page()
        assert 'kvaffinity_requests_total{pool="m",reason="locality",tokens="exact"} 1.0' in page
        assert 'kvaffinity_pool_fault{pool="m"} 0.0' in page


async def test_nodes_come_and_go_with_a_file(tmp_path: Path) -> None:
    listed = tmp_path / "nodes.toml"
    source = f'[[models.sources]]\nfrom = "file"\npath = "{listed}"\nkeep_s = 1.0\n'
    async with served(tmp_path, model=source, nodes=()) as app:
        assert CLUSTER not in mutated(await app.ask(chat(PROMPT)))
        for name in ("one", "two"):
            fresh = tmp_path / "fresh"
            fresh.write_text(f'nodes = [{{ address = "10.0.0.1:8000", name = "{name}" }}]\n')
            fresh.replace(listed)

            async def routed(name: str = name) -> bool:
                return mutated(await app.ask(chat(PROMPT))).get(CLUSTER) == name

            await until(routed, timeout_s=30)
        (state,) = json.loads(await app.page("/healthz"))["sources"]["m"]
        assert (state["nodes"], state["error"]) == (1, None)
        app.path.write_text(app.path.read_text() + "\n")
        app.process.send_signal(signal.SIGHUP)
        await until(lambda: "configuration reloaded" in app.log())
        assert mutated(await app.ask(chat(PROMPT)))[CLUSTER] == "two"  # a reload takes away nothing that was found
        listed.unlink()

        async def gone() -> bool:
            return CLUSTER not in mutated(await app.ask(chat(PROMPT)))

        await until(gone, timeout_s=30)
