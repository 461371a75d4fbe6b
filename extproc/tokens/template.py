"""Chat templates: jinja2 with the environment that transformers gives them, and vLLM's choice of variables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from extproc.core.prompt import Message
from extproc.tokens.content_format import ContentFormat, content_format

MAX_CHARS = 1 << 25
"""Of a rendered prompt: twice what a 16 MB body can hold."""

_REFUSED_OPTIONS = frozenset(
    (
        *("chat_template", "tokenize"),  # another template or another tokenization; the engine refuses the first
        *("conversation", "conversations", "messages", "model_config", "self", "tokenizer"),  # given twice in its calls
    )
)

_OTHER_OPTIONS = frozenset(
    (
        *("add_generation_prompt", "continue_final_message", "documents", "tools"),  # arguments of their own
        *("max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
        *("tokenizer_kwargs", "truncation"),
    )
)
"""Options that `apply_chat_template` takes for itself: a template never sees them under these names."""

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""What transformers puts behind the final message to find where to cut; a template that looks at lengths sees it."""

_DICT_METHODS = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))


class TemplateError(ValueError):
    """A template that cannot be used, or does not take these messages; the text quotes nothing of a prompt."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short cut for what templates do most; the answers are the sandbox's own."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _STR_METHODS:
            return getattr(obj, attribute)
        if kind in (Namespace, LoopContext) and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Macro) -> str:
        return caller()


_json = json.JSONEncoder(ensure_ascii=False).encode


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _json(value)  # the same without making an encoder each time
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


_ENVIRONMENT = _environment()


class Template:
    """One chat template, compiled. Any thread may render it."""

    def __init__(
        self,
        source: str,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
        special_tokens: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`now`: local time, for templates that write the date; such prompts change when it does.

        `clock`: seconds, what `render`'s deadline is measured with. `defaults`: options that the engine was started
        with. Raises TemplateError for a template that does not compile.
        """
        try:
            tree = _ENVIRONMENT.parse(source)
            self._variables = meta.find_undeclared_variables(tree) - _OTHER_OPTIONS
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template does not compile: {error.message} (line {error.lineno})") from None
        except Exception as error:  # what else its Python may meet: too deep, too many blocks, odd characters
            raise TemplateError(f"the chat template does not compile: {type(error).__name__}") from None
        self.content_format: ContentFormat = content_format(tree)
        self.developer = '"developer"' in source or "'developer'" in source
        """Whether it knows that role, as vLLM tells."""
        self.dated = "strftime_now" in source
        """Whether it may write the date."""
        self._continues = "content" in source
        self._clock = clock
        self._defaults = defaults or {}
        self._constants = {
            **_ENVIRONMENT.globals,
            "strftime_now": lambda format: now().strftime(format),
            **(special_tokens or {}),
        }

    def tools(self, tools: list[Any] | None, options: Mapping[str, Any] | None) -> list[Any] | None:
        """The tools that are rendered: a request's options may hold others."""
        chosen: list[Any] | None = self._chosen(options).get("tools", tools)
        return chosen

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        deadline_at_s: float | None = None,
        max_chars: int = MAX_CHARS,
    ) -> str:
        """The text of the prompt, character for character that of vLLM with transformers.

        `messages` are prepared (`conversation.prepare`) and not changed. `options` are the request's
        chat_template_kwargs with its documents and reasoning_effort: what the template does not read is passed over,
        null and "auto" count as not set, as in vLLM. Time and size are looked at between the pieces that the template
        writes. Raises TemplateError when the template does, when the engine refuses, and past deadline or size.
        """
        if not messages:
            raise TemplateError("no messages")
        chosen = self._chosen(options)
        tools, documents = chosen.get("tools", tools), chosen.get("documents")
        if not (_objects(tools) and _objects(documents)):
            raise TemplateError("tools or documents are not a list of objects")
        final = None
        if continue_final_message:
            if add_generation_prompt or not self._continues:
                raise TemplateError("the final message cannot be continued")
            messages, final = _opened(messages)
        variables = {
            **self._constants,
            **{name: value for name, value in chosen.items() if name in self._variables},
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._rendered(variables, deadline_at_s, max_chars)
        return text if final is None else _cut(text, final)

    def _chosen(self, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if not options:
            return self._defaults
        chosen = {name: value for name, value in options.items() if value is not None and value != "auto"}
        if not _REFUSED_OPTIONS.isdisjoint(chosen) or chosen.get("return_assistant_tokens_mask"):
            raise TemplateError("an option that is not the client's to set")
        return {**self._defaults, **chosen}

    def _rendered(self, variables: dict[str, Any], deadline_at_s: float | None, max_chars: int) -> str:
        clock = self._clock
        pieces: list[str] = []
        try:
            # what Template.generate does, but for a copy of all variables
            for piece in self._template.root_render_func(self._template.new_context(variables, shared=True)):
                pieces.append(piece)
                max_chars -= len(piece)
                if max_chars < 0:
                    raise TemplateError("the rendered prompt is too long")
                if deadline_at_s is not None and clock() > deadline_at_s:
                    raise TemplateError("the chat template takes too long")
        except TemplateError:
            raise
        except Exception as error:  # a template may raise anything, and its words may quote the prompt
            what = "refuses the messages" if type(error) is jinja2.TemplateError else f"fails: {type(error).__name__}"
            raise TemplateError(f"the chat template {what}{_where(error)}") from None
        return "".join(pieces)


def _objects(values: Any) -> bool:
    return values is None or (isinstance(values, list) and all(isinstance(each, dict) for each in values))


def _opened(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """The messages with a mark behind the last text of the last one, and that text."""
    *before, last = messages
    content = last.get("content") if isinstance(last, dict) else None
    if isinstance(content, str):
        return [*before, {**last, "content": content + _CONTINUE}], content
    if isinstance(content, list):
        for at in reversed(range(len(content))):
            part = content[at]
            if isinstance(part, dict) and "text" in part:
                if not isinstance(text := part["text"], str):
                    break
                marked = [*content[:at], {**part, "text": text + _CONTINUE}, *content[at + 1 :]]
                return [*before, {**last, "content": marked}], text
    raise TemplateError("the final message has no text to continue")


def _cut(text: str, final: str) -> str:
    """`text` up to the mark; a template that trims content cut the mark's space as well, then all before goes too."""
    mark = _CONTINUE.strip()
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        raise TemplateError("the chat template does not show the final message")
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()


def _where(error: BaseException) -> str:
    """The line of the template that an error comes from."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if (template := trace.tb_frame.f_globals.get("__jinja_template__")) is not None:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return "" if line is None else f" (line {line})"
