"""Which chat templates and special tokens a model's files hold, as transformers reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from extproc.tokens.template import Template, TemplateError


@dataclass(frozen=True, slots=True)
class Templates:
    """The chat templates of a model."""

    default: Template
    tool_use: Template | None = None
    """For requests with tools, where there is one."""
    now: Callable[[], datetime] = datetime.now

    def day(self) -> str:
        """What a prompt depends on beside its request: the date, where a template may write it; else nothing."""
        dated = self.default.dated or (self.tool_use is not None and self.tool_use.dated)
        return self.now().strftime("%Y-%m-%d") if dated else ""

    @classmethod
    def from_files(
        cls,
        tokenizer_config: Mapping[str, Any],
        chat_template: str | None = None,
        additional: Mapping[str, str] | None = None,
        special_tokens_map: Mapping[str, Any] | None = None,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
        defaults: Mapping[str, Any] | None = None,
    ) -> Templates:
        """What transformers takes from a model's directory.

        In this order of files, parsed: tokenizer_config.json; chat_template.jinja; additional_chat_templates/*.jinja by
        name; special_tokens_map.json. Template files win over what tokenizer_config.json holds. The template of a
        multimodal model's processor is its chat_template.jinja too; one in chat_template.json or
        processor_config.json, as older models have, vLLM uses for requests without tools, and we do not.
        Raises TemplateError for a model without a default template.
        """
        files = {**({} if chat_template is None else {"default": chat_template}), **(additional or {})}
        sources = files or _named(tokenizer_config.get("chat_template"))
        tokens = special_tokens(tokenizer_config, special_tokens_map)

        def template(name: str) -> Template | None:
            if not isinstance(source := sources.get(name), str):
                return None
            return Template(source, now=now, clock=clock, special_tokens=tokens, defaults=defaults)

        if (default := template("default")) is None:
            raise TemplateError("the model has no chat template")
        return cls(default, template("tool_use"), now)

    def pick(self, tools: list[Any] | None, options: Mapping[str, Any] | None = None) -> Template:
        """The template for a request."""
        if self.tool_use is not None and self.tool_use.tools(tools, options) is not None:
            return self.tool_use
        return self.default


def special_tokens(
    tokenizer_config: Mapping[str, Any], special_tokens_map: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The special tokens that templates see, by name (`bos_token`), as transformers reads them from a model's files."""
    config = dict(tokenizer_config)
    if special_tokens_map and "added_tokens_decoder" not in config:
        config.update(special_tokens_map)
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named.update(extra)
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _named(templates: Any) -> dict[str, Any]:
    """tokenizer_config.json's chat_template by name: it is one template, or a list of named ones."""
    if isinstance(templates, list):
        return {str(each.get("name")): each.get("template") for each in templates if isinstance(each, dict)}
    return templates if isinstance(templates, dict) else {"default": templates}
