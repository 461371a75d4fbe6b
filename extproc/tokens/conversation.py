"""What vLLM makes of OpenAI chat messages for its chat template (0.32: renderers/chat_utils.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from extproc.core.prompt import Message
from extproc.tokens.content_format import ContentFormat

_TEXT_OF = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "thinking": "thinking",
    "refusal": "refusal",
}
"""Types of parts that are text, and where the text is."""

_PART_FIELDS = frozenset(
    (
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url"),
        *("input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid"),
        *("video_embeds", "video_url"),
    )
)
"""What the engine knows in parts of any type; a template that reads parts gets whatever else a text part has."""

_CALL_FIELDS = ("id", "function", "type")
_CALLED_FIELDS = ("arguments", "name")
_TOOL_FIELDS = ("function", "type")
_DEFINITION_FIELDS = ("name", "description", "parameters", "strict")

_BILLING_HEADER = "x-anthropic-billing-header"


class MessageError(ValueError):
    """A message that the engine refuses; the text quotes nothing of it."""


def prepare(
    messages: Sequence[Any], *, content_format: ContentFormat, developer: bool, validated: bool = True
) -> list[Message]:
    """The messages as the chat template gets them; shares what it does not change with `messages`, changes none.

    `developer`: the template knows this role; if not, developers' messages become the system's, and then all of the
    system's become one at the front, which needs the whole conversation at once. Without developers, or when the
    template knows them, each message is prepared by itself.
    `validated`: as the engine's request class leaves them, which reads reasoning_content as reasoning and puts the keys
    of tool calls in its own order, as templates see that write a whole call as JSON; not so for /v1/responses.
    Raises MessageError for what the engine refuses; only what a template can tell apart is looked at, so null content
    of a user or a tool call without an id passes here and not there.
    """
    prepared = [_message(message, content_format == "openai", validated) for message in messages]
    if not developer and any(message["role"] == "developer" for message in prepared):
        return _to_system(prepared)
    return prepared


def _message(message: Any, as_parts: bool, validated: bool) -> Message:
    if not isinstance(message, dict):
        raise MessageError("a message is not an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise MessageError("a message has no role")
    prepared: Message = {"role": role, "content": _content(role, content, as_parts)}
    if len(message) == 2 and content is not None and role != "developer":
        return prepared
    if role == "assistant":
        if calls := message.get("tool_calls"):
            prepared["tool_calls"] = _tool_calls(calls, validated)
        reasoning = message.get("reasoning")
        if reasoning is None and validated:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            prepared["reasoning"] = prepared["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        prepared["tool_call_id"] = message["tool_call_id"]
    for key in ("name", "task"):
        if isinstance(value := message.get(key), str):
            prepared[key] = value
    if role == "developer":
        prepared["tools"] = _tools(message.get("tools"), validated)
    return prepared


def _content(role: str, content: Any, as_parts: bool) -> Any:
    if isinstance(content, str):
        if role != "system" or not content.startswith(_BILLING_HEADER):
            return [{"type": "text", "text": content}] if as_parts and role != "tool" else content
        content = [content]
    elif content is None:
        content = []
    elif not isinstance(content, list):
        raise MessageError("content is neither text nor a list of parts")
    if role == "system":
        content = _without_billing_header(content)
    parts = [prepared for part in content if (prepared := _part(part, as_parts))]
    if as_parts and (role != "tool" or any(part["type"] != "text" for part in parts)):
        return parts
    try:
        return "\n".join([part["text"] for part in parts] if as_parts else parts)
    except TypeError:
        raise MessageError("a content part's text is not a string") from None


def _part(part: Any, as_parts: bool) -> Any:
    """A part as a template gets it; something false: it is skipped."""
    if isinstance(part, str):
        return {"type": "text", "text": part} if as_parts else part
    if not isinstance(part, dict):
        raise MessageError("a content part is neither text nor an object")
    kind = part.get("type")
    marked = part.get("uuid") is not None
    if isinstance(kind, str) and kind in _TEXT_OF and not marked:
        text = part.get(_TEXT_OF[kind])
        if not isinstance(text, str):
            if text is not None:
                raise MessageError("a content part's text is not a string")
            if kind in ("text", "refusal"):
                return None
        if not as_parts:
            return text
        return {"type": "text", "text": text} | {key: part[key] for key in part if key not in _PART_FIELDS}
    if (kind == "tool_reference" and not marked) or ((kind is None or marked) and "tool_reference" in part):
        name = part.get("name")
        return {"type": "tool_reference", "name": name} if as_parts else name
    raise MessageError("a content part of a type that is not text")


def _without_billing_header(parts: list[Any]) -> list[Any]:
    """Without the line that Claude Code puts in front of its system prompts, which differs in every request."""
    kept: list[Any] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if part is text else part | {"text": rest})
    return kept


def _tool_calls(calls: Any, validated: bool) -> list[Message]:
    if not isinstance(calls, list):
        raise MessageError("tool_calls is not a list")
    return [_tool_call(call, validated) for call in calls]


def _tool_call(call: Any, validated: bool) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise MessageError("a tool call is not one of a function")
    if validated:
        call, function = _ordered(call, _CALL_FIELDS), _ordered(function, _CALLED_FIELDS)
    arguments = _arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(value: Any) -> dict[str, Any]:
    """Arguments as an object; what is none counts as empty, for the client could never mend its history."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {}
        except (ValueError, RecursionError):
            raise MessageError("arguments of a tool call that cannot be read") from None
    return value if isinstance(value, dict) else {}


def _tools(tools: Any, validated: bool) -> Any:
    """Tools of a developer's message; the request class orders their keys if all of them are tools."""
    if not (validated and _objects(tools) and _objects([tool.get("function") for tool in tools])):
        return tools
    return [
        _ordered(tool | {"function": _ordered(tool["function"], _DEFINITION_FIELDS)}, _TOOL_FIELDS) for tool in tools
    ]


def _objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def _ordered(value: dict[str, Any], first: Sequence[str]) -> dict[str, Any]:
    """The same object, with those keys of `first` that it has in front."""
    return {key: value[key] for key in first if key in value} | value


def _to_system(messages: list[Message]) -> list[Message]:
    """Developers' messages as the system's, and if not just the first is one, all of the system's as one in front."""
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
            del message["tools"]
    if not any(message["role"] == "system" for message in messages[1:]):
        return messages
    try:
        texts = [_text(message["content"]) for message in messages if message["role"] == "system"]
    except TypeError:
        raise MessageError("a content part's text is not a string") from None
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _text(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "\n".join([part["text"] for part in content if "text" in part])
