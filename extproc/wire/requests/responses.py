"""OpenAI responses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.core.prompt import Message
from extproc.wire.requests.chat import chat, has_media, identity_of, message, objects, tool
from extproc.wire.requests.content import (
    FENCE,
    Content,
    NoContent,
    NotExact,
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

_STORED = ("conversation", "previous_input_messages", "previous_response_id", "prompt")

_PAYLOAD = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""What vLLM shows as the parameters of a custom tool, which takes text."""


def responses(body: Mapping[str, Any]) -> Content:
    """Tools and effort, then the instructions as a system message, then the input: a string is one user message.

    What went before `previous_response_id` (or a stored conversation or prompt) is not in the body; so its name stands
    in front, and requests that go on from the same one share a prefix. Left out: `tool_choice`, as in chat completions,
    and ids, states and encrypted parts of items, which no engine renders.
    """
    items = _items(body)
    done = front(body, _FRONT)
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        done += (canonical(reasoning["effort"]), FENCE)
    if body.get("instructions"):
        done += conversation([{"role": "system", "content": body["instructions"]}])
    for item in items:
        done += conversation([item]) if isinstance(item, dict) and "role" in item else _other(item)
    return content_of(body, b"".join(done))


def _items(body: Mapping[str, Any]) -> list[Any]:
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise NoContent("input is neither text nor a list")
    return items


def exact_responses(body: Mapping[str, Any]) -> Content:
    """The chat that vLLM 0.32 makes of it, the instructions first. Unlike chats of other APIs it gets special tokens.

    NotExact: whatever goes on from something stored. Not followed: what Harmony (gpt-oss) makes of it.
    """
    items = _items(body)
    if any(body.get(key) for key in _STORED):
        raise NotExact("it goes on from something stored")
    reasoning, instructions, tools = body.get("reasoning"), body.get("instructions"), body.get("tools")
    continues = _is_open(items[-1]) if items else False
    prompt = chat(
        body,
        [{"role": "system", "content": instructions}, *items] if instructions else items,
        expand,
        identity,
        tools=[done for each in objects(tools) for done in _tools(each)] if tools else None,
        media=has_media(each.get(key) for each in items if isinstance(each, dict) for key in ("content", "output")),
        effort=reasoning.get("effort") if isinstance(reasoning, dict) else None,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        add_special_tokens=True,
        validated=False,
    )
    return content_of(body, b"", prompt=prompt)


def expand(items: Sequence[Any]) -> list[Message]:
    """Text, reasoning and calls of the assistant that follow each other become one message.

    So a run of items may be expanded by itself when the item before it is not the assistant's.
    """
    done: list[Message] = []
    for item in items:
        key, value = _item(item)
        before = done[-1] if done and done[-1]["role"] == "assistant" else None
        if key == "":
            done.append(value)
        elif before is None:
            done.append({"role": "assistant", key: value})
        elif before.get(key) is None:
            before[key] = value
        elif key == "tool_calls":
            before[key] += value
        else:
            done.append({"role": "assistant", key: value})
    return done


def identity(item: Any) -> list[bytes]:
    """An item by what it becomes, or adds to a message of the assistant."""
    key, value = _item(item)
    return [msgspec.json.encode([key, value])] if key else identity_of(value)


def _item(item: Any) -> tuple[str, Any]:
    """What an item adds to the assistant's message, and where; or "" and a message of its own."""
    if not isinstance(item, dict):
        raise NotExact("an item is not an object")
    kind, role = item.get("type"), item.get("role")
    if kind == "function_call":
        name, arguments = _string(item, "name"), _string(item, "arguments")
        if item.get("namespace"):
            name = f"{_string(item, 'namespace')}__{name}"
        return "tool_calls", [_call(item, name, arguments)]
    if kind == "custom_tool_call":
        words = _string(item, "input") if item.get("input") else ""
        return "tool_calls", [_call(item, _string(item, "name"), json.dumps({"input": words}, ensure_ascii=False))]
    if kind == "reasoning":
        return "reasoning", _reasoning(item)
    if kind in ("function_call_output", "custom_tool_call_output"):
        result = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        return "", message(result)
    if role == "assistant":
        said = item.get("content")
        if isinstance(said, list):
            said = said[0].get("text") if said and isinstance(said[0], dict) else None
        if isinstance(said, str):
            return "content", said
    if role is None:
        raise NotExact("an item of a kind that is unknown")
    return "", message(item)


def _call(item: dict[str, Any], name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": _string(item, "call_id"), "function": function, "type": "function"}


def _reasoning(item: dict[str, Any]) -> str:
    """The first text alone; a summary where there is none."""
    if item.get("encrypted_content"):
        raise NotExact("encrypted reasoning")
    for key in ("content", "summary"):
        if texts := item.get(key):
            return _string(objects(texts)[0], "text")
    return ""


def _string(value: dict[str, Any], key: str) -> str:
    found = value.get(key)
    if not isinstance(found, str):
        raise NotExact(f"{key} is not text")
    return found


def _is_open(item: Any) -> bool:
    """Is this a message, or reasoning, that the model is to go on with?"""
    return (
        isinstance(item, dict)
        and item.get("type", "message") in ("message", "reasoning")
        and item.get("status") in ("in_progress", "incomplete")
    )


def _tools(value: dict[str, Any]) -> list[dict[str, Any]]:
    """A tool as the functions that the model sees: none, one, or all of a namespace."""
    kind, name = value.get("type"), value.get("name")
    if kind == "function":
        return [_function(value, name)]
    if kind == "custom":
        return [tool(name, value.get("description"), _PAYLOAD)]
    if kind == "namespace":
        return [
            _function(each, f"{_string(value, 'name')}__{_string(each, 'name')}")
            for each in objects(value.get("tools"))
            if each.get("type") == "function"
        ]
    return []


def _function(value: dict[str, Any], name: Any) -> dict[str, Any]:
    return tool(
        name, value.get("description"), value.get("parameters"), value.get("strict"), value.get("defer_loading")
    )


def _other(item: Any) -> tuple[bytes, ...]:
    """A call, its output, a reasoning item."""
    if not isinstance(item, dict):
        raise NoContent("an item is not an object")
    rest = canonical(without(item, "id", "status", "encrypted_content", "output"))
    return rest, FENCE, parts(item.get("output")), FENCE
