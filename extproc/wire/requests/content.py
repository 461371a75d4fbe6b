"""What a request asks a model to read, in canonical form: white space, key order and client do not matter."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from extproc.core.prompt import Ids, Prompt, Text

FENCE = b"\x1e"
"""Between the parts of a canonical text; no tokenizer's business, and not found in what people write."""


@dataclass(frozen=True, slots=True)
class Content:
    """The prompt of one request. `data`: 4 bytes count as one token (or are one, when the client sends token ids)."""

    model: str | None
    """None: the body does not say, or the head was cut before it."""
    salt: str
    """What keeps the whole prompt apart in the engine, the client's `cache_salt` above all; "" when nothing does."""
    data: bytes
    """b"" where there is nothing to match: such a request is routed by load. Also b"" when `prompt` has it."""
    extra_bytes: int = 0
    """Work of the same request that `data` does not show: further prompts of the same body, or all that is embedded."""
    prompt: Prompt | None = None
    """What exact reading finds in place of `data`; None as well when there is nothing to match."""


class NoContent(ValueError):
    """The body parsed, but is not a request of this API."""


class NotExact(ValueError):
    """A request whose tokens cannot be told from its body, or that the engine would refuse."""


def content_of(
    body: Mapping[str, Any],
    data: bytes,
    extra_bytes: int = 0,
    *,
    apart: frozenset[str] = frozenset(),
    prompt: Prompt | None = None,
) -> Content:
    """What was read, with the model and salt that the body names; what it sets of `apart` enters the salt by hash."""
    salt = name(body.get("cache_salt")) or ""
    if apart and (others := front(body, apart)):
        salt += xxh3_128_hexdigest(b"".join(others))
    return Content(name(body.get("model")), salt, data, extra_bytes, prompt)


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


def media(value: Any) -> bytes:
    """What is not text, by the hash of what it is; engines hash it their own way."""
    return FENCE + xxh3_128_digest(canonical(without(value, "cache_control")))


def without(value: Any, *keys: str) -> Any:
    """An object without `keys`: ids, states and cache marks move between turns, and no engine renders them."""
    return {key: each for key, each in value.items() if key not in keys} if isinstance(value, dict) else value


def parts(value: Any) -> bytes:
    """Content: a string, or a list of parts. Text parts are joined; any other stands at its place by its hash."""
    if isinstance(value, list):
        return b"".join([_part(each) for each in value])
    return text(value)


def _part(value: Any) -> bytes:
    if not isinstance(value, dict):
        return text(value)
    # a tuple: the type may be anything, also what cannot be hashed
    return text(value.get("text")) if value.get("type") in ("text", "input_text", "output_text") else media(value)


def flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean of the body. NotExact: anything else, though engines read some of it as one ("yes", 1)."""
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise NotExact(f"{key} is no boolean")
    return value


def front(body: Mapping[str, Any], keys: frozenset[str]) -> list[bytes]:
    """What the body sets of `keys`, in a fixed order, each with its name; null and empty count as not set."""
    if keys.isdisjoint(body):
        return []
    return [
        part
        for key in sorted(keys.intersection(body))
        if body[key] or body[key] is False
        for part in (key.encode(), FENCE, canonical(body[key]), FENCE)
    ]


_MESSAGE_REST: dict[str, Callable[[Any], bytes]] = {
    "name": canonical,
    "tool_calls": canonical,
    "tool_call_id": canonical,
    "tool_name": canonical,
    "function_call": canonical,
    "refusal": canonical,
    "reasoning": canonical,
    "reasoning_content": canonical,
    "thinking": canonical,
    "audio": media,
    "images": media,
}
"""What a message carries beside role and content that a chat template may render."""


def conversation(messages: Any, of: Callable[[Any], bytes] = parts) -> list[bytes]:
    """Role and content of each message, each with a fence behind it; `of` reads what content is no string.

    One more message only adds to the end. The generation prompt is left out: it is a few tokens at the end, the same
    after every conversation, and mostly the start of the next message.
    """
    if not isinstance(messages, list):
        raise NoContent("messages is not a list")
    done: list[bytes] = []
    for message in messages:
        if not isinstance(message, dict):
            raise NoContent("a message is not an object")
        content = message.get("content")
        words = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else of(content)
        done += (text(message.get("role")), FENCE, words, FENCE)
        if len(message) == 2:
            continue
        for key, rest in _MESSAGE_REST.items():
            if message.get(key):
                done += (key.encode(), rest(message[key]), FENCE)
    return done


def prompts(value: Any) -> list[bytes]:
    """A string, token ids, or a list of either, as one or more prompts."""
    return [_prompt(each) for each in (value if _is_several(value) else [value])]


def text_or_ids(value: Any, prompt: bytes, *, add_special_tokens: bool) -> Text | Ids:
    """The first prompt of `value` in exact form; `prompt` is how `prompts` read it."""
    first = value[0] if _is_several(value) else value
    return Text(first, add_special_tokens) if isinstance(first, str) else Ids(prompt)


def _is_several(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | list)


def _prompt(value: Any) -> bytes:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        try:
            return array("I", value).tobytes()
        except (TypeError, OverflowError) as error:
            raise NoContent("a prompt is neither text nor token ids") from error
    raise NoContent("no prompt")


def size(value: Any) -> int:
    """Bytes of all text in a value, 4 for each token id; what is not text (an image) counts as nothing."""
    if isinstance(value, str):
        return len(text(value))
    if isinstance(value, list):
        return 4 * len(value) if value and isinstance(value[0], int) else sum(map(size, value))
    if isinstance(value, dict):
        if value.get("type", "text") != "text":
            return 0
        return sum(size(each) for key, each in value.items() if key not in ("role", "type"))
    return 0
