"""Bodies as they come: what is done with each kind of bad input, and that nothing but a refusal ever escapes."""

from __future__ import annotations

import base64
import json
import os
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.core.prompt import Chat, Ids, Text
from extproc.wire.requests import APIS, parse, read
from extproc.wire.requests.content import FENCE, Content, NoContent, NotExact
from tests.wire.test_requests import GOLDEN, SEVERAL, api
from tests.wire.test_requests_exact import EXACT

CHAT = "/v1/chat/completions"


def chat(content: str, *more: str) -> bytes:
    """A chat body around raw JSON."""
    return ('{"model":"m","messages":[{"role":"user","content":' + content + "}]" + "".join(more) + "}").encode()


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def data(text: str) -> bytes:
    return text.replace("|", "\x1e").encode()


NUL = "\0"
PLAIN = data("user|a|")
READ: dict[str, tuple[str, bytes, bytes]] = {
    "byte order mark": (CHAT, b"\xef\xbb\xbf" + chat('"a"'), PLAIN),
    "key given twice: the last counts": (CHAT, chat('"b"', ',"messages":[{"role":"user","content":"a"}]'), PLAIN),
    "key given twice in a message": (CHAT, chat('"b","content":"a"'), PLAIN),
    "number for content": (CHAT, chat("7"), data("user|7|")),
    "number for a role": (CHAT, b'{"model":"m","messages":[{"role":7,"content":"a"}]}', data("7|a|")),
    "number for a text": (CHAT, chat('[{"type":"text","text":7}]'), data("user|7|")),
    "no content": (CHAT, b'{"model":"m","messages":[{"role":"user"}]}', data("user||")),
    "null parts": (CHAT, chat("[null,null]"), data("user||")),
    "NaN and infinity as null": (CHAT, chat("[NaN,Infinity,1e999]"), data("user|nullnullnull|")),
    "number beyond 64 bits": (CHAT, chat("18446744073709551616000"), data("user|18446744073709551616000|")),
    "NUL": (CHAT, chat('"a\\u0000b"'), data(f"user|a{NUL}b|")),
    "pair of surrogates": (CHAT, chat('"\\ud83d\\ude00"'), data("user|😀|")),
    "190 levels": (CHAT, chat(deep(190)), data(f"user|{deep(189)}|")),
    "number for a system text": (
        "/v1/messages",
        b'{"model":"m","system":[{"type":"text","text":7}],"messages":[]}',
        data("system|7|"),
    ),
    "no turns": (CHAT, b'{"model":"m","messages":[]}', b""),
}


@pytest.mark.parametrize(("path", "body", "expected"), READ.values(), ids=READ)
def test_odd_bodies_that_are_read(path: str, body: bytes, expected: bytes) -> None:
    found = read(api(path).canonical, parse(body, cut=False))
    assert (found.model, found.data) == ("m", expected)


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "empty": (CHAT, b"", "invalid JSON"),
    "only byte order marks": (CHAT, b"\xef\xbb\xbf" * 5000, "invalid JSON"),
    "UTF-16": (CHAT, chat('"a"').decode().encode("utf-16"), "invalid JSON"),
    "UTF-16, no mark": (CHAT, chat('"a"').decode().encode("utf-16-le"), "invalid JSON"),
    "UTF-32": (CHAT, chat('"a"').decode().encode("utf-32"), "invalid JSON"),
    "Latin-1": (CHAT, chat('"é"').decode().encode("latin-1"), "invalid JSON"),
    "half a pair of surrogates": (CHAT, chat('"\\ud800"'), "invalid JSON"),
    "surrogates in UTF-8": (CHAT, chat('"_"').replace(b"_", b"\xed\xa0\x80"), "invalid JSON"),
    "raw NUL": (CHAT, chat('"_"').replace(b"_", b"\0"), "invalid JSON"),
    "10,000 levels": (CHAT, chat(deep(10_000)), "invalid JSON"),
    "10,000 levels of objects": (CHAT, chat('{"a":' * 10_000 + "1" + "}" * 10_000), "invalid JSON"),
    "an array": (CHAT, b"[" + chat('"a"') + b"]", "not an object"),
    "a string": (CHAT, b'"a"', "not an object"),
    "a number": (CHAT, b"NaN", "not an object"),
    "messages are text": (CHAT, b'{"messages":"a"}', "messages is not a list"),
    "a message is text": (CHAT, b'{"messages":["a"]}', "a message is not an object"),
    "no prompt": ("/v1/completions", b"{}", "no prompt"),
    "a number as prompt": ("/v1/completions", b'{"prompt":7}', "no prompt"),
    "a token id below 0": ("/v1/completions", b'{"prompt":[-1]}', "neither text nor token ids"),
    "a token id of 33 bits": ("/v1/completions", b'{"prompt":[4294967296]}', "neither text nor token ids"),
    "a fraction of a token": ("/v1/completions", b'{"prompt":[1.5]}', "neither text nor token ids"),
    "NaN as a token": ("/v1/completions", b'{"prompt":[NaN]}', "neither text nor token ids"),
    "a text among token ids": ("/v1/completions", b'{"prompt":[1,"a"]}', "neither text nor token ids"),
    "no input": ("/v1/responses", b"{}", "input is neither"),
    "an item is text": ("/v1/responses", b'{"input":["a"]}', "an item is not an object"),
    "no messages": ("/v1/messages", b'{"system":"s"}', "messages is not a list"),
    "nothing to count": ("/v1/messages/count_tokens", b"{}", "messages is not a list"),
    "nothing to embed": ("/v1/embeddings", b'{"input":null}', "no input"),
    "no token ids": ("/inference/v1/generate", b"{}", "no prompt"),
    "text for token ids": ("/inference/v1/generate", b'{"token_ids":"a"}', "not those of one prompt"),
    "several lists of token ids": ("/inference/v1/generate", b'{"token_ids":[[1],[2]]}', "not those of one prompt"),
    "features without places": ("/inference/v1/generate", b'{"token_ids":[1],"features":{}}', "features"),
    "a feature outside": (
        "/inference/v1/generate",
        b'{"token_ids":[1],"features":{"mm_hashes":{"i":["h"]},"mm_placeholders":{"i":[{"offset":1,"length":1}]}}}',
        "features",
    ),
    "nothing to tokenize": ("/tokenize", b"{}", "neither prompt nor messages"),
    "nothing to generate from": ("/generate", b'{"prompt":"a"}', "none of"),
    "Ollama without a prompt": ("/api/generate", b'{"prompt":null}', "no prompt"),
    "llama.cpp without a prompt": ("/completion", b'{"prompt":{"a":1}}', "no prompt"),
}


@pytest.mark.parametrize(("path", "body", "why"), REFUSED.values(), ids=REFUSED)
def test_bodies_that_are_refused(path: str, body: bytes, why: str) -> None:
    with pytest.raises(NoContent, match=why):
        read(api(path).canonical, parse(body, cut=False))


def test_an_image_of_40_mb_is_a_few_bytes() -> None:
    image = base64.b64encode(os.urandom(1 << 20)) * 29
    body = chat('[{"type":"image_url","image_url":{"url":"' + image.decode() + '"}}]')
    assert len(body) > 40_000_000
    assert len(read(api(CHAT).canonical, parse(body, cut=False)).data) == len(b"user" + FENCE + FENCE + FENCE) + 16


# ---- whatever comes ----

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["text", "tool_use", "tool_result", "disabled", "é\0", "x-anthropic-billing-header"])
    | st.sampled_from(["user", "assistant", "system", "tool", "developer", "function", "namespace", "reasoning"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "offset", "length", "image"]), inner)
    ),
    max_leaves=6,
)
REAL = [
    (path, {"model": "m", "cache_salt": "s", **body})
    for path, body, *_ in (*GOLDEN.values(), *SEVERAL.values(), *EXACT)
]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path to a value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] + [place for key, each in inner for place in places(each, (*at, key))]


def with_value(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy in which `new` stands at that place."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = with_value(value[at[0]], at[1:], new)
    return copy


def only_refusals_escape(path: str, body: bytes, *, cut: bool) -> None:
    """The canonical reading refuses with NoContent, the exact one with NotExact as well; so do looks at its chat."""
    canonical, exact = api(path)
    try:
        parsed = parse(body, cut=cut)
    except NoContent:
        return
    try:
        found = read(canonical, parsed)
    except NoContent:
        found = None
    else:
        assert isinstance(found, Content)
        assert isinstance(found.data, bytes)
        assert found.extra_bytes >= 0
    if exact is None:
        return
    try:
        exactly = read(exact, parsed)
    except NotExact:
        return
    except NoContent:
        assert found is None
        return
    assert (exactly.data, exactly.extra_bytes >= 0) == (b"", True)
    if isinstance(exactly.prompt, Chat):
        only_not_exact_escapes(exactly.prompt)
    else:
        assert isinstance(exactly.prompt, Text | Ids | None)


def only_not_exact_escapes(chat: Chat) -> None:
    with suppress(NotExact):
        assert all(isinstance(message["role"], str) for message in chat.expand(chat.messages))
    for message in chat.messages:
        with suppress(NotExact):
            assert b"".join(chat.identity(message)) != b""


@settings(max_examples=1500, deadline=None)
@given(real=st.sampled_from(REAL), drawn=st.data(), cut=st.booleans())
def test_a_real_body_with_another_value_somewhere(
    real: tuple[str, dict[str, Any]], drawn: st.DataObject, cut: bool
) -> None:
    path, body = real
    for _ in range(drawn.draw(st.integers(1, 2))):
        body = with_value(body, drawn.draw(st.sampled_from(places(body))), drawn.draw(JSON))
    only_refusals_escape(path, json.dumps(body).encode(), cut=cut)


@settings(max_examples=1000, deadline=None)
@given(
    real=st.sampled_from(REAL),
    start=st.integers(0, 2000),
    stop=st.integers(0, 2000),
    new=st.binary(max_size=4)
    | st.sampled_from([b'"', b"\\ud800", b"\\", b"{", b"]", b"\xef\xbb\xbf", b"NaN", b"1e9999"]),
    cut=st.booleans(),
)
def test_a_real_body_with_other_bytes_somewhere(
    real: tuple[str, dict[str, Any]], start: int, stop: int, new: bytes, cut: bool
) -> None:
    body = json.dumps(real[1]).encode()
    start, stop = sorted((start % len(body), stop % len(body)))
    only_refusals_escape(real[0], body[:start] + new + body[stop:], cut=cut)
    only_refusals_escape(real[0], body[:start] + new, cut=True)


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(list(APIS)), body=st.binary(max_size=50) | JSON.map(lambda v: json.dumps(v).encode()))
@example(path="/chat/completions", body=b"")
def test_any_bytes_at_any_api(path: str, body: bytes) -> None:
    only_refusals_escape(path, body, cut=False)
    only_refusals_escape(path, body, cut=True)
