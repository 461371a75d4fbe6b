"""Compressed bodies: what is decoded, how far, and what is refused."""

from __future__ import annotations

import json
import os
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from extproc.server import Cause, Cut
from extproc.wire.requests import encoding
from extproc.wire.requests.content import NoContent
from extproc.wire.requests.encoding import decode
from tests.builders import body, chat, headers, running


def deflated(data: bytes, wbits: int) -> bytes:
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(data) + packer.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", lambda data: deflated(data, 31)),
    "x-gzip": ("x-gzip", lambda data: deflated(data, 31)),
    "deflate": ("deflate", lambda data: deflated(data, 15)),
    "bare deflate": ("deflate", lambda data: deflated(data, -15)),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", zstandard.compress),
    "zstd, size not told": ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress),
}
each_coding = pytest.mark.parametrize(("coding", "packed"), CODINGS.values(), ids=CODINGS)


@each_coding
@given(data=st.binary(max_size=300))
def test_what_was_packed_comes_out(coding: str, packed: Callable[[bytes], bytes], data: bytes) -> None:
    assert decode(packed(data), coding, limit=300, complete=True) == (data, False)


@each_coding
def test_output_stops_at_the_limit_and_then_counts_as_cut(coding: str, packed: Callable[[bytes], bytes]) -> None:
    bomb = packed(b"a" * (20 << 20))
    tracemalloc.start()
    try:
        assert decode(bomb, coding, limit=5000, complete=True) == (b"a" * 5000, True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@each_coding
def test_a_cut_head_decodes_as_far_as_it_goes(coding: str, packed: Callable[[bytes], bytes]) -> None:
    data = os.urandom(400_000).hex().encode()
    whole = packed(data)
    decoded, cut = decode(whole[: len(whole) // 2], coding, limit=1 << 20, complete=False)
    assert cut
    assert data.startswith(decoded)
    assert len(decoded) > len(data) // 4


@each_coding
@given(data=st.binary(max_size=200), complete=st.booleans(), at=st.integers(0, 60), byte=st.integers(0, 255))
def test_broken_data_is_refused_or_comes_out_wrong_but_within_the_limit(
    coding: str, packed: Callable[[bytes], bytes], data: bytes, complete: bool, at: int, byte: int
) -> None:
    broken = bytearray(packed(b"0123456789" * 6))
    broken[at % len(broken)] = byte
    for wrong in (data, bytes(broken)):
        try:
            decoded, _ = decode(wrong, coding, limit=100, complete=complete)
        except NoContent:
            continue
        assert len(decoded) <= 100


@pytest.mark.parametrize("coding", ["identity", "", " Identity "])
def test_identity_is_handed_back(coding: str) -> None:
    assert decode(b"data", coding, limit=2, complete=True) == (b"data", False)
    assert decode(b"data", coding, limit=2, complete=False) == (b"data", True)


def test_names_are_read_in_any_case() -> None:
    assert decode(deflated(b"data", 31), " GZip", limit=9, complete=True) == (b"data", False)


@pytest.mark.parametrize("coding", ["compress", "gzip, gzip", "gzip,br", "gzip;q=1", "äöü"])
def test_what_is_not_known_is_refused(coding: str) -> None:
    with pytest.raises(NoContent, match="unknown content encoding"):
        decode(b"data", coding, limit=9, complete=True)


def test_a_zstd_window_beyond_what_http_allows_is_refused() -> None:
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=24)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    packed = packer.compress(b"a" * 5000) + packer.flush()
    with pytest.raises(NoContent, match="broken"):
        decode(packed, "zstd", limit=1 << 20, complete=True)


def test_an_optional_package_that_is_absent_is_no_error() -> None:
    assert encoding._optional("no_such_package_as_this") is None


# ---- through the server ----

PROMPT = "the quick brown fox jumps over the lazy dog, again and again; " * 40


@each_coding
async def test_a_compressed_body_matches_the_plain_one(coding: str, packed: Callable[[bytes], bytes]) -> None:
    async with running() as server:
        await server.ask(chat(PROMPT))
        await server.ask(packed(chat(PROMPT, stream=True)), ("content-encoding", coding))
        plain, compressed = server.seen.tickets
        assert plain.request.chains
        assert compressed.request.chains == plain.request.chains
        assert server.seen.cuts == [None, None]


async def test_a_bomb_is_decided_on_its_head() -> None:
    async with running() as server:
        bomb = deflated(json.dumps({"model": "m", "messages": [], "pad": "a" * (8 << 20)}).encode(), 31)
        await server.ask(bomb, ("content-encoding", "gzip"))
        assert server.seen.cuts == [Cut.HEAD_BYTES]


async def test_a_head_that_is_cut_and_broken_is_routed_by_load_and_counts_as_cut() -> None:
    async with running(head_bytes=1024) as server:
        await server.say_on(headers(("content-encoding", "gzip")), body(b"no gzip" * 1000))
        assert server.seen.cuts == [Cut.HEAD_BYTES]


@pytest.mark.parametrize(("coding", "data"), [("gzip", b"no gzip"), ("compress", b"x"), ("gzip", chat(PROMPT))])
async def test_what_cannot_be_decoded_is_passed_on_as_invalid(coding: str, data: bytes) -> None:
    async with running() as server:
        await server.ask(data, ("content-encoding", coding))
        assert server.seen.causes == [Cause.INVALID_BODY]
