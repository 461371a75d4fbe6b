"""From the head of a request to what the router is asked: model, blocks, work, session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from xxhash import xxh3_64_intdigest

from extproc.core.blocks import TOKEN_BYTES, beginning, extend
from extproc.core.pool import Pool
from extproc.core.prompt import Chat, Ids
from extproc.core.router import Router
from extproc.core.types import Chain, InferenceRequest
from extproc.tokens.encoder import Encoder, Job
from extproc.wire.exchange import Exchange
from extproc.wire.requests import Api, api_of, parse, read
from extproc.wire.requests.content import Content, NoContent, NotExact, name
from extproc.wire.requests.encoding import decode
from extproc.wire.requests.session import session

_SLICE_BLOCKS = 4096
"""Hashed at a time, 0.6 ms; then the loop gets a turn and the decision deadline is looked at."""

_INLINE_BYTES = 8192
"""Of text read on the loop, 0.6 ms with a fast tokenizer; more goes to a thread, which costs 0.1 ms."""
_INLINE_BYTES_SLOW = 1024


class Cause(StrEnum):
    """Why a request was passed on to Envoy's fallback route, or a stream ended without a reply."""

    UNKNOWN_PATH = "unknown_path"
    EMPTY_BODY = "empty_body"
    INVALID_BODY = "invalid_body"
    NO_MODEL = "no_model"
    UNKNOWN_MODEL = "unknown_model"
    NO_NODE = "no_node"
    ERROR = "error"
    PROTOCOL = "protocol"
    CLIENT_GONE = "client_gone"
    OVERLOADED = "overloaded"
    """`max_streams` exchanges were in hand."""


class Cut(StrEnum):
    """Why a decision was made on less than the whole prompt."""

    HEAD_BYTES = "head_bytes"
    COLLECTION_DEADLINE = "collection_deadline"
    DECISION_DEADLINE = "decision_deadline"
    NO_ROOM = "no_room"
    """All heads together reached `max_held_bytes`: decided on the headers."""
    BUSY = "busy"
    """The tokenizer had more to do than it may put off: decided on what it had seen before."""


class Unkeyed(StrEnum):
    """Why the prompt of a model with a tokenizer could not be turned into the engine's blocks."""

    TOKENIZER = "tokenizer"
    """It could not be loaded."""
    TEMPLATE = "template"
    """The chat template is missing, or refused the conversation."""
    OPTION = "option"
    """The request asks for something that changes its tokens and is not followed here."""
    API = "api"
    """How the engine reads this API is not known here."""


@dataclass(slots=True)
class Phases:
    """When the steps of one decision ended, on the router's clock; and what fell short."""

    received_s: float = 0.0
    collected_s: float = 0.0
    parsed_s: float = 0.0
    hashed_s: float = 0.0
    routed_s: float = 0.0
    cut: Cut | None = None
    unkeyed: Unkeyed | None = None
    rejected: bool = False


class Passed(Exception):
    """The request is not for us."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class ReadingSettings:
    """What reading needs of the configuration."""

    head_bytes: int
    decide_s: float
    decide_s_per_16_kib: float
    pool_of: Mapping[str, str]
    """Model name or alias to pool; "*" takes every other name."""
    adapters: frozenset[str]
    """Names that share a pool but no blocks."""
    session_hints: tuple[str, ...]
    isolate_by_header: str
    """Its value keeps prompts apart; "": nothing but what the engine keeps apart."""
    salt: int
    backlog_bytes: int
    """Of text that may wait for a thread."""


class _Plain:
    """Bytes on their way to block hashes, a slice at a time, under one or more salts."""

    def __init__(self, data: bytes, salts: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        self._data, self._sizes, self._at = data, sizes, 0
        self._slice = max(_SLICE_BLOCKS // (len(salts) * len(sizes)), 1) * min(sizes) * TOKEN_BYTES
        self._marks = [beginning(salt, sizes) for salt in salts]
        self._parts: list[list[tuple[Chain, ...]]] = [[] for _ in salts]

    def advance(self) -> bool:
        """Hash a slice; True when all is hashed."""
        data = self._data[self._at : self._at + self._slice]
        self._at += self._slice
        for i, mark in enumerate(self._marks):
            self._marks[i], chains = extend(mark, data, self._sizes)
            self._parts[i].append(chains)
        return self._at >= len(self._data)

    def chains(self) -> list[dict[int, Chain]]:
        """The hashes so far under each salt, for each block size."""
        return [
            {size: b"".join([part[i] for part in parts]) for i, size in enumerate(self._sizes)} for parts in self._parts
        ]


@dataclass(slots=True)
class Reading:
    """One request on its way to the router."""

    pool: str
    session: int | None
    most_tokens: int
    """A longer prompt fits no node: whatever a client declares, it is not counted as more work than that."""
    cut: bool
    """The head is not the whole."""
    exact: bool = False
    """The tokens are the engine's."""
    tokens: int = 0
    """Of work; of a prompt with a job what is beside it."""
    until_s: float = 0.0
    """The decision deadline."""
    plain: _Plain | None = None
    """Of a cut head under two salts, the last one being that of cut heads; under that alone in a pool that is exact."""
    job: Job | None = None
    rest: asyncio.Future[None] | None = None
    """A thread goes on with the job."""

    def request(self) -> InferenceRequest:
        """What is known by now."""
        tokens, chains, cut_chains = self.tokens, _NOTHING, None
        if self.job is not None:
            tokens, chains = tokens + self.job.tokens, self.job.chains()
        elif self.plain is not None:
            *whole, last = self.plain.chains()
            chains, cut_chains = (whole[0] if whole else _NOTHING, last) if self.cut else (last, None)
        tokens = min(tokens, self.most_tokens)
        return InferenceRequest(self.pool, tokens, chains, cut_chains, self.exact, self.session)


_NOTHING: dict[int, Chain] = {}


class Reader:
    """Reads requests; what takes long is left to `threads`."""

    def __init__(
        self, router: Router, settings: ReadingSettings, threads: Executor, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.encoders: dict[str, Encoder] = {}
        """By pool; the one of an exact pool is missing until it could be loaded."""
        self.faults: dict[str, str] = {}
        """By pool: why its tokenizer is not there, or what its self-test found."""
        self.waiting_bytes = 0
        """Of prompts that threads have not read yet."""
        self._router = router
        self._threads = threads
        self._clock = clock

    async def begin(self, exchange: Exchange, phases: Phases) -> Reading:
        """What the head says; the prompt is still to be hashed. Passed: it is not for us."""
        api = api_of(exchange.headers.get(":path", ""))
        if api is None:
            raise Passed(Cause.UNKNOWN_PATH)
        settings, body, cut = self.settings, None, True
        if phases.cut is not Cut.NO_ROOM:
            body, cut = await self._body(exchange, phases)
            if cut and phases.cut is None:
                phases.cut = Cut.HEAD_BYTES
        pool, key = self._pool(None if body is None else name(body.get("model")))
        serving = self._router.pools.get(pool)
        if serving is None:
            raise Passed(Cause.UNKNOWN_MODEL)
        hint = session(body or {}, exchange.headers, settings.session_hints)
        reading = Reading(pool, None if hint is None else self._salt(key, hint), serving.cache_tokens, cut)
        try:
            if body is None:
                reading.tokens = _declared_bytes(exchange) // TOKEN_BYTES
            elif serving.exact and not cut:
                self._read_exactly(api, body, reading, serving, key, exchange, phases)
            else:
                self._read(api, body, reading, serving, key, exchange)
        except NoContent as error:
            if not cut:
                raise Passed(Cause.INVALID_BODY) from error
            reading.tokens = _declared_bytes(exchange) // TOKEN_BYTES
        phases.parsed_s = self._clock()
        reading.until_s = phases.collected_s + settings.decide_s + settings.decide_s_per_16_kib * exchange.held / 16384
        return reading

    async def finish(self, reading: Reading, phases: Phases) -> None:
        """Hash the prompt, or as much of it as the decision deadline allows."""
        if reading.plain is not None:
            while not reading.plain.advance():
                await asyncio.sleep(0)
                if self._clock() >= reading.until_s:
                    phases.cut = Cut.DECISION_DEADLINE
                    break
        elif reading.job is not None:
            try:
                await self._run(reading, reading.job, phases)
            except ValueError:
                phases.unkeyed = Unkeyed.TEMPLATE
                reading.tokens += reading.job.tokens
                reading.job, reading.exact = None, False

    async def _run(self, reading: Reading, job: Job, phases: Phases) -> None:
        encoder = job.encoder
        if job.fresh_bytes <= (_INLINE_BYTES if encoder.tokenizer.fast else _INLINE_BYTES_SLOW):
            job.run()
        elif self.waiting_bytes + job.fresh_bytes > self.settings.backlog_bytes:
            phases.cut = Cut.BUSY
            return
        else:
            rest = self._in_thread(job.run, job.fresh_bytes)
            done, _ = await asyncio.wait((rest,), timeout=reading.until_s - self._clock())
            if not done:
                phases.cut, reading.rest = Cut.DECISION_DEADLINE, rest
                return
            rest.result()
        if job.continued and encoder.wants_check() and not self.waiting_bytes:
            self._in_thread(partial(encoder.check, job), job.text_bytes)

    def _in_thread(self, work: Callable[[], Any], size: int) -> asyncio.Future[Any]:
        self.waiting_bytes += size
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)

        def done(future: asyncio.Future[Any]) -> None:
            self.waiting_bytes -= size
            if not future.cancelled():
                future.exception()  # seen: whoever waited for it may have left

        future.add_done_callback(done)
        return future

    async def _body(self, exchange: Exchange, phases: Phases) -> tuple[Mapping[str, Any] | None, bool]:
        """The parsed head, and: is that not the whole? None: nothing can be made of the head of a cut body."""
        head, cut = exchange.head(), exchange.cut_short
        if not head and not cut:
            raise Passed(Cause.EMPTY_BODY)
        try:
            if (encoding := exchange.headers.get("content-encoding")) is not None:
                limit = self.settings.head_bytes
                decoding = self._in_thread(partial(decode, head, encoding, limit=limit, complete=not cut), len(head))
                done, _ = await asyncio.wait((decoding,), timeout=self.settings.decide_s)
                if not done:
                    phases.cut = Cut.DECISION_DEADLINE
                    return None, True
                head, cut = decoding.result()
            return parse(head, cut=cut), cut
        except NoContent as error:
            if not cut:
                raise Passed(Cause.INVALID_BODY) from error
            return None, True

    def _read(
        self, api: Api, body: Mapping[str, Any], reading: Reading, serving: Pool, key: str, exchange: Exchange
    ) -> None:
        content = read(api.canonical, body)
        salt, sizes = self._content_salt(key, content, exchange), serving.block_sizes()
        reading.tokens = (len(content.data) + content.extra_bytes) // TOKEN_BYTES
        salts: tuple[int, ...] = (salt,)
        if reading.cut:
            # Tools or model may lie beyond a cut: what it holds is no prefix of the whole, and gets a key space of its
            # own. Engine's blocks cannot be made of it at all.
            salts = (salt ^ 1,) if serving.exact else (salt, salt ^ 1)
            # the rest is taken to be like the head: as much prompt, and as many pictures, to the byte
            seen = max(min(exchange.held, self.settings.head_bytes), 1)
            reading.tokens = reading.tokens * _declared_bytes(exchange) // seen
        reading.plain = _Plain(content.data, salts, sizes)

    def _read_exactly(
        self,
        api: Api,
        body: Mapping[str, Any],
        reading: Reading,
        serving: Pool,
        key: str,
        exchange: Exchange,
        phases: Phases,
    ) -> None:
        encoder = self.encoders.get(reading.pool)
        bytes_per_token = TOKEN_BYTES if encoder is None else encoder.bytes_per_token
        reading.tokens = int(_declared_bytes(exchange) / bytes_per_token)
        if api.exact is None:
            phases.unkeyed = Unkeyed.API
            return
        try:
            content = read(api.exact, body)
        except NotExact:
            phases.unkeyed = Unkeyed.OPTION
            return
        salt, sizes = self._content_salt(key, content, exchange), serving.block_sizes()
        prompt, reading.tokens = content.prompt, int(content.extra_bytes / bytes_per_token)
        if isinstance(prompt, Ids):
            reading.tokens += len(prompt.data) // TOKEN_BYTES
            reading.exact, reading.plain = True, _Plain(prompt.data, (salt,), sizes)
        elif prompt is not None and encoder is None:
            reading.tokens = int(_declared_bytes(exchange) / bytes_per_token)
            phases.unkeyed = Unkeyed.TOKENIZER
        elif prompt is not None and encoder is not None:
            reading.job = Job(encoder, prompt, salt, sizes)
            reading.exact = not (isinstance(prompt, Chat) and prompt.media)

    def _pool(self, model: str | None) -> tuple[str, str]:
        """The pool that serves `model`, and the name that keeps its blocks apart from those of others."""
        pool_of, pools = self.settings.pool_of, self._router.pools
        if model is not None and model in pool_of:
            return pool_of[model], model if model in self.settings.adapters else pool_of[model]
        if "*" in pool_of:
            pool = pool_of["*"]
        elif len(pools) == 1:
            pool = next(iter(pools))
        else:
            raise Passed(Cause.NO_MODEL if model is None else Cause.UNKNOWN_MODEL)
        return pool, model or pool

    def _content_salt(self, key: str, content: Content, exchange: Exchange) -> int:
        """What keeps prompts apart in the engine, and the tenant's header where the operator wants that too."""
        header = self.settings.isolate_by_header
        tenant = exchange.headers.get(header, "") if header else ""
        return self._salt(key, f"{content.salt}\0{tenant}" if tenant else content.salt)

    def _salt(self, key: str, more: str) -> int:
        return xxh3_64_intdigest(f"{key}\0{more}".encode("utf-8", "surrogatepass"), self.settings.salt)


def _declared_bytes(exchange: Exchange) -> int:
    """The body's length as the client declared it; what has arrived where it did not."""
    declared = exchange.headers.get("content-length", "")
    return max(int(declared) if declared.isdecimal() and len(declared) < 12 else 0, exchange.held)
