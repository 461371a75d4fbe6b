"""OpenAI chat completions and completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.wire.requests.content import FENCE, Content, content_of, conversation, front, prompts, size, text

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
