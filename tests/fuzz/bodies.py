"""Requests as they come, from a seed: valid or nearly so, with other values or bytes, compressed, long, cut short."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any

import brotli
import zstandard
from hypothesis import strategies as st

from extproc.wire.exchange import BodyMode
from tests.fuzz.apis import (
    ADAPTER,
    FAST,
    KEYS,
    MODELS,
    PLAIN,
    SLOW,
    maybe,
    message,
    prose,
    request,
    text,
    tools,
    value,
    written,
)
from tests.fuzz.lengths import long


class Ending(StrEnum):
    """How the client's side of a request ends."""

    END = "end of stream"
    TRAILERS = "trailers"
    LEAVES = "the client leaves before the end"
    PAUSES = "a pause beyond the collection deadline, then the end"


@dataclass(frozen=True, slots=True)
class Case:
    """One request as Envoy hands it on."""

    kind: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    mode: BodyMode = BodyMode.HEAD
    cuts: tuple[int, ...] = ()
    """Where the body is cut into chunks, ascending."""
    ending: Ending = Ending.END
    small: bool = False
    """For the server that sees but a short head."""

    def __str__(self) -> str:
        at = f"{self.path} {len(self.body)} B, {self.mode}"
        extras = [f"{key}: {value}" for key, value in self.headers]
        if self.small:
            extras.append("short head")
        if self.ending is not Ending.END:
            extras.append(self.ending)
        return f"{self.kind} | {at}{', ' * bool(extras)}{', '.join(extras)}"


# ---- mutations ----


def mutated(rng: Random, body: Any) -> Any:
    """Something in it is another value, is missing, stands there twice, or deeper."""
    if isinstance(body, dict) and body and rng.randrange(5):
        key = rng.choice(list(body))
        return {**body, key: mutated(rng, body[key])}
    if isinstance(body, list) and body and rng.randrange(5):
        at = rng.randrange(len(body))
        return [*body[:at], mutated(rng, body[at]), *body[at + 1 :]]
    choice = rng.randrange(8)
    if choice == 0 and isinstance(body, dict):
        return dict(list(body.items())[1:]) | {rng.choice(KEYS): value(rng)}
    if choice == 1 and isinstance(body, list):
        return body * 3
    if choice == 2:
        return [body]
    if choice == 3:
        return {rng.choice(KEYS): body}
    if choice == 4:
        return str(body)
    return value(rng)


_BYTES = (
    b'"', b"\\", b"\\ud800", b"\\ud83d\\ude00", b"\\u", b"{", b"}", b"[", b"]", b",", b":", b"\xef\xbb\xbf",
    b"\xed\xa0\x80", b"\xff", b"\0", b"NaN", b"-Infinity", b"1e9999", b"9" * 5000, b"1.", b"-", b'"model":"fast",',
    b'"messages":[],', b"null", b"/**/", b"\xc3", b"{}", b"'",
)  # fmt: skip


def broken(rng: Random, data: bytes) -> bytes:
    """Some bytes of it are others, are gone, or stand there twice."""
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(data) + 1)
        stop = min(start + rng.randrange(1, 20), len(data))
        choice = rng.randrange(5)
        if choice == 0:
            data = data[:start] + bytes([rng.randrange(256)]) + data[start + 1 :]
        elif choice == 1:
            data = data[:start] + data[stop:]
        elif choice == 2:
            data = data[:stop] + data[start:]
        elif choice == 3:
            data = data[:start] if not rng.randrange(3) else data[:stop] + data[stop + 1 :]
        else:
            data = data[:start] + rng.choice(_BYTES) + data[start:]
    return data


def _named_twice(rng: Random, data: bytes) -> bytes:
    at = data.find(b"{") + 1
    return (
        data[:at] + rng.choice((b'"model":"slow",', b'"messages":7,', b'"prompt":["a"],', b'"model":null,')) + data[at:]
    )


def _compressors() -> dict[str, Callable[[bytes], bytes]]:
    bare = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return {
        "gzip": lambda data: gzip.compress(data, 1),
        "X-GZIP ": lambda data: gzip.compress(data, 1),
        "deflate": lambda data: zlib.compress(data, 1),
        "Deflate": lambda data: (compressor := bare.copy()).compress(data) + compressor.flush(),
        "br": lambda data: brotli.compress(data, quality=1),
        "zstd": zstandard.ZstdCompressor(level=1).compress,
        "identity": bytes,
        "compress": bytes,
        "gzip, br": lambda data: brotli.compress(gzip.compress(data, 1), quality=1),
        "": bytes,
    }


_COMPRESSORS = _compressors()


# ---- whole bodies that are odd ----


def _deep(levels: int, opening: str, closing: str) -> str:
    return opening * levels + "1" * bool(opening.endswith(":")) + closing * levels


def _around(inner: str, model: str) -> bytes:
    said = f'[{{"role":"user","content":{inner}}}]'
    return f'{{"model":"{model}","messages":{said},"prompt":{inner},"input":{inner}}}'.encode()


def odd(rng: Random) -> bytes:
    """No object, no UTF-8, no end, or nothing in it."""
    model = rng.choice(MODELS)
    plain = _around(json.dumps(text(rng)), model)
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"text":', "}]"), ("[", ""), ('{"a":[', "")))
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: b"",
        lambda: b" " * rng.randrange(1, 3000),
        lambda: b"\xef\xbb\xbf" * rng.randrange(1, 2000),
        lambda: b"\xef\xbb\xbf" + plain,
        lambda: b"[" + plain + b"]",
        lambda: rng.choice((b"null", b"7", b'"a"', b"NaN", b"[]", b"{}", b"true", b"-", b"\0", b"\xff")),
        lambda: plain.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-16-be"))),
        lambda: plain.decode("utf-8", "replace").encode("latin-1", "replace"),
        lambda: plain + plain,
        lambda: _around(_deep(rng.choice((50, 150, 190, 199, 201, 1000, 10_000)), opening, closing), model),
        lambda: _around(rng.choice(("9" * 4000, "9" * 5000, "-" + "9" * 5000, "1e999", "1." + "0" * 5000)), model),
        lambda: _around("NaN", model),
        lambda: rng.randbytes(rng.randrange(300)),
        lambda: _around(json.dumps(json.loads(_deep(190, "[", "]"))), model),
        lambda: _called_with(
            rng.choice((_deep(10_000, "[", "]"), _deep(950, '{"a":', "}"), "9" * 5000, "[" * 200, "")), model
        ),
    )
    return rng.choice(makers)()


def _called_with(arguments: str, model: str) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return json.dumps({"model": model, "messages": said}).encode()


# ---- cases ----

_LENGTHS = ("0", "1", "99999999999", "-5", "abc", "²", "1e9", "", "12345678901234567890")


def _headers(rng: Random, body: bytes) -> Iterator[tuple[str, str]]:
    if not rng.randrange(3):
        yield "content-length", str(len(body)) if rng.randrange(4) else rng.choice(_LENGTHS)
    if not rng.randrange(8):
        yield "x-session-id", text(rng).encode("utf-8", "replace").decode()
    if not rng.randrange(20):
        yield (
            "content-type",
            rng.choice(("application/json; charset=utf-16", "text/plain", "multipart/form-data; boundary=a")),
        )


_AROUND = ("/prefix{}", "{}/", "{}//?api-version=1", "{}?{}", "/{}", "{}x", "/v1/models", "", "*")


def sent(rng: Random, kind: str, path: str, body: bytes, *, most_cuts: int = 4) -> Case:
    """A body on its way: mode, chunks, headers, compression, and how it ends."""
    headers = [*_headers(rng, body)]
    if not rng.randrange(12):
        encoding = rng.choice(list(_COMPRESSORS))
        body = _COMPRESSORS[encoding](body)
        kind += " compressed"
        if not rng.randrange(3):
            body, kind = broken(rng, body), kind + " and broken"
        headers.append(("content-encoding", encoding if rng.randrange(8) else rng.choice(list(_COMPRESSORS))))
    if not rng.randrange(25):
        path = rng.choice(_AROUND).format(path, path)
    cuts: list[int] = []
    if not rng.randrange(3):
        cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(1, most_cuts + 1)))
    ending = Ending.END
    if not rng.randrange(25):
        ending = rng.choice((Ending.TRAILERS, Ending.LEAVES)) if rng.randrange(8) else Ending.PAUSES
    return Case(
        kind, path, body, tuple(headers), rng.choice(list(BodyMode)), tuple(cuts), ending, small=not rng.randrange(5)
    )


def case(rng: Random) -> Case:
    """One request, not long."""
    choice = rng.randrange(20)
    path, parsed = request(rng)
    if choice == 0:
        return sent(rng, "odd", path, odd(rng))
    if choice < 8:
        return sent(rng, "valid", path, written(rng, parsed))
    if choice < 14:
        for _ in range(rng.randrange(1, 4)):
            parsed = mutated(rng, parsed)
        return sent(rng, "other values", path, written(rng, parsed))
    if choice < 19:
        return sent(rng, "other bytes", path, broken(rng, written(rng, parsed)))
    return sent(rng, "twice", path, _named_twice(rng, written(rng, parsed)))


def whole_requests() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """Path and parsed body, for hypothesis to draw and to shrink."""
    return st.randoms(use_true_random=False).map(request)


def cases() -> st.SearchStrategy[Case]:
    """Requests that are not long, for hypothesis."""
    return st.randoms(use_true_random=False).map(case)


_TALKS = 24
"""Conversations that go on beside each other."""

_LONG_PER_MILLE = 4
_MEDIUM_PER_MILLE, _MEDIUM_BYTES = 15, 40_000
_TALK_PER_MILLE = 120


class Bodies:
    """An endless stream of cases; equal arguments, equal cases."""

    def __init__(self, seed: int, *, most_bytes: int = 1_400_000) -> None:
        """`most_bytes`: about the length of the longest; by default more than the head that is read of one."""
        self._rng = Random(seed)
        self._most_bytes = most_bytes
        self._talks: list[tuple[str, dict[str, Any]]] = []

    def __iter__(self) -> Iterator[Case]:
        while True:
            yield self.next()

    def next(self) -> Case:
        rng, draw = self._rng, self._rng.randrange(1000)
        if draw < _LONG_PER_MILLE:
            return sent(rng, *long(rng, self._most_bytes), most_cuts=40)
        if draw < _LONG_PER_MILLE + _MEDIUM_PER_MILLE:
            return sent(rng, *long(rng, _MEDIUM_BYTES))
        if draw < _LONG_PER_MILLE + _MEDIUM_PER_MILLE + _TALK_PER_MILLE:
            return self._talk()
        return case(rng)

    def _talk(self) -> Case:
        """The next turn of a conversation: its prompt was read up to here."""
        rng = self._rng
        if len(self._talks) < _TALKS:
            system = {"role": "system", "content": prose(rng, rng.choice((2000, 20_000, self._most_bytes // 4)))}
            more = maybe(rng, tools=lambda: tools(rng), add_generation_prompt=lambda: True)
            first = {"model": rng.choice((FAST, FAST, SLOW, ADAPTER, PLAIN)), "messages": [system] * rng.randrange(2)}
            self._talks.append(("/v1/chat/completions", first | more))
        at = rng.randrange(len(self._talks))
        path, body = self._talks[at]
        said = [*body["messages"], {"role": "user", "content": prose(rng, rng.choice((200, 3000, 9000)))}]
        following = [*said, {"role": "assistant", "content": text(rng) if rng.randrange(6) else prose(rng, 4000)}]
        if len(said) > 40 or not rng.randrange(60):
            del self._talks[at]
        else:
            self._talks[at] = (path, {**body, "messages": following})
        now = {**body, "messages": said}
        if not rng.randrange(4):
            now["messages"] = [*said, message(rng)]
        if not rng.randrange(20):
            now |= {rng.choice(("tools", "chat_template_kwargs", "continue_final_message")): value(rng)}
        whole = sent(rng, "talk", path, written(rng, now))
        return replace(whole, small=False, ending=Ending.END)
