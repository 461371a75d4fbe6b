"""What ties the requests of one conversation together, beside their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xxhash import xxh3_128_hexdigest

_MOST = 256
"""Characters of a session; a longer one is known by its hash."""


def session(body: Mapping[str, Any], headers: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The first of `names` that is set, with its name: equal values under different names are different sessions.

    A header of that name (`headers` has lower case) comes before the body's string, which a dotted name
    (`metadata.user_id`) finds further inside.
    """
    for name in names:
        value = headers.get(name.lower()) or _inside(body, name)
        if value:
            found = f"{name}={value}"
            return (
                found if len(found) <= _MOST else f"{name}#{xxh3_128_hexdigest(found.encode('utf-8', 'surrogatepass'))}"
            )
    return None


def _inside(body: Mapping[str, Any], name: str) -> str | None:
    value: Any = body
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else None
