"""vLLM's own APIs: generate from token ids, and tokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_128_digest

from extproc.core.prompt import Ids
from extproc.wire.requests.content import Content, NoContent, NotExact, content_of, prompts, text

_APART = frozenset(("content_parts",))
"""Media that the engine puts in their places itself: they keep the whole prompt apart."""


def generate(body: Mapping[str, Any]) -> Content:
    """Token ids as they are; where an image stands, its placeholder ids give way to the hash that the client sends."""
    return content_of(body, _ids(body), apart=_APART)


def exact_generate(body: Mapping[str, Any]) -> Content:
    """The same ids: blocks with a hash in them match our own predictions alone."""
    ids = _ids(body)
    if body.get("content_parts"):
        raise NotExact("media that the engine puts in their places")
    return content_of(body, b"", prompt=Ids(ids, media=body.get("features") is not None))


def _ids(body: Mapping[str, Any]) -> bytes:
    data = prompts(body.get("token_ids"))
    if len(data) > 1 or not isinstance(body["token_ids"], list):
        raise NoContent("token_ids are not those of one prompt")
    features = body.get("features")
    return data[0] if features is None else _placed(data[0], features)


def _placed(data: bytes, features: Any) -> bytes:
    ids = bytearray(data)
    try:
        for kind, places in features["mm_placeholders"].items():
            for place, mm_hash in zip(places, features["mm_hashes"][kind], strict=True):
                start, width = 4 * place["offset"], 4 * min(place["length"], 4)
                if not 0 <= start < start + width <= len(ids):
                    raise ValueError("outside the prompt")
                ids[start : start + width] = xxh3_128_digest(text(mm_hash))[:width]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NoContent("features without places and hashes") from error
    return bytes(ids)


def tokenize(body: Mapping[str, Any]) -> Content:
    """No work and nothing to match: the engine tokenizes a prompt or messages, and caches nothing."""
    if body.get("prompt") is None and body.get("messages") is None:
        raise NoContent("neither prompt nor messages")
    return content_of(body, b"")
