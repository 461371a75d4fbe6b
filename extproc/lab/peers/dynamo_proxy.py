"""A reverse proxy whose choices are those of Dynamo's own selection engine. Runs in Dynamo's environment, by path.

Usage: dynamo_proxy.py PORT MODEL BLOCK_TOKENS BLOCKS NODE_URL...
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
from aiohttp import web

TOKEN_BYTES = 4


def token_ids(body: dict[str, Any]) -> list[int]:
    """A chat as the simulated node reads it: each role and text filled up to whole tokens of 4 bytes."""
    pieces = [piece for message in body["messages"] for piece in (f"<|{message['role']}|>", message["content"])]
    data = b""
    for piece in (*pieces, "<|assistant|>"):
        data += piece.encode()
        data += b" " * (-len(data) % TOKEN_BYTES)
    return memoryview(data).cast("I").tolist()


class Proxy:
    """Asks the engine where each chat goes, tells it when the prompt is computed and when all is said."""

    def __init__(self, model: str, block_tokens: int, blocks: int, urls: list[str]) -> None:
        self._model = model
        self._workers = [
            {
                "worker_id": number,
                "model_name": model,
                "endpoint": url,
                "block_size": block_tokens,
                "total_kv_blocks": blocks,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
            }
            for number, url in enumerate(urls, start=1)
        ]

    async def lifetime(self, _: web.Application) -> AsyncGenerator[None]:
        from dynamo._core import SelectionService  # type: ignore[import-not-found]  # only in its own environment

        self._service = SelectionService(indexer_threads=1)
        for worker in self._workers:
            await self._service.upsert_worker(worker)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._http:
            yield
        self._service.shutdown()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        name = uuid.uuid4().hex
        chosen = await self._service.select_and_reserve(
            {"selection_id": name, "model_name": self._model, "token_ids": token_ids(json.loads(raw))}
        )
        try:
            return await self._forward(request, raw, chosen["endpoint"], name)
        finally:
            await self._service.free_reservation(name)

    async def _forward(self, request: web.Request, raw: bytes, url: str, name: str) -> web.StreamResponse:
        headers = {"content-type": "application/json"}
        async with self._http.post(url + request.path, data=raw, headers=headers) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers["content-type"]}
            )
            await response.prepare(request)
            computed = False
            async for chunk in answer.content.iter_any():  # the headers come before prefill, the first chunk after it
                if not computed:
                    computed = True
                    await self._service.prefill_complete(name)
                await response.write(chunk)
            await response.write_eof()
            return response


async def health(_: web.Request) -> web.Response:
    return web.Response()


def main(port: str, model: str, block_tokens: str, blocks: str, *urls: str) -> None:
    proxy = Proxy(model, int(block_tokens), int(blocks), list(urls))
    app = web.Application(client_max_size=1 << 28)
    app.cleanup_ctx.append(proxy.lifetime)
    app.add_routes([web.post("/v1/chat/completions", proxy.chat), web.get("/health", health)])
    web.run_app(app, host="127.0.0.1", port=int(port), access_log=None, print=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
