"""Messages as a chat template gets them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.tokens.conversation import MessageError, prepare

HEADER = "x-anthropic-billing-header: cc_version=1; cch=4f2a1;"


def one(message: Any, content_format: Any = "string", **kinds: Any) -> Any:
    [prepared] = prepare([message], content_format=content_format, **{"developer": True, **kinds})
    return prepared


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


def part(kind: str | None, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields} if kind else fields


CONTENT: dict[str, tuple[str, Any, Any, Any]] = {
    # role, content, as a string, as parts
    "text": ("user", "hello", "hello", text("hello")),
    "empty text": ("user", "", "", text("")),
    "no content": ("user", None, "", []),
    "an empty list": ("user", [], "", []),
    "parts": ("user", text("a", "b"), "a\nb", text("a", "b")),
    "an empty part": ("user", text("a", "", "b"), "a\nb", text("a", "", "b")),
    "parts that are strings": ("user", ["a", "b"], "a\nb", text("a", "b")),
    "text of other APIs": (
        "assistant",
        [part("input_text", text="a"), part("output_text", text="b")],
        "a\nb",
        text("a", "b"),
    ),
    "what else is text": (
        "assistant",
        [part("refusal", refusal="no"), part("thinking", thinking="hm", closed=True)],
        "no\nhm",
        text("no", "hm"),
    ),
    "null text is left out": ("user", [part("text", text=None), *text("a")], "a", text("a")),
    "a refusal without words": ("assistant", [part("refusal")], "", []),
    "thinking without words": ("assistant", [part("thinking")], "", [part("text", text=None)]),
    "what else a part has": (
        "user",
        [part("text", text="a", cache_control={"type": "ephemeral"}, name="n", uuid=None)],
        "a",
        [part("text", text="a", cache_control={"type": "ephemeral"})],
    ),
    "a tool's text": ("tool", "a", "a", "a"),
    "a tool's parts": ("tool", text("a", "", "b"), "a\nb", "a\n\nb"),
    "a tool's null": ("tool", None, "", ""),
    "a reference to a tool": (
        "tool",
        [*text("a"), part("tool_reference", name="f", more=1)],
        "a\nf",
        [*text("a"), part("tool_reference", name="f")],
    ),
    "a reference without a type": (
        "tool",
        [part(None, tool_reference="f", name="g")],
        "g",
        [part("tool_reference", name="g")],
    ),
    "a billing header": (
        "system",
        f"{HEADER}\nBe kind.\nBe brief.",
        "Be kind.\nBe brief.",
        text("Be kind.\nBe brief."),
    ),
    "nothing but a billing header": ("system", HEADER, "", []),
    "a billing header in a part": ("system", [*text(HEADER), *text("Be kind.")], "Be kind.", text("Be kind.")),
    "a billing header and text in a part": (
        "system",
        [part("text", text=f"{HEADER}\nBe kind.", more=1)],
        "Be kind.",
        [part("text", text="Be kind.", more=1)],
    ),
    "a billing header in a string": ("system", [f"{HEADER}\nBe kind."], "Be kind.", text("Be kind.")),
    "a billing header further on": ("system", f"Be kind. {HEADER}", f"Be kind. {HEADER}", text(f"Be kind. {HEADER}")),
    "a billing header of a user": ("user", HEADER, HEADER, text(HEADER)),
}


@pytest.mark.parametrize("name", CONTENT)
def test_content_is_one_string_or_parts_as_the_template_wants(name: str) -> None:
    role, content, as_string, as_parts = CONTENT[name]
    message = {"role": role, "content": copy.deepcopy(content)}
    assert one(message, "string")["content"] == as_string
    assert one(message, "openai")["content"] == as_parts
    assert message == {"role": role, "content": content}


def call(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"index": 0, "type": "function", "function": {"name": "f", "arguments": arguments}, "id": "1", **more}


KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # beside content, and what becomes of it
    "what templates do not get": ({"role": "user", "audio": {}, "tool_call_id": "1", "tool_calls": [call()]}, {}),
    "a name": ({"role": "user", "name": "ann"}, {"name": "ann"}),
    "a name that is none": ({"role": "user", "name": 5}, {}),
    "a task": ({"role": "user", "task": "t"}, {"task": "t"}),
    "a tool's call": ({"role": "tool", "tool_call_id": "1"}, {"tool_call_id": "1"}),
    "reasoning": ({"role": "assistant", "reasoning": "r"}, {"reasoning": "r", "reasoning_content": "r"}),
    "reasoning of older clients": (
        {"role": "assistant", "reasoning_content": "r"},
        {"reasoning": "r", "reasoning_content": "r"},
    ),
    "reasoning twice": (
        {"role": "assistant", "reasoning": "r", "reasoning_content": "older"},
        {"reasoning": "r", "reasoning_content": "r"},
    ),
    "reasoning of a user": ({"role": "user", "reasoning": "r"}, {}),
    "no calls": ({"role": "assistant", "tool_calls": []}, {}),
    "null calls": ({"role": "assistant", "tool_calls": None}, {}),
    "a developer": ({"role": "developer"}, {"tools": None}),
    "a developer's tools": ({"role": "developer", "tools": []}, {"tools": []}),
    "another role": ({"role": "critic", "reasoning": "r", "name": "n"}, {"name": "n"}),
}


@pytest.mark.parametrize("name", KEYS)
def test_of_the_other_keys_those_stay_that_the_engine_passes_on(name: str) -> None:
    message, kept = KEYS[name]
    assert one({"content": "c", **message}) == {"role": message["role"], "content": "c", **kept}


@pytest.mark.parametrize("message", [message for message, _ in KEYS.values()])
def test_a_message_without_content_keeps_its_other_keys(message: dict[str, Any]) -> None:
    assert one(message) == {**one({"content": "c", **message}), "content": ""}


ARGUMENTS: list[tuple[Any, dict[str, Any]]] = [
    ('{"b": 1, "a": [2.50, null]}', {"b": 1, "a": [2.5, None]}),
    ({"a": 1}, {"a": 1}),
    ("", {}),
    (None, {}),
    ('{"a": ', {}),
    ("[1]", {}),
    ('"text"', {}),
    ([1], {}),
]


@pytest.mark.parametrize(("arguments", "read"), ARGUMENTS)
def test_arguments_of_calls_become_objects(arguments: Any, read: dict[str, Any]) -> None:
    [prepared] = one({"role": "assistant", "tool_calls": [call(arguments)]})["tool_calls"]
    assert prepared == call(read)


@pytest.mark.parametrize(
    ("validated", "written"),
    [
        (True, '{"id": "1", "function": {"arguments": {}, "name": "f"}, "type": "function", "index": 0}'),
        (False, '{"index": 0, "type": "function", "function": {"name": "f", "arguments": {}}, "id": "1"}'),
    ],
)
def test_the_keys_of_a_call_stand_in_the_order_of_the_engines_request_class(validated: bool, written: str) -> None:
    calls = [call()]
    message = one({"role": "assistant", "tool_calls": calls}, validated=validated)
    assert json.dumps(message["tool_calls"][0]) == written
    assert calls == [call()]


def test_what_the_request_class_does_not_see_keeps_its_older_reasoning_unread() -> None:
    assert "reasoning" not in one({"role": "assistant", "content": "", "reasoning_content": "r"}, validated=False)


@pytest.mark.parametrize(
    ("validated", "others", "written"),
    [
        (True, [], '[{"function": {"name": "f", "parameters": {}, "extra": 1}, "type": "function"}]'),
        (True, [5], '[{"type": "function", "function": {"parameters": {}, "extra": 1, "name": "f"}}, 5]'),
        (True, [{}], '[{"type": "function", "function": {"parameters": {}, "extra": 1, "name": "f"}}, {}]'),
        (False, [], '[{"type": "function", "function": {"parameters": {}, "extra": 1, "name": "f"}}]'),
    ],
)
def test_the_keys_of_a_developers_tools_stand_in_the_order_of_the_engines_request_class(
    validated: bool, others: list[Any], written: str
) -> None:
    tool = {"type": "function", "function": {"parameters": {}, "extra": 1, "name": "f"}}
    message = one({"role": "developer", "content": "", "tools": [tool, *others]}, validated=validated)
    assert json.dumps(message["tools"]) == written


def said(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


DEVELOPERS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "alone": (said(("developer", "d"), ("user", "u")), said(("system", "d"), ("user", "u"))),
    "after the system": (
        said(("system", "s"), ("developer", "d"), ("user", "u")),
        said(("system", "s\n\nd"), ("user", "u")),
    ),
    "later": (
        said(("user", "u"), ("developer", "d"), ("user", "v")),
        said(("system", "d"), ("user", "u"), ("user", "v")),
    ),
    "with parts": (said(("user", "u"), ("developer", text("d", "e"))), said(("system", "d\ne"), ("user", "u"))),
    "empty": (said(("system", ""), ("developer", "d")), said(("system", "d"))),
    "nobody": (said(("system", "s"), ("system", "t")), said(("system", "s"), ("system", "t"))),
}


@pytest.mark.parametrize("content_format", ["string", "openai"])
@pytest.mark.parametrize("name", DEVELOPERS)
def test_developers_are_the_system_for_a_template_that_does_not_know_them(name: str, content_format: Any) -> None:
    messages, expected = DEVELOPERS[name]
    prepared = prepare(messages, content_format=content_format, developer=False)
    for message in prepared:
        if isinstance(message["content"], list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
    assert prepared == expected


def test_a_developer_that_stands_alone_in_front_keeps_name_and_parts() -> None:
    messages = [{"role": "developer", "content": text("d", "e"), "name": "ann", "tools": []}, *said(("user", "u"))]
    [system, _] = prepare(messages, content_format="openai", developer=False)
    assert system == {"role": "system", "content": text("d", "e"), "name": "ann"}


def test_what_is_no_text_is_left_out_where_system_messages_become_one() -> None:
    messages = said(("user", "u"), ("developer", [part("tool_reference", name="f"), *text("d")]))
    assert prepare(messages, content_format="openai", developer=False)[0] == said(("system", "d"))[0]


def test_system_messages_without_words_do_not_become_one() -> None:
    messages = said(("user", "u"), ("developer", [part("thinking")]))
    with pytest.raises(MessageError):
        prepare(messages, content_format="openai", developer=False)


BAD: dict[str, Any] = {
    "text for a message": "hello",
    "null for a message": None,
    "no role": {"content": "SECRET"},
    "a role that is none": {"role": 5, "content": "SECRET"},
    "a number for content": {"role": "user", "content": 5},
    "an object for content": {"role": "user", "content": {"SECRET": 1}},
    "a number for a part": {"role": "user", "content": [5]},
    "a list for a part": {"role": "user", "content": [["SECRET"]]},
    "a type nobody knows": {"role": "user", "content": [part("SECRET", text="SECRET")]},
    "a type that is no string": {"role": "user", "content": [{"type": ["SECRET"], "text": "SECRET"}]},
    "no type": {"role": "user", "content": [part(None, text="SECRET")]},
    "an image": {"role": "user", "content": [part("image_url", image_url={"url": "SECRET"})]},
    "a text part marked as media": {"role": "user", "content": [part("text", text="SECRET", uuid="1")]},
    "a number for text": {"role": "user", "content": [part("text", text=5)]},
    "a reference to a number": {"role": "tool", "content": [part("tool_reference", name=5)]},
    "calls that are no list": {"role": "assistant", "tool_calls": {"SECRET": 1}},
    "a call that is none": {"role": "assistant", "tool_calls": ["SECRET"]},
    "a call of nothing": {"role": "assistant", "tool_calls": [{"type": "function"}]},
    "a call of something else": {"role": "assistant", "tool_calls": [call(type="custom")]},
    "deep arguments": {"role": "assistant", "tool_calls": [call("[" * 100_000)]},
    "a number too long": {"role": "assistant", "tool_calls": [call("9" * 10_000)]},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_prepared_is_refused_without_quoting_it(name: str) -> None:
    with pytest.raises(MessageError) as refused:
        one(BAD[name])
    assert "SECRET" not in str(refused.value)


def test_a_tool_has_no_text_without_words() -> None:
    with pytest.raises(MessageError):
        one({"role": "tool", "content": [part("thinking")]}, "openai")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
words = st.sampled_from(["", "a", "b c", HEADER, f"{HEADER}\nrest", "{}", '{"a": [1]}', "["]) | st.text(max_size=8)


def some(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Objects with some of these fields, each mostly of its kind."""
    return st.fixed_dictionaries({}, optional={name: value | anything for name, value in fields.items()})


kinds = ["text", "input_text", "output_text", "thinking", "refusal", "tool_reference", "image_url"]
parts = some(
    {
        "type": st.sampled_from(kinds),
        "text": words,
        "thinking": words,
        "refusal": words,
        "name": words,
        "uuid": st.none(),
        "cache_control": anything,
    }
)
calls = some({"id": words, "type": st.just("function"), "function": some({"name": words, "arguments": words})})
message_objects = some(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        "content": words | st.lists(parts | words, max_size=3),
        "tool_calls": st.lists(calls, max_size=2),
        "tool_call_id": words,
        "reasoning": words,
        "reasoning_content": words,
        "name": words,
        "tools": st.lists(some({"type": st.just("function"), "function": some({"name": words})}), max_size=2),
    }
)


@given(
    st.lists(message_objects | anything, max_size=4),
    st.sampled_from(["string", "openai"]),
    st.booleans(),
    st.booleans(),
)
def test_preparing_changes_no_message_and_raises_nothing_but_its_refusal(
    messages: list[Any], content_format: Any, developer: bool, validated: bool
) -> None:
    before = copy.deepcopy(messages)
    try:
        prepared = prepare(messages, content_format=content_format, developer=developer, validated=validated)
    except MessageError:
        pass
    else:
        assert all(isinstance(message["role"], str) and "content" in message for message in prepared)
        if content_format == "string":
            assert all(isinstance(message["content"], str) for message in prepared)
    assert repr(messages) == repr(before)
