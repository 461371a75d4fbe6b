"""Anthropic messages, and their count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.wire.requests.content import (
    FENCE,
    Content,
    canonical,
    content_of,
    conversation,
    front,
    parts,
    text,
    without,
)

_FRONT = frozenset(("chat_template_kwargs",))

_BILLING = "x-anthropic-billing-header"
"""How a system block of Claude Code begins that differs in every request; vLLM strips it, or nothing would match."""


def messages(body: Mapping[str, Any]) -> Content:
    """Tools and effort, then the system prompt, then role and blocks of each message.

    Left out: cache marks, redacted thinking and thinking budgets, which engines do not render.
    """
    done = front(body, _FRONT)
    if tools := body.get("tools"):
        done += (_tools(tools), FENCE)
    if effort := _effort(body):
        done += (effort, FENCE)
    if system := body.get("system"):
        done += conversation([{"role": "system", "content": _unbilled(system)}])
    done += conversation(body.get("messages"), _blocks)
    return content_of(body, b"".join(done))


def count_tokens(body: Mapping[str, Any]) -> Content:
    """No work and nothing to match: the engine renders and counts, and caches nothing."""
    messages(body)
    return content_of(body, b"")


def _tools(tools: Any) -> bytes:
    return canonical([without(tool, "cache_control") for tool in tools] if isinstance(tools, list) else tools)


def _effort(body: Mapping[str, Any]) -> bytes:
    """vLLM renders thinking that is disabled as the effort "none", else the effort that is asked for."""
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return b"none"
    return text(output.get("effort")) if isinstance(output, dict) else b""


def _unbilled(system: Any) -> Any:
    if not isinstance(system, list):
        return system
    return [each for each in system if not (isinstance(each, dict) and str(each.get("text", "")).startswith(_BILLING))]


def _blocks(value: Any) -> bytes:
    return b"".join([_block(each) for each in value]) if isinstance(value, list) else text(value)


def _block(value: Any) -> bytes:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "thinking":
        return FENCE + text(value.get("thinking")) + FENCE
    if kind == "redacted_thinking":
        return b""
    if kind == "tool_use":
        return FENCE + canonical([value.get("id"), value.get("name"), value.get("input")])
    if kind == "tool_result":
        return FENCE + text(value.get("tool_use_id")) + FENCE + _blocks(value.get("content"))
    return parts([value])
