"""OpenAI responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.wire.requests.content import (
    FENCE,
    Content,
    NoContent,
    canonical,
    content_of,
    conversation,
    front,
    parts,
    without,
)

_FRONT = frozenset(
    (
        "chat_template_kwargs",
        "conversation",
        "mm_processor_kwargs",
        "previous_input_messages",
        "previous_response_id",
        "prompt",
        "tools",
    )
)


def responses(body: Mapping[str, Any]) -> Content:
    """Tools and effort, then the instructions as a system message, then the input: a string is one user message.

    What went before `previous_response_id` (or a stored conversation or prompt) is not in the body; so its name stands
    in front, and requests that go on from the same one share a prefix. Left out: `tool_choice`, as in chat completions,
    and ids, states and encrypted parts of items, which no engine renders.
    """
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise NoContent("input is neither text nor a list")
    done = front(body, _FRONT)
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        done += (canonical(reasoning["effort"]), FENCE)
    if body.get("instructions"):
        done += conversation([{"role": "system", "content": body["instructions"]}])
    for item in items:
        done += conversation([item]) if isinstance(item, dict) and "role" in item else _other(item)
    return content_of(body, b"".join(done))


def _other(item: Any) -> tuple[bytes, ...]:
    """A call, its output, a reasoning item."""
    if not isinstance(item, dict):
        raise NoContent("an item is not an object")
    rest = canonical(without(item, "id", "status", "encrypted_content", "output"))
    return rest, FENCE, parts(item.get("output")), FENCE
