"""The simulated node: an OpenAI-compatible HTTP server over simulated engines, with vLLM's metrics and KV events."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import click
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from extproc.lab.engine import TOKEN_BYTES, Engine, Job, Refusal
from extproc.lab.kv_publisher import Faults, Feed, KvPublisher
from extproc.lab.meters import Meters, RankMeters
from extproc.lab.openai import Answer, ChatBody, CompletionBody, error
from extproc.lab.prompts import Prompts

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_BODY_BYTES = 256 * 1024 * 1024
REFUSALS = {"never fits": (400, "BadRequestError"), "queue full": (503, "ServiceUnavailableError")}


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """How one simulated node behaves."""

    name: str
    host: str
    port: int
    model: str
    blocks: int = 4096
    block_tokens: int = 16
    prefill_tokens_per_s: float = 8000.0
    decode_s: float = 0.01  # for each output token
    max_running: int = 16
    max_queue: int = 1024
    feed: Feed | None = None
    data_parallel_size: int = 1
    adapters: tuple[str, ...] = ()
    """LoRA adapters, which requests name as their model."""
    max_loras: int = 1  # told, not enforced
    tokenizer: str | None = None  # a directory


@dataclass(frozen=True, slots=True)
class Rank:
    """One data-parallel rank: a cache of its own behind the same address."""

    engine: Engine
    meters: RankMeters
    publisher: KvPublisher | None


class Node:
    """The HTTP handlers of one simulated node."""

    def __init__(self, settings: NodeSettings) -> None:
        """ValueError or OSError: the tokenizer is no good, or the feed has no place for each rank."""
        self.settings = settings
        self._prompts = None if settings.tokenizer is None else Prompts(settings.tokenizer)
        self._faults = [Faults()] * settings.data_parallel_size
        self._turn = itertools.cycle(range(settings.data_parallel_size))
        self._answering: dict[Job, web.Request] = {}
        self._open = AsyncExitStack()
        self._start()

    def _start(self) -> None:
        """With nothing in the caches, all counters at zero, and events numbered from 0."""
        settings, sizes = self.settings, range(self.settings.data_parallel_size)
        publishers = [
            None
            if settings.feed is None
            else KvPublisher(
                settings.feed.of_rank(rank),
                rank=rank,
                block_tokens=settings.block_tokens,
                adapters=settings.adapters,
                faults=self._faults[rank],
            )
            for rank in sizes
        ]
        engines = [
            Engine(
                blocks=settings.blocks,
                block_tokens=settings.block_tokens,
                prefill_tokens_per_s=settings.prefill_tokens_per_s,
                decode_s=settings.decode_s,
                max_running=settings.max_running,
                max_queue=settings.max_queue,
                voice=None if self._prompts is None else self._prompts.voice,
                publish=None if publisher is None else publisher.publish,
            )
            for publisher in publishers
        ]
        self._meters = Meters(
            engines,
            model=settings.model,
            blocks=settings.blocks,
            block_tokens=settings.block_tokens,
            started_at_s=time.time(),
            max_loras=settings.max_loras if settings.adapters else None,
        )
        self.ranks = [Rank(*each) for each in zip(engines, self._meters.ranks, publishers, strict=True)]

    async def _lifetime(self, _: web.Application) -> AsyncGenerator[None]:
        await self._open_feed()
        yield
        await self._open.aclose()

    async def _open_feed(self) -> None:
        for rank in self.ranks:
            if rank.publisher is not None:
                await self._open.enter_async_context(rank.publisher)

    def application(self) -> web.Application:
        """Serve it with `handler_cancellation=True`: that is how a handler learns that its client left."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post(CHAT, self.chat_completions),
                web.post(COMPLETIONS, self.completions),
                web.post(f"{CHAT}/render", self.render),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
                web.get("/kv_event_sources", self.kv_event_sources),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.post("/restart", self.restart),
                web.post("/fault", self.fault),
            ]
        )
        app.cleanup_ctx.append(self._lifetime)
        app.on_response_prepare.append(self._name_node)
        return app

    async def _name_node(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-kvaffinity-node"] = self.settings.name

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, ChatBody)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CompletionBody)

    async def render(self, request: web.Request) -> web.Response:
        """The token ids of a chat: what vLLM's router asks for before it routes one."""
        raw = await request.read()
        try:
            prompt = self._prompt(CHAT, raw, msgspec.json.decode(raw, type=ChatBody))
        except ValueError as fault:  # msgspec's errors are among them
            return error(400, "BadRequestError", str(fault))
        rendered = {"token_ids": memoryview(prompt).cast("I").tolist(), "sampling_params": {}}
        return web.Response(body=msgspec.json.encode(rendered), content_type="application/json")

    async def models(self, _: web.Request) -> web.Response:
        names, parent = (self.settings.model, *self.settings.adapters), self.settings.model
        cards = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": name,
                "parent": None if name == parent else parent,
                "max_model_len": self.ranks[0].engine.capacity_tokens,
            }
            for name in names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0+simulated"})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._meters.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        publishers = [rank.publisher for rank in self.ranks]
        return web.json_response({str(rank): each.feed.described() for rank, each in enumerate(publishers) if each})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """409 while a request runs, where vLLM answers 200 and does nothing: a test should hear of it."""
        if any(rank.engine.running for rank in self.ranks):
            return error(409, "ConflictError", "Requests are running: the prefix cache was not reset.")
        for rank in self.ranks:
            rank.engine.reset()
        return web.Response()

    async def restart(self, _: web.Request) -> web.Response:
        """As if the process had been killed and started again: no request in hand is answered, the sockets of the feed
        close, then all begins anew. The faults stay."""
        for request in self._answering.values():
            if request.transport is not None:
                request.transport.abort()
        before, self._open = self._open, AsyncExitStack()
        self._start()  # first, so that whoever asks in between is answered by the new one
        await before.aclose()
        await self._open_feed()
        return web.Response()

    async def fault(self, request: web.Request) -> web.Response:
        """Break the event feed, or put it in order again (an empty object); see Faults for the body."""
        try:
            faults = msgspec.json.decode(await request.read(), type=Faults)
            for number in range(len(self.ranks)) if faults.rank is None else [faults.rank]:
                self._faults[number] = faults
                if (publisher := self.ranks[number].publisher) is not None:
                    publisher.faults = faults
        except (msgspec.MsgspecError, IndexError) as wrong:
            return error(400, "BadRequestError", str(wrong))
        return web.Response()

    async def _generate(self, request: web.Request, kind: type[ChatBody | CompletionBody]) -> web.StreamResponse:
        raw = await request.read()
        sha256 = {"x-body-sha256": hashlib.sha256(raw).hexdigest()}
        try:
            body = msgspec.json.decode(raw, type=kind)
            lora = body.model if body.model in self.settings.adapters else None
            if body.model not in (None, self.settings.model, lora):
                return error(404, "NotFoundError", f"The model `{body.model}` does not exist.", sha256)
            rank = self._rank(request.headers.get("x-data-parallel-rank"))
            prompt = self._prompt(request.path, raw, body)
        except ValueError as fault:  # msgspec's errors are among them
            return error(400, "BadRequestError", str(fault), sha256)
        job = rank.engine.submit(prompt, body.answer_tokens, salt=body.cache_salt or "", lora=lora)
        if isinstance(job, Refusal):
            status, name = REFUSALS[job.reason]
            return error(status, name, job.message, sha256)
        finished = "abort"
        self._answering[job] = request
        try:
            response = await self._answer(request, body, rank, job, sha256)
            finished = "length"
            return response
        finally:
            del self._answering[job]
            rank.engine.finish(job)
            rank.meters.finished[finished].inc()

    def _prompt(self, path: str, raw: bytes, body: ChatBody | CompletionBody) -> bytes:
        return body.prompt_text() if self._prompts is None else self._prompts.read(path, raw)

    def _rank(self, pinned: str | None) -> Rank:
        """The rank that the request's header names, else each in turn; what is no number names none."""
        try:
            number = next(self._turn) if pinned is None else int(pinned)
        except ValueError:
            number = next(self._turn)
        if not 0 <= number < len(self.ranks):
            raise ValueError(f"data_parallel_rank {number} is out of range [0, {len(self.ranks)}).")
        return self.ranks[number]

    async def _answer(
        self, request: web.Request, body: ChatBody | CompletionBody, rank: Rank, job: Job, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        answer = Answer(body.model or self.settings.model, isinstance(body, ChatBody))
        async with aclosing(_metered(rank, job)) as tokens:
            if not body.stream:
                text = "".join([token async for token in tokens])
                return web.json_response(answer.whole(text, job), headers=headers)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)  # the headers go out now, long before the first token
            left, before = len(job.answer) // TOKEN_BYTES, answer.role_chunk()
            async for token in tokens:
                left -= 1
                await response.write(before + answer.chunk(token, last=left == 0))
                before = b""
            if body.stream_options is not None and body.stream_options.include_usage:
                await response.write(answer.usage_chunk(job))
            await response.write(b"data: [DONE]\n\n")
            return response


async def _metered(rank: Rank, job: Job) -> AsyncGenerator[str]:
    meters, submitted_at, first = rank.meters, time.perf_counter(), True
    async with aclosing(rank.engine.tokens(job)) as tokens:
        async for token in tokens:
            if first:
                first = False
                meters.ttft_s.observe(time.perf_counter() - submitted_at)
                meters.queries.inc(job.prompt_tokens)
                meters.hits.inc(job.cached_tokens)
                meters.prompt_tokens.inc(job.prompt_tokens)
                meters.cached_tokens.inc(job.cached_tokens)
            meters.generated.inc()
            yield token


def run_node(settings: NodeSettings) -> None:
    """Serve until SIGINT or SIGTERM."""
    try:
        application = Node(settings).application()
        click.echo(f"{settings.name}: {settings.model} on {settings.host}:{settings.port}", err=True)
        web.run_app(
            application,
            host=settings.host,
            port=settings.port,
            handler_cancellation=True,
            keepalive_timeout=3600.0,  # a proxy that reuses its connections should never meet one that is being closed
            shutdown_timeout=0.5,
            access_log=None,
            print=None,
        )
    except (ValueError, OSError) as fault:
        raise click.ClickException(str(fault)) from fault


@click.command()
@click.option("--name", default="node", show_default=True, help="What x-kvaffinity-node says.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=int, required=True)
@click.option("--model", default="tiny", show_default=True)
@click.option("--blocks", type=click.IntRange(min=2), default=4096, show_default=True, help="Size of the KV cache.")
@click.option("--block-tokens", type=click.IntRange(min=1), default=16, show_default=True)
@click.option(
    "--prefill-rate", type=click.FloatRange(min=0, min_open=True), default=8000.0, show_default=True, help="Tokens/s."
)
@click.option(
    "--decode-ms", type=click.FloatRange(min=0), default=10.0, show_default=True, help="For each output token."
)
@click.option("--max-running", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--max-queue", type=click.IntRange(min=1), default=1024, show_default=True, help="Beyond it: 503.")
@click.option("--kv-events", help="Publish KV events there: tcp://host:port; rank r has port + r.")
@click.option("--kv-replay", help="Replay them there; several ranks need as many ports between the two.")
@click.option("--kv-topic", default="", show_default=True)
@click.option("--kv-connect", is_flag=True, help="Connect to --kv-events instead of binding it.")
@click.option("--data-parallel-size", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks.")
@click.option("--adapter", "adapters", multiple=True, help="A LoRA adapter that requests may name as their model.")
@click.option("--max-loras", type=click.IntRange(min=1), default=1, show_default=True, help="What the metrics say.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False),
    help="Directory of the model's tokenizer and chat template. Without: 4 bytes are a token.",
)
def node(
    name: str,
    host: str,
    port: int,
    model: str,
    blocks: int,
    block_tokens: int,
    prefill_rate: float,
    decode_ms: float,
    max_running: int,
    max_queue: int,
    kv_events: str | None,
    kv_replay: str | None,
    kv_topic: str,
    kv_connect: bool,
    data_parallel_size: int,
    adapters: tuple[str, ...],
    max_loras: int,
    tokenizer: str | None,
) -> None:
    """Run a simulated node: an OpenAI-compatible server with a real prefix cache, and vLLM's metrics and KV events."""
    if kv_replay is not None and kv_events is None:
        raise click.UsageError("--kv-replay needs --kv-events")
    run_node(
        NodeSettings(
            name=name,
            host=host,
            port=port,
            model=model,
            blocks=blocks,
            block_tokens=block_tokens,
            prefill_tokens_per_s=prefill_rate,
            decode_s=decode_ms / 1000,
            max_running=max_running,
            max_queue=max_queue,
            feed=None if kv_events is None else Feed(kv_events, kv_replay, kv_topic, kv_connect),
            data_parallel_size=data_parallel_size,
            adapters=adapters,
            max_loras=max_loras,
            tokenizer=tokenizer,
        )
    )


if __name__ == "__main__":
    node()
