"""What we make of a request: from bytes, by way of the application's own parts, to blocks and to a prediction."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Executor
from datetime import datetime
from pathlib import Path

import msgspec
from corpus import MODEL

from extproc.app import apply_pools, reading_settings_of
from extproc.config import Config
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.types import InferenceRequest, Ticket
from extproc.models import load_encoder
from extproc.reader import Reader
from extproc.reading import Interpreter, Phases
from extproc.tokens.memo import Memo
from extproc.wire.envoy_pb2 import HttpBody, HttpHeaders, ProcessingRequest, ProtocolConfiguration
from extproc.wire.exchange import Exchange

_BUFFERED = ProtocolConfiguration(request_body_mode=ProtocolConfiguration.BUFFERED)


class Ours:
    """A pool of one node, as the configuration makes it, no haste; exact with the tokenizer of a directory."""

    def __init__(
        self,
        directory: Path | None,
        threads: Executor,
        *,
        block_tokens: int,
        cache_tokens: int = 1_000_000,
        adapters: Iterable[str] = (),
    ) -> None:
        model = {
            "name": MODEL,
            "tokenizer": None if directory is None else str(directory),
            "adapters": [*adapters],
            "block_tokens": block_tokens,
            "cache_tokens": cache_tokens,
            "nodes": [{"name": "node", "address": "127.0.0.1:1", "cluster": "node"}],
        }
        config = msgspec.convert({"models": [model], "server": {"decide_s": 60.0}}, Config)
        pools: dict[str, Pool] = {}
        apply_pools(pools, config)
        self._router = Router(pools, ticket_ttl_s=600.0, ticket_prefix="t-")
        settings = reading_settings_of(config, salt=1)
        self._reader = Reader(Interpreter(pools, settings), threads, threads, time.monotonic)
        self._exact = directory is not None
        if self._exact:
            self._reader.interpreter.encoders[MODEL] = load_encoder(
                config.models[0], Memo(config.server.memo_bytes), clock=time.monotonic, now=datetime.now
            )

    async def read(self, path: str, body: bytes) -> InferenceRequest:
        """The request as the router gets it, with every block of its prompt. ValueError: it has no exact ones."""
        exchange, phases = Exchange(head_bytes=len(body) + 1), Phases()
        headers = HttpHeaders()
        headers.headers.headers.add(key=":path", raw_value=path.encode())
        exchange.receive(ProcessingRequest(request_headers=headers, protocol_config=_BUFFERED))
        exchange.receive(ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True)))
        phases.collected_s = time.monotonic()
        reading = await self._reader.begin(exchange, phases)
        await self._reader.finish(reading, phases)
        if phases.unkeyed is not None or phases.cut is not None or reading.exact is not self._exact:
            raise ValueError(f"no blocks: {phases.unkeyed or phases.cut or 'not exact'}")
        return reading.request()

    def route(self, request: InferenceRequest) -> int:
        """How many tokens of the prompt the node holds, as we believe; from now on it holds all of it."""
        ticket = self._router.route(request, now=time.monotonic())
        assert isinstance(ticket, Ticket)
        return ticket.decision.chosen.matched_tokens

    def faults(self) -> int:
        """Conversations that were found to be continued wrongly."""
        return self._reader.interpreter.encoders[MODEL].mismatches
