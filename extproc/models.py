"""Tokenizers and templates of the models: loaded in the background, tested against themselves, and reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from extproc.config import Config, ModelConfig
from extproc.core.prefix_map import PrefixMap
from extproc.core.types import HASH_BYTES
from extproc.reader import Reader
from extproc.reading import Passed, Phases, Reading, Unkeyed
from extproc.tokens.encoder import Encoder
from extproc.tokens.files import find
from extproc.tokens.growth import Growth
from extproc.tokens.memo import Memo
from extproc.tokens.template_files import Templates
from extproc.tokens.tokenizer import Tokenizer
from extproc.wire.envoy_pb2 import HttpBody, HttpHeaders, ProcessingRequest, ProtocolConfiguration
from extproc.wire.exchange import Exchange

log = logging.getLogger(__name__)

_TEST_S = 3600.0
_RETRY_S = 60.0
_TEST_DEADLINE_S = 10.0

_QUESTION = "What is the weight of the moon, and what would it be worth in cheese? " * 40
_TURNS = [
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": "About 7.3e22 kg, and far too much. " * 10},
    {"role": "user", "content": "And of the sun?"},
]
_TEXT = {"prompt": _QUESTION}


class Models:
    """Keeps `reader.encoders` as the configuration wants them."""

    def __init__(self, reader: Reader, memo: Memo, *, clock: Callable[[], float], now: Callable[[], datetime]) -> None:
        """`now`: local time, for templates that write the date."""
        self._reader = reader
        self._load = partial(load_encoder, memo=memo, clock=clock, now=now)
        self._wanted: dict[str, ModelConfig] = {}
        self._loaded: dict[str, tuple[object, ...]] = {}
        self._faults = reader.faults
        self._wake, self._settled = asyncio.Event(), asyncio.Event()

    def want(self, config: Config) -> None:
        """Take a new configuration; `run` makes it so."""
        self._wanted = {model.name: model for model in config.models}
        for name in [name for name in self._loaded if self._source(name) != self._loaded[name]]:
            del self._loaded[name], self._reader.interpreter.encoders[name]
            self._faults.pop(name, None)
        for name in self._faults.keys() - self._wanted.keys():
            del self._faults[name]
        self._wake.set()

    def _source(self, name: str) -> tuple[object, ...] | None:
        model = self._wanted.get(name)
        if model is None or model.tokenizer is None:
            return None
        kwargs = json.dumps(model.chat_template_kwargs)
        return (
            model.tokenizer,
            model.tokenizer_revision,
            model.follow_tokenizer_class,
            model.chat_template,
            kwargs,
        )

    async def load(self) -> bool:
        """Load what is wanted and not there, in a thread; True when something was. What fails is tried again at the
        next call."""
        any_loaded = False
        for name, model in list(self._wanted.items()):
            source = self._source(name)
            if source is None or name in self._loaded:
                continue
            try:
                encoder = await _in_daemon(partial(self._load, model))
            except (
                Exception
            ) as error:  # what libraries raise at a broken file or a hub that is away is theirs to choose
                self._faults[name] = f"{Unkeyed.TOKENIZER}: {error}"
                log.warning("pool %s: prompts are routed by load alone: %s", name, error)
                continue
            if self._source(name) == source:  # the configuration may have changed meanwhile
                self._loaded[name] = source
                self._reader.interpreter.encoders[name] = encoder
                self._faults.pop(name, None)
                log.info("pool %s: %s", name, ", ".join(f"{key}: {value}" for key, value in encoder.status().items()))
                any_loaded = True
        return any_loaded

    async def test(self) -> None:
        """Send a known prompt twice through every pool's reading, and a conversation that goes on."""
        for name in list(self._wanted):
            if self._source(name) is not None and name not in self._loaded:
                continue
            found = await self_test(self._reader, name)
            if found is None:
                self._faults.pop(name, None)
            else:
                self._faults[name] = f"self-test: {found}"
                log.error("pool %s: self-test: %s", name, found)

    async def run(self) -> None:
        """For ever: loads what is wanted, tries again every minute what failed, tests every hour."""
        loop = asyncio.get_running_loop()
        test_at_s = loop.time()
        while True:
            self._wake.clear()
            if await self.load() or loop.time() >= test_at_s:
                await self.test()
                test_at_s = loop.time() + _TEST_S
            self._settled.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._wake.wait()

    async def settled(self, timeout_s: float) -> None:
        """Wait until everything was tried once, but no longer than this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()

    def status(self) -> dict[str, dict[str, object]]:
        """For the health page: what each pool's blocks are made of, and what is wrong with that."""
        encoders = self._reader.interpreter.encoders
        return {
            name: {
                "tokens": "approximate" if model.tokenizer is None else "exact" if name in encoders else "none",
                **(encoders[name].status() if name in encoders else {}),
                "fault": self._faults.get(name),
            }
            for name, model in self._wanted.items()
        }


async def _in_daemon(work: Callable[[], Encoder]) -> Encoder:
    """Wait for a thread that the process does not wait for when it ends: a hub may keep it for ever."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Encoder] = loop.create_future()

    def set_unless_cancelled(settle: Callable[[Any], None], value: Any) -> None:
        if not done.cancelled():
            settle(value)

    def run() -> None:
        settle: Callable[[Any], None] = done.set_result
        try:
            value: Any = work()
        except Exception as error:
            settle, value = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_unless_cancelled, settle, value)

    threading.Thread(target=run, name="load a tokenizer", daemon=True).start()
    return await done


def load_encoder(model: ModelConfig, memo: Memo, *, clock: Callable[[], float], now: Callable[[], datetime]) -> Encoder:
    """The tokenizer and the templates of a model. ValueError or OSError says what is missing or broken."""
    assert model.tokenizer is not None
    files = find(model.tokenizer, revision=model.tokenizer_revision)
    source = files.chat_template
    if model.chat_template is not None:
        source = Path(model.chat_template).read_text(encoding="utf-8")
    tokenizer, growth = Tokenizer.load(files, by_class=model.follow_tokenizer_class), None
    if source is not None or "chat_template" in files.config:
        templates = Templates.from_files(
            files.config,
            source,
            special_tokens_map=files.special_tokens,
            now=now,
            clock=clock,
            defaults=model.chat_template_kwargs,
        )
        growth = Growth(templates, tokenizer.last_fence, clock)
    return Encoder(tokenizer, growth, memo)


async def self_test(reader: Reader, pool: str) -> str | None:
    """Does a known prompt match itself on its way from bytes to blocks, and is a conversation that goes on what it is
    when read anew? None (as well when there was no time to find out), or what is wrong."""
    encoder = reader.interpreter.encoders.get(pool)
    chat = encoder is None or encoder.growth is not None
    prompts = [{"messages": _TURNS[:1]}, {"messages": _TURNS[:1]}, {"messages": _TURNS}] if chat else [_TEXT, _TEXT]
    try:
        first, again, *longer = [await _read(reader, pool, prompt, chat=chat) for prompt in prompts]
    except _Busy:
        return None
    except (Passed, ValueError) as error:
        return f"a prompt cannot be read: {error}"
    chains, others = first.request().chains, again.request().chains
    for size in chains.keys() & others.keys():  # a scrape may have told another size meanwhile
        held = PrefixMap()
        held.add_node("node", 1 << 20)
        held.store("node", chains[size], now=0.0)
        if not chains[size] or held.match(others[size]) != {"node": len(chains[size]) // HASH_BYTES}:
            return "a prompt does not match itself"
    for each in longer:
        if each.job is not None and not await asyncio.to_thread(each.job.encoder.check, each.job):
            return "a conversation that goes on is not what it is when read anew"
    return None if chains else "a prompt has no blocks"


class _Busy(Exception):
    """The prompt was not read to its end."""


async def _read(reader: Reader, pool: str, prompt: dict[str, Any], *, chat: bool) -> Reading:
    """As if Envoy had sent it."""
    body = json.dumps({"model": pool, **prompt}).encode()
    headers = HttpHeaders()
    path = b"/v1/chat/completions" if chat else b"/v1/completions"
    headers.headers.headers.add(key=":path", raw_value=path)
    exchange, phases = Exchange(head_bytes=len(body) + 1), Phases()
    mode = ProtocolConfiguration(request_body_mode=ProtocolConfiguration.BUFFERED)
    exchange.receive(ProcessingRequest(request_headers=headers, protocol_config=mode))
    exchange.receive(ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True)))
    reading = await reader.begin(exchange, phases)
    reading.until_s += _TEST_DEADLINE_S
    await reader.finish(reading, phases)
    if phases.unkeyed is not None:
        raise ValueError(f"cause {phases.unkeyed}")
    if phases.cut is not None:
        raise _Busy
    return reading
