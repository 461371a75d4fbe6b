"""The simulated node: an OpenAI-compatible HTTP server over the simulated engine, with vLLM's metric names."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import click
import msgspec
from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from extproc.lab.engine import TOKEN_BYTES, Engine, Job, Refusal
from extproc.lab.openai import Answer, ChatBody, CompletionBody, error

MAX_BODY_BYTES = 256 * 1024 * 1024
LABELS = ("engine", "model_name")
REFUSALS = {"never fits": (400, "BadRequestError"), "queue full": (503, "ServiceUnavailableError")}
# vLLM's own buckets of vllm:time_to_first_token_seconds
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)


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


class Meters:
    """What the node counts, in a registry of its own and under vLLM's names."""

    def __init__(self, settings: NodeSettings, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        values = ("0", settings.model)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"vllm:{name}", text, LABELS, registry=self.registry).labels(*values).set_function(value)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, LABELS, registry=self.registry).labels(*values)

        cache = engine.cache
        gauge("num_requests_running", "Number of requests in model execution batches.", lambda: engine.running)
        gauge("num_requests_waiting", "Number of requests waiting to be processed.", lambda: engine.waiting)
        gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda: cache.in_use / cache.usable)
        self.queries = counter("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.")
        self.hits = counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        self.prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.cached_tokens = counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).")
        self.generated = counter("generation_tokens", "Number of generation tokens processed.")
        ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            LABELS,
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.ttft_s = ttft.labels(*values)
        finished = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.finished = {reason: finished.labels(*values, reason) for reason in ("stop", "length", "abort", "error")}
        config = {
            "engine": "0",
            "block_size": str(settings.block_tokens),
            "num_gpu_blocks": str(settings.blocks),
            "kv_cache_size_tokens": str(settings.blocks * settings.block_tokens),
            "enable_prefix_caching": "True",
        }
        info = Gauge(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", config, registry=self.registry
        )
        info.labels(**config).set(1)


class Node:
    """The HTTP handlers of one simulated node."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.engine = Engine(
            blocks=settings.blocks,
            block_tokens=settings.block_tokens,
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
            decode_s=settings.decode_s,
            max_running=settings.max_running,
            max_queue=settings.max_queue,
        )
        self.meters = Meters(settings, self.engine)

    def application(self) -> web.Application:
        """Serve it with `handler_cancellation=True`: that is how a handler learns that its client left."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat_completions),
                web.post("/v1/completions", self.completions),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
            ]
        )
        app.on_response_prepare.append(self._name_node)
        return app

    async def _name_node(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-kvaffinity-node"] = self.settings.name

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, ChatBody)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CompletionBody)

    async def models(self, _: web.Request) -> web.Response:
        card = {
            "id": self.settings.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.settings.model,
            "max_model_len": self.engine.capacity_tokens,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0+simulated"})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.meters.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """409 while a request runs, where vLLM answers 200 and does nothing: a test should hear of it."""
        if self.engine.cache.reset():
            return web.Response()
        return error(409, "ConflictError", "Requests are running: the prefix cache was not reset.")

    async def _generate(self, request: web.Request, kind: type[ChatBody | CompletionBody]) -> web.StreamResponse:
        raw = await request.read()
        sha256 = {"x-body-sha256": hashlib.sha256(raw).hexdigest()}
        try:
            body = msgspec.json.decode(raw, type=kind)
        except msgspec.MsgspecError as fault:
            return error(400, "BadRequestError", str(fault), sha256)
        if body.model not in (None, self.settings.model):
            return error(404, "NotFoundError", f"The model `{body.model}` does not exist.", sha256)
        job = self.engine.submit(body.prompt_text(), body.answer_tokens, salt=body.cache_salt or "")
        if isinstance(job, Refusal):
            status, name = REFUSALS[job.reason]
            return error(status, name, job.message, sha256)
        finished = "abort"
        try:
            response = await self._answer(request, body, job, sha256)
            finished = "length"
            return response
        finally:
            self.engine.finish(job)
            self.meters.finished[finished].inc()

    async def _answer(
        self, request: web.Request, body: ChatBody | CompletionBody, job: Job, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        answer = Answer(self.settings.model, isinstance(body, ChatBody))
        async with aclosing(self._metered(job)) as tokens:
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

    async def _metered(self, job: Job) -> AsyncGenerator[str]:
        meters, submitted_at, first = self.meters, time.perf_counter(), True
        async with aclosing(self.engine.tokens(job)) as tokens:
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
    click.echo(f"{settings.name}: {settings.model} on {settings.host}:{settings.port}", err=True)
    web.run_app(
        Node(settings).application(),
        host=settings.host,
        port=settings.port,
        handler_cancellation=True,
        keepalive_timeout=3600.0,  # a proxy that reuses its connections should never meet one that is just being closed
        shutdown_timeout=0.5,
        access_log=None,
        print=None,
    )


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
) -> None:
    """Run a simulated node: an OpenAI-compatible server with a real prefix cache."""
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
        )
    )


if __name__ == "__main__":
    node()
