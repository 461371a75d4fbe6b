"""Ollama's chat and generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.wire.requests.content import FENCE, Content, NoContent, content_of, conversation, front, text

_CHAT = frozenset(("think", "tools"))
_GENERATE = frozenset(("context", "raw", "system", "template", "think"))
_APART = frozenset(("images",))


def chat(body: Mapping[str, Any]) -> Content:
    """Tools, then role and text of each message, images by hash. Options, format and keep_alive are left out."""
    return content_of(body, b"".join((*front(body, _CHAT), *conversation(body.get("messages")))))


def generate(body: Mapping[str, Any]) -> Content:
    """What the template renders before the prompt, then the prompt, then the suffix. Images keep the whole apart."""
    if not isinstance(body.get("prompt"), str):
        raise NoContent("no prompt")
    done = [*front(body, _GENERATE), text(body["prompt"])]
    if body.get("suffix"):
        done += (FENCE, text(body["suffix"]))
    return content_of(body, b"".join(done), apart=_APART)
