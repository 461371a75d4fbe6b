"""What a request asks a model to read, in canonical form: white space, key order and client do not matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

FENCE = b"\x1e"
"""Between the parts of a canonical text; no tokenizer's business, and not found in what people write."""


@dataclass(frozen=True, slots=True)
class Content:
    """The prompt of one request. `data`: 4 bytes count as one token (or are one, when the client sends token ids)."""

    model: str | None
    """None: the body does not say, or the head was cut before it."""
    salt: str
    """The client's `cache_salt`, which keeps prompts apart in the engine; "" when there is none."""
    data: bytes
    extra_bytes: int = 0
    """Work of the same request that `data` does not show: further prompts of the same body."""


class NoContent(ValueError):
    """The body parsed, but is not a request of this API."""


def canonical(value: Any) -> bytes:
    """Any JSON value as bytes, keys sorted."""
    return msgspec.json.encode(value, order="sorted")


def text(value: Any) -> bytes:
    """A string as UTF-8; anything else canonically."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return b"" if value is None else canonical(value)


def name(value: Any) -> str | None:
    """A string that names something, else None."""
    return value if isinstance(value, str) and value else None
