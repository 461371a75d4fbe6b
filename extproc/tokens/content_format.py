"""Whether a chat template wants content as a string or as a list of parts (vLLM 0.32: renderers/hf.py)."""

from __future__ import annotations

from typing import Literal, TypeAlias

from jinja2 import nodes

ContentFormat: TypeAlias = Literal["string", "openai"]
"""Whether a template gets content as one string or as a list of parts."""


class _Unclear(Exception):
    """The template gives what is followed to something that is not one name."""


def content_format(tree: nodes.Template) -> ContentFormat:
    """ "openai" if the template loops over the parts of a message's content, as vLLM tells.

    Names are followed as there, limits included: whatever the scope, through assignments, filters, tests and slices,
    and into macros; where that ends, content is a string.
    """
    try:
        return "openai" if _loops_over_content(tree) else "string"
    except _Unclear:
        return "string"


def _loops_over_content(tree: nodes.Template) -> bool:
    loops = list(tree.find_all(nodes.For))
    lists = ["messages"]
    for name in lists:  # grows
        for assign in tree.find_all(nodes.Assign):
            if _is(assign.node, name) and (alias := _name(assign.target)) not in lists:
                lists.append(alias)
    messages = [_name(loop.target) for loop in loops if any(_is(loop.iter, name) for name in lists)]

    def is_content(node: nodes.Node) -> bool:
        return any(_is(node, message, "content") for message in messages)

    parameters: dict[int, set[str]] = {}
    """Of loops in macros: which parameters of the macro get content."""
    for macro in tree.find_all(nodes.Macro):
        names = [each.name for each in macro.args]
        calls = [
            call
            for call in tree.find_all(nodes.Call)
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name
        ]
        got = {name for call in calls for name, value in zip(names, call.args, strict=False) if is_content(value)}
        got |= {each.key for call in calls for each in call.kwargs if each.key in names and is_content(each.value)}
        for loop in macro.find_all(nodes.For):
            if got or id(loop) not in parameters:
                parameters[id(loop)] = got
    for loop in loops:
        known = parameters.get(id(loop), ("content",))
        if is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in known):
            _name(loop.target)
            return True
    return False


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unclear
    return target.name


def _is(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is a variable or its item `key`, perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test | nodes.Getitem):
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            break
        node = node.node
    if key is not None:
        if (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == key) or (
            isinstance(node, nodes.Getattr) and node.attr == key
        ):
            node = node.node
        else:
            return False
    return isinstance(node, nodes.Name) and node.name == name and node.ctx == "load"
