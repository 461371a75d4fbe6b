"""OpenAI chat completions and completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.wire.requests.chat import chat, has_media, identity, listed, messages, objects, tool, unchanged
from extproc.wire.requests.content import (
    FENCE,
    Content,
    NotExact,
    content_of,
    conversation,
    flag,
    front,
    prompts,
    size,
    text,
    text_or_ids,
)

_FRONT = frozenset(
    (
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "functions",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "reasoning_effort",
        "tools",
        "truncate_prompt_tokens",
    )
)

_APART = frozenset(("add_special_tokens", "truncate_prompt_tokens"))

_EMBEDS_BYTES = 2048
"""Of base64 for a byte of text: a token of text has 4 bytes, one of embeddings 8 KiB (3,072 values of 16 bits)."""


def chat_completions(body: Mapping[str, Any]) -> Content:
    """What the template may render before the messages, tools among it, then role and text of each message.

    With `continue_final_message` the last message stays open. Left out is what only steers sampling or the answer's
    form; and `tool_choice`: by default vLLM 0.32 renders the tools all the same (but for Kimi K3), and agents set it
    for single turns of conversations that they go on with.
    """
    parts = front(body, _FRONT)
    parts += conversation(body.get("messages"))
    if parts and body.get("continue_final_message"):
        parts.pop()
    return content_of(body, b"".join(parts))


def exact_chat_completions(body: Mapping[str, Any]) -> Content:
    """The chat as vLLM 0.32 renders it.

    Not followed is `--exclude-tools-when-tool-choice-none`, and what Harmony (gpt-oss) makes of a chat.
    """
    said = listed(body.get("messages"))
    continues, prompted = flag(body, "continue_final_message", False), flag(body, "add_generation_prompt", True)
    if continues and prompted:
        raise NotExact("continue_final_message with a generation prompt")
    tools = body.get("tools")
    prompt = chat(
        body,
        said,
        messages,
        identity,
        tools=[_tool(each) for each in objects(tools)] if tools else None,
        media=has_media(each.get("content") for each in said if isinstance(each, dict)),
        effort=body.get("reasoning_effort"),
        documents=body.get("documents"),
        add_generation_prompt=prompted,
        continue_final_message=continues,
        add_special_tokens=flag(body, "add_special_tokens", False),
    )
    return content_of(body, b"", prompt=prompt)


def _tool(value: dict[str, Any]) -> dict[str, Any]:
    function, outer = value.get("function"), value.get("defer_loading")
    if value.get("type", "function") != "function" or not isinstance(function, dict):
        raise NotExact("a tool that is no function")
    inner = function.get("defer_loading")
    done = tool(
        function.get("name"),
        function.get("description"),
        function.get("parameters"),
        function.get("strict"),
        outer if inner is None else inner,
    )
    return done if outer is None else {**done, "defer_loading": outer}


def completions(body: Mapping[str, Any]) -> Content:
    """A string, token ids, or a list of either: the first decides, all count as work.

    A suffix follows the prompt, as in vLLM's rendering. `prompt_embeds` have no text to match: load only. What changes
    the tokens of the same text (`add_special_tokens`, truncation) keeps it apart.
    """
    if embeds := body.get("prompt_embeds"):
        return content_of(body, b"", size(embeds) // _EMBEDS_BYTES + size(body.get("prompt")))
    first, *others = prompts(body.get("prompt"))
    if suffix := body.get("suffix"):
        first, *others = (prompt + FENCE + text(suffix) for prompt in (first, *others))
    return content_of(body, first, sum(map(len, others)), apart=_APART)


def exact_completions(body: Mapping[str, Any]) -> Content:
    """The first prompt, text or ids; a suffix is put in place by the model's own rules, which few models have."""
    if body.get("prompt_embeds"):
        return completions(body)
    first, *others = prompts(body.get("prompt"))
    unchanged(body)
    if body.get("suffix") is not None:
        raise NotExact("a suffix")
    special = flag(body, "add_special_tokens", True)
    prompt = text_or_ids(body["prompt"], first, add_special_tokens=special)
    return content_of(body, b"", sum(map(len, others)), prompt=prompt)
