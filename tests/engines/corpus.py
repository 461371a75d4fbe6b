"""Request bodies as people send them: every shape that changes the prompt, in many scripts; the same each time.

At least 500 are generated. Where ../shared/data is, real conversations, tools and system prompts come beside them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from models import SHARED, unpacked

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
MODEL = "m"


class Request(NamedTuple):
    kind: str
    path: str
    body: bytes


def requests() -> list[Request]:
    """All of them; what is alike stands together, the turns of a conversation in order."""
    rng = random.Random(3)
    made = [*_generated(rng)]
    if SHARED.is_dir():
        made += _shared(rng)
    return made


TEXTS = {
    "english": "Please summarise the report, list three risks, and say which one you'd act on first.",
    "code": 'def area(r: float) -> float:\n\treturn 3.14159 * r**2  # "π"\n\n\nprint(f"{area(2):>8.3f}")\r\n',
    "json": '{"id": 17, "tags": ["a", "b"], "nested": {"x": null, "y": -1.5e-07}}',
    "german": "Fünf Übungen für größere Füße: «Straße», Maßband, ÄÖÜ.",
    "greek": "Ποια είναι η πρωτεύουσα της Ελλάδας;",
    "russian": "Расскажи, пожалуйста, о погоде в Санкт-Петербурге.",
    "arabic": "ما هي عاصمة المغرب؟ أجب بجملة واحدة.",
    "hebrew": "מה השעה עכשיו בתל אביב?",
    "hindi": "कृपया मुझे मौसम के बारे में बताइए।",
    "thai": "กรุณาแปลประโยคนี้เป็นภาษาอังกฤษ",
    "chinese": "请用三句话总结这篇文章，并给出两个例子。",
    "japanese": "東京タワーの高さは何メートルですか？ｶﾀｶﾅも。",
    "korean": "오늘 서울 날씨가 어때요? 한글 자모도.",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 1️⃣ — ok?",
    "combining": "cafe\u0301 vs café, n\u0303 vs ñ, ẛ\u0323, ﬁ, Å vs \u212b",
    "mathematics": "∑_{i=1}^{n} i² ≤ ∫₀^∞ e^{−x} dx ≈ ½",
    "spaces": "  leading,\ttabs\t\t, three   spaces, nbsp\u00a0, thin\u2009, zero\u200bwidth, trailing  ",
    "lines": "\n\nfirst\n\n\nsecond\r\n\r\nthird\n",
    "numbers": "1 12 123 1234 12345 3.14159 1,000,000 0x1F 2024-05-15T15:00:00Z ١٢٣ Ⅷ",
    "controls": "bell\x07 escape\x1b[31m nul\x00 delete\x7f \x85 bom\ufeff",
    "rare": "𐍈 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 \U0010ffff \ue000 ꙮ",
    "html": "<p class='x'>Tom & Jerry's \"best\" &amp; <br/></p>",
    "underscore": "▁a ▁▁b _ __ Ġ Ċ Âł",
}
"""By what is special about them."""

_SPECIAL = (
    "<s>", "</s>", "<unk>", "<|im_start|>system", "<|im_end|>", "<|endoftext|>", "<|begin|>", "<|end|>", "<|call|>",
    "<|eot_id|>", "<|start_header_id|>", "<|begin_of_text|>", "[INST]", "[/INST]", "<think>", "</think>", "<tool_call>",
)  # fmt: skip

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather; °C and m/s. Don't call it twice for <one> place & day.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": 'Such as "Köln" or 東京'},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14, "default": 1},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": ["string", "null"]},
                    "threshold": {"type": "number", "default": 0.1, "maximum": 1.0, "multipleOf": 1e-7},
                    "limit": {"enum": [1, 10, 10000000000000000000000]},
                    "exact": {"type": "boolean", "default": False},
                },
                "additionalProperties": False,
                "$defs": {},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
)

_ARGUMENTS = (
    '{"city": "Köln", "days": 3}',
    "{}",
    "",
    '{"city":"東京","nested":{"b":[1,2.50,1e-7,true,null],"a":"\\u00fc \\ud83d\\ude00 <&>\'"}}',
    "{ not json",
    "[1, 2]",
    '{"days": 1.0, "big": 123456789012345678901234567890, "tiny": 0.00001}',
)

_OTHER_FIELDS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 64,
    "n": 1,
    "stop": ["###"],
    "seed": 7,
    "user": "u-1",
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_object"},
    "logprobs": True,
    "top_logprobs": 2,
    "frequency_penalty": 0.1,
    "parallel_tool_calls": False,
    "metadata": {"a": "b"},
    "store": False,
    "cache_salt": "tenant-1",
    "ignore_eos": True,
    "no_such_field": {"x": [1]},
}
"""None of them changes the prompt."""


def _message(role: str, content: Any, **rest: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **rest}


def _call(arguments: str, name: str = "get_weather", call: str = "call00001") -> dict[str, Any]:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _chat(kind: str, messages: list[Any], **fields: Any) -> Request:
    return _request(f"chat, {kind}", CHAT, {"messages": messages, **fields})


def _request(kind: str, path: str, fields: dict[str, Any]) -> Request:
    return Request(kind, path, json.dumps({"model": MODEL, **fields}, ensure_ascii=len(kind) % 2 == 0).encode())


def prose(rng: random.Random, words: int) -> str:
    """That many words of the texts above, in an order of their own."""
    vocabulary = " ".join(TEXTS[each] for each in ("english", "code", "german", "numbers", "html")).split()
    return " ".join(rng.choices(vocabulary, k=words))


def _generated(rng: random.Random) -> Iterator[Request]:
    yield from _plain(rng)
    yield from _tools(rng)
    yield from _roles(rng)
    yield from _options(rng)
    yield from _hard(rng)
    yield from _completions(rng)
    yield from _other_apis()


def _plain(rng: random.Random) -> Iterator[Request]:
    for name, text in TEXTS.items():
        yield _chat("one question", [_message("user", text)])
        yield _chat("system", [_message("system", f"Answer in {name}."), _message("user", text)])
        yield _chat("parts", [_message("user", _parts(text))])
        yield _chat("several parts", [_message("user", _parts("Look at this:", text, "What is it?"))])
        yield _chat("in the middle", [_message("user", f"Translate ``{text}`` now.\n")])
    for start in range(6):
        names = list(TEXTS)[3 * start : 3 * start + 6]
        turns: list[Any] = [_message("system", prose(rng, 150))]
        for question, answer in zip(names, reversed(names), strict=True):
            turns.append(_message("user", f"{prose(rng, 20)} {TEXTS[question]}"))
            yield _chat("several turns", [*turns])
            turns.append(_message("assistant", TEXTS[answer] + prose(rng, 60)))
    for words in (1_000, 4_000, 15_000):
        yield _chat("long", [_message("user", prose(rng, words))])
        yield _chat("long", [_message("system", prose(rng, words)), _message("user", "Go on.")])


def _tools(rng: random.Random) -> Iterator[Request]:
    for count in (1, 2, 3):
        tools = list(TOOLS[:count])
        for name in ("english", "chinese", "html"):
            ask = [_message("user", TEXTS[name])]
            yield _chat("tools", ask, tools=tools)
            yield _chat("tools", [_message("system", prose(rng, 30)), *ask], tools=tools)
            yield _chat("tools, choice none", ask, tools=tools, tool_choice="none")
            yield _chat("tools, choice auto", ask, tools=tools, tool_choice="auto")
            yield _chat("tools, choice required", ask, tools=tools, tool_choice="required")
            named = {"type": "function", "function": {"name": "get_weather"}}
            yield _chat("tools, choice named", ask, tools=tools, tool_choice=named)
    extra = {**TOOLS[0], "function": {**TOOLS[0]["function"], "x-own": 1, "return": {"type": "string"}}}
    yield _chat("tools, unknown keys", [_message("user", "?")], tools=[{**extra, "own": 2}])
    shuffled = {"function": dict(reversed(TOOLS[1]["function"].items())), "type": "function"}
    yield _chat("tools, keys in another order", [_message("user", "?")], tools=[shuffled])
    for arguments in _ARGUMENTS:
        for content in (None, "", "Let me look."):
            asked = [_message("user", "Weather?"), _message("assistant", content, tool_calls=[_call(arguments)])]
            result = _message("tool", '{"temperature": 7, "wind": "5 m/s"}', tool_call_id="call00001")
            yield _chat("tool call", [*asked, result], tools=list(TOOLS))
        after = [_message("assistant", "Seven degrees."), _message("user", "And tomorrow?")]
        yield _chat("tool call", [*asked, result, *after], tools=list(TOOLS))
        yield _chat("tool call without tools", [*asked, result, *after])
    for content in ("", TEXTS["json"], TEXTS["hindi"], _parts("one", "two"), _parts("only"), None):
        result = _message("tool", content, tool_call_id="call00001")
        asked = [_message("user", "Go."), _message("assistant", None, tool_calls=[_call("{}", "now")]), result]
        yield _chat("tool result", asked, tools=[TOOLS[2]])
        yield _chat("tool result, named", [*asked[:2], {**result, "name": "now"}], tools=[TOOLS[2]])
    both = [_call("{}", "now", "call00001"), _call('{"query": "x"}', "search", "call00002")]
    results = [_message("tool", f"r{i}", tool_call_id=f"call0000{i}") for i in (1, 2)]
    asked = [_message("user", "Both."), _message("assistant", None, tool_calls=both), *results]
    yield _chat("two tool calls", asked, tools=list(TOOLS))
    yield _chat("two tool calls", [*asked, _message("assistant", "Done."), _message("user", "Thanks")])
    yield _chat(
        "no tool calls", [_message("user", "?"), _message("assistant", "!", tool_calls=[]), _message("user", ".")]
    )


def _roles(rng: random.Random) -> Iterator[Request]:
    for name in ("english", "german", "thai", "spaces"):
        text = TEXTS[name]
        yield _chat("developer", [_message("developer", text), _message("user", "hello")])
        both = [_message("system", text), _message("developer", prose(rng, 10)), _message("user", "hello")]
        yield _chat("developer and system", both)
        yield _chat(
            "name",
            [_message("user", text, name="alice"), _message("assistant", "hi", name="bob"), _message("user", "?")],
        )
        yield _chat("system in the middle", [_message("user", "1"), _message("system", text), _message("user", "2")])
        yield _chat("two questions", [_message("user", "1"), _message("user", text)])
        yield _chat("ends with an answer", [_message("user", "1"), _message("assistant", text)])
        for key in ("reasoning", "reasoning_content"):
            thought = _message("assistant", "42", **{key: f"Let me think.\n{text}"})
            yield _chat(key, [_message("user", "1"), thought, _message("user", "Sure?")])
            called = {**thought, "content": None, "tool_calls": [_call("{}", "now")]}
            result = _message("tool", "12:00", tool_call_id="call00001")
            yield _chat(f"{key} before a tool call", [_message("user", "1"), called, result], tools=[TOOLS[2]])
        inline = _message("assistant", f"<think>\n{text}\n</think>\n\n42")
        yield _chat("thoughts in the text", [_message("user", "1"), inline, _message("user", "Sure?")])
    yield _chat("unknown keys", [_message("user", "hello", cache_control={"type": "ephemeral"}, id="m1")])
    yield _chat("refusal", [_message("user", "1"), _message("assistant", None, refusal="No."), _message("user", "2")])
    yield _chat("key order", [{"content": "hello", "role": "user"}])
    yield _chat("odd role", [_message("narrator", "Once."), _message("user", "hello")])


def _options(rng: random.Random) -> Iterator[Request]:
    talk = [
        _message("system", prose(rng, 20)),
        _message("user", "Why?"),
        _message("assistant", "Because"),
        _message("user", "So?"),
    ]
    for kwargs in (
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"thinking": True},
        {"no_such_variable": [1, {"a": None}]},
        {"date_string": "1 Jan 2025"},
        {"tools_in_user_message": False},
        {"add_generation_prompt": False},
        {"custom_tools": [TOOLS[2]]},
        {"bos_token": "X"},
        {},
    ):
        yield _chat("template variables", talk, chat_template_kwargs=kwargs)
        yield _chat("template variables", talk[1:], chat_template_kwargs=kwargs, tools=list(TOOLS[:1]))
    for effort in ("none", "low", "high"):
        yield _chat("reasoning effort", talk, reasoning_effort=effort)
        yield _chat("reasoning effort", talk, reasoning_effort=effort, chat_template_kwargs={"enable_thinking": True})
    for text in ("Because", "Because ", "", "Because\n\nof", TEXTS["japanese"]):
        open_end = [*talk[:2], _message("assistant", text)]
        yield _chat("no generation prompt", open_end, add_generation_prompt=False)
        yield _chat("continued answer", open_end, add_generation_prompt=False, continue_final_message=True)
        yield _chat("continued answer and generation prompt", open_end, continue_final_message=True)
        parts = [*talk[:2], _message("assistant", _parts("So: ", text))]
        yield _chat("continued answer, parts", parts, add_generation_prompt=False, continue_final_message=True)
    yield _chat("no generation prompt", talk, add_generation_prompt=False)
    yield _chat("special tokens added", talk, add_special_tokens=True)
    yield _chat("special tokens added", talk[1:2], add_special_tokens=True)
    yield _chat("truncated", talk, truncate_prompt_tokens=10, max_tokens=5)
    documents = [{"title": "A", "text": "Paris is in France."}, {"title": "B", "text": TEXTS["greek"]}]
    yield _chat("documents", talk, documents=documents)
    for key, value in _OTHER_FIELDS.items():
        needs = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}.get(key, {})
        yield _chat("fields that change nothing", talk, **{key: value}, **needs)
    for key in (
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "reasoning_effort",
        "documents",
        "cache_salt",
        "max_tokens",
    ):
        yield _chat("null fields", talk, **{key: None})


def _hard(rng: random.Random) -> Iterator[Request]:
    for special in _SPECIAL:
        yield _chat("special token as text", [_message("user", f"What does {special} mean?")])
        yield _chat(
            "special token as text", [_message("system", special), _message("user", f"{special}{special} \n{special}")]
        )
    for content in ("", " ", "\n", [], None, _parts(""), _parts("", "a", ""), _parts(" a ", "\n")):
        yield _chat("empty content", [_message("user", content)])
        yield _chat(
            "empty content",
            [
                _message("system", content),
                _message("user", "hello"),
                _message("assistant", content),
                _message("user", "?"),
            ],
        )
    yield _chat("no content", [_message("user", "hello"), {"role": "assistant"}, _message("user", "?")])
    yield _chat("bare strings as parts", [_message("user", ["one", "two"])])
    for text in ("a" * 5_000, " " * 3_000, "\n" * 2_000, "啊" * 2_000, "!?" * 1_500, "ab1 " * 2_000, "=" * 4_096):
        yield _chat("monotonous", [_message("user", text)])
    for length in range(1, 40):
        yield _chat("one word more each time", [_message("user", prose(rng, length))])
    for escaped in (b'"\\u00fc\\/\\n\\ud83d\\ude00"', b'"\\ud83d"', b'"a\\u0000b"', b'"\\u2028\\u2029"'):
        body = b'{ "messages" : [ {"role": "user" , "content": ' + escaped + b'} ],\n\t"model":"m" }'
        yield Request("chat, written by hand", CHAT, body)
    yield Request("chat, key twice", CHAT, b'{"model":"m","messages":[],"messages":[{"role":"user","content":"b"}]}')


def _completions(rng: random.Random) -> Iterator[Request]:
    def completion(kind: str, prompt: Any, **fields: Any) -> Request:
        return _request(f"completion, {kind}", COMPLETIONS, {"prompt": prompt, "max_tokens": 5, **fields})

    for text in TEXTS.values():
        yield completion("text", text)
        yield completion("no special tokens", text, add_special_tokens=False)
    for special in _SPECIAL[:8]:
        yield completion("special token as text", f"{special}\nsome text{special}")
    for words in (100, 3_000, 12_000):
        yield completion("long", prose(rng, words))
    yield completion("list of texts", [TEXTS["english"], TEXTS["korean"]])
    yield completion("list of texts", [TEXTS["korean"]])
    yield completion("ids", [rng.randrange(300, 4_000) for _ in range(100)])
    yield completion("ids", [5])
    yield completion("lists of ids", [[rng.randrange(300, 4_000) for _ in range(20)] for _ in range(3)])
    yield completion("ids, special tokens asked for", [300, 301], add_special_tokens=True)
    yield completion("empty", "")
    yield completion("empty", [])
    yield completion("echo", TEXTS["english"], echo=True)
    yield completion("suffix", TEXTS["code"], suffix="return r")
    yield completion("salt", TEXTS["english"], cache_salt="tenant-1")
    yield completion("truncated", TEXTS["russian"], truncate_prompt_tokens=10)


def _other_apis() -> Iterator[Request]:
    for name, text in TEXTS.items():
        asked = [_message("user", text)]
        yield _request("messages", MESSAGES, {"max_tokens": 9, "messages": asked, "system": f"Answer in {name}."})
        yield _request("responses", RESPONSES, {"input": text, "instructions": f"Answer in {name}."})
    blocks = [
        {"type": "text", "text": "One."},
        {"type": "text", "text": "Two.", "cache_control": {"type": "ephemeral"}},
    ]
    use = {"type": "tool_use", "id": "call00001", "name": "now", "input": {"zone": "UTC", "n": 1}}
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": "12:00"}
    thought = {"type": "thinking", "thinking": "Which zone?", "signature": "x"}
    tool = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}
    for answer in ([use], [blocks[0], use], [thought, use]):
        for content in ("12:00", [{"type": "text", "text": "12:00"}], [*blocks]):
            said = [{**result, "content": content}]
            turns = [_message("user", blocks), _message("assistant", answer), _message("user", said)]
            yield _request(
                "messages, tools", MESSAGES, {"max_tokens": 9, "messages": turns, "tools": [tool], "system": blocks}
            )
            said = [{**result, "content": content}, {"type": "text", "text": "And then?"}]
            turns = [_message("user", blocks), _message("assistant", answer), _message("user", said)]
            yield _request("messages, tools", MESSAGES, {"max_tokens": 9, "messages": turns, "tools": [tool]})
    items = [
        _message("user", "What time is it?"),
        {"type": "function_call", "call_id": "call00001", "name": "now", "arguments": '{"zone": "UTC"}'},
        {"type": "function_call_output", "call_id": "call00001", "output": "12:00"},
    ]
    flat = {"type": "function", **TOOLS[0]["function"]}
    yield _request("responses, items", RESPONSES, {"input": items[:1]})
    yield _request("responses, tools", RESPONSES, {"input": items, "tools": [flat]})
    parts = [{"type": "input_text", "text": "One."}, {"type": "input_text", "text": "Two."}]
    yield _request(
        "responses, items", RESPONSES, {"input": [_message("developer", "Be brief."), _message("user", parts)]}
    )


# ---- published conversations ----


def _shared(rng: random.Random) -> Iterator[Request]:
    airline = json.loads((SHARED / "tau_bench" / "tools_airline.json").read_text())
    lines = unpacked(SHARED / "tau_bench" / "gpt4o_airline_conversations.jsonl.zst").decode().split("\n")
    for line in lines[:24]:
        messages = json.loads(line)["messages"]
        ends = [i for i, each in enumerate(messages, 1) if each["role"] in ("user", "tool")]
        for end in ends[:: max(len(ends) // 2, 1)][:3]:
            yield _chat("tau-bench", messages[:end], tools=airline)
    dialogues = _lines("mtbench101/mtbench101")
    for line in dialogues[:: len(dialogues) // 60]:
        turns: list[Any] = []
        for said in json.loads(line)["history"]:
            turns.append(_message("user", said["user"]))
            yield _chat("mt-bench-101", [*turns])
            turns.append(_message("assistant", said["bot"]))
    github = json.loads((SHARED / "system_prompts" / "github_mcp_tools.json").read_text())
    for name in ("gemini_cli_prompts", "roo_code_prompts"):
        for line in _lines(f"system_prompts/{name}")[::3]:
            system = _message("system", json.loads(line)["system"])
            asked = [system, _message("user", prose(rng, 12))]
            yield _chat("coding agent", asked)
            yield _chat("coding agent with tools", asked, tools=rng.sample(github, 12))


def _lines(name: str) -> list[str]:
    # not splitlines(): text has line ends of its own, U+2028 among them
    return (SHARED / f"{name}.jsonl").read_text().rstrip("\n").split("\n")
