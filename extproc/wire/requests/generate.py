"""`/generate` of SGLang (`text` or `input_ids`) and of TGI (`inputs`): the body says whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from extproc.wire.requests.content import Content, NoContent, NotExact, content_of, flag, prompts, text_or_ids

_APART = frozenset(("audio_data", "extra_key", "image_data", "lora_path", "video_data"))
"""Images come beside the text, and where they stand in it is for the model to say: they keep the whole apart."""


def generate(body: Mapping[str, Any]) -> Content:
    """One prompt or several: the first decides, all count as work. Sampling parameters are left out."""
    first, *others = prompts(body[_key(body)])
    return content_of(body, first, sum(map(len, others)), apart=_APART)


def exact_generate(body: Mapping[str, Any]) -> Content:
    """Text with special tokens, as both engines read it, or ids. What keeps apart matches our own predictions alone."""
    key = _key(body)
    first, *others = prompts(body[key])
    parameters = body.get("parameters")
    if isinstance(parameters, dict) and parameters.get("truncate") is not None:
        raise NotExact("the prompt is truncated")
    special = flag(body, "add_special_tokens", True) if key == "inputs" else True
    prompt = replace(
        text_or_ids(body[key], first, add_special_tokens=special), media=any(body.get(each) for each in _APART)
    )
    return content_of(body, b"", sum(map(len, others)), apart=_APART, prompt=prompt)


def _key(body: Mapping[str, Any]) -> str:
    for key in ("text", "input_ids", "inputs"):
        if body.get(key) is not None:
            return key
    raise NoContent("none of text, input_ids and inputs")
