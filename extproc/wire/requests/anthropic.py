"""Anthropic messages, and their count_tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from extproc.core.prompt import Message
from extproc.wire.requests.chat import (
    BILLING,
    chat,
    identity_of_all,
    listed,
    message,
    objects,
    tool,
)
from extproc.wire.requests.content import (
    FENCE,
    Content,
    NotExact,
    canonical,
    content_of,
    conversation,
    front,
    parts,
    text,
    without,
)

_FRONT = frozenset(("chat_template_kwargs",))


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


def exact_messages(body: Mapping[str, Any]) -> Content:
    """The chat that vLLM 0.32 makes of it, system prompt first.

    Thinking that is disabled is the effort "none", or "low" where the template does not know "none" (vLLM tries it);
    here it is "none". System messages among the others stay in their places: for a template that refuses them there,
    vLLM moves them to the front, and here the template's refusal stands.
    """
    said = listed(body.get("messages"))
    contents = [each.get("content") for each in said if isinstance(each, dict)]
    blocks = [
        block for content in contents if isinstance(content, list) for block in content if isinstance(block, dict)
    ]
    if any(block.get("type") in ("tool_addition", "tool_removal") for block in blocks):
        raise NotExact("tools that change on the way")
    tools = body.get("tools")
    prompt = chat(
        body,
        [{"system": body["system"]}, *said] if body.get("system") else said,
        expand,
        identity,
        tools=None if tools is None else [_exact_tool(each) for each in objects(tools)],
        media=any(
            block.get("type") == "image" or (block.get("type") == "tool_result" and _shows(block.get("content")))
            for block in blocks
        ),
        effort=_exact_effort(body),
    )
    return content_of(body, b"", prompt=prompt)


def expand(said: Sequence[Any]) -> list[Message]:
    """Each message becomes messages by itself, so any run of them may be expanded by itself."""
    return [one for each in said for one in _expanded(each)]


def identity(value: Any) -> list[bytes]:
    """A message by what it becomes."""
    return identity_of_all(_expanded(value))


def _exact_tool(value: dict[str, Any]) -> dict[str, Any]:
    schema = value.get("input_schema")
    if not isinstance(schema, dict):
        raise NotExact("a tool without a schema")
    schema = schema if "type" in schema else {**schema, "type": "object"}
    return tool(value.get("name"), value.get("description"), schema, value.get("strict"), value.get("defer_loading"))


def _exact_effort(body: Mapping[str, Any]) -> Any:
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return "none"
    return output.get("effort") if isinstance(output, dict) else None


def _shows(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(each, dict) and each.get("type") == "image" for each in content)


def _expanded(value: Any) -> list[Message]:
    if not isinstance(value, dict):
        raise NotExact("a message is not an object")
    if "system" in value and "role" not in value:
        words = value["system"]
        words = words if isinstance(words, str) else _system(words)
        return [{"role": "system", "content": words}] if words else []
    role, content = value.get("role"), value.get("content")
    if role == "system":
        words = _system([{"type": "text", "text": content}] if isinstance(content, str) else content)
        return [{"role": "system", "content": words}] if words else []
    if role not in ("user", "assistant"):
        raise NotExact("a role that is unknown")
    if isinstance(content, str):
        return [value if len(value) == 2 else {"role": role, "content": content}]
    return _turn(role, objects(content))


def _system(blocks: Any) -> str:
    """All text of a system prompt, without the block that is Claude Code's own."""
    words = [_text(block, "text") for block in objects(blocks) if block.get("type") == "text"]
    return "".join([each for each in words if not each.startswith(BILLING)])


def _text(block: dict[str, Any], key: str) -> str:
    words = block.get(key)
    if not isinstance(words, str | None):
        raise NotExact(f"{key} is not text")
    return words or ""


def _turn(role: str, blocks: list[dict[str, Any]]) -> list[Message]:
    """The results of tools as messages of their own, in front of what else the message says."""
    done: list[Message] = []
    said: list[Any] = []
    calls: list[Any] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            if words := _text(block, "text"):
                said.append({"type": "text", "text": words})
        elif kind == "image":
            if block.get("source"):
                said.append(block)
        elif kind == "thinking":
            if block.get("thinking") is not None:
                thoughts.append(_text(block, "thinking"))
        elif kind == "tool_use":
            calls.append(_called(block))
        elif kind == "tool_result":
            if role == "user":
                done += _result(block)
            else:
                said.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise NotExact("a block of a kind that is unknown")
    if role == "assistant" or said:
        turn: Message = {"role": role, "content": said or None}
        if thoughts:
            turn["reasoning"] = "".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
        done.append(message(turn))
    return done


def _called(block: dict[str, Any]) -> dict[str, Any]:
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict) or not (call_id := _text(block, "id")):
        raise NotExact("a tool call without an id, or with an input that is no object")
    function = {"arguments": json.dumps(arguments), "name": _text(block, "name")}
    return {"id": call_id, "function": function, "type": "function"}


def _result(block: dict[str, Any]) -> list[Message]:
    """Text, then its images as the user's, then the tools that it names."""
    call, content = _text(block, "tool_use_id"), block.get("content")
    words, images, names = content, [], []
    if isinstance(content, list):
        texts = []
        for item in objects(content):
            kind = item.get("type")
            if kind == "text":
                texts.append(_text(item, "text"))
            elif kind == "image":
                images.append(item)
            elif kind == "tool_reference" and (name := _text(item, "tool_name") or _text(item, "name")):
                names.append({"type": "tool_reference", "name": name})
        words = "\n".join(texts)
    elif not isinstance(content, str | None):
        raise NotExact("a tool result that is neither text nor a list")
    done: list[Message] = [{"role": "tool", "content": words or "", "tool_call_id": call}]
    if images:
        done.append(message({"role": "user", "content": images}))
    if names:
        done.append({"role": "tool", "content": names, "tool_call_id": call})
    return done


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
    return [each for each in system if not (isinstance(each, dict) and str(each.get("text", "")).startswith(BILLING))]


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
