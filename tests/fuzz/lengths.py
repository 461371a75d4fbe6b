"""Bodies that are long: one kind of thing, over and over."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.apis import MODELS, prose

_RUNS = (
    " ", "a", "A", "\n", "\t", "\r\n", "1", "😀", "e\u0301", "\u0301", "漢", "ᄀ", "\0", "\u200d", "'s", "!", "aA",
    "<|im_end|>", "<|im_start|", "\ufffd", "\u1100\u1161", "\U00013000", "▁", "\\", '"', "\u00c5", "\u0344", "ﷺ",
    "\x1e", "a ",
)  # fmt: skip

_CHAT, _COMPLETIONS, _RESPONSES, _ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def _asks(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


def _calls(calls: list[Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}]}


def _features(places: list[Any]) -> dict[str, Any]:
    return {"token_ids": [1] * 100, "features": {"mm_placeholders": {"i": places}, "mm_hashes": {"i": places}}}


_FUNCTION = {"name": "f", "arguments": "{}"}
_MANY: dict[str, tuple[str, Any, Callable[[list[Any]], dict[str, Any]]]] = {
    "turns": (_CHAT, {"role": "user", "content": "a"}, lambda many: {"messages": many}),
    "empty turns": (_CHAT, {}, lambda many: {"messages": many}),
    "numbers for turns": (_CHAT, 7, lambda many: {"messages": many}),
    "parts": (_CHAT, {"type": "text", "text": "a"}, _asks),
    "null parts": (_CHAT, None, _asks),
    "pictures": (_CHAT, {"type": "image_url", "image_url": {"url": "a"}}, _asks),
    "tools": (_CHAT, {"type": "function", "function": {"name": "f"}}, lambda many: _asks("a", tools=many)),
    "lists for tools": (_CHAT, [], lambda many: _asks("a", tools=many)),
    "documents": (_CHAT, {"a": 1}, lambda many: _asks("a", documents=many)),
    "calls": (_CHAT, {"id": "c", "function": _FUNCTION}, _calls),
    "values in arguments": (
        _CHAT, [1, {"a": None}],
        lambda many: _calls([{"id": "c", "function": {**_FUNCTION, "arguments": json.dumps(many)}}]),
    ),
    "prompts": (_COMPLETIONS, "a", lambda many: {"prompt": many}),
    "lists of ids": (_COMPLETIONS, [1], lambda many: {"prompt": many}),
    "ids": (_COMPLETIONS, 1000, lambda many: {"prompt": many}),
    "ids and a text": (_COMPLETIONS, 1000, lambda many: {"prompt": [*many, "a"]}),
    "ids to generate from": ("/inference/v1/generate", 1000, lambda many: {"token_ids": many}),
    "features": ("/inference/v1/generate", {"offset": 0, "length": 1}, _features),
    "texts to embed": ("/v1/embeddings", "a", lambda many: {"input": many}),
    "objects to embed": ("/v1/embeddings", {"a": "b"}, lambda many: {"input": many}),
    "items": (
        _RESPONSES, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        lambda many: {"input": many},
    ),
    "outputs": (
        _RESPONSES, {"type": "function_call_output", "call_id": "c", "output": "a"}, lambda many: {"input": many},
    ),
    "blocks": (_ANTHROPIC, {"type": "text", "text": "a"}, _asks),
    "results": (_ANTHROPIC, {"type": "tool_result", "tool_use_id": "c"}, _asks),
    "turns to count": ("/v1/messages/count_tokens", {"role": "user", "content": "a"}, lambda many: {"messages": many}),
    "texts in a prompt": ("/completion", "a", lambda many: {"prompt": [*many, 1]}),
    "ids in a prompt": ("/completion", 1, lambda many: {"prompt": ["a", *many]}),
    "inputs": ("/generate", "a", lambda many: {"inputs": many}),
    "messages of ollama": ("/api/chat", {"role": "user", "content": "a"}, lambda many: {"messages": many}),
    "ids in a context": ("/api/generate", 1, lambda many: {"prompt": "a", "context": many}),
}  # fmt: skip
"""By path: what stands there many times, and the body around it."""

_KEYED: dict[str, Callable[[dict[str, int]], dict[str, Any]]] = {
    "keys": lambda many: {**_asks("a"), **many},
    "variables": lambda many: _asks("a", chat_template_kwargs=many),
    "parameters": lambda many: _asks("a", tools=[{"type": "function", "function": {"name": "f", "parameters": many}}]),
    "keys of a message": lambda many: {"messages": [{"role": "user", "content": "a", **many}]},
    "keys of a part": lambda many: _asks([{"type": "text", "text": "a", **many}]),
}
"""Bodies around an object with many keys."""

_TEXTS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "text": (_CHAT, _asks),
    "prompt": (_COMPLETIONS, lambda text: {"prompt": text}),
    "role": (_CHAT, lambda text: {"messages": [{"role": text, "content": "a"}]}),
    "arguments": (_CHAT, lambda text: _calls([{"id": "c", "function": {**_FUNCTION, "arguments": text}}])),
    "model": (_CHAT, lambda text: _asks("a", model=text)),
    "salt": (_CHAT, lambda text: _asks("a", cache_salt=text)),
    "session": (_CHAT, lambda text: _asks("a", user=text)),
    "picture": (_CHAT, lambda text: _asks([{"type": "image_url", "image_url": {"url": text}}])),
    "embeddings": (_COMPLETIONS, lambda text: {"prompt": "a", "prompt_embeds": text}),
    "system": (_ANTHROPIC, lambda text: {"system": text, "messages": []}),
}
"""Bodies around a long text."""


def long(rng: Random, most: int) -> tuple[str, str, bytes]:
    """What it is, the path, and a body of up to about so many bytes."""
    size = most if rng.randrange(2) else rng.randrange(most // 8, most)
    path, body = _CHAT, {"model": rng.choice(MODELS)}
    draw = rng.randrange(10)
    if draw < 4:
        kind = rng.choice(list(_MANY))
        path, item, around = _MANY[kind]
        body |= around([item] * (size // len(json.dumps(item) + ", ") + 1))
        kind = f"many {kind}"
    elif draw < 5:
        kind = rng.choice(list(_KEYED))
        body |= _KEYED[kind]({str(number): 0 for number in range(size // 10)})
        kind = f"many {kind}"
    elif draw < 6:
        kind = "many turns of prose"
        turn = prose(rng, 400)
        body["messages"] = [{"role": "user", "content": f"{turn} {at}"} for at in range(size // (len(turn) + 40))]
    else:
        kind = rng.choice(list(_TEXTS)) if rng.randrange(2) else rng.choice(("text", "prompt"))
        path, around_text = _TEXTS[kind]
        unit = rng.choice(_RUNS)
        text = prose(rng, size) if not rng.randrange(6) else unit * (size // len(unit.encode()))
        body |= around_text(text)
        kind = f"long {kind}, {text[: len(unit)]!r}"
    return kind, path, json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
