"""What a conversation's new messages add to its rendered text, without rendering the rest again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from cachetools import LRUCache

from extproc.core.prompt import Chat, Message
from extproc.tokens.conversation import prepare
from extproc.tokens.template_files import Templates

_FAR = 3
"""New messages that a probe continues a conversation by, and all that there are."""

_RENDER_S = 1.0
"""More than any template needs; a thread may be kept that long by a template that is broken."""

_OPTIONS = 64
"""Clients send what they like as options, mostly the same ones."""

_NEAR = 8
"""Messages since the last question that a window holds whole; of more, the question and the last turn."""


class More(NamedTuple):
    """Rendered text from the last fence of what was known to the end. A fence: just behind a special token, so that
    what lies before and behind it is tokenized apart."""

    behind: int
    """Characters of `text` that were there already."""
    text: str
    fence: int
    """The last fence of all messages, in `text`; behind it are `left` characters more, and the generation prompt."""
    left: int
    answer: int = 0
    """The last fence of what the model answered to what was known, in `text`; 0: it did not, or what it wrote is not
    what stands there now."""


class Growth:
    """A chat template, rendered whole or from where an earlier rendering ended.

    Most templates only add to the end, and look back no further than to the first message, the last question and the
    last turn: so these, and what is new, are rendered as a window, and what it adds is what the whole would add. That
    is probed when the template is loaded, and checked now and then by the encoder; `sure` is False once it was wrong.
    """

    def __init__(
        self,
        templates: Templates,
        last_fence: Callable[[str], int],
        clock: Callable[[], float],
    ) -> None:
        """`clock`: seconds, for the time limit of a rendering. Probing takes up to a second or two."""
        self._templates = templates
        self._last_fence = last_fence
        self._clock = clock
        self.keeps_answers = False
        """Is what the model wrote in the next turn's prompt as it wrote it? Not where old thoughts are dropped."""
        self._opens: LRUCache[bytes, bool] = LRUCache(_OPTIONS)
        """By a request's options: does an answer begin with what asks for it?"""
        self.sure = True
        self.sure = all(self._grows(messages, tools) for messages in _PROBES for tools in (None, _TOOLS))
        thoughtful = _try(partial(self.whole, Chat(_TALK, list, _none)))
        self.keeps_answers = thoughtful is not None and _THOUGHT in thoughtful

    def day(self) -> str:
        """What a prompt depends on beside its request; see Templates."""
        return self._templates.day()

    def whole(self, chat: Chat) -> str:
        """All of it. ValueError: the engine refuses it, or the template cannot render it."""
        return self._render(chat, chat.messages, chat.add_generation_prompt, chat.tools, chat.continue_final_message)

    def more(self, chat: Chat, known: int) -> More | None:
        """What follows the last fence of the first `known` messages (1 at least). None: the template changes what it
        has rendered before, so that only the whole will do."""
        tools = chat.tools[:1] if chat.tools else chat.tools  # the rest stands in front, or the probe has found it out
        base = _window(chat.messages, known)
        messages = [*base, *chat.messages[known:]]
        try:
            before = self._render(chat, base, False, tools)
            closed = before if known == len(chat.messages) else self._render(chat, messages, False, tools)
            text = self._render(chat, messages, True, tools) if chat.add_generation_prompt else closed
            answered = self._answered(chat, base, known, tools)
        except ValueError:  # of the window only: the whole may be rendered all the same
            return None
        start, end = self._last_fence(before), self._last_fence(closed)
        if not start or not text.startswith(closed) or not closed.startswith(before):
            return None
        answer = 0
        if answered is not None and closed.startswith(answered):
            answer = max(self._last_fence(answered) - start, 0)
        return More(len(before) - start, text[start:], end - start, len(closed) - end, answer)

    def _answered(self, chat: Chat, base: list[Any], known: int, tools: list[Any] | None) -> str | None:
        """`base` and what the model answered to it, where it did, and where that is kept as it wrote it."""
        end = known
        while end < len(chat.messages) and _speaks(chat.messages[end]):
            end += 1
        if end == known or not self.keeps_answers:
            return None
        answered = self._render(chat, [*base, *chat.messages[known:end]], False, tools)
        options = msgspec.json.encode(chat.options)
        opens = self._opens.get(options)
        if opens is None:
            opens = self._opens[options] = answered.startswith(self._render(chat, base, True, tools))
        return answered if opens else None

    def _render(
        self, chat: Chat, messages: Sequence[Any], generation: bool, tools: list[Any] | None, final: bool = False
    ) -> str:
        template = self._templates.pick(tools, chat.options)
        prepared = prepare(
            chat.expand(messages),
            content_format=template.content_format,
            developer=template.developer,
            validated=chat.validated,
        )
        return template.render(
            prepared,
            tools=tools,
            options=chat.options,
            add_generation_prompt=generation,
            continue_final_message=final,
            deadline_at_s=self._clock() + _RENDER_S,
        )

    def _grows(self, messages: list[Message], tools: list[Any] | None) -> bool:
        """Is every continuation of this conversation either right, or known to need the whole?"""
        turns = [Chat(messages[:n], list, _none, tools) for n in range(1, len(messages) + 1)]
        texts = [_try(partial(self._render, chat, chat.messages, False, tools)) for chat in turns]
        for known, before in enumerate(texts[:-1], 1):
            if before is None:
                continue
            fence = self._last_fence(before)
            for chat in (*turns[known : known + _FAR], turns[-1]):
                whole, more = _try(partial(self.whole, chat)), self.more(chat, known)
                if whole is None or more is None:
                    continue
                if more.behind != len(before) - fence or whole != before[:fence] + more.text:
                    return False
        return True


def _none(message: Any) -> list[bytes]:
    return []


_Result = TypeVar("_Result")


def _try(render: Callable[[], _Result]) -> _Result | None:
    """None where the template refuses: it may want another order of roles."""
    try:
        return render()
    except ValueError:
        return None


def _call(name: str, thought: str = "", **arguments: str) -> Message:
    call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    thoughts = {"reasoning": thought, "reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": "", "tool_calls": [call], **thoughts}


def _result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "call00001", "name": "find", "content": text}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text, "reasoning": f"about {text}", "reasoning_content": f"about {text}"}


_THOUGHT = "<think>\nsix\n</think>\n\nseven"
_TALK: list[Message] = [
    {"role": "user", "content": " one "},
    _answer("two"),
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four\n"},
    {"role": "user", "content": "five"},
    {"role": "assistant", "content": _THOUGHT},
    {"role": "user", "content": "eight"},
]
_WORK: list[Message] = [
    {"role": "user", "content": "find one"},
    *[
        each
        for n in range(7)
        for each in (_call("find", "so" * (n % 3 == 1), what=f"item {n}"), _result(f"result {n}"))
    ],
    _answer("found"),
    {"role": "user", "content": "and two"},
    _call("find", what="item 2"),
    _result("more"),
    _result("and more"),
    {"role": "assistant", "content": "found as well"},
    {"role": "user", "content": "thanks"},
]
_SYSTEM: Message = {"role": "system", "content": "You find things."}
_PROBES = (_TALK, _WORK, [_SYSTEM, *_TALK], [_SYSTEM, *_WORK])
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Finds {name}.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
    for name in ("find", "look")
]


def _window(messages: Sequence[Any], known: int) -> list[Any]:
    """Of the first `known` messages what a template may look back at."""
    question = next((i for i in range(known - 1, -1, -1) if _role(messages[i]) == "user"), 0)
    start = question
    if known - question > _NEAR:
        start = known - 1
        while start > question + 1 and not (_speaks(messages[start]) and not _speaks(messages[start - 1])):
            start -= 1
    thought = next((i for i in range(question + 1, start) if _thinks(messages[i])), question)
    first = 1 if _role(messages[0]) in ("system", "developer") else 0
    picked = {*range(first), question, thought, *range(start, known)}
    return [messages[i] for i in sorted(picked)]


def weight(chat: Chat, known: int) -> int:
    """How many messages, parts and calls are rendered when the first `known` are: 10-20 us each."""
    window = _window(chat.messages, known) if known else ()
    return sum(map(_weight, (*window, *chat.messages[known:])))


def _weight(message: Any) -> int:
    if not isinstance(message, dict):
        return 1
    return 1 + sum(len(each) for each in (message.get("content"), message.get("tool_calls")) if isinstance(each, list))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _speaks(message: Any) -> bool:
    """Is it of the model? An item of the responses API without a role is: a call or a thought, unless an output."""
    role = _role(message)
    return role == "assistant" or (role is None and not str(message.get("type", "")).endswith("_output"))


def _thinks(message: Any) -> bool:
    """Does it hold a thought? Templates leave thoughts out once there is another question."""
    if not isinstance(message, dict):
        return False
    if message.get("reasoning") or message.get("reasoning_content") or message.get("type") == "reasoning":
        return True
    content = message.get("content")
    if isinstance(content, str):
        return "</think>" in content
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") == "thinking" for part in content
    )
