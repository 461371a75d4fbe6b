"""The README's configuration table says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from extproc.config import (
    Config,
    DnsConfig,
    EventsConfig,
    FileConfig,
    KubernetesConfig,
    ModelConfig,
    NodeConfig,
    SourceConfig,
    parse,
)

README = Path(__file__).parent.parent / "README.md"
SOURCES = {"file": FileConfig, "dns": DnsConfig, "kubernetes": KubernetesConfig}
SECTIONS = {
    "": Config,
    "[[models]]": ModelConfig,
    "[models.events]": EventsConfig,
    "[[models.nodes]]": NodeConfig,
    "[[models.sources]]": SourceConfig,
    **{f'[[models.sources]] from = "{name}"': kind for name, kind in SOURCES.items()},
}


def documented() -> dict[str, dict[str, str]]:
    """Section to key to default, as the table has them."""
    text = README.read_text(encoding="utf-8").split("## Configuration", 1)[1].split("\n## ", 1)[0]
    found: dict[str, dict[str, str]] = {}
    section = ""
    for row in re.findall(r"^\| (`.*?) \| (.*?) \|", text, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", row[0])
        if names[0].startswith("["):
            section = names.pop(0)
        defaults = [each.strip().strip("`") for each in row[1].split(", ")]
        if len(defaults) != len(names):
            defaults = [row[1]] * len(names)
        found.setdefault(section, {}).update(dict(zip(names, defaults, strict=True)))
    return found


def sections() -> dict[str, type[msgspec.Struct]]:
    nested = {
        f"[{field.name}]": field.type
        for field in msgspec.structs.fields(Config)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    }
    return {**SECTIONS, **nested}


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    there = {
        name: {field.name for field in msgspec.structs.fields(section)} - {"models"}
        for name, section in sections().items()
    }
    there["[[models]]"] -= {"nodes", "events", "sources"}
    for name in SOURCES:
        there[f'[[models.sources]] from = "{name}"'] -= there["[[models.sources]]"]
    there[""] -= {name.strip("[]") for name in there}
    assert {name: set(keys) for name, keys in documented().items()} == there


@pytest.mark.parametrize("section", ["[server]", "[policy]", "[scrape]", "[[models]]"])
def test_the_documented_defaults_are_the_defaults(section: str) -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(sections()[section])}
    for key, text in documented()[section].items():
        value = defaults[key]
        if isinstance(value, bool):
            assert text == str(value).lower(), key
        elif isinstance(value, int | float):
            assert float(text) == value, key
        elif isinstance(value, str):
            assert text.strip('"') == value, key


def test_the_example_can_be_used() -> None:
    example = re.search(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    config = parse(re.sub(r"^   ", "", example[1], flags=re.MULTILINE))
    assert len(config.models[0].nodes) == 2


def test_nothing_in_it_is_left_to_be_filled_in() -> None:
    assert "<!--" not in README.read_text(encoding="utf-8")
