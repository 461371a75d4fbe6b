"""Exact reading: golden cases against what vLLM 0.32 makes of each body, and what holds for all chats."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from extproc.core.prompt import Chat, Ids, Text
from extproc.wire.requests import APIS, parse, read
from extproc.wire.requests.content import Content, NotExact, canonical
from extproc.wire.requests.session import session
from tests.wire.test_requests import ANTHROPIC, CHAT, RESPONSES, api, reversed_keys


def exact(path: str, body: dict[str, Any]) -> Content:
    reader = api(path).exact
    assert reader is not None
    return read(reader, parse(json.dumps({"model": "m", **body}).encode(), cut=False))


def chat(path: str, body: dict[str, Any]) -> Chat:
    found = exact(path, body)
    assert (found.model, found.data, found.extra_bytes) == ("m", b"", 0)
    assert isinstance(found.prompt, Chat)
    return found.prompt


def said(path: str, *messages: Any, **more: Any) -> list[Any]:
    """The messages that a template gets."""
    found = chat(path, {"input" if path == RESPONSES else "messages": list(messages), **more})
    return found.expand(found.messages)


def marked(part: Any) -> str:
    return f"\x1e{xxh3_128_hexdigest(canonical(part))}\x1e"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


MARK = {"cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
BILLED = text("x-anthropic-billing-header: cch=1;")
SCHEMA = {"type": "object", "z": 1, "a": 2}


def called(name: str = "f", arguments: str = "{}", call: str = "c") -> dict[str, Any]:
    """A call, the function's fields in the order of vLLM's validation."""
    return {"id": call, "function": {"arguments": arguments, "name": name}, "type": "function"}


def answered(name: str = "f", arguments: str = "{}", call: str = "c") -> dict[str, Any]:
    """A call, the function's fields in the order of vLLM's responses."""
    return {"id": call, "function": {"name": name, "arguments": arguments}, "type": "function"}


def assistant(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(content: Any, call: str = "c") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call}


# ---- golden messages ----

MESSAGES: dict[str, tuple[str, list[Any], list[Any]]] = {
    "chat": (CHAT, [{"role": "system", "content": "s"}, USER], [{"role": "system", "content": "s"}, USER]),
    "chat, one text part is a string": (CHAT, [{"role": "user", "content": [{**text("hi"), **MARK}]}], [USER]),
    "chat, parts": (
        CHAT,
        [{"role": "user", "content": [text("a"), {**text("b"), **MARK, "prompt_cache_breakpoint": {}, "uuid": None}]}],
        [{"role": "user", "content": [text("a"), text("b")]}],
    ),
    "chat, other text parts": (
        CHAT,
        [{"role": "user", "content": [{"type": "refusal", "refusal": "r"}, {"type": "thinking", "thinking": "t"}]}],
        [{"role": "user", "content": [text("r"), text("t")]}],
    ),
    "chat, a part with a field of its own": (
        CHAT,
        [{"role": "user", "content": [{**text("a"), "foo": 1}]}],
        [{"role": "user", "content": [{**text("a"), "foo": 1}]}],
    ),
    "chat, null texts": (
        CHAT,
        [{"role": "user", "content": [{"type": "text", "text": None}, text("hi"), {"type": "refusal"}]}],
        [USER],
    ),
    "chat, image": (
        CHAT,
        [{"role": "user", "content": [text("a"), {**IMAGE, **MARK}, text("b")]}],
        [{"role": "user", "content": [text("a"), text(marked(IMAGE)), text("b")]}],
    ),
    "chat, tool calls": (CHAT, [assistant(tool_calls=[answered()], id="x")], [assistant(tool_calls=[answered()])]),
    "chat, a developer": (CHAT, [{"role": "developer", "content": "d"}], [{"role": "developer", "content": "d"}]),
    "chat, a developer's tools": (
        CHAT,
        [{"role": "developer", "content": "d", "tools": [{"function": {}}]}],
        [{"role": "developer", "content": "d", "tools": [{"function": {}}]}],
    ),
    "chat, tool result": (
        CHAT,
        [{"role": "tool", "content": [text("4"), text("2")], "tool_call_id": "c", "name": "f", "id": "x"}],
        [{"role": "tool", "content": [text("4"), text("2")], "tool_call_id": "c", "name": "f"}],
    ),
    "chat, reasoning under its old name": (
        CHAT,
        [assistant("a", reasoning_content="r"), assistant("a", reasoning="r", reasoning_content="o")],
        [assistant("a", reasoning="r"), assistant("a", reasoning="r")],
    ),
    "chat, what is not rendered": (
        CHAT,
        [
            assistant("a", refusal=None, audio={"id": "x"}, annotations=[], tool_calls=[], prefix=True),
            {
                "role": "user",
                "content": "a",
                "tool_calls": [called()],
                "reasoning": "r",
                "name": 7,
                "tool_call_id": "c",
            },
        ],
        [assistant("a"), {"role": "user", "content": "a"}],
    ),
    "chat, what is": (
        CHAT,
        [{"role": "user", "content": "a", "name": "n", "task": "t"}],
        [{"role": "user", "content": "a", "name": "n", "task": "t"}],
    ),
    "anthropic": (ANTHROPIC, [USER, {"role": "assistant", "content": "yo"}], [USER, assistant("yo")]),
    "anthropic, texts": (
        ANTHROPIC,
        [{"role": "user", "content": [{**text("a"), **MARK, "citations": []}, text(""), text("b")]}],
        [{"role": "user", "content": [text("a"), text("b")]}],
    ),
    "anthropic, one text": (ANTHROPIC, [{"role": "user", "content": [{**text("hi"), **MARK}, text("")]}], [USER]),
    "anthropic, image": (
        ANTHROPIC,
        [{"role": "user", "content": [{**PNG, **MARK}, text("a")]}],
        [{"role": "user", "content": [text(marked(PNG)), text("a")]}],
    ),
    "anthropic, thinking and tool use": (
        ANTHROPIC,
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "thinking", "thinking": "u", "signature": "y"},
                    text("a"),
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"b": 1, "a": "é"}},
                    {"type": "tool_use", "id": "d", "name": "g"},
                ],
            }
        ],
        [
            assistant(
                "a",
                tool_calls=[called("f", '{"b": 1, "a": "\\u00e9"}'), called("g", "{}", "d")],
                reasoning="tu",
            )
        ],
    ),
    "anthropic, tool results come first": (
        ANTHROPIC,
        [
            {
                "role": "user",
                "content": [
                    text("look"),
                    {"type": "tool_result", "tool_use_id": "c", "content": "42", "is_error": True, **MARK},
                    {"type": "tool_result", "tool_use_id": "d", "content": [text("4"), PNG, text("3")]},
                    {
                        "type": "tool_result",
                        "tool_use_id": "e",
                        "content": [{"type": "tool_reference", "tool_name": "n"}],
                    },
                    {"type": "tool_result", "tool_use_id": "g"},
                ],
            }
        ],
        [
            result("42"),
            result("4\n3", "d"),
            {"role": "user", "content": marked(PNG)},
            result("", "e"),
            result([{"type": "tool_reference", "name": "n"}], "e"),
            result("", "g"),
            {"role": "user", "content": "look"},
        ],
    ),
    "anthropic, what is left of nothing": (
        ANTHROPIC,
        [{"role": "user", "content": []}, {"role": "assistant", "content": []}],
        [assistant()],
    ),
    "anthropic, system on the way": (
        ANTHROPIC,
        [
            {"role": "system", "content": "s"},
            {"role": "system", "content": [BILLED, text("a"), {**text("b"), **MARK}]},
            {"role": "system", "content": BILLED["text"]},
        ],
        [{"role": "system", "content": "s"}, {"role": "system", "content": "ab"}],
    ),
    "anthropic, an assistant with a tool result": (
        ANTHROPIC,
        [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"a": None}]}]}],
        [assistant("Tool result: [{'a': None}]")],
    ),
    "responses": (
        RESPONSES,
        [
            {"role": "developer", "content": "d"},
            {"type": "message", "id": "x", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        [{"role": "developer", "content": "d"}, USER],
    ),
    "responses, image": (
        RESPONSES,
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}]}],
        [{"role": "user", "content": [text("a"), text(marked({"type": "input_image", "image_url": "u"}))]}],
    ),
    "responses, one message of the assistant": (
        RESPONSES,
        [
            {"type": "reasoning", "id": "rs", "summary": [{"text": "s"}], "content": [{"text": "t"}, {"text": "u"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"text": "b"}]},
            {"type": "function_call", "id": "i", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
            {"type": "function_call", "call_id": "d", "name": "f", "namespace": "n", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "e", "name": "g", "input": "é"},
            {"type": "function_call_output", "id": "o", "call_id": "c", "output": "42"},
        ],
        [
            assistant(
                "a",
                reasoning="t",
                tool_calls=[answered(), answered("n__f", call="d"), answered("g", '{"input": "é"}', "e")],
            ),
            result("42"),
        ],
    ),
    "responses, several of them": (
        RESPONSES,
        [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"type": "reasoning", "summary": [{"text": "s"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "42"}]},
            {"role": "assistant", "content": "c"},
        ],
        [
            {"role": "assistant", "tool_calls": [answered()], "content": "a"},
            assistant("b", reasoning="s"),
            {"role": "assistant", "reasoning": "", "tool_calls": [answered()]},
            result("42"),
            assistant("c"),
        ],
    ),
}


def plain(messages: Sequence[dict[str, Any]]) -> str:
    """As JSON, the order of the keys of messages left out: templates see that of what stands in them."""
    return json.dumps(
        [[(key, message[key]) for key in sorted(message) if message[key] is not None] for message in messages]
    )


@pytest.mark.parametrize(("path", "messages", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_messages(path: str, messages: list[Any], expected: list[Any]) -> None:
    assert plain(said(path, *messages)) == plain(expected)


SYSTEM: dict[str, tuple[str, dict[str, Any], str]] = {
    "text": (ANTHROPIC, {"system": "s"}, "s"),
    "blocks": (ANTHROPIC, {"system": [BILLED, {**text("a"), **MARK}, text(""), text("b")]}, "ab"),
    "a billed text, which vLLM strips later": (ANTHROPIC, {"system": BILLED["text"] + "\ns"}, BILLED["text"] + "\ns"),
    "instructions": (RESPONSES, {"instructions": "s"}, "s"),
}


@pytest.mark.parametrize(("path", "body", "expected"), SYSTEM.values(), ids=SYSTEM)
def test_a_system_prompt_is_the_first_message(path: str, body: dict[str, Any], expected: str) -> None:
    assert said(path, USER, **body) == [{"role": "system", "content": expected}, USER]


@pytest.mark.parametrize(
    ("path", "body"),
    [(ANTHROPIC, {"system": ""}), (ANTHROPIC, {"system": [BILLED]}), (RESPONSES, {"instructions": ""})],
)
def test_an_empty_system_prompt_is_no_message(path: str, body: dict[str, Any]) -> None:
    assert said(path, USER, **body) == [USER]


def test_an_input_that_is_text_is_the_users() -> None:
    found = chat(RESPONSES, {"input": "hi"})
    assert found.expand(found.messages) == [USER]


# ---- golden tools ----

FULL = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
BARE = {"name": "f", "description": None, "parameters": None}
PAYLOAD = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}

TOOLS: dict[str, tuple[str, Any, Any]] = {
    "chat": (CHAT, [{"function": {**FULL, "foo": 1}, **MARK, "type": "function"}], [FULL]),
    "chat, bare": (CHAT, [{"function": {"name": "f", "strict": None}}], [BARE]),
    "chat, none": (CHAT, [], None),
    "chat, null": (CHAT, None, None),
    "anthropic": (
        ANTHROPIC,
        [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True, **MARK}],
        [FULL],
    ),
    "anthropic, no type": (
        ANTHROPIC,
        [{"name": "f", "input_schema": {"a": 2}, "type": "custom"}],
        [{**BARE, "parameters": {"a": 2, "type": "object"}}],
    ),
    "anthropic, none": (ANTHROPIC, [], []),
    "anthropic, null": (ANTHROPIC, None, None),
    "responses": (RESPONSES, [{"type": "function", "foo": 1, **FULL}, {"type": "web_search"}], [FULL]),
    "responses, bare": (RESPONSES, [{"type": "function", "name": "f"}], [BARE]),
    "responses, none of ours": (RESPONSES, [{"type": "web_search"}], []),
    "responses, none": (RESPONSES, [], None),
    "responses, custom": (
        RESPONSES,
        [{"type": "custom", "name": "f", "format": {"type": "text"}}],
        [{**BARE, "parameters": PAYLOAD}],
    ),
    "responses, a namespace": (
        RESPONSES,
        [
            {
                "type": "namespace",
                "name": "n",
                "description": "x",
                "tools": [{"type": "function", **FULL}, {"type": "custom"}],
            }
        ],
        [{**FULL, "name": "n__f"}],
    ),
}
EMPTY: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    ANTHROPIC: {"messages": [USER]},
    RESPONSES: {"input": "hi"},
}


@pytest.mark.parametrize(("path", "tools", "expected"), TOOLS.values(), ids=TOOLS)
def test_tools(path: str, tools: Any, expected: Any) -> None:
    wrapped = None if expected is None else [{"type": "function", "function": each} for each in expected]
    # the order counts: templates show tools as JSON
    assert json.dumps(chat(path, {**EMPTY[path], "tools": tools}).tools) == json.dumps(wrapped)


@pytest.mark.parametrize(
    ("outside", "inside", "expected"),
    [
        ({}, {"defer_loading": True}, {"function": {**BARE, "defer_loading": True}}),
        ({"defer_loading": True}, {}, {"function": {**BARE, "defer_loading": True}, "defer_loading": True}),
        (
            {"defer_loading": False},
            {"defer_loading": True},
            {"function": {**BARE, "defer_loading": True}, "defer_loading": False},
        ),
    ],
)
def test_a_tool_that_is_loaded_later(outside: Any, inside: Any, expected: Any) -> None:
    found = chat(CHAT, {**EMPTY[CHAT], "tools": [{"function": {"name": "f", **inside}, **outside}]})
    assert json.dumps(found.tools) == json.dumps([{"type": "function", **expected}])


@pytest.mark.parametrize("path", EMPTY)
def test_the_choice_of_a_tool_does_not_take_tools_away(path: str) -> None:
    tools = {CHAT: [{"function": {"name": "f"}}], ANTHROPIC: [{"name": "f", "input_schema": {}}]}
    body = {**EMPTY[path], "tools": tools.get(path, [{"type": "function", "name": "f"}])}
    assert chat(path, {**body, "tool_choice": "none"}).tools == chat(path, body).tools != None  # noqa: E711


# ---- golden template variables ----

OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "none": (CHAT, {"chat_template_kwargs": {}, "documents": None, "reasoning_effort": None}, None),
    "null and auto": (CHAT, {"chat_template_kwargs": {"a": None, "b": "auto", "c": 0}}, {"c": 0}),
    "effort": (CHAT, {"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
    "no effort": (CHAT, {"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
    "effort, thinking said": (
        CHAT,
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"}},
        {"reasoning_effort": "low", "enable_thinking": False},
    ),
    "effort, thinking said to be null": (
        CHAT,
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": None}},
        {"reasoning_effort": "low"},
    ),
    "documents": (
        CHAT,
        {"documents": [{"text": "d"}], "chat_template_kwargs": {"documents": [], "a": 1}},
        {"documents": [{"text": "d"}], "a": 1},
    ),
    "what is not for the client": (CHAT, {"chat_template_kwargs": {"add_generation_prompt": False}}, None),
    "anthropic": (
        ANTHROPIC,
        {"chat_template_kwargs": {"a": 1}, "output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}},
        {"a": 1, "reasoning_effort": "low", "enable_thinking": True},
    ),
    "anthropic, no thinking": (
        ANTHROPIC,
        {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
        {"reasoning_effort": "none", "enable_thinking": False},
    ),
    "anthropic, a budget": (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, None),
    "anthropic, not its own": (ANTHROPIC, {"documents": [{"a": "b"}], "reasoning_effort": "low"}, None),
    "responses": (
        RESPONSES,
        {"reasoning": {"effort": "low", "summary": "auto"}, "chat_template_kwargs": {"a": 1}},
        {"a": 1, "reasoning_effort": "low", "enable_thinking": True},
    ),
    "responses, not its own": (RESPONSES, {"documents": [{"a": "b"}], "reasoning_effort": "low"}, None),
}


@pytest.mark.parametrize(("path", "body", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_template_variables(path: str, body: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert chat(path, {**EMPTY[path], **body}).options == expected


def test_tools_among_the_template_variables_win() -> None:
    body = {**EMPTY[CHAT], "tools": [{"function": {"name": "f"}}], "chat_template_kwargs": {"tools": [1]}}
    assert chat(CHAT, body).tools == [1]


FLAGS: dict[str, tuple[str, dict[str, Any], tuple[bool, bool, bool]]] = {
    "chat": (CHAT, {}, (True, False, False)),
    "chat, no prompt": (CHAT, {"add_generation_prompt": False}, (False, False, False)),
    "chat, going on": (CHAT, {"add_generation_prompt": False, "continue_final_message": True}, (False, True, False)),
    "chat, special tokens": (CHAT, {"add_special_tokens": True}, (True, False, True)),
    "anthropic": (ANTHROPIC, {"add_special_tokens": True, "add_generation_prompt": False}, (True, False, False)),
    "responses": (RESPONSES, {}, (True, False, True)),
    "responses, a message that is not done": (
        RESPONSES,
        {"input": [USER, {"role": "assistant", "content": "a", "status": "incomplete"}]},
        (False, True, True),
    ),
    "responses, reasoning that is not done": (
        RESPONSES,
        {"input": [USER, {"type": "reasoning", "summary": [], "status": "in_progress"}]},
        (False, True, True),
    ),
    "responses, a call that is not done": (
        RESPONSES,
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "status": "incomplete"}]},
        (True, False, True),
    ),
}


@pytest.mark.parametrize(("path", "body", "expected"), FLAGS.values(), ids=FLAGS)
def test_how_it_ends_and_whether_special_tokens_are_added(
    path: str, body: dict[str, Any], expected: tuple[bool, bool, bool]
) -> None:
    found = chat(path, {**EMPTY[path], **body})
    assert (found.add_generation_prompt, found.continue_final_message, found.add_special_tokens) == expected


# ---- golden texts and ids ----


def ids(*tokens: int) -> Ids:
    return Ids(array("I", tokens).tobytes())


WHOLE: dict[str, tuple[str, dict[str, Any], Text | Ids | None, int]] = {
    "completions": ("/v1/completions", {"prompt": "hi"}, Text("hi"), 0),
    "completions, bare": ("/v1/completions", {"prompt": "hi", "add_special_tokens": False}, Text("hi", False), 0),
    "completions, several": ("/v1/completions", {"prompt": ["hi", "four"]}, Text("hi"), 4),
    "completions, ids": ("/v1/completions", {"prompt": [1, 2]}, ids(1, 2), 0),
    "completions, lists of ids": ("/v1/completions", {"prompt": [[1, 2], [3]]}, ids(1, 2), 4),
    "completions, to the model's length": (
        "/v1/completions",
        {"prompt": "a", "truncate_prompt_tokens": -1},
        Text("a"),
        0,
    ),
    "completions, embeds": ("/v1/completions", {"prompt_embeds": "A" * 8192}, None, 4),
    "vllm": ("/inference/v1/generate", {"token_ids": [7, 8]}, ids(7, 8), 0),
    "sglang": ("/generate", {"text": ["a", "bc"], "add_special_tokens": False}, Text("a"), 2),
    "sglang, ids": ("/generate", {"input_ids": [[1], [2, 3]]}, ids(1), 8),
    "tgi": ("/generate", {"inputs": "a", "parameters": {"temperature": 1}}, Text("a"), 0),
    "tgi, bare": ("/generate", {"inputs": "a", "add_special_tokens": False}, Text("a", False), 0),
    "llama.cpp": ("/completion", {"prompt": "a"}, Text("a"), 0),
    "llama.cpp, several": ("/completion", {"prompt": [{"prompt_string": "a"}, [1, "b"]]}, Text("a"), 5),
    "llama.cpp, ids": ("/completion", {"prompt": [1, 2]}, ids(1, 2), 0),
    "llama.cpp, lists of ids": ("/completion", {"prompt": [[1, 2], [3]]}, ids(1, 2), 4),
    "embeddings": ("/v1/embeddings", {"input": "four"}, None, 4),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [USER]}, None, 0),
    "tokenize": ("/tokenize", {"prompt": "hi"}, None, 0),
}


@pytest.mark.parametrize(("path", "body", "prompt", "extra"), WHOLE.values(), ids=WHOLE)
def test_texts_ids_and_what_is_load_only(path: str, body: dict[str, Any], prompt: Any, extra: int) -> None:
    assert exact(path, {**body, "cache_salt": "s"}) == Content("m", "s", b"", extra, prompt)


def test_an_image_among_ids_is_its_hash() -> None:
    features = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 5}]}}
    body = {"token_ids": [1, 9, 9, 9, 9, 9], "features": features}
    data = read(api("/inference/v1/generate").canonical, body).data
    assert exact("/inference/v1/generate", body).prompt == Ids(data, media=True)


def test_what_keeps_a_prompt_apart_does_so_here_too() -> None:
    salts = {exact("/generate", {"text": "a", **more}).salt for more in ({}, {"lora_path": "l"}, {"image_data": "AA"})}
    assert len(salts) == 3
    parts = [{"token_ids": [1], "content_parts": [each]} for each in ("a", "b")]
    assert len({read(api("/inference/v1/generate").canonical, body).salt for body in parts}) == 2


def test_ollama_is_not_read_exactly() -> None:
    assert [path for path, found in APIS.items() if found.exact is None] == ["/api/chat", "/api/generate"]


# ---- what cannot be followed ----

NOT_EXACT: dict[str, tuple[str, dict[str, Any], str]] = {
    "a template": (CHAT, {"chat_template": "t"}, "template of its own"),
    "a template among the variables": (CHAT, {"chat_template_kwargs": {"chat_template": "t"}}, "reserved"),
    "ids for a template": (ANTHROPIC, {"chat_template_kwargs": {"tokenize": True}}, "reserved"),
    "variables that are a list": (RESPONSES, {"chat_template_kwargs": [1]}, "wrong type"),
    "truncation": (CHAT, {"truncate_prompt_tokens": 5}, "truncated"),
    "media arguments": (CHAT, {"mm_processor_kwargs": {"a": 1}}, "media"),
    "ids of a prefill": (ANTHROPIC, {"kv_transfer_params": {"prompt_token_ids": [1]}}, "prefill"),
    "both ends": (CHAT, {"continue_final_message": True}, "continue_final_message"),
    "a word for a boolean": (CHAT, {"add_generation_prompt": "no"}, "no boolean"),
    "a tool of another kind": (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "no function"),
    "a tool without a name": (CHAT, {"tools": [{"function": {}}]}, "no function"),
    "a tool that is strict in words": (CHAT, {"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "no boolean"),
    "a tool of Anthropic's": (ANTHROPIC, {"tools": [{"type": "web_search_20250305", "name": "f"}]}, "without a schema"),
    "tools that change": (
        ANTHROPIC,
        {"messages": [{"role": "system", "content": [{"type": "tool_removal", "tool": {}}]}]},
        "change",
    ),
    "stored": (RESPONSES, {"previous_response_id": "r"}, "stored"),
    "a stored conversation": (RESPONSES, {"conversation": "c"}, "stored"),
    "a suffix": ("/v1/completions", {"prompt": "a", "suffix": ""}, "suffix"),
    "a truncated completion": ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 1}, "truncated"),
    "a truncated text": ("/generate", {"inputs": "a", "parameters": {"truncate": 5}}, "truncated"),
    "media that have no place": ("/inference/v1/generate", {"token_ids": [1], "content_parts": [{}]}, "media"),
    "mixed": ("/completion", {"prompt": ["a", 1]}, "text and token ids"),
    "media of llama.cpp": ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["A"]}}, "media"),
}


@pytest.mark.parametrize(("path", "body", "why"), NOT_EXACT.values(), ids=NOT_EXACT)
def test_what_cannot_be_followed_is_refused(path: str, body: dict[str, Any], why: str) -> None:
    with pytest.raises(NotExact, match=why):
        exact(path, {**EMPTY.get(path, {}), **body})


NO_MESSAGE: dict[str, tuple[str, Any]] = {
    "chat, text": (CHAT, "a"),
    "chat, no role": (CHAT, {"content": "a"}),
    "chat, content that is an object": (CHAT, {"role": "user", "content": {}}),
    "chat, a number in the content": (CHAT, {"role": "user", "content": [7]}),
    "chat, a number for a text": (CHAT, {"role": "user", "content": [{"type": "text", "text": 7}]}),
    "chat, a number for reasoning": (CHAT, assistant("a", reasoning=7)),
    "chat, calls that are text": (CHAT, assistant(tool_calls="a")),
    "chat, a call that is text": (CHAT, assistant(tool_calls=["a"])),
    "chat, a reference to nothing": (CHAT, {"role": "tool", "content": [{"type": "tool_reference"}]}),
    "chat, tools of a developer that are text": (CHAT, {"role": "developer", "content": "a", "tools": "f"}),
    "anthropic, text": (ANTHROPIC, "a"),
    "anthropic, another role": (ANTHROPIC, {"role": "tool", "content": "a"}),
    "anthropic, a role that is a list": (ANTHROPIC, {"role": [], "content": "a"}),
    "anthropic, no content": (ANTHROPIC, {"role": "user"}),
    "anthropic, another block": (ANTHROPIC, {"role": "user", "content": [{"type": "document"}]}),
    "anthropic, a kind that is a list": (ANTHROPIC, {"role": "user", "content": [{"type": []}]}),
    "anthropic, a call without an id": (
        ANTHROPIC,
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]},
    ),
    "anthropic, a result that is a number": (
        ANTHROPIC,
        {"role": "user", "content": [{"type": "tool_result", "content": 7}]},
    ),
    "responses, text": (RESPONSES, "a"),
    "responses, another kind": (RESPONSES, {"type": "item_reference", "id": "x"}),
    "responses, encrypted": (RESPONSES, {"type": "reasoning", "summary": [], "encrypted_content": "x"}),
    "responses, arguments that are an object": (
        RESPONSES,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}},
    ),
    "responses, an output that is an object": (
        RESPONSES,
        {"type": "function_call_output", "call_id": "c", "output": {}},
    ),
}


@pytest.mark.parametrize(("path", "message"), NO_MESSAGE.values(), ids=NO_MESSAGE)
def test_what_the_engine_would_refuse_is_refused_when_it_is_looked_at(path: str, message: Any) -> None:
    found = chat(path, {"input" if path == RESPONSES else "messages": [message]})
    with pytest.raises(NotExact):
        found.expand(found.messages)
    with pytest.raises(NotExact):
        found.identity(message)


# ---- media ----


@pytest.mark.parametrize(
    ("path", "message", "media"),
    [
        (CHAT, {"role": "user", "content": [text("a"), {"type": "tool_reference", "name": "f"}]}, False),
        (CHAT, {"role": "user", "content": [text("a"), IMAGE]}, True),
        (CHAT, {"role": "tool", "content": [{"type": []}]}, True),
        (ANTHROPIC, {"role": "user", "content": [text("a"), {"type": "tool_result", "content": [text("a")]}]}, False),
        (ANTHROPIC, {"role": "user", "content": [PNG]}, True),
        (ANTHROPIC, {"role": "user", "content": [{"type": "tool_result", "content": [text("a"), PNG]}]}, True),
        (RESPONSES, {"role": "user", "content": [{"type": "input_text", "text": "a"}]}, False),
        (RESPONSES, {"role": "user", "content": [{"type": "input_image"}]}, True),
        (RESPONSES, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}, True),
    ],
)
def test_media_are_seen_wherever_they_stand(path: str, message: Any, media: bool) -> None:
    found = chat(path, {"input" if path == RESPONSES else "messages": [USER, message]})
    assert found.media is media
    assert ("\\u001e" in json.dumps(found.expand(found.messages))) is media


EXACT = [
    *((path, {"input" if path == RESPONSES else "messages": messages}) for path, messages, _ in MESSAGES.values()),
    *((path, {**EMPTY[path], "tools": tools}) for path, tools, _ in TOOLS.values()),
    *((path, {**EMPTY.get(path, {}), **body}) for path, body, *_ in (*SYSTEM.values(), *OPTIONS.values())),
    *((path, {**EMPTY.get(path, {}), **body}) for path, body, *_ in (*FLAGS.values(), *NOT_EXACT.values())),
    *((path, body) for path, body, *_ in WHOLE.values()),
]
"""Every body above, to be mutated."""


# ---- properties ----

# what identities and hashes are made of as well
WORDS = st.text(st.sampled_from('ab4:{"[\x1e,}]\n'), max_size=6)
NAMES = st.sampled_from(["f", "g"])
ODD = st.dictionaries(st.sampled_from(["foo", "cache_control", "id"]), WORDS, max_size=1)
PART = st.one_of(
    WORDS,
    st.builds(lambda words, more: {**text(words), **more}, WORDS, ODD),
    st.builds(lambda words: {"type": "refusal", "refusal": words}, WORDS),
    st.builds(lambda words: {"type": "image_url", "image_url": {"url": words}}, WORDS),
)
CALL = st.builds(lambda call, name, words: called(name, words, call), NAMES, NAMES, WORDS)
OPENAI = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "4:user"]),
        "content": st.one_of(st.none(), WORDS, st.lists(PART, max_size=3)),
    },
    optional={
        "name": WORDS,
        "tool_call_id": WORDS,
        "tool_calls": st.lists(CALL, max_size=2),
        "reasoning": WORDS,
        "refusal": WORDS,
    },
)
BLOCK = st.one_of(
    st.builds(lambda words, more: {**text(words), **more}, WORDS, ODD),
    st.builds(lambda words: {"type": "image", "source": {"data": words}}, WORDS),
    st.builds(lambda words: {"type": "thinking", "thinking": words}, WORDS),
    st.builds(lambda name, words: {"type": "tool_use", "id": "c", "name": name, "input": {words: 1}}, NAMES, WORDS),
    st.builds(lambda call, words: {"type": "tool_result", "tool_use_id": call, "content": words}, NAMES, WORDS),
    st.builds(lambda words: {"type": "tool_result", "tool_use_id": "c", "content": [text(words)]}, WORDS),
)
TURN = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.one_of(WORDS, st.lists(BLOCK, max_size=3))}
    ),
    st.fixed_dictionaries({"role": st.just("system"), "content": WORDS}),
)
ITEM = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": WORDS}),
    st.builds(lambda words: {"role": "user", "content": [{"type": "input_text", "text": words}]}, WORDS),
    st.builds(lambda words: {"role": "assistant", "content": [{"type": "input_image", "url": words}]}, WORDS),
    st.builds(lambda words: {"type": "reasoning", "summary": [], "content": [{"text": words}]}, WORDS),
    st.builds(
        lambda name, words: {"type": "function_call", "id": words, "call_id": "c", "name": name, "arguments": words},
        NAMES,
        WORDS,
    ),
    st.builds(lambda words: {"type": "function_call_output", "call_id": "c", "output": words, "id": words}, WORDS),
)
SAID = {CHAT: OPENAI, ANTHROPIC: TURN, RESPONSES: ITEM}


def ends_a_request(message: Any) -> bool:
    return message.get("role", message.get("type")) in ("user", "function_call_output")


@pytest.mark.parametrize("path", SAID)
def test_what_follows_a_users_turn_is_expanded_by_itself(path: str) -> None:
    found = chat(path, EMPTY[path])

    @settings(max_examples=200, deadline=None)
    @given(st.lists(SAID[path], max_size=4), SAID[path].filter(ends_a_request), st.lists(SAID[path], max_size=4))
    def holds(before: list[Any], last: Any, after: list[Any]) -> None:
        head = [*before, last]
        assert found.expand(head + after) == found.expand(head) + found.expand(after)

    holds()


@pytest.mark.parametrize("path", SAID)
def test_two_messages_have_one_identity_when_they_become_the_same_and_only_then(path: str) -> None:
    found = chat(path, EMPTY[path])

    @settings(max_examples=2000, deadline=None)
    @given(SAID[path], SAID[path])
    def holds(one: Any, other: Any) -> None:
        assume(found.expand([one]) != [] or found.expand([other]) != [])
        same = b"".join(found.identity(one)) == b"".join(found.identity(other))
        assert same == (plain(found.expand([one])) == plain(found.expand([other])))

    holds()


@pytest.mark.parametrize("path", SAID)
def test_reading_changes_no_message(path: str) -> None:
    found = chat(path, EMPTY[path])

    @settings(max_examples=200, deadline=None)
    @given(st.lists(SAID[path], max_size=5))
    def holds(messages: list[Any]) -> None:
        before = json.dumps(messages)
        found.expand(messages)
        for message in messages:
            found.identity(message)
        assert json.dumps(messages) == before

    holds()


SAME: dict[str, tuple[str, Any, Any]] = {
    "a string and one part": (CHAT, USER, {"role": "user", "content": [{**text("hi"), **MARK}]}),
    "a cache mark": (
        CHAT,
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "user", "content": [text("a"), {**text("b"), **MARK}], **MARK},
    ),
    "a marked image": (CHAT, {"role": "user", "content": [IMAGE]}, {"role": "user", "content": [{**IMAGE, **MARK}]}),
    "an id": (CHAT, assistant("a"), assistant("a", id="x", annotations=[])),
    "a billed line": (
        CHAT,
        {"role": "system", "content": BILLED["text"] + "\ns"},
        {"role": "system", "content": "x-anthropic-billing-header: cch=2;\ns"},
    ),
    "a billed part": (
        CHAT,
        {"role": "system", "content": [text(BILLED["text"] + "\ns"), "t"]},
        {"role": "system", "content": [text("s"), "t"]},
    ),
    "a billed block": (ANTHROPIC, {"system": [BILLED, text("s")]}, {"system": [text("s")]}),
    "a marked result": (
        ANTHROPIC,
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [text("a"), PNG]}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [text("a"), {**PNG, **MARK}]}],
        },
    ),
    "a signature": (
        ANTHROPIC,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "x"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "redacted_thinking"}]},
    ),
    "an item's id and state": (
        RESPONSES,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "x", "status": "completed"},
    ),
    "a message and its long form": (
        RESPONSES,
        {"role": "assistant", "content": "a"},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    ),
}


@pytest.mark.parametrize(("path", "one", "other"), SAME.values(), ids=SAME)
def test_what_is_not_rendered_is_not_in_the_identity(path: str, one: Any, other: Any) -> None:
    identity = chat(path, EMPTY[path]).identity
    assert b"".join(identity(one)) == b"".join(identity(other))


DIFFERENT: dict[str, tuple[str, Any, Any]] = {
    "where the role ends": (CHAT, {"role": "userx", "content": "a"}, {"role": "user", "content": "xa"}),
    "a billed line alone is another's empty text": (
        CHAT,
        {"role": "system", "content": BILLED["text"]},
        {"role": "system", "content": ""},
    ),
    "a user's line is rendered": (
        CHAT,
        {"role": "user", "content": BILLED["text"] + "\ns"},
        {"role": "user", "content": "s"},
    ),
    "the order of an input's keys": (
        ANTHROPIC,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1, "b": 2}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"b": 2, "a": 1}}]},
    ),
    "an assistant's text and reasoning": (
        RESPONSES,
        {"role": "assistant", "content": "a"},
        {"type": "reasoning", "summary": [{"text": "a"}]},
    ),
}


@pytest.mark.parametrize(("path", "one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_is_rendered_is_in_the_identity(path: str, one: Any, other: Any) -> None:
    identity = chat(path, EMPTY[path]).identity
    assert b"".join(identity(one)) != b"".join(identity(other))


IN_ORDER = ("tool_calls", "tool_use", "tools", "custom_tool_call", "'a': None")
"""What templates may show as JSON, with its keys in the client's order."""


@pytest.mark.parametrize(("path", "messages", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_the_order_of_keys_is_not_in_the_identity(path: str, messages: list[Any], expected: list[Any]) -> None:
    identity = chat(path, EMPTY[path]).identity
    for message in messages:
        if not any(each in str(message) for each in IN_ORDER):
            assert b"".join(identity(message)) == b"".join(identity(reversed_keys(message)))


@pytest.mark.parametrize(("path", "validated"), [(CHAT, True), (ANTHROPIC, True), (RESPONSES, False)])
def test_which_chats_the_engine_validates_before_it_renders_them(path: str, validated: bool) -> None:
    assert chat(path, EMPTY[path]).validated is validated


# ---- sessions ----

NAMED = ("x-session-id", "prompt_cache_key", "metadata.user_id", "user")
SESSIONS: dict[str, tuple[dict[str, Any], dict[str, str], str | None]] = {
    "none": ({"prompt_cache_key": "", "metadata": "x", "user": None}, {"other": "x"}, None),
    "header": ({"user": "u"}, {"x-session-id": "s"}, "x-session-id=s"),
    "body": ({"user": "u", "prompt_cache_key": "k"}, {}, "prompt_cache_key=k"),
    "a header before the body": ({"user": "u"}, {"user": "h"}, "user=h"),
    "further inside": ({"metadata": {"user_id": "u"}, "user": "v"}, {}, "metadata.user_id=u"),
    "not text": ({"prompt_cache_key": 7, "user": ["u"]}, {}, None),
    "256 characters": ({"user": "u" * 251}, {}, "user=" + "u" * 251),
    "half a pair of surrogates": ({"user": "\ud800"}, {}, "user=\ud800"),
}


@pytest.mark.parametrize(("body", "headers", "expected"), SESSIONS.values(), ids=SESSIONS)
def test_a_session_is_the_first_name_that_is_set(
    body: dict[str, Any], headers: dict[str, str], expected: str | None
) -> None:
    assert session(body, headers, NAMED) == expected


def test_long_sessions_are_short_and_differ() -> None:
    long = [session({name: "u" * 4000 + end}, {}, NAMED) for name in ("user", "prompt_cache_key") for end in "ab"]
    assert len(set(long)) == 4
    assert all(each is not None and len(each) <= 256 for each in long)


def test_headers_are_found_in_lower_case() -> None:
    assert session({}, {"x-session-id": "s"}, ["X-Session-Id"]) == "X-Session-Id=s"
