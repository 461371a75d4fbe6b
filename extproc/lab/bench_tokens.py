"""What it costs to get from a request's bytes to the engine's blocks, beside a router that remembers nothing.

One process; its result is JSON on the standard output. Prompts are Python's own sources in chat messages. The baseline
parses, renders and tokenizes the whole prompt with `tokenizers` for every request, as routers do that keep no memo.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from tokenizers import Tokenizer

from extproc.app import SWITCH_S, apply_pools, reading_settings_of
from extproc.config import Config, ModelConfig
from extproc.core.blocks import block_hashes
from extproc.core.pool import Pool
from extproc.lab import vocabulary
from extproc.lab.bench_core import BLOCK_TOKENS, MODEL, Stopwatch, Timing
from extproc.models import load_encoder
from extproc.reader import Reader
from extproc.reading import Interpreter, Phases
from extproc.tokens.encoder import Encoder
from extproc.tokens.memo import Memo
from extproc.wire.envoy_pb2 import HttpBody, HttpHeaders, ProcessingRequest, ProtocolConfiguration
from extproc.wire.exchange import Exchange
from extproc.wire.requests import parse, read
from extproc.wire.requests.openai import exact_chat_completions

CONVERSATIONS = {32_768: (60, 2_200), 87_000: (200, 1_800)}
"""Tokens, about: messages, and the characters of each."""
COLD_BYTES = (16_000, 400_000)
_PROBE_S = 0.0005

Message = dict[str, str]


class _Source:
    """Text without end, never the same twice in a row."""

    def __init__(self) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
        self._at = 0

    def take(self, characters: int) -> str:
        at = self._at = (self._at + 7919) % (len(self._text) - characters)
        return self._text[at : at + characters]


class _Reading:
    """The server's way from bytes to blocks, and the baseline's."""

    def __init__(self, encoder: Encoder, directory: Path, threads: ThreadPoolExecutor) -> None:
        config = Config(models=(ModelConfig(name=MODEL, tokenizer=str(directory), block_tokens=BLOCK_TOKENS),))
        pools: dict[str, Pool] = {}
        apply_pools(pools, config)
        self.encoder = encoder
        self.reader = Reader(Interpreter(pools, reading_settings_of(config, salt=1)), threads, threads, time.monotonic)
        self.reader.interpreter.encoders[MODEL] = encoder
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    async def ours(self, data: bytes) -> int:
        """Tokens of the prompt."""
        headers = HttpHeaders()
        headers.headers.headers.add(key=":path", raw_value=b"/v1/chat/completions")
        exchange = Exchange(head_bytes=1 << 20)
        mode = ProtocolConfiguration(request_body_mode=ProtocolConfiguration.BUFFERED)
        exchange.receive(ProcessingRequest(request_headers=headers, protocol_config=mode))
        exchange.receive(ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=True)))
        phases = Phases(collected_s=time.monotonic())
        reading = await self.reader.begin(exchange, phases)
        reading.until_s += 10.0
        await self.reader.finish(reading, phases)
        assert (phases.cut, phases.unkeyed) == (None, None)
        return reading.request().prompt_tokens

    async def baseline(self, data: bytes) -> int:
        prompt = read(exact_chat_completions, parse(data, cut=False)).prompt
        assert self.encoder.growth is not None
        text = self.encoder.growth.whole(prompt)  # type: ignore[arg-type]
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        block_hashes(b"".join([each.to_bytes(4, "little") for each in ids]), block_tokens=BLOCK_TOKENS, salt=1)
        return len(ids)

    async def rested(self) -> None:
        """Until nothing is checked in the background any more."""
        while self.reader.waiting_bytes:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)


def _body(messages: list[Message]) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages}, ensure_ascii=False).encode()


def _conversation(source: _Source, messages: int, characters: int) -> list[Message]:
    roles = ("system", *(("user", "assistant") * messages)[: messages - 1])
    return [{"role": role, "content": source.take(characters)} for role in roles]


def _next_turns(source: _Source, talk: list[Message], calls: int) -> Iterator[bytes]:
    """The answer to the last message, and the next message: 400 and 800 characters, never the same."""
    for _ in range(calls):
        answer = {"role": "assistant", "content": source.take(800)}
        yield _body([*talk, answer, {"role": "user", "content": source.take(400)}])


async def _timed(read: Callable[[bytes], Awaitable[int]], data: bytes, watch: Stopwatch) -> int:
    return await watch.time_async(lambda: read(data))


async def _measure(directory: Path, calls: int) -> list[Timing]:
    encoder = load_encoder(
        ModelConfig(name=MODEL, tokenizer=str(directory)), Memo(256 << 20), clock=time.monotonic, now=datetime.now
    )
    sys.setswitchinterval(SWITCH_S)
    source, timings = _Source(), []
    with ThreadPoolExecutor(1) as threads:
        reading = _Reading(encoder, directory, threads)
        for messages, characters in CONVERSATIONS.values():
            talk = _conversation(source, messages, characters)
            tokens = await reading.ours(_body(talk))
            for name, way, times in (("ours", reading.ours, calls), ("whole", reading.baseline, max(calls // 10, 3))):
                watch = Stopwatch()
                for data in _next_turns(source, talk, times):
                    await _timed(way, data, watch)
                    await reading.rested()
                timings.append(watch.timing(f"next turn of {messages} messages, {name}", tokens, None))
        for size in COLD_BYTES:
            times = max(calls // (1 if size < 100_000 else 10), 3)
            for name, way in (("ours", reading.ours), ("whole", reading.baseline)):
                watch, tokens = Stopwatch(), 0
                for _ in range(times):
                    data = _body([{"role": "user", "content": source.take(size)}])
                    tokens = await _timed(way, data, watch)
                timings.append(watch.timing(f"new prompt of {size // 1000} KB, {name}", tokens, None))
        timings.append(await _delays(reading, source, calls))
    return timings


async def _delays(reading: _Reading, source: _Source, calls: int) -> Timing:
    """How late the loop wakes a sleeper while prompts of all sizes are read by the thread."""
    watch = Stopwatch()

    async def probe() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_PROBE_S)
            watch.add(time.perf_counter() - before - _PROBE_S)

    probing = asyncio.create_task(probe())
    for number in range(calls):
        await reading.ours(_body([{"role": "user", "content": source.take((4_000, 40_000, 400_000)[number % 3])}]))
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    return watch.timing("the loop's delay while prompts are read", 0, None)


def run(tokenizer: Path | None, *, quick: bool) -> list[Timing]:
    """Measure in a fresh process, with the tokenizer of that directory or one that is made for it."""
    calls = 30 if quick else 200
    command = [sys.executable, "-m", "extproc.lab.bench_tokens", str(calls)]
    if tokenizer is not None:
        command.append(str(tokenizer))
    done = subprocess.run(command, capture_output=True, check=True)
    return [Timing(**each) for each in json.loads(done.stdout)]


def main() -> None:
    calls, *tokenizer = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(tokenizer[0]) if tokenizer else vocabulary.make(Path(folder))
        print(json.dumps([asdict(each) for each in asyncio.run(_measure(directory, int(calls)))]))


if __name__ == "__main__":
    main()
