"""Request APIs: golden cases of every reader, and what holds for all that are conversations."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from extproc.wire.requests import APIS, Api, api_of, parse, read
from extproc.wire.requests.content import FENCE, Content, canonical

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ANTHROPIC = "/v1/messages"
OLLAMA = "/api/chat"


def api(path: str) -> Api:
    found = api_of(path)
    assert found is not None
    return found


def content(path: str, body: Any) -> Content:
    return read(api(path).canonical, parse(json.dumps({"model": "m", **body}).encode(), cut=False))


def fenced(*texts: str | bytes) -> bytes:
    return b"".join(text if isinstance(text, bytes) else text.replace("|", "\x1e").encode() for text in texts)


def ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def seen(part: Any) -> bytes:
    return FENCE + xxh3_128_digest(canonical(part))


# ---- paths ----


@pytest.mark.parametrize("suffix", APIS)
@pytest.mark.parametrize("path", ["{}", "/a/b{}", "{}/", "{}//?api-version=1&x=/chat/completions", "/openai{}?"])
def test_prefix_query_and_trailing_slashes_do_not_matter(suffix: str, path: str) -> None:
    assert api_of(path.format(suffix)) is APIS[suffix]


def test_the_most_specific_suffix_wins() -> None:
    assert api_of("/v1/completions") is not api_of("/v1/chat/completions")
    assert api_of("/completion") is not api_of("/completions")
    assert len({api_of("/generate"), api_of("/api/generate"), api_of("/inference/v1/generate")}) == 3
    assert api_of("/v1/messages/count_tokens") is not api_of("/v1/messages")


@pytest.mark.parametrize(
    "path", ["", "/", "/v1/models", "/v1/mycompletions", "/v1/threads/t/messages", "/v1/responses/r"]
)
def test_other_paths_have_no_api(path: str) -> None:
    assert api_of(path) is None


# ---- golden cases ----

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
TOOL_BYTES = '{"function":{"name":"f","parameters":{"a":2,"b":1}},"type":"function"}'
USER = {"role": "user", "content": "hi"}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED_BYTES = '{"function":{"arguments":"{}","name":"f"},"id":"c","type":"function"}'

GOLDEN: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": (CHAT, {"messages": [{"role": "system", "content": "s"}, USER]}, fenced("system|s|user|hi|")),
    "chat, parts": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}]}
            ]
        },
        fenced("user|a", seen(IMAGE), "b|"),
    ),
    "chat, parts that are strings": (CHAT, {"messages": [{"role": "user", "content": ["a", "b"]}]}, fenced("user|ab|")),
    "chat, audio": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA"}}]}]},
        fenced("user|", seen({"type": "input_audio", "input_audio": {"data": "AA"}}), "|"),
    ),
    "chat, tool call and result": (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": "42"},
            ]
        },
        fenced("assistant||tool_calls[", CALLED_BYTES, ']|tool|42|tool_call_id"c"|'),
    ),
    "chat, tools": (CHAT, {"messages": [USER], "tools": [TOOL]}, fenced("tools|[", TOOL_BYTES, "]|user|hi|")),
    "chat, no tools": (CHAT, {"messages": [USER], "tools": [], "functions": None}, fenced("user|hi|")),
    "chat, functions": (
        CHAT,
        {"messages": [USER], "functions": [{"name": "f"}]},
        fenced('functions|[{"name":"f"}]|user|hi|'),
    ),
    "chat, what templates render": (
        CHAT,
        {
            "messages": [USER],
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
            "documents": [{"text": "d"}],
        },
        fenced(
            'chat_template_kwargs|{"enable_thinking":false}|documents|[{"text":"d"}]|reasoning_effort|"low"|user|hi|'
        ),
    ),
    "chat, final message open": (CHAT, {"messages": [USER], "continue_final_message": True}, fenced("user|hi")),
    "completions": ("/v1/completions", {"prompt": "hi"}, b"hi"),
    "completions, suffix": ("/v1/completions", {"prompt": "hi", "suffix": "end"}, fenced("hi|end")),
    "completions, ids": ("/v1/completions", {"prompt": [1, 2, 4294967295]}, ids(1, 2, 4294967295)),
    "completions, empty": ("/v1/completions", {"prompt": ""}, b""),
    "responses": (RESPONSES, {"input": "hi"}, fenced("user|hi|")),
    "responses, instructions and tools": (
        RESPONSES,
        {
            "input": "hi",
            "instructions": "s",
            "tools": [{"type": "function", "name": "f"}],
            "reasoning": {"effort": "low"},
        },
        fenced('tools|[{"name":"f","type":"function"}]|"low"|system|s|user|hi|'),
    ),
    "responses, items": (
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}],
                },
                {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
                {
                    "type": "function_call",
                    "id": "fc",
                    "call_id": "c",
                    "name": "f",
                    "arguments": "{}",
                    "status": "completed",
                },
                {"type": "function_call_output", "call_id": "c", "output": "42"},
                {
                    "type": "message",
                    "id": "m",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "b", "annotations": []}],
                },
            ]
        },
        fenced(
            "user|a",
            seen({"type": "input_image", "image_url": "u"}),
            '|{"summary":[],"type":"reasoning"}||'
            '{"arguments":"{}","call_id":"c","name":"f","type":"function_call"}||'
            '{"call_id":"c","type":"function_call_output"}|42|assistant|b|',
        ),
    ),
    "responses, going on": (
        RESPONSES,
        {"input": "hi", "previous_response_id": "r"},
        fenced('previous_response_id|"r"|user|hi|'),
    ),
    "anthropic": (
        ANTHROPIC,
        {"system": "s", "messages": [USER, {"role": "assistant", "content": "yo"}]},
        fenced("system|s|user|hi|assistant|yo|"),
    ),
    "anthropic, blocks": (
        ANTHROPIC,
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}},
            ],
            "tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [{**PNG, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "a"}],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"b": 1, "a": 2}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "42"}, PNG]},
                        {"type": "tool_result", "tool_use_id": "d", "content": "43"},
                    ],
                },
            ],
        },
        fenced(
            '[{"input_schema":{},"name":"f"}]|system|s|user|',
            seen(PNG),
            'a|assistant||t||["c","f",{"a":2,"b":1}]|',
            "user||c|42",
            seen(PNG),
            "|d|43|",
        ),
    ),
    "anthropic, no thinking": (
        ANTHROPIC,
        {"messages": [USER], "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        fenced("none|user|hi|"),
    ),
    "anthropic, effort": (
        ANTHROPIC,
        {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"}},
        fenced("low|user|hi|"),
    ),
    "vllm": ("/inference/v1/generate", {"token_ids": [7, 8]}, ids(7, 8)),
    "vllm, image": (
        "/inference/v1/generate",
        {
            "token_ids": [1, 9, 9, 9, 9, 9, 2, 8, 8],
            "features": {
                "mm_hashes": {"image": ["h"], "audio": ["g"]},
                "mm_placeholders": {"image": [{"offset": 1, "length": 5}], "audio": [{"offset": 7, "length": 2}]},
            },
        },
        ids(1) + xxh3_128_digest(b"h") + ids(9, 2) + xxh3_128_digest(b"g")[:8],
    ),
    "sglang": ("/generate", {"text": "hi"}, b"hi"),
    "sglang, ids": ("/generate", {"input_ids": [7, 8]}, ids(7, 8)),
    "tgi": ("/generate", {"inputs": "hi", "parameters": {}}, b"hi"),
    "ollama": (
        OLLAMA,
        {"messages": [{**USER, "images": ["AAAA"]}], "tools": [TOOL], "think": False},
        fenced("think|false|tools|[", TOOL_BYTES, "]|user|hi|images", seen(["AAAA"]), "|"),
    ),
    "ollama, generate": (
        "/api/generate",
        {"prompt": "hi", "system": "s", "suffix": "end", "options": {"temperature": 0}},
        fenced('system|"s"|hi|end'),
    ),
    "llama.cpp": ("/completion", {"prompt": "hi"}, b"hi"),
    "llama.cpp, ids": ("/completion", {"prompt": [7, 8]}, ids(7, 8)),
    "llama.cpp, mixed": ("/completion", {"prompt": ["a", 7, "b"]}, b"a" + ids(7) + b"b"),
    "llama.cpp, media": ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["AA"]}}, b"a"),
}


@pytest.mark.parametrize(("path", "body", "data"), GOLDEN.values(), ids=GOLDEN)
def test_golden(path: str, body: dict[str, Any], data: bytes) -> None:
    found = content(path, body)
    assert found.data == data
    assert found.model == "m"
    assert found.extra_bytes == 0


SEVERAL: dict[str, tuple[str, dict[str, Any], bytes, int]] = {
    "texts": ("/v1/completions", {"prompt": ["one", "four", "é"]}, b"one", 6),
    "texts with a suffix": ("/v1/completions", {"prompt": ["a", "b"], "suffix": "end"}, fenced("a|end"), 5),
    "ids": ("/v1/completions", {"prompt": [[1, 2], [3], [4, 5]]}, ids(1, 2), 12),
    "sglang texts": ("/generate", {"text": ["a", "bc"]}, b"a", 2),
    "sglang ids": ("/generate", {"input_ids": [[1], [2, 3]]}, ids(1), 8),
    "llama.cpp": ("/completion", {"prompt": ["a", [1, "b"], {"prompt_string": "cd"}]}, b"a", 7),
    "embeddings": ("/v1/embeddings", {"input": ["one", "four"]}, b"", 7),
    "embeddings of ids": ("/v1/embeddings", {"input": [[1, 2], [3]]}, b"", 12),
    "rerank": ("/v1/rerank", {"query": "q", "documents": ["one", {"text": "two"}]}, b"", 7),
    "score": ("/score", {"text_1": "a", "text_2": ["b", "c"]}, b"", 3),
    "pooling an image": (
        "/pooling",
        {"messages": [{"role": "u", "content": [IMAGE, {"type": "text", "text": "abc"}]}]},
        b"",
        3,
    ),
    "classify": ("/classify", {"input": "one"}, b"", 3),
    "prompt embeds": ("/v1/completions", {"prompt_embeds": "A" * 8192, "prompt": "hi"}, b"", 6),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [USER]}, b"", 0),
    "tokenize": ("/tokenize", {"prompt": "hi"}, b"", 0),
    "tokenize messages": ("/tokenize", {"messages": [USER]}, b"", 0),
}


@pytest.mark.parametrize(("path", "body", "data", "extra"), SEVERAL.values(), ids=SEVERAL)
def test_the_first_prompt_decides_and_all_count_as_work(
    path: str, body: dict[str, Any], data: bytes, extra: int
) -> None:
    found = content(path, body)
    assert (found.data, found.extra_bytes) == (data, extra)


STEERING = {
    "temperature": 0.1,
    "max_tokens": 7,
    "stream": True,
    "user": "u",
    "n": 2,
    "stop": ["x"],
    "seed": 1,
    "logprobs": True,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "metadata": {},
    "add_generation_prompt": True,
    "store": False,
    "priority": 1,
    "request_id": "r",
    "prompt_cache_key": "k",
    "stop_sequences": ["x"],
    "options": {"seed": 1},
    "keep_alive": "5m",
    "sampling_params": {"top_k": 1},
}


@pytest.mark.parametrize(("path", "body", "data"), GOLDEN.values(), ids=GOLDEN)
def test_what_only_steers_sampling_changes_nothing(path: str, body: dict[str, Any], data: bytes) -> None:
    assert content(path, {**STEERING, **body}) == content(path, body)


@pytest.mark.parametrize(("path", "body", "data"), GOLDEN.values(), ids=GOLDEN)
def test_a_salt_keeps_apart_and_is_not_in_the_bytes(path: str, body: dict[str, Any], data: bytes) -> None:
    salted = content(path, {**body, "cache_salt": "pepper"})
    assert salted.data == data
    assert salted.salt == "pepper" + content(path, body).salt


APART: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "other special tokens": ("/v1/completions", {"prompt": "a"}, {"add_special_tokens": False}),
    "truncated": ("/v1/completions", {"prompt": "a"}, {"truncate_prompt_tokens": 5}),
    "adapter": ("/generate", {"text": "a"}, {"lora_path": "l"}),
    "image": ("/generate", {"text": "a"}, {"image_data": "AA"}),
    "image of ollama": ("/api/generate", {"prompt": "a"}, {"images": ["AA"]}),
}


@pytest.mark.parametrize(("path", "body", "more"), APART.values(), ids=APART)
def test_what_changes_the_whole_prompt_keeps_it_apart(path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    plain, other = content(path, body), content(path, {**body, **more})
    assert plain.data == other.data
    assert plain.salt == ""
    assert other.salt not in ("", content(path, {**body, **dict.fromkeys(more, "other")}).salt)


def test_media_beside_a_prompt_of_llama_cpp_keep_it_apart() -> None:
    one, two = ({"prompt": {"prompt_string": "a", "multimodal_data": [each]}} for each in ("AA", "BB"))
    assert content("/completion", one).salt != content("/completion", two).salt


# ---- properties ----

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
OPENAI_PART = st.one_of(
    WORDS.map(lambda text: {"type": "text", "text": text}),
    WORDS.map(lambda url: {"type": "image_url", "image_url": {"url": url}}),
)
OPENAI = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": st.one_of(st.none(), WORDS, st.lists(OPENAI_PART, max_size=3)),
    },
    optional={"name": WORDS, "tool_call_id": WORDS, "tool_calls": st.lists(st.dictionaries(WORDS, WORDS), max_size=2)},
)
BLOCK = st.one_of(
    WORDS.map(lambda text: {"type": "text", "text": text}),
    WORDS.map(lambda data: {"type": "image", "source": {"data": data}}),
    WORDS.map(lambda text: {"type": "thinking", "thinking": text}),
    WORDS.map(lambda text: {"type": "tool_use", "id": "c", "name": text, "input": {text: 1}}),
    WORDS.map(lambda text: {"type": "tool_result", "tool_use_id": "c", "content": text}),
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.one_of(WORDS, st.lists(BLOCK, max_size=3))}
)
ITEMS = st.one_of(
    MESSAGES,
    WORDS.map(lambda text: {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}),
    WORDS.map(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}),
)
IMAGES = st.fixed_dictionaries({"role": WORDS, "content": WORDS}, optional={"images": st.lists(WORDS, max_size=2)})

CONVERSATIONS: dict[str, tuple[str, str, st.SearchStrategy[Any], dict[str, Any]]] = {
    "chat": (CHAT, "messages", OPENAI, {"tools": [TOOL]}),
    "responses": (RESPONSES, "input", ITEMS, {"instructions": "s"}),
    "anthropic": (ANTHROPIC, "messages", MESSAGES, {"system": "s"}),
    "ollama": (OLLAMA, "messages", IMAGES, {"think": True}),
}


@pytest.mark.parametrize(("path", "key", "message", "more"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_one_more_message_keeps_the_bytes_of_what_came_before(
    path: str, key: str, message: st.SearchStrategy[Any], more: dict[str, Any]
) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(message, max_size=5), message)
    def holds(before: list[Any], last: Any) -> None:
        short = content(path, {**more, key: before}).data
        longer = content(path, {**more, key: [*before, last]}).data
        assert longer.startswith(short)
        assert len(longer) > len(short)

    holds()


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("path", "body", "data"), GOLDEN.values(), ids=GOLDEN)
def test_white_space_escapes_and_key_order_do_not_matter(path: str, body: dict[str, Any], data: bytes) -> None:
    forms: list[Callable[[Any], str]] = [
        lambda value: json.dumps(value, indent=3),
        lambda value: json.dumps(reversed_keys(value), separators=(",", ":"), ensure_ascii=False),
    ]
    for form in forms:
        assert read(api(path).canonical, parse(form(body).encode(), cut=False)).data == data


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, "text"), (RESPONSES, "input_text"), (RESPONSES, "output_text"), (ANTHROPIC, "text")]
)
@given(text=WORDS)
@settings(max_examples=20, deadline=None)
def test_a_string_and_a_single_text_part_are_the_same(path: str, kind: str, text: str) -> None:
    key = "input" if path == RESPONSES else "messages"
    whole = {key: [{"role": "user", "content": text}]}
    part = {key: [{"role": "user", "content": [{"type": kind, "text": text}]}]}
    assert content(path, whole).data == content(path, part).data


def test_an_image_is_known_again_at_its_place_and_another_is_not() -> None:
    def chat(*parts: Any) -> bytes:
        return content(CHAT, {"messages": [{"role": "user", "content": list(parts)}]}).data

    word = {"type": "text", "text": "w"}
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    assert chat(word, IMAGE) == chat(word, {**IMAGE, "cache_control": {}})
    assert len({chat(word, IMAGE), chat(IMAGE, word), chat(word, other), chat(word)}) == 4
