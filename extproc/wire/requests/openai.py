"""OpenAI chat completions and completions."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_128_digest

from extproc.wire.requests.content import FENCE, Content, NoContent, canonical, name, text

_MESSAGE_REST = ("name", "tool_calls", "tool_call_id", "refusal", "reasoning_content")
"""What a message carries beside role and content that a chat template may render."""


def chat_completions(body: Mapping[str, Any]) -> Content:
    """Tools first, as most templates render them, then role and text of each message."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise NoContent("messages is not a list")
    parts: list[bytes] = []
    for key in ("tools", "functions"):
        if body.get(key):
            parts += (canonical(body[key]), FENCE)
    for message in messages:
        if not isinstance(message, dict):
            raise NoContent("a message is not an object")
        parts += (text(message.get("role")), FENCE, _content(message.get("content")), FENCE)
        if len(message) == 2:
            continue
        for key in _MESSAGE_REST:
            if message.get(key):
                parts += (key.encode(), canonical(message[key]), FENCE)
    return Content(name(body.get("model")), name(body.get("cache_salt")) or "", b"".join(parts))


def _content(value: Any) -> bytes:
    """A string, or a list of parts: text parts are joined, an image stands there by the hash of what it is."""
    if isinstance(value, list):
        return b"".join(
            text(part.get("text"))
            if isinstance(part, dict) and part.get("type") == "text"
            else FENCE + xxh3_128_digest(canonical(part))
            for part in value
        )
    return text(value)


def completions(body: Mapping[str, Any]) -> Content:
    """A string, token ids, or a list of either: the first decides, all count as work."""
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    datas = [_prompt(each) for each in prompts]
    model, salt = name(body.get("model")), name(body.get("cache_salt")) or ""
    return Content(model, salt, datas[0], sum(map(len, datas[1:])))


def _prompt(value: Any) -> bytes:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        try:
            return array("I", value).tobytes()
        except (TypeError, OverflowError) as error:
            raise NoContent("a prompt is neither text nor token ids") from error
    raise NoContent("no prompt")
