"""Chat templates: the environment that transformers gives them, vLLM's variables, and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.tokens.conversation import MessageError, prepare
from extproc.tokens.template import Template, TemplateError
from extproc.tokens.template_files import Templates, special_tokens


def noon() -> datetime:
    return datetime(2026, 3, 14, 12)


def still() -> float:
    return 0.0


def template(source: str, **kinds: Any) -> Template:
    return Template(source, **{"now": noon, "clock": still, **kinds})


def user(content: Any = "hello") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.question %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

TOOL = {"type": "function", "function": {"name": "weather", "description": "<é> & more"}}


def test_a_conversation_with_tools_is_rendered_as_it_is_told() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}, {"type": "text", "text": "Soon?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "look\n",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Zürich"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "no"},
        {"role": "tool", "tool_call_id": "2", "content": "none"},
    ]
    chatml = template(CHATML)
    prepared = prepare(messages, content_format=chatml.content_format, developer=chatml.developer)
    assert chatml.render(prepared, tools=[TOOL], options={"enable_thinking": False}) == (
        "<|im_start|>system\nBe kind.\n\n# Tools\n"
        '{"type": "function", "function": {"name": "weather", "description": "<é> & more"}}\n<|im_end|>\n'
        "<|im_start|>user\nRain?\nSoon?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nlook\n</think>\n"
        '\n<tool_call>\n{"name": "weather", "arguments": {"at": "Zürich"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nno\n</tool_response>\n<tool_response>\nnone\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


FEATURES: dict[str, tuple[str, str]] = {
    # with a user's "hello"
    "lines of blocks leave nothing": ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
    "the last newline goes": ("a\n", "a"),
    "nothing is escaped": ("{{ '<&>' }}{{ '<&>' | tojson }}", '<&>"<&>"'),
    "json": ("{{ {'b': 'é', 'a': [1, 2.50, none, true]} | tojson }}", '{"b": "é", "a": [1, 2.5, null, true]}'),
    "json in ascii": ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
    "indented json": ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
    "json by place": ("{{ {'a': 1} | tojson(true, 1) }}", '{\n "a": 1\n}'),
    "dense json": ("{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}", '{"a":[1,2]}'),
    "sorted json": ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
    "the date": ("{{ strftime_now('%d %b %Y') }} {{ strftime_now(format='%H') }}", "14 Mar 2026 12"),
    "break": ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    "continue": ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
    "generation": ("{% generation %}a{{ messages[0].content }}{% endgeneration %}b", "ahellob"),
    "generation has a scope": ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
    "a namespace": (
        "{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        "4",
    ),
    "a namespace without it": ("{{ namespace(a=1).b is defined }}", "False"),
    "a macro": ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages[0].content) }}", "[hello]"),
    "loops know their place": (
        "{% for m in 'ab' %}{{ loop.index }}{{ loop.last }}{{ loop.previtem }}{% endfor %}",
        "1False2Truea",
    ),
    "what is not there is empty": ("{{ messages[0].name }}{{ messages[0]['name'] }}{{ nobody }}", ""),
    "a key goes before a method by brackets": (
        "{{ {'items': 1}['items'] }}{{ {'keys': 1}.keys is callable }}",
        "1True",
    ),
    "methods of text": ("{{ ' a-b '.strip().split('-') | join('+') }}{{ 'a'.upper() }}{{ 'ab'[::-1] }}", "a+bAba"),
    "format": ("{{ '{:>3}|{a}'.format(1, a=2) }}{{ '%s' | format('x') }}", "  1|2x"),
    "a method of a dict": (
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.get('b', 2) }}",
        "a12",
    ),
    "no tools are none": ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
    "special tokens": ("{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}", "<s>|</s>|False"),
    "the generation prompt": ("{{ add_generation_prompt }}", "True"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_templates_have_the_environment_of_transformers(name: str) -> None:
    source, expected = FEATURES[name]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert template(source, special_tokens=tokens).render(user()) == expected


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "|default|None|None"),
    "one that is read": ({"thinking": True}, "True|default|None|None"),
    "one that is not": ({"unknown": True}, "|default|None|None"),
    "null": ({"thinking": None}, "|default|None|None"),
    "auto": ({"thinking": "auto"}, "|default|None|None"),
    "false": ({"thinking": False}, "False|default|None|None"),
    "the engine's own default": ({"effort": "high"}, "|high|None|None"),
    "null does not unset a default": ({"effort": None}, "|default|None|None"),
    "tools": ({"tools": [{"a": 1}]}, "|default|[{'a': 1}]|None"),
    "documents": ({"documents": [{"a": 1}]}, "|default|None|[{'a': 1}]"),
    "what the tokenizer takes": ({"padding": True, "max_length": 3}, "|default|None|None"),
    "what the request says better": (
        {"add_generation_prompt": False, "continue_final_message": True},
        "|default|None|None",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_template_sees_the_options_that_it_reads(name: str) -> None:
    options, expected = OPTIONS[name]
    source = "{{ thinking }}|{{ effort }}|{{ tools }}|{{ documents }}{{ padding }}{{ max_length }}"
    assert template(source, defaults={"effort": "default"}).render(user(), options=options) == expected


def test_an_option_wins_over_a_special_token() -> None:
    assert (
        template("{{ bos_token }}", special_tokens={"bos_token": "<s>"}).render(user(), options={"bos_token": "<b>"})
        == "<b>"
    )


def render(source: str, messages: Any = None, **kinds: Any) -> Callable[[], str]:
    return lambda: template(source).render(user("SECRET") if messages is None else messages, **kinds)


DEEP: list[Any] = []
for _ in range(9999):
    DEEP = [DEEP]

REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "syntax": (render("a\n{% if %}"), r"does not compile: .* \(line 2\)"),
    "an unknown filter": (render("{{ 1 | shout }}"), "does not compile: No filter named 'shout'"),
    "too many blocks": (render("{% for x in 'a' %}" * 30 + "{% endfor %}" * 30), "does not compile: SyntaxError"),
    "too deep": (render("{{" + "(" * 5000 + ")" * 5000 + "}}"), "does not compile: "),
    "its own refusal": (
        render("\n{{ raise_exception('no ' ~ messages[0].content) }}"),
        r"refuses the messages \(line 2\)",
    ),
    "an unknown name": (render("{{ nobody.x }}"), r"fails: UndefinedError \(line 1\)"),
    "an unknown name in a macro": (
        render("{% macro m() %}\n\n{{ nobody.x }}{% endmacro %}{{ m() }}"),
        r"UndefinedError \(line 3\)",
    ),
    "text and number": (render("{{ messages[0].content + 1 }}"), "fails: TypeError"),
    "division": (render("{{ 1 / 0 }}"), "fails: ZeroDivisionError"),
    "json of what is not there": (render("{{ nobody | tojson }}"), "fails: TypeError"),
    "json of deep data": (render("{{ tools | tojson }}", tools=[{"a": DEEP}]), "fails: RecursionError"),
    "endless": (render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "fails: RecursionError"),
    "other files": (render("{% include 'SECRET' %}"), "fails: TypeError"),
    "private attributes": (render("{{ messages.__class__.__bases__ }}"), "fails: SecurityError"),
    "private attributes of text": (render("{{ messages[0].content.__class__.mro() }}"), "fails: SecurityError"),
    "private attributes by format": (render("{{ '{0.__class__.__mro__}'.format(1) }}"), "fails: SecurityError"),
    "private attributes by format_map": (
        render("{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}"),
        "fails: SecurityError",
    ),
    "changing messages": (render("{{ messages.append(1) }}"), "fails: SecurityError"),
    "changing a message": (render("{{ messages[0].update(a=1) }}"), "fails: SecurityError"),
    "a range too long": (render("{% for i in range(10 ** 9) %}{% endfor %}"), "fails: OverflowError"),
    "no messages": (render("a", []), "no messages"),
    "tools that are no objects": (render("a", tools=["SECRET"]), "tools or documents are not"),
    "tools that are no list": (render("a", options={"tools": "SECRET"}), "tools or documents are not"),
    "documents that are no objects": (render("a", options={"documents": ["SECRET"]}), "tools or documents are not"),
    "a template of the client": (render("a", options={"chat_template": "SECRET"}), "not the client's"),
    "messages of the options": (render("a", options={"messages": "SECRET"}), "not the client's"),
    "a mask": (render("a", options={"return_assistant_tokens_mask": True}), "not the client's"),
    "too long": (render("{% for i in range(99) %}{{ i }}{% endfor %}", max_chars=100), "too long"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rendered_is_refused_without_quoting_the_prompt(name: str) -> None:
    attempt, reason = REFUSED[name]
    with pytest.raises(TemplateError, match=reason) as refused:
        attempt()
    assert "SECRET" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_a_template_that_takes_too_long_is_stopped_between_two_pieces() -> None:
    ticks = itertools.count()
    counting = template("{% for i in range(100000) %}{{ i }}{% endfor %}", clock=lambda: float(next(ticks)))
    with pytest.raises(TemplateError, match="too long"):
        counting.render(user(), deadline_at_s=20.0)
    assert next(ticks) == 22


def test_a_prompt_of_the_longest_length_in_the_last_moment_is_rendered() -> None:
    assert template("{{ messages[0].content }}").render(user(), deadline_at_s=0.0, max_chars=5) == "hello"


def test_a_prompt_of_one_character_more_is_refused() -> None:
    with pytest.raises(TemplateError, match="too long"):
        template("{{ messages[0].content }}").render(user(), max_chars=4)


SHOWN = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}{{ p.name }}>{% endfor %}{% endfor %}"
CONTINUED: dict[str, tuple[str, Any, str]] = {
    "text": (SHOWN, "an answer", "<an answer"),
    "white space stays": (SHOWN, "an answer \n", "<an answer \n"),
    "trimmed text": ("<{{ messages[-1].content | trim }}>", "an answer", "<an answer"),
    "trimmed white space": ("<{{ messages[-1].content | trim }}>", "an answer \n", "<an answer"),
    "empty text": (SHOWN, "", "<"),
    "the last text part": (PARTS, [{"text": "a"}, {"text": "b"}], "<a><b"),
    "the last part that has text": (PARTS, [{"text": "a"}, {"name": "f"}], "<a"),
    "text that shows twice": (SHOWN + SHOWN, "a", "<a CONTINUE_FINAL_MESSAGE_TAG ><a".replace(" C", "C")),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_continued_message_stays_open(name: str) -> None:
    source, content, expected = CONTINUED[name]
    messages = user(content)
    before = copy.deepcopy(messages)
    assert template(source).render(messages, add_generation_prompt=False, continue_final_message=True) == expected
    assert messages == before


CLOSED: dict[str, tuple[str, Any]] = {
    "no content": (SHOWN, None),
    "no parts": (PARTS, []),
    "a part without text": (PARTS, [{"name": "SECRET"}]),
    "a part with null text": (PARTS, [{"text": "SECRET"}, {"text": None}]),
    "a message that is not shown": ("content", "SECRET"),
    "a message of which the end is not shown": ("{{ messages[0].content[:6] }}", "SECRET"),
    "a message shown otherwise": ("{{ messages[0].content | upper }}", "secret"),
    "a template without content": ("{{ messages }}", "SECRET"),
}


@pytest.mark.parametrize("name", CLOSED)
def test_what_cannot_be_continued_is_refused(name: str) -> None:
    source, content = CLOSED[name]
    with pytest.raises(TemplateError, match="final message"):
        template(source).render(user(content), add_generation_prompt=False, continue_final_message=True)


def test_a_message_is_not_continued_and_answered_at_once() -> None:
    with pytest.raises(TemplateError, match="continued"):
        template(SHOWN).render(user(), add_generation_prompt=True, continue_final_message=True)


LOOP = "{% for p in CONTENT %}{% endfor %}"
EACH = "{% for m in MESSAGES %}" + LOOP + "{% endfor %}"
MACRO = "{% macro m(y, x) %}" + LOOP + "{% endmacro %}{% for t in messages %}{{ CALL }}{% endfor %}"


def each(content: str, messages: str = "messages") -> str:
    return EACH.replace("CONTENT", content).replace("MESSAGES", messages)


def macro(content: str, call: str) -> str:
    return MACRO.replace("CONTENT", content).replace("CALL", call)


FORMATS: dict[str, tuple[str, str]] = {
    "no loop": (SHOWN, "string"),
    "a loop over content": (each("m.content"), "openai"),
    "by brackets": (each("m['content']"), "openai"),
    "by other brackets": (each("m['tool_calls']"), "string"),
    "over another key": (each("m.tool_calls"), "string"),
    "over another's content": (each("other.content"), "string"),
    "filtered and sliced": (each("m.content[1:] | list", "messages[1:]"), "openai"),
    "an item is no slice": (each("m.content[0]"), "string"),
    "by another name": ("{% set a = messages %}{% set b = a[1:] %}" + each("m.content", "b"), "openai"),
    "names in a circle": ("{% set a = messages %}{% set messages = a %}{{ a }}", "string"),
    "any content": ("{% set content = messages[0].content %}" + LOOP.replace("CONTENT", "content"), "openai"),
    "any content in a macro": (macro("content", "m(1, 2)"), "string"),
    "a macro's parameter": (macro("x", "m(1, t.content)"), "openai"),
    "a macro's named parameter": (macro("x", "m(1, x=t.content)"), "openai"),
    "a macro's other parameter": (macro("x", "m(t.content, 1)"), "string"),
    "no parameter of the macro": (macro("x", "m(1, x=t.content)").replace("y, x", "y"), "string"),
    "another macro's parameter": (macro("x", "n(1, t.content)"), "string"),
    "messages in a namespace": ("{% set ns = namespace() %}{% set ns.m = messages %}" + each("m.content"), "string"),
    "two names at once": (each("m.content").replace("for p in", "for a, b in"), "string"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_template_tells_whether_it_wants_parts(name: str) -> None:
    source, expected = FORMATS[name]
    assert template(source).content_format == expected


@pytest.mark.parametrize(
    ("source", "known"),
    [("{{ m.role == 'developer' }}", True), ('{{ m.role == "developer" }}', True), ("{# developer #}", False)],
)
def test_the_template_tells_whether_it_knows_developers(source: str, known: bool) -> None:
    assert template(source).developer is known


CONFIG = {"chat_template": "config", "bos_token": "<s>"}
NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
FILES: dict[str, tuple[tuple[Any, ...], str, str]] = {
    # files, what is rendered without and with tools
    "the configuration": ((CONFIG,), "config", "config"),
    "a file of its own": ((CONFIG, "file"), "file", "file"),
    "an empty file": ((CONFIG, ""), "", ""),
    "named ones": (({"chat_template": NAMED},), "plain", "tools"),
    "named ones and a file": (({"chat_template": NAMED}, "file"), "file", "file"),
    "named ones by name": (({"chat_template": {"default": "plain", "tool_use": "tools"}},), "plain", "tools"),
    "more files": ((CONFIG, "file", {"tool_use": "tools", "rag": "{% if"}), "file", "tools"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_models_files_name_its_templates(name: str) -> None:
    files, plain, with_tools = FILES[name]
    templates = Templates.from_files(*files, now=noon, clock=still)
    assert templates.pick(None).render(user()) == plain
    assert templates.pick([TOOL]).render(user(), tools=[TOOL]) == with_tools
    assert templates.pick(None, {"tools": [TOOL]}).render(user()) == with_tools


@pytest.mark.parametrize(
    "config",
    [{}, {"chat_template": None}, {"chat_template": [{"name": "rag", "template": "a"}]}, {"chat_template": [5]}],
)
def test_a_model_without_a_default_template_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        Templates.from_files(config, now=noon, clock=still)


def test_templates_of_files_have_the_models_tokens_and_the_engines_defaults() -> None:
    config = {"chat_template": "{{ bos_token }}{{ thinking }}", "bos_token": "<s>"}
    templates = Templates.from_files(config, now=noon, clock=still, defaults={"thinking": 1})
    assert templates.pick(None).render(user()) == "<s>1"


TOKENS: dict[str, tuple[tuple[Any, ...], dict[str, str]]] = {
    "strings": (({"bos_token": "<s>", "eos_token": "</s>"},), {"bos_token": "<s>", "eos_token": "</s>"}),
    "objects": (({"bos_token": {"__type": "AddedToken", "content": "<s>"}},), {"bos_token": "<s>"}),
    "what is no token": (({"bos_token": None, "add_bos_token": True, "model_max_length": 5},), {}),
    "the model's own": (
        ({"image_token": "<i>", "extra_special_tokens": {"boi": "<b>"}},),
        {"image_token": "<i>", "boi": "<b>"},
    ),
    "more that have no name": (({"extra_special_tokens": ["<b>"]},), {}),
    "a map": (({"bos_token": "a"}, {"bos_token": {"content": "b"}}), {"bos_token": "b"}),
    "a map beside decoded tokens": (
        ({"bos_token": "a", "added_tokens_decoder": {}}, {"bos_token": "b"}),
        {"bos_token": "a"},
    ),
}


@pytest.mark.parametrize("name", TOKENS)
def test_a_models_files_name_its_special_tokens(name: str) -> None:
    files, expected = TOKENS[name]
    assert special_tokens(*files) == expected


ATTRIBUTES = ["a", "items", "format", "format_map", "upper", "append", "__class__", "_x", "mro", "index", "cycle"]
OBJECTS = ["'text'", "{'a': 1, 'items': 2, 'format': 3, '_x': 4}", "[1]", "1", "none", "namespace(a=1, _x=2)", "loop"]


@pytest.mark.parametrize("attribute", ATTRIBUTES)
@pytest.mark.parametrize("obj", OBJECTS)
def test_attributes_are_those_that_the_sandbox_allows(obj: str, attribute: str) -> None:
    source = "{% for _ in 'x' %}{{ note((OBJECT).NAME) }}{% endfor %}".replace("OBJECT", obj).replace("NAME", attribute)
    seen: list[Any] = []
    ImmutableSandboxedEnvironment().from_string(source).render(note=seen.append)
    template(source).render(user(), options={"note": seen.append})
    theirs, ours = (
        (type(value), getattr(value, "_undefined_exception", None), getattr(value, "__name__", repr(value)))
        for value in seen
    )
    assert ours == theirs


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
spoken = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=8)},
    optional={"reasoning_content": anything, "tool_calls": anything, "name": anything},
)


@given(
    st.lists(spoken | anything, max_size=4),
    st.none() | st.lists(st.dictionaries(st.text(max_size=3), anything, max_size=2), max_size=2),
    st.dictionaries(st.sampled_from(["enable_thinking", "tools", "documents", "messages", "x"]), anything, max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_rendering_changes_nothing_and_raises_nothing_but_its_refusal(
    messages: list[Any], tools: list[Any] | None, options: dict[str, Any], generation: bool, final: bool
) -> None:
    before = repr((messages, tools, options))
    for given_messages in (messages, _prepared(messages)):
        try:
            text = CHATML_TEMPLATE.render(
                given_messages,
                tools=tools,
                options=options,
                add_generation_prompt=generation,
                continue_final_message=final,
            )
        except TemplateError:
            continue
        assert isinstance(text, str)
    assert repr((messages, tools, options)) == before


def _prepared(messages: list[Any]) -> list[dict[str, Any]]:
    try:
        return prepare(messages, content_format="string", developer=False)
    except MessageError:
        return []


CHATML_TEMPLATE = template(CHATML)
