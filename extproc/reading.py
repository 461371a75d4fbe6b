"""From the head of a request to what the router is asked: model, blocks, work, session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from xxhash import xxh3_64_intdigest

from extproc.core.blocks import TOKEN_BYTES, beginning, extend
from extproc.core.pool import Pool
from extproc.core.prompt import Ids
from extproc.core.types import Chain, InferenceRequest
from extproc.tokens.encoder import Encoder, Job
from extproc.wire.exchange import Exchange
from extproc.wire.requests import Api, parse, read
from extproc.wire.requests.content import Content, NoContent, NotExact, name
from extproc.wire.requests.encoding import decode
from extproc.wire.requests.session import session

_SLICE_BLOCKS = 4096
"""Hashed at a time, 0.6 ms; then the loop gets a turn and the decision deadline is looked at."""

_DENSE, _DENSE_SHARE = 100_000, 0.4
"""More structure than this, and than this share of the head: prose has 3 %, token ids 18 %, JSON in a string 30 %;
a megabyte of empty objects, which would keep a thread for 0.3 s, has 66 %."""


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
    LATE = "late"
    """The head could not be parsed in time, and there are several pools."""
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
    """Threads had more to do than they may put off: decided on what was read before."""
    DENSE = "dense"
    """More brackets and strings than any prompt has: decided on the headers."""
    UNBROKEN = "unbroken"
    """A stretch of text that tokenizers cannot cut is too long to take in one step: decided on what comes before it."""


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
    adapter: str | None = None
    cut: bool = True
    """The head is not the whole."""
    why_cut: Cut | None = None
    unkeyed: Unkeyed | None = None
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
        turn, answered = (None, None) if self.job is None else (self.job.turn, self.job.answered)
        return InferenceRequest(
            self.pool, tokens, chains, cut_chains, self.exact, self.session, self.adapter, turn, answered
        )


_NOTHING: dict[int, Chain] = {}


class Interpreter:
    """What a head says. Of large ones a thread asks."""

    def __init__(self, pools: Mapping[str, Pool], settings: ReadingSettings) -> None:
        self.pools = pools
        self.settings = settings
        self.encoders: dict[str, Encoder] = {}
        """By pool; the one of an exact pool is missing until it could be loaded."""

    def read(self, api: Api, exchange: Exchange, head: bytes) -> Reading:
        """The prompt is still to be hashed. Passed: it is not for us."""
        cut = exchange.cut_short
        try:
            if (encoding := exchange.headers.get("content-encoding")) is not None:
                head, cut = decode(head, encoding, limit=self.settings.head_bytes, complete=not cut)
            if structure(head) > max(_DENSE, _DENSE_SHARE * len(head)):
                return self.unread(exchange, Cut.DENSE)
            body = parse(head, cut=cut)
            reading, serving, key = self._reading(body, exchange)
            reading.cut, reading.why_cut = cut, Cut.HEAD_BYTES if cut else None
            if serving.exact and not cut:
                self._read_exactly(api, body, reading, serving, key, exchange)
            else:
                self._read(api, body, reading, serving, key, exchange)
        except NoContent as error:
            if not cut:
                raise Passed(Cause.INVALID_BODY) from error
            return self.unread(exchange)
        return reading

    def unread(self, exchange: Exchange, why: Cut = Cut.HEAD_BYTES) -> Reading:
        """By the headers alone."""
        reading, _, _ = self._reading({}, exchange)
        reading.why_cut = why
        reading.tokens = _declared_bytes(exchange) // TOKEN_BYTES
        return reading

    def _reading(self, body: Mapping[str, Any], exchange: Exchange) -> tuple[Reading, Pool, str]:
        """With the pool, and the name that keeps its blocks apart."""
        pool, key = self._pool(name(body.get("model")))
        serving = self.pools.get(pool)
        if serving is None:
            raise Passed(Cause.UNKNOWN_MODEL)
        hint = session(body, exchange.headers, self.settings.session_hints)
        session_key = None if hint is None else self._salt(key, hint)
        return Reading(pool, session_key, serving.cache_tokens, None if key == pool else key), serving, key

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
    ) -> None:
        encoder = self.encoders.get(reading.pool)
        bytes_per_token = TOKEN_BYTES if encoder is None else encoder.bytes_per_token
        reading.tokens = int(_declared_bytes(exchange) / bytes_per_token)
        if api.exact is None:
            reading.unkeyed = Unkeyed.API
            return
        try:
            content = read(api.exact, body)
        except NotExact:
            reading.unkeyed = Unkeyed.OPTION
            return
        salt, sizes = self._content_salt(key, content, exchange), serving.block_sizes()
        prompt, reading.tokens = content.prompt, int(content.extra_bytes / bytes_per_token)
        if isinstance(prompt, Ids):
            reading.tokens += len(prompt.data) // TOKEN_BYTES
            reading.exact, reading.plain = not prompt.media, _Plain(prompt.data, (salt,), sizes)
        elif prompt is not None and encoder is None:
            reading.tokens = int(_declared_bytes(exchange) / bytes_per_token)
            reading.unkeyed = Unkeyed.TOKENIZER
        elif prompt is not None and encoder is not None:
            try:
                reading.job = Job(encoder, prompt, salt, sizes)
            except NotExact:  # a message that is none
                reading.tokens, reading.unkeyed = int(_declared_bytes(exchange) / bytes_per_token), Unkeyed.OPTION
                return
            reading.exact = not prompt.media

    def _pool(self, model: str | None) -> tuple[str, str]:
        """The pool that serves `model`, and the name that keeps its blocks apart from those of others."""
        pool_of, pools = self.settings.pool_of, self.pools
        if model is not None and model in pool_of:
            return pool_of[model], model if model in self.settings.adapters else pool_of[model]
        if "*" in pool_of:
            return pool_of["*"], model or pool_of["*"]
        if len(pools) == 1:  # whatever a client calls it
            (pool,) = pools
            return pool, pool
        raise Passed(Cause.NO_MODEL if model is None else Cause.UNKNOWN_MODEL)

    def seed(self, pool: str, adapter: str | None, cache_salt: str | None) -> int:
        """What the blocks of such prompts begin with, where no header keeps tenants apart: for the engines' events."""
        return self._salt(adapter or pool, cache_salt or "")

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


def structure(head: bytes) -> int:
    """How many characters of a JSON text, those in its strings among them, part values: what reading it costs, at most
    1 us each. 1 ms a megabyte."""
    return len(head) - len(head.translate(None, b'{[",'))
