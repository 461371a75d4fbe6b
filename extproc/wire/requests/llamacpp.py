"""llama.cpp's own `/completion`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from extproc.wire.requests.content import Content, NotExact, content_of, prompts, text_or_ids

_APART = frozenset(("multimodal_data",))


def completion(body: Mapping[str, Any]) -> Content:
    """A string, token ids, a list that mixes them (one prompt), an object with media, or a list of all these.

    The first decides, all count as work. Media keep the whole prompt apart.
    """
    first, *others = _several(body)
    named = {**body, **first} if isinstance(first, dict) else body
    return content_of(named, _one(first), _size(others), apart=_APART)


def exact_completion(body: Mapping[str, Any]) -> Content:
    """A text with special tokens, or ids; not a list that mixes them, nor media."""
    first, *others = _several(body)
    data = _one(first)
    if isinstance(first, dict):
        if first.get("multimodal_data"):
            raise NotExact("media")
        first = first["prompt_string"]
    if isinstance(first, list) and any(isinstance(each, str) for each in first):
        raise NotExact("text and token ids in one prompt")
    return content_of(body, b"", _size(others), prompt=text_or_ids(first, data, add_special_tokens=True))


def _several(body: Mapping[str, Any]) -> list[Any]:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not any(isinstance(each, int) for each in prompt)
    return (prompt if several else None) or [prompt]


def _size(prompts: list[Any]) -> int:
    return sum(len(_one(each)) for each in prompts)


def _one(value: Any) -> bytes:
    if isinstance(value, dict):
        value = value.get("prompt_string")
    if isinstance(value, list):
        runs = groupby(value, lambda each: isinstance(each, str))
        return b"".join([part for texts, run in runs for part in prompts([*run] if texts else [[*run]])])
    return prompts(value)[0]
