"""Compressed bodies: the decoded head of one, within a bound."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from typing import Any

from extproc.wire.requests.content import NoContent


def _optional(package: str) -> Any:
    """An optional dependency: None where it is not installed."""
    try:
        return import_module(package)
    except ImportError:
        return None


_brotli = _optional("brotli")
_zstandard = _optional("zstandard")

_ZSTD_WINDOW_BYTES = 8 << 20
"""What RFC 9659 allows in HTTP; the window is allocated, whatever comes out."""


def _gzip(data: bytes, most: int) -> bytes:
    return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(data, most)


def _deflate(data: bytes, most: int) -> bytes:
    """With zlib's header as RFC 9110 wants it, or bare, as some clients send it."""
    headed = len(data) >= 2 and data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if headed else -zlib.MAX_WBITS).decompress(data, most)


def _br(data: bytes, most: int) -> bytes:
    """One call hands out 32 KiB of a stream that is cut (measured, brotli 1.2.1), so it is asked until it has no more.

    Its bound is soft: a bomb gives up to twice as much.
    """
    decompressor, done = _brotli.Decompressor(), bytearray()
    while len(done) < most and (more := decompressor.process(data, output_buffer_limit=most - len(done))):
        done += more
        data = b""
    return bytes(done)


def _zstd(data: bytes, most: int) -> bytes:
    decompressor = _zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    done: bytes = decompressor.stream_reader(BytesIO(data)).read(most)
    return done


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {"gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate}
_ERRORS: tuple[type[Exception], ...] = (zlib.error,)
if _brotli is not None and hasattr(_brotli.Decompressor, "can_accept_more_data"):  # older ones know no bound
    _DECODERS["br"] = _br
    _ERRORS += (_brotli.error,)
if _zstandard is not None:
    _DECODERS["zstd"] = _zstd
    _ERRORS += (_zstandard.ZstdError,)


def decode(data: bytes, encoding: str, *, limit: int, complete: bool) -> tuple[bytes, bool]:
    """The first `limit` bytes of what `data` encodes, and: is that not the whole?

    `complete` says that `data` is the whole body; else it is decoded as far as it goes. An end that is missing, or
    bytes after it, are left to the reader of what comes out. NoContent: broken data, or an encoding that is not known
    here, several on top of each other among them (each would cost another pass).
    """
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return data, not complete
    decoder = _DECODERS.get(coding)
    if decoder is None:
        raise NoContent("unknown content encoding")
    try:
        decoded = decoder(data, limit + 1)
    except _ERRORS as error:
        raise NoContent("broken compressed data") from error
    return decoded[:limit], not complete or len(decoded) > limit
