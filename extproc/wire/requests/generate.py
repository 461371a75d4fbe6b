"""`/generate` of SGLang (`text` or `input_ids`) and of TGI (`inputs`): the body says whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.wire.requests.content import Content, NoContent, content_of, prompts

_APART = frozenset(("audio_data", "extra_key", "image_data", "lora_path", "video_data"))
"""Images come beside the text, and where they stand in it is for the model to say: they keep the whole apart."""


def generate(body: Mapping[str, Any]) -> Content:
    """One prompt or several: the first decides, all count as work. Sampling parameters are left out."""
    for key in ("text", "input_ids", "inputs"):
        if body.get(key) is not None:
            first, *others = prompts(body[key])
            return content_of(body, first, sum(map(len, others)), apart=_APART)
    raise NoContent("none of text, input_ids and inputs")
