"""llama.cpp's own `/completion`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.wire.requests.content import Content, content_of, prompts

_APART = frozenset(("multimodal_data",))


def completion(body: Mapping[str, Any]) -> Content:
    """A string, token ids, a list that mixes them (one prompt), an object with media, or a list of all these.

    The first decides, all count as work. Media keep the whole prompt apart.
    """
    prompt = body.get("prompt")
    several = prompt if isinstance(prompt, list) and not any(isinstance(each, int) for each in prompt) else None
    first, *others = several or [prompt]
    named = {**body, **first} if isinstance(first, dict) else body
    return content_of(named, _one(first), sum(len(_one(each)) for each in others), apart=_APART)


def _one(value: Any) -> bytes:
    if isinstance(value, dict):
        value = value.get("prompt_string")
    if isinstance(value, list):
        return b"".join([prompts(each if isinstance(each, str) else [each])[0] for each in value])
    return prompts(value)[0]
