"""Requests of every API from a seed: valid ones, and such as are so almost."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.tokens.vocabularies import MARKERS

FAST, SLOW, UNLOADED, PLAIN = "fast", "slow", "unloaded", "plain"
"""Models: with a tokenizer that tiktoken can do, with one that it cannot, with one that is not there, and without."""
ADAPTER = "adapter"
"""Of the fast one."""
MODELS = (FAST, FAST, SLOW, SLOW, PLAIN, PLAIN, UNLOADED, ADAPTER)


# ---- values ----

_WORDS = (
    "the", "cache", "of", "a", "node", "holds", "what", "it", "has", "read,", "and", "no", "more;", "漢字", "über",
    "naïve", "'don't'", "3.14159", "\n\n\tdef", "f(x):", "pass",
)  # fmt: skip
_ODD = (
    "", " ", "\0", "😀", "e\u0301", "\ufb01", "\u212b", "\uac00\u11a8", "\u1e9b\u0323", "\U0010ffff", "\x1e", "\u2028",
    "\ufeff", "\r\n", "{{ 1 }}", "{% raw %}", "</think>", "<think>\n", "x-anthropic-billing-header: a;\nb", '{"a":',
    "NaN", "\\ud800", "auto", "none", "CONTINUE_FINAL_MESSAGE_TAG ", *MARKERS, "<|im_start|>system\n", "<|im_", "▁",
    "<0x0A>",
)  # fmt: skip
_SURROGATES = ("\ud800", "\udc00\ud800", "\ud83d ")
"""Seldom: a body with one of them is refused whole."""
KEYS = (
    "type", "text", "role", "content", "model", "name", "arguments", "function", "tool_calls", "id", "input", "prompt",
    "messages", "tools", "parameters", "reasoning", "thinking", "offset", "length", "uuid", "cache_control",
    "tool_call_id", "output", "é\0",
)  # fmt: skip
_ROLES = ("system", "user", "assistant", "tool", "developer", "function", "", "ROLE", "user\0")
_SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**40, 1.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), -float("inf"), "", "a", "1", "auto", [], {}, [[]], [{}], {"": None},
)  # fmt: skip


def text(rng: Random) -> str:
    """A few words, and what is odd among them."""
    done = [rng.choice(_WORDS) for _ in range(rng.randrange(12))]
    for _ in range(rng.randrange(3) * rng.randrange(3)):
        odd = rng.choice(_ODD) if rng.randrange(4) else chr(rng.randrange(0x110000))
        if not rng.randrange(300):
            odd = rng.choice(_SURROGATES)
        done.insert(rng.randrange(len(done) + 1), odd)
    return " ".join(done)


def prose(rng: Random, most: int) -> str:
    """Up to so many characters in which little repeats."""
    words = [f"{rng.choice(_WORDS)}{rng.randrange(10_000)}" for _ in range(rng.randrange(1, 40))]
    start, length = rng.randrange(1000), rng.randrange(1, max(most, 2))
    return "".join(f"{words[i % len(words)]} {i} " for i in range(start, start + length // 8 + 1))[:length]


def value(rng: Random, depth: int = 3) -> Any:
    """Any JSON value."""
    kind = rng.randrange(6 if depth else 4)
    if kind < 2:
        return rng.choice(_SCALARS)
    if kind < 4:
        return text(rng)
    inner = [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return inner if kind == 4 else {rng.choice(KEYS): each for each in inner}


def maybe(rng: Random, **fields: Callable[[], Any]) -> dict[str, Any]:
    return {key: make() for key, make in fields.items() if not rng.randrange(4)}


def _odd(rng: Random, usual: Any) -> Any:
    return value(rng) if not rng.randrange(25) else usual


# ---- requests ----


def _part(rng: Random) -> Any:
    url = "data:image/png;base64," + base64.b64encode(rng.randbytes(rng.randrange(60))).decode()
    part: dict[str, Any] = rng.choice(
        (
            {"type": "text", "text": text(rng)},
            {"type": "input_text", "text": text(rng)},
            {"type": "output_text", "text": text(rng)},
            {"type": "refusal", "refusal": text(rng)},
            {"type": "thinking", "thinking": text(rng)},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "source": {"type": "base64", "data": url}},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "tool_reference", "name": text(rng)},
        )
    )
    part |= maybe(rng, cache_control=lambda: {"type": "ephemeral"}) if rng.randrange(2) else {}
    return _odd(rng, part if rng.randrange(5) else text(rng))


def _content(rng: Random) -> Any:
    usual = text(rng) if rng.randrange(3) else [_part(rng) for _ in range(rng.randrange(4))]
    return _odd(rng, usual)


def _function(rng: Random) -> dict[str, Any]:
    schema = {"type": "object", "properties": {rng.choice(KEYS): {"type": "string", "minimum": value(rng, 0)}}}
    return {"name": text(rng), "description": text(rng), "parameters": _odd(rng, schema)} | maybe(
        rng, strict=lambda: _odd(rng, True), defer_loading=lambda: _odd(rng, False)
    )


def tools(rng: Random) -> Any:
    return _odd(rng, [_odd(rng, {"type": "function", "function": _function(rng)}) for _ in range(rng.randrange(4))])


def _call(rng: Random) -> Any:
    arguments = (
        json.dumps(value(rng))
        if rng.randrange(3)
        else rng.choice(("", "{", "[1]", '{"a":1}', "null", "NaN", text(rng)))
    )
    function = {"name": text(rng), "arguments": _odd(rng, arguments)}
    return _odd(rng, {"id": text(rng), "type": "function", "function": _odd(rng, function)})


def message(rng: Random) -> Any:
    """A message of a chat."""
    done = {"role": _odd(rng, rng.choice(_ROLES[:5])), "content": _content(rng)}
    if not rng.randrange(3):
        done |= maybe(
            rng,
            tool_calls=lambda: [_call(rng) for _ in range(rng.randrange(3))],
            tool_call_id=lambda: text(rng),
            name=lambda: _odd(rng, text(rng)),
            reasoning=lambda: _odd(rng, text(rng)),
            reasoning_content=lambda: _odd(rng, text(rng)),
            tools=lambda: tools(rng),
        )
    return _odd(rng, done)


def _messages(rng: Random) -> list[Any]:
    return [message(rng) for _ in range(rng.randrange(6))]


def _chat(rng: Random) -> dict[str, Any]:
    return {"messages": _messages(rng)} | maybe(
        rng,
        tools=lambda: tools(rng),
        tool_choice=lambda: value(rng, 1),
        chat_template_kwargs=lambda: _odd(rng, {rng.choice((*KEYS, "enable_thinking", "tools")): value(rng, 1)}),
        add_generation_prompt=lambda: _odd(rng, rng.choice((True, False))),
        continue_final_message=lambda: _odd(rng, rng.choice((True, False))),
        add_special_tokens=lambda: _odd(rng, True),
        documents=lambda: value(rng, 2),
        reasoning_effort=lambda: _odd(rng, rng.choice(("low", "none", "high"))),
        truncate_prompt_tokens=lambda: rng.choice((-1, 7)),
    )


def _ids(rng: Random) -> list[Any]:
    return [rng.randrange(2000) if rng.randrange(200) else rng.choice(_SCALARS) for _ in range(rng.randrange(80))]


def _prompts(rng: Random) -> Any:
    one: Callable[[], Any] = rng.choice((lambda: text(rng), lambda: _ids(rng)))
    return _odd(rng, one() if rng.randrange(2) else [one() for _ in range(rng.randrange(4))])


def _completions(rng: Random) -> dict[str, Any]:
    return {"prompt": _prompts(rng)} | maybe(
        rng,
        suffix=lambda: value(rng, 0),
        prompt_embeds=lambda: _odd(rng, "AAAA" * rng.randrange(50)),
        add_special_tokens=lambda: value(rng, 0),
    )


def _item(rng: Random) -> Any:
    item: dict[str, Any] = rng.choice(
        (
            {"role": rng.choice(_ROLES), "content": _content(rng)},
            {"type": "message", "role": "assistant", "content": _content(rng), "status": "in_progress"},
            {"type": "function_call", "name": text(rng), "arguments": text(rng), "call_id": text(rng)},
            {
                "type": "custom_tool_call",
                "name": text(rng),
                "input": text(rng),
                "call_id": text(rng),
                "namespace": text(rng),
            },
            {"type": "function_call_output", "call_id": text(rng), "output": _content(rng)},
            {
                "type": "reasoning",
                "summary": [{"text": text(rng)}],
                "content": value(rng, 2),
                "encrypted_content": None,
            },
            {"type": "web_search_call", "id": text(rng)},
        )
    )
    return _odd(rng, item)


def _responses(rng: Random) -> dict[str, Any]:
    items = text(rng) if not rng.randrange(4) else [_item(rng) for _ in range(rng.randrange(6))]
    space = {"type": "namespace", "name": text(rng), "tools": [{"type": "function", **_function(rng)}]}
    return {"input": _odd(rng, items)} | maybe(
        rng,
        instructions=lambda: _content(rng),
        previous_response_id=lambda: text(rng),
        tools=lambda: _odd(rng, [space, {"type": "custom", **_function(rng)}, {"type": "function", **_function(rng)}]),
        reasoning=lambda: _odd(rng, {"effort": "low"}),
    )


def _block(rng: Random) -> Any:
    block: dict[str, Any] = rng.choice(
        (
            {"type": "text", "text": text(rng)},
            {"type": "thinking", "thinking": text(rng), "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": text(rng), "name": text(rng), "input": value(rng)},
            {"type": "tool_result", "tool_use_id": text(rng), "content": _content(rng)},
            {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
            {"type": "tool_addition", "tool": value(rng, 1)},
        )
    )
    return _odd(rng, block)


def _anthropic(rng: Random) -> dict[str, Any]:
    said = [
        _odd(
            rng,
            {
                "role": rng.choice(_ROLES[:4]),
                "content": text(rng) if rng.randrange(2) else [_block(rng) for _ in range(3)],
            },
        )
        for _ in range(rng.randrange(6))
    ]
    tools = [{"name": text(rng), "description": text(rng), "input_schema": _odd(rng, {"properties": {}})}]
    return {"messages": _odd(rng, said)} | maybe(
        rng,
        system=lambda: _content(rng),
        tools=lambda: _odd(rng, tools),
        thinking=lambda: _odd(rng, {"type": "disabled"}),
        output_config=lambda: _odd(rng, {"effort": "high"}),
    )


def _pooling(rng: Random) -> dict[str, Any]:
    return {rng.choice(("input", "query", "documents", "text_1", "data")): _prompts(rng)} | maybe(
        rng, items=lambda: value(rng)
    )


def _generate_ids(rng: Random) -> dict[str, Any]:
    places = {
        "mm_placeholders": {"image": [{"offset": 1, "length": _odd(rng, 3)}]},
        "mm_hashes": {"image": [text(rng)]},
    }
    return {"token_ids": _odd(rng, _ids(rng))} | maybe(
        rng, features=lambda: _odd(rng, places), content_parts=lambda: value(rng)
    )


def _generate(rng: Random) -> dict[str, Any]:
    return {rng.choice(("text", "input_ids", "inputs")): _prompts(rng)} | maybe(
        rng,
        parameters=lambda: _odd(rng, {"truncate": value(rng, 0)}),
        image_data=lambda: value(rng),
        add_special_tokens=lambda: value(rng, 0),
    )


def _ollama_chat(rng: Random) -> dict[str, Any]:
    return {"messages": _messages(rng)} | maybe(
        rng, tools=lambda: tools(rng), think=lambda: value(rng, 0), images=lambda: ["A"]
    )


def _ollama_generate(rng: Random) -> dict[str, Any]:
    return {"prompt": _odd(rng, text(rng))} | maybe(
        rng, system=lambda: text(rng), context=lambda: _ids(rng), images=lambda: value(rng)
    )


def _llamacpp(rng: Random) -> dict[str, Any]:
    mixed = [text(rng), *_ids(rng)]
    several = [{"prompt_string": text(rng), "multimodal_data": value(rng, 1)}, mixed]
    return {"prompt": _odd(rng, rng.choice((mixed, several, several[0], _prompts(rng))))}


REQUESTS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/responses": _responses,
    "/v1/messages": _anthropic,
    "/v1/messages/count_tokens": _anthropic,
    "/v1/embeddings": _pooling,
    "/v1/rerank": _pooling,
    "/pooling": _pooling,
    "/score": _pooling,
    "/classify": _pooling,
    "/inference/v1/generate": _generate_ids,
    "/tokenize": lambda rng: rng.choice((_chat, _completions))(rng),
    "/api/chat": _ollama_chat,
    "/api/generate": _ollama_generate,
    "/generate": _generate,
    "/completion": _llamacpp,
}
"""By path; every API has one."""

PATHS = tuple(REQUESTS)
_BUSY = (*PATHS, *("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions") * 5)


def request(rng: Random) -> tuple[str, dict[str, Any]]:
    """The path and the parsed body of a request that is valid, or almost."""
    path = rng.choice(_BUSY)
    named = {"model": _odd(rng, rng.choice(MODELS))} if rng.randrange(30) else {}
    more = maybe(rng, cache_salt=lambda: value(rng, 0), user=lambda: value(rng, 0)) if not rng.randrange(3) else {}
    return path, named | REQUESTS[path](rng) | more


def written(rng: Random, body: Any) -> bytes:
    """As JSON, with or without escapes; lone surrogates are escapes, or bytes that are no UTF-8."""
    if rng.randrange(4):
        return json.dumps(body).encode()
    return json.dumps(body, ensure_ascii=False, indent=rng.choice((None, 1))).encode("utf-8", "surrogatepass")
