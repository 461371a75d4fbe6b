"""Whatever was read before, a prompt has the blocks of its token ids."""

from __future__ import annotations

import pickle
import tempfile
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.blocks import TOKEN_BYTES, block_hashes
from extproc.core.prompt import Chat, Message, Text
from extproc.tokens.encoder import Encoder, Job
from extproc.tokens.files import find
from extproc.tokens.growth import Growth
from extproc.tokens.memo import Memo
from extproc.tokens.template_files import Templates
from extproc.tokens.tokenizer import Tokenizer
from tests.tokens import vocabularies

SIZES = (1, 3, 16)
KINDS = ("qwen2", "llama3", "metaspace")

CHATML = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content | trim }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONG = "{% if messages | length > 40 %}long{% endif %}" + CHATML
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception(messages[0].content) }}{% endif %}" + CHATML


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(find(str(vocabularies.make(kind, Path(folder))), revision=None))


@cache
def probed(kind: str, template: str) -> tuple[Growth, bool]:
    templates = Templates.from_files({"chat_template": template}, now=datetime.now, clock=time.monotonic)
    growth = Growth(templates, tokenizer_of(kind).last_fence, time.monotonic)
    return growth, growth.sure


def encoder_of(kind: str, template: str = CHATML, memo_bytes: int = 1 << 20) -> Encoder:
    growth, growth.sure = probed(kind, template)
    return Encoder(tokenizer_of(kind), growth, Memo(memo_bytes))


def chat(messages: list[Message], tools: list[Any] | None = None, **options: Any) -> Chat:
    return Chat(messages, list, lambda message: [repr(message).encode()], tools, **options)


def read(encoder: Encoder, prompt: Chat | Text, *, salt: int = 1, sizes: tuple[int, ...] = SIZES) -> Job:
    job = Job(encoder, prompt, salt, sizes)
    job.run()
    assert job.done
    return job


def expected(ids: bytes, *, salt: int = 1, sizes: tuple[int, ...] = SIZES) -> dict[int, bytes]:
    return {size: block_hashes(ids, block_tokens=size, salt=salt) for size in sizes}


texts = st.text(alphabet=st.sampled_from("ab Z0\n.é漢<|im_end|>" + "\u0301"), max_size=40)
words = st.text(alphabet="abc de", min_size=1, max_size=400)
messages = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "tool", "system"]),
        st.one_of(texts, words),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(prompt=st.one_of(texts, words), special=st.booleans())
def test_a_text_has_the_blocks_of_its_ids(kind: str, prompt: str, special: bool) -> None:
    encoder = encoder_of(kind)
    ids = encoder.tokenizer.encode(prompt)
    if special:
        ids = encoder.tokenizer.start + ids + encoder.tokenizer.end
    for _ in range(2):  # from nothing, and from the memo
        job = read(encoder, Text(prompt, special))
        assert job.chains() == expected(ids)
        assert job.tokens == len(ids) // TOKEN_BYTES


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    talk=messages,
    template=st.sampled_from([CHATML, TRIMMED]),
    generation=st.booleans(),
    special=st.booleans(),
    turns=st.integers(1, 3),
)
def test_a_conversation_has_the_blocks_of_its_ids_in_every_turn(
    kind: str, talk: list[Message], template: str, generation: bool, special: bool, turns: int
) -> None:
    encoder = encoder_of(kind, template)
    for upto in range(1, len(talk) + 1, turns):
        prompt = chat(talk[:upto], add_generation_prompt=generation, add_special_tokens=special)
        assert encoder.growth is not None
        ids = encoder.tokenizer.encode(encoder.growth.whole(prompt))
        if special:
            ids = encoder.tokenizer.start + ids + encoder.tokenizer.end
        job = read(encoder, prompt)
        assert job.chains() == expected(ids)
        assert job.tokens == len(ids) // TOKEN_BYTES
        assert encoder.check(job)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_is_continued_from_the_one_before(kind: str) -> None:
    encoder = encoder_of(kind)
    talk = [{"role": "user", "content": "word " * 2000}]
    assert not read(encoder, chat(talk)).continued
    talk += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    job = Job(encoder, chat(talk), 1, SIZES)
    assert job.fresh_bytes < 200 < job.text_bytes
    assert job.tokens > 400  # an estimate, before anything is read
    assert job.chains()[16]
    job.run()
    assert job.continued


answers = st.lists(
    st.one_of(words.map(lambda text: [{"role": "assistant", "content": text}]), st.just([])), min_size=1, max_size=4
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(first=texts, answers=answers, special=st.booleans())
def test_what_was_answered_is_found_in_the_next_turn(
    kind: str, first: str, answers: list[list[Message]], special: bool
) -> None:
    encoder = encoder_of(kind)
    talk: list[Message] = [{"role": "user", "content": first}]
    before = read(encoder, chat(talk, add_special_tokens=special))
    for answer in answers:
        talk += [*answer, {"role": "user", "content": "and"}]
        turn = read(encoder, chat(talk, add_special_tokens=special))
        assert turn.turn not in (None, before.turn)
        # what an engine has of it: the prompt, and what it sampled and fed back to itself
        written = encoder.tokenizer.encode(answer[0]["content"]) if answer else b""
        if not turn.continued or special or not answer:
            assert not answer or turn.continued or turn.answered is None
        else:
            assert turn.answered is not None
            assert (turn.answered.turn, turn.answered.begin) == (before.turn, before.tokens)
            assert abs(turn.answered.end - before.tokens - len(written) // TOKEN_BYTES) <= 1
        before = turn


@pytest.mark.parametrize(
    ("options", "generation", "second"),
    [
        ({"enable_thinking": False}, True, "assistant"),  # the answer does not begin with what asked for it
        ({}, False, "assistant"),
        ({}, True, "user"),
    ],
)
def test_no_answer_is_found_where_the_engine_wrote_something_else(
    options: dict[str, Any], generation: bool, second: str
) -> None:
    encoder = encoder_of(
        "qwen2", CHATML.replace("assistant\n", "assistant\n{% if enable_thinking is false %}<t>{% endif %}")
    )
    talk = [{"role": "user", "content": "one"}]
    read(encoder, chat(talk, options=options, add_generation_prompt=generation))
    talk += [{"role": second, "content": "some words"}, {"role": "user", "content": "two"}]
    turn = read(encoder, chat(talk, options=options))
    assert (turn.continued, turn.answered) == (True, None)


def test_where_old_thoughts_are_dropped_no_turn_has_a_name() -> None:
    encoder = encoder_of("qwen2", CHATML.replace("m.content", "m.content.split('</think>')[-1]"))
    talk = [{"role": "user", "content": "one"}]
    assert read(encoder, chat(talk)).turn is None
    talk += [{"role": "assistant", "content": "some words"}, {"role": "user", "content": "two"}]
    turn = read(encoder, chat(talk))
    assert (turn.continued, turn.turn, turn.answered) == (True, None, None)


CHAT = ("tools", "options", "add_special_tokens")
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "other",
    [
        {"salt": 2},
        {"sizes": (3, 16)},
        {"tools": [TOOL]},
        {"options": {"documents": []}},
        {"add_special_tokens": True},
        {"talk": [{"role": "user", "content": "another"}]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_differs_is_not_taken_from_the_memo(kind: str, other: dict[str, Any]) -> None:
    encoder = encoder_of(kind)
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    read(encoder, chat(talk[:1]))
    prompt = chat(other.get("talk", talk[:1]) + talk[1:], **{key: value for key, value in other.items() if key in CHAT})
    job = Job(encoder, prompt, other.get("salt", 1), other.get("sizes", SIZES))
    assert job.fresh_bytes == job.text_bytes
    assert not any(job.chains().values())


def test_the_memo_is_bounded_and_holds_neither_text_nor_more_than_a_block_of_ids() -> None:
    encoder = encoder_of("qwen2", memo_bytes=20_000)
    memo = encoder.memo
    talk: list[Message] = []
    for turn in range(40):
        talk += [{"role": "user", "content": f"secret words {turn} " * 20}, {"role": "assistant", "content": "done"}]
        read(encoder, chat(talk[:-1]))
        read(encoder, Text(f"secret words {turn} " * 20))
        assert 0 < len(memo) <= 20_000
    entries = list(memo._entries.values())
    assert entries
    assert all(len(entry.mark.tail) < max(SIZES) * TOKEN_BYTES for entry in entries)
    assert b"secret" not in pickle.dumps((list(memo._entries), entries))


def test_a_continuation_that_is_wrong_is_found_out_and_not_tried_again() -> None:
    encoder = encoder_of("qwen2", LONG)
    assert encoder.growth is not None
    assert encoder.growth.sure  # no probe is as long
    talk = [{"role": ("user", "assistant")[i % 2], "content": "word " * 40} for i in range(43)]
    assert encoder.check(read(encoder, chat(talk[:39])))
    wrong = read(encoder, chat(talk[:41]))
    assert wrong.continued
    assert not encoder.check(wrong)
    assert (encoder.mismatches, encoder.growth.sure) == (1, False)
    right = read(encoder, chat(talk[:43]))
    assert not right.continued
    assert encoder.check(right)


def test_what_the_template_refuses_has_no_blocks_and_is_not_quoted() -> None:
    encoder = encoder_of("qwen2", STRICT)
    job = Job(encoder, chat([{"role": "system", "content": "secret " * 40}]), 1, SIZES)
    with pytest.raises(ValueError, match="refuses") as refused:
        job.run()
    assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="no chat template"):
        Job(
            Encoder(tokenizer_of("qwen2"), None, Memo(1 << 20)), chat([{"role": "user", "content": "a"}]), 1, SIZES
        ).run()


def test_a_template_that_writes_the_date_is_read_anew_when_it_has_changed() -> None:
    today = datetime(2026, 11, 30, 23, 59)
    clock = [today]
    dated = "{{ strftime_now('%d %B') }}\n" + CHATML
    templates = Templates.from_files({"chat_template": dated}, now=lambda: clock[0], clock=time.monotonic)
    tokenizer = tokenizer_of("qwen2")
    encoder = Encoder(tokenizer, Growth(templates, tokenizer.last_fence, time.monotonic), Memo(1 << 20))
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    read(encoder, chat(talk[:1]))
    assert read(encoder, chat(talk)).continued
    before = read(encoder, chat(talk))
    clock[0] = datetime(2026, 12, 1, 0, 1)
    after = read(encoder, chat(talk))
    assert not after.continued
    assert after.chains() != before.chains()
    assert encoder.check(before)  # of another day: nothing can be said
    assert encoder.check(after)
    assert encoder.growth is not None
    assert encoder.growth.sure


def test_what_is_to_be_rendered_has_its_weight_however_short_it_is() -> None:
    encoder = encoder_of("qwen2")
    parts = [{"type": "text", "text": ""}] * 500
    talk: list[Message] = [{"role": "system", "content": parts}, {"role": "user", "content": "a"}]
    assert Job(encoder, chat(talk), 1, SIZES).weight > 500
    plain = [{"role": "system", "content": "s"}, *[{"role": "user", "content": "a"}] * 300]
    assert Job(encoder, chat(plain), 1, SIZES).weight == 301
    read(encoder, chat(plain))
    assert Job(encoder, chat([*plain, {"role": "assistant", "content": "b"}]), 1, SIZES).weight < 10


@pytest.mark.parametrize("kind", ["qwen2", "metaspace"])
def test_a_stretch_that_cannot_be_cut_ends_what_is_hashed(kind: str) -> None:
    encoder = encoder_of(kind)
    before = read(encoder, chat([{"role": "user", "content": "word " * 500}]))
    job = read(encoder, chat([{"role": "user", "content": "word " * 500 + "x" * 300_000 + " word" * 500}]))
    assert job.short
    assert len(job.chains()[16]) <= len(before.chains()[16])
    assert job.tokens > 1000  # an estimate of all of it
    again = Job(encoder, chat([{"role": "user", "content": "word " * 500 + "x" * 300_000 + " word" * 500}]), 1, SIZES)
    assert not any(again.chains().values())


def test_an_estimate_counts_bytes_whatever_the_script() -> None:
    encoder = encoder_of("qwen2")
    text = "漢字" * 6000
    read(encoder, Text(text, False), salt=1)
    estimated = Job(encoder, chat([{"role": "user", "content": text}]), 2, SIZES).tokens
    assert estimated == pytest.approx(read(encoder, chat([{"role": "user", "content": text}]), salt=3).tokens, rel=0.1)


def test_checks_are_for_the_first_continuations_and_now_and_then() -> None:
    encoder = encoder_of("qwen2")
    wanted = [encoder.wants_check() for _ in range(1000)]
    assert all(wanted[:32])
    assert 10 < sum(wanted[32:]) < 20


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_per_token_are_learnt(kind: str) -> None:
    encoder = encoder_of(kind)
    assert encoder.bytes_per_token == 4.0
    text = "import re\n" * 2000
    job = read(encoder, Text(text, False))
    assert encoder.bytes_per_token == pytest.approx(len(text) / job.tokens, rel=0.01)
