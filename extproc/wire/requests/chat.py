"""Chats as vLLM has them before it parses their messages: what is left of messages, tools, template variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from extproc.core.prompt import Chat, Message
from extproc.wire.requests.content import FENCE, NoContent, NotExact, media

BILLING = "x-anthropic-billing-header"
"""How a system text of Claude Code begins that differs in every request; vLLM strips it, or nothing would match."""

_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The parts that vLLM reads as text, and where each has it."""

_NOT_RENDERED = frozenset(
    ("cache_control", "closed", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid")
)
"""Of a text part. All but `cache_control` vLLM takes out as well; that one moves between turns, and no template that is
known renders it."""

_RESERVED = frozenset(
    (
        "chat_template",
        "conversation",
        "messages",
        "model_config",
        "return_assistant_tokens_mask",
        "tokenize",
        "tokenizer",
    )
)
"""Template variables that are not for a client to set: refused, or in the way of vLLM's own arguments."""


def message(value: Any) -> Message:
    """An OpenAI message with what a template may render, and nothing else."""
    if not isinstance(value, dict):
        raise NotExact("a message is not an object")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str):
        raise NotExact("a message without a role")
    if isinstance(content, str):
        if len(value) == 2:
            return value
    elif isinstance(content, list):
        content = _content(content)
    elif content is not None:
        raise NotExact("content is neither text nor a list")
    done: Message = {"role": role, "content": content}
    if role == "assistant":
        if calls := value.get("tool_calls"):
            done["tool_calls"] = objects(calls)
        reasoning = value.get("reasoning")
        if reasoning is None:
            reasoning = value.get("reasoning_content")
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise NotExact("reasoning is not text")
            done["reasoning"] = reasoning
    elif role == "tool":
        if "tool_call_id" in value:
            done["tool_call_id"] = value["tool_call_id"]
    elif role == "developer" and value.get("tools") is not None:
        done["tools"] = objects(value["tools"])
    for key in ("name", "task"):
        if isinstance(value.get(key), str):
            done[key] = value[key]
    return done


def messages(values: Sequence[Any]) -> list[Message]:
    """Each by itself, so that any run of them may be expanded by itself."""
    return [message(value) for value in values]


def identity(value: Any) -> list[bytes]:
    """An OpenAI message by what `message` leaves of it."""
    return identity_of(message(value))


def identity_of(found: Message) -> list[bytes]:
    """A message as bytes, the same for no two that render differently.

    The first line of a system message is passed over where vLLM strips it: it differs in every request.
    """
    role, content = found["role"], found.get("content")
    if role == "system":
        content = _unbilled(content)
    if len(found) == 2 and isinstance(content, str):
        who = role.encode("utf-8", "surrogatepass")
        return [b"%d:" % len(who), who, content.encode("utf-8", "surrogatepass")]
    return [msgspec.json.encode({**found, "content": content})]


def identity_of_all(found: list[Message]) -> list[bytes]:
    """One identity for the messages that one message of another API becomes."""
    return identity_of(found[0]) if len(found) == 1 else [msgspec.json.encode(found)]


def has_media(contents: Iterable[Any]) -> bool:
    """Is a part that is not text in one of these contents?"""
    return any(
        isinstance(part, dict) and part.get("type") not in _NO_MEDIA
        for content in contents
        if isinstance(content, list)
        for part in content
    )


_NO_MEDIA = (*_TEXTS, "tool_reference")
"""A tuple: the type may be anything, also what cannot be hashed."""


def chat(
    body: Mapping[str, Any],
    said: Sequence[Any],
    expand: Callable[[Sequence[Any]], list[Message]],
    identity: Callable[[Any], list[bytes]],
    *,
    tools: list[Any] | None,
    media: bool,
    effort: Any = None,
    documents: Any = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    validated: bool = True,
) -> Chat:
    """A chat with the template variables that the body sets.

    As vLLM merges them: effort and documents win over `chat_template_kwargs`, null and "auto" count as not set, and
    an effort turns thinking on (or off, "none") where the client does not say. NotExact: what `unchanged` refuses.
    """
    unchanged(body)
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict) or not isinstance(effort, str | None) or not isinstance(documents, list | None):
        raise NotExact("template variables of a wrong type")
    options = {key: value for key, value in kwargs.items() if value is not None and value != "auto"}
    if not _RESERVED.isdisjoint(options):
        raise NotExact("a reserved template variable is set")
    if documents is not None:
        options["documents"] = documents
    if effort is not None:
        options["reasoning_effort"] = effort
        if "enable_thinking" not in kwargs:
            options["enable_thinking"] = effort != "none"
    for ours in ("add_generation_prompt", "continue_final_message"):
        options.pop(ours, None)
    tools = options.pop("tools", tools)
    if not isinstance(tools, list | None):
        raise NotExact("tools is not a list")
    return Chat(
        messages=said,
        expand=expand,
        identity=identity,
        tools=tools,
        options=options or None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        add_special_tokens=add_special_tokens,
        validated=validated,
        media=media,
    )


def unchanged(body: Mapping[str, Any]) -> None:
    """NotExact when the body has something that changes the tokens in a way that it does not show.

    A truncation to -1 is to the model's length: it changes only what would be refused without it.
    """
    if body.get("chat_template") is not None:
        raise NotExact("a chat template of its own")
    if body.get("truncate_prompt_tokens") not in (None, -1):
        raise NotExact("the prompt is truncated")
    if body.get("mm_processor_kwargs") or body.get("media_io_kwargs"):
        raise NotExact("arguments for the processing of media")
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise NotExact("token ids of a prefill elsewhere")


def tool(
    name: Any, description: Any = None, parameters: Any = None, strict: Any = None, defer_loading: Any = None
) -> dict[str, Any]:
    """A function as templates get it, in the order in which vLLM dumps it, null where it leaves null."""
    if not isinstance(name, str) or not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise NotExact("a tool that is no function")
    function: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    for key, value in (("strict", strict), ("defer_loading", defer_loading)):
        if value is not None:
            if not isinstance(value, bool):
                raise NotExact(f"{key} is no boolean")
            function[key] = value
    return {"type": "function", "function": function}


def objects(value: Any) -> list[dict[str, Any]]:
    """A list of objects, as tools come."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise NotExact("not a list of objects")
    return value


def listed(value: Any) -> list[Any]:
    """The messages of a body."""
    if not isinstance(value, list):
        raise NoContent("messages is not a list")
    return value


def _content(parts: list[Any]) -> Any:
    """Parts that vLLM takes for the same are the same; one text alone is a string, as it is to vLLM."""
    done = [_part(part) for part in parts if not _is_empty(part)]
    if len(done) == 1:
        (only,) = done
        if isinstance(only, str):
            return only
        if only["type"] == "text" and len(only) == 2:
            return only["text"]
    return done


def _is_empty(part: Any) -> bool:
    """vLLM passes over a text that is null, or not there."""
    return isinstance(part, dict) and (
        (part.get("type") == "text" and part.get("text") is None)
        or (part.get("type") == "refusal" and part.get("refusal") is None)
    )


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise NotExact("a part is neither text nor an object")
    kind = part.get("type")
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is not None:
        if not isinstance(words := part.get(key), str):
            raise NotExact("a text part without text")
        done = {"type": "text", "text": words}
        if len(part) > 2:
            done.update((each, value) for each, value in part.items() if each not in _NOT_RENDERED)
        return done
    if kind == "tool_reference":
        if not isinstance(part.get("name"), str):
            raise NotExact("a tool reference without a name")
        return {"type": "tool_reference", "name": part["name"]}
    fence = FENCE.decode()
    return {"type": "text", "text": f"{fence}{media(part)[len(FENCE) :].hex()}{fence}"}


def _unbilled(content: Any) -> Any:
    if isinstance(content, str):
        return (content.partition("\n")[2] or content) if content.startswith(BILLING) else content
    if isinstance(content, list):
        return [
            {**part, "text": _unbilled(part["text"])} if isinstance(part, dict) and "text" in part else _unbilled(part)
            for part in content
        ]
    return content
