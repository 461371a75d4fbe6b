"""What is found of a tokenizer, and what is said when there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.tokens.files import TokenizerError, find


def test_a_directory_gives_what_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (tmp_path / "chat_template.jinja").write_text("{{ é }}", encoding="utf-8")
    files = find(str(tmp_path), revision=None)
    assert files.tokenizer == tmp_path / "tokenizer.json"
    assert (files.config, files.special_tokens) == ({"bos_token": "<s>"}, {})
    assert (files.chat_template, files.tiktoken) == ("{{ é }}", None)


@pytest.mark.parametrize(
    ("present", "says"),
    [
        ({}, "neither tokenizer.json nor"),
        ({"a.tiktoken": b"", "b.tiktoken": b""}, "several"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"{"}, "tokenizer_config.json is not JSON"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"\xff\xfe"}, "tokenizer_config.json is not JSON"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"[" * 100_000}, "tokenizer_config.json is not JSON"),
        ({"tokenizer.json": b"{}", "special_tokens_map.json": b"[]"}, "special_tokens_map.json is not a JSON object"),
    ],
)
def test_a_directory_that_gives_no_tokenizer_is_told(tmp_path: Path, present: dict[str, bytes], says: str) -> None:
    for name, data in present.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TokenizerError, match=says):
        find(str(tmp_path), revision=None)


@pytest.mark.parametrize("source", ["/no/such/place", "./none", "~nobody-of-that-name/x"])
def test_a_path_is_not_looked_for_on_the_hub(source: str) -> None:
    with pytest.raises(TokenizerError, match="there is no such directory"):
        find(source, revision=None)


@pytest.mark.parametrize("source", ["", "a/b/c", "a\0b", "-", "a b"])
def test_what_is_no_name_is_told(source: str) -> None:
    with pytest.raises(TokenizerError):
        find(source, revision=None)


FIND = """
import sys
from extproc.tokens.files import TokenizerError, find
try:
    print(find(sys.argv[1], revision=None).tokenizer)
except TokenizerError as error:
    print("TokenizerError", error)
"""


def test_the_hubs_cache_does_without_a_network(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    model, commit = tmp_path / "hub" / "models--acme--tiny", "0" * 40
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    (snapshot / "tokenizer.json").write_text(json.dumps({}))
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": ""}

    def found(source: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", FIND, source], env=environment, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    assert found("acme/tiny") == str(snapshot / "tokenizer.json")
    assert found("acme/other").startswith("TokenizerError no tokenizer at 'acme/other'")
