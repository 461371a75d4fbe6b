"""A conversation that goes on is rendered from where it ended, or whole; never wrong."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.prompt import Chat, Message
from extproc.tokens.growth import Growth
from extproc.tokens.template_files import Templates

FENCE = re.compile(r"<\|\w+\|>")

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOOLS_FIRST = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHATML
NO_OLD_THOUGHTS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
RESULTS_TOGETHER = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|start|>user{% endif %}\n<r>{{ m.content }}</r>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>\n{% endif %}"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOOLS_LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
    "{% if loop.index0 == ns.last and tools %}<|tools|>{{ tools | tojson }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
)
NUMBERED = "{% for m in messages %}<|start|>{{ loop.index }} {{ m.content }}<|end|>{% endfor %}"
COUNTED = "{{ messages | length }} messages" + CHATML
TOOLS_EVERYWHERE = (
    "{% for m in messages %}<|start|>{% if m.role == 'user' and tools %}{{ tools | tojson }}{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
)
UNFENCED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

SURE = {
    "chatml": CHATML,
    "tools first": TOOLS_FIRST,
    "no old thoughts": NO_OLD_THOUGHTS,
    "results together": RESULTS_TOGETHER,
    "tools last": TOOLS_LAST,
    "unfenced": UNFENCED,
    "counted": COUNTED,
}
UNSURE = {"numbered": NUMBERED, "tools everywhere": TOOLS_EVERYWHERE}


def last_fence(text: str) -> int:
    return max((found.end() for found in FENCE.finditer(text)), default=0)


def growth_of(source: str) -> Growth:
    templates = Templates.from_files({"chat_template": source}, now=datetime.now, clock=time.monotonic)
    return Growth(templates, last_fence, time.monotonic)


def chat(messages: list[Message], tools: list[Any] | None = None, *, generation: bool = True) -> Chat:
    return Chat(messages, list, lambda _: [], tools, add_generation_prompt=generation)


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("a", "b", "c")]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, thought: str = "") -> Message:
    return {"role": "assistant", "content": text, **({"reasoning": thought} if thought else {})}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": "1"}


texts = st.text(alphabet="ab <|end|>\n", max_size=12)
turns = st.one_of(
    texts.map(user), st.builds(assistant, texts, st.sampled_from(["", "hm"])), texts.map(tool), texts.map(tool)
)
conversations = st.builds(
    lambda system, first, rest: [*system, user(first), *rest],
    st.sampled_from([[], [{"role": "system", "content": "s"}]]),
    texts,
    st.lists(turns, min_size=1, max_size=14),
)


@pytest.mark.parametrize("source", SURE.values(), ids=SURE)
@settings(max_examples=40, deadline=None)
@given(messages=conversations, known=st.integers(1, 14), tools=st.sampled_from([None, TOOLS]), generation=st.booleans())
def test_what_new_messages_add_is_what_the_whole_has_more(
    source: str, messages: list[Message], known: int, tools: list[Any] | None, generation: bool
) -> None:
    growth = GROWTHS.setdefault(source, growth_of(source))
    assert growth.sure
    known = min(known, len(messages))
    more = growth.more(chat(messages, tools, generation=generation), known)
    if more is None:
        return
    before = growth.whole(chat(messages[:known], tools, generation=False))
    closed = growth.whole(chat(messages, tools, generation=False))
    fence = last_fence(before)
    assert before[fence:] == more.text[: more.behind]
    assert before[:fence] + more.text == growth.whole(chat(messages, tools, generation=generation))
    assert closed[: last_fence(closed)] == before[:fence] + more.text[: more.fence]
    assert len(closed) - last_fence(closed) == more.left


GROWTHS: dict[str, Growth] = {}


@pytest.mark.parametrize("source", UNSURE.values(), ids=UNSURE)
def test_a_template_that_writes_what_a_window_cannot_show_is_found_out(source: str) -> None:
    assert not growth_of(source).sure


def test_most_templates_continue_a_conversation_however_long() -> None:
    talk = [user("q"), *[each for _ in range(40) for each in (assistant("call", "hm"), tool("result"))]]
    for source in (CHATML, TOOLS_FIRST, NO_OLD_THOUGHTS, RESULTS_TOGETHER):
        growth = growth_of(source)
        assert growth.more(chat([*talk, assistant("call"), tool("result")], TOOLS), len(talk)) is not None
        assert growth.more(chat([*talk, assistant("done"), user("q")], TOOLS), len(talk)) is None or source != (
            NO_OLD_THOUGHTS
        )


def test_a_thought_that_a_new_question_removes_is_rendered_whole() -> None:
    growth = growth_of(NO_OLD_THOUGHTS)
    known = [user("q"), assistant("call", "hm"), tool("result"), *[assistant("call"), tool("result")] * 8]
    assert growth.more(chat([*known, assistant("call"), tool("result")]), len(known)) is not None
    assert growth.more(chat([*known, assistant("done"), user("next")]), len(known)) is None


@pytest.mark.parametrize("source", [COUNTED, UNFENCED, TOOLS_LAST])
def test_a_template_that_changes_what_it_wrote_is_rendered_whole(source: str) -> None:
    assert growth_of(source).more(chat([user("q"), assistant("a"), user("q")], TOOLS), 1) is None


def test_a_window_that_the_template_refuses_is_rendered_whole() -> None:
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('order') }}{% endif %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    )
    growth = growth_of(strict)
    assert growth.sure
    assert growth.more(chat([user("q"), user("q")]), 1) is None
    with pytest.raises(ValueError, match="refuses"):
        growth.whole(chat([user("q"), user("q")]))
