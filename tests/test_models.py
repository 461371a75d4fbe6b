"""Tokenizers come and go with the configuration, and what is wrong with one can be seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from extproc.config import Config, ModelConfig
from extproc.models import Models, self_test
from extproc.reader import Reader
from extproc.reading import Interpreter
from extproc.tokens.memo import Memo
from tests.builders import pool_of, settings, until
from tests.tokens import vocabularies

SMALL_BLOCKS = 16


def config(**models: dict[str, Any]) -> Config:
    return Config(models=tuple(ModelConfig(name=name, **fields) for name, fields in models.items()))


@asynccontextmanager
async def kept(**models: dict[str, Any]) -> AsyncIterator[tuple[Models, Reader]]:
    """Models that keep a reader as this configuration wants it."""
    pools = {name: pool_of("n1", exact="tokenizer" in fields) for name, fields in models.items()}
    with ThreadPoolExecutor(1) as threads:
        _, reading = settings(pool_of={name: name for name in models})
        reader = Reader(Interpreter(pools, reading), threads, threads, time.monotonic)
        found = Models(reader, Memo(1 << 20), clock=time.monotonic, now=datetime.now)
        found.want(config(**models))
        running = asyncio.create_task(found.run())
        try:
            await found.settled(20.0)
            yield found, reader
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vocabularies.make("qwen2", tmp_path_factory.mktemp("model"))


async def test_a_model_with_a_tokenizer_and_one_without_are_well(directory: Path) -> None:
    async with kept(exact={"tokenizer": str(directory)}, plain={}) as (models, reader):
        assert set(reader.interpreter.encoders) == {"exact"}
        status = models.status()
        assert (status["exact"]["tokens"], status["plain"]["tokens"]) == ("exact", "approximate")
        assert status["exact"]["tokenizer"] == "fast"
        assert [each["fault"] for each in status.values()] == [None, None]


BROKEN = {
    "no such directory": (None, {}, "no such directory"),
    "no tokenizer in it": ({"tokenizer_config.json": "{}"}, {}, "tokenizer.json"),
    "no JSON": ({"tokenizer.json": "{"}, {}, "tokenizer.json"),
    "no tokenizer's JSON": ({"tokenizer.json": "{}"}, {}, "tokenizer.json"),
    "no such template": ({}, {"chat_template": "/nowhere/at/all.jinja"}, "all.jinja"),
    "a template that does not compile": ({"chat_template.jinja": "{% for"}, {}, "does not compile"),
}


@pytest.mark.parametrize(("files", "fields", "said"), BROKEN.values(), ids=BROKEN)
async def test_a_tokenizer_that_cannot_be_loaded_is_a_fault_that_says_why(
    files: dict[str, str] | None, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    there = tmp_path / "model"
    if files is not None:
        vocabularies.make("gpt2", there)
        for name, text in files.items():
            if name != "chat_template.jinja":
                for path in there.iterdir():
                    path.unlink()
            (there / name).write_text(text)
    async with kept(m={"tokenizer": str(there), **fields}) as (models, reader):
        assert not reader.interpreter.encoders
        assert said in str(models.status()["m"]["fault"])
        assert reader.faults["m"].startswith("tokenizer: ")


async def test_a_new_configuration_is_taken_and_an_old_one_forgotten(directory: Path, tmp_path: Path) -> None:
    other = vocabularies.make("llama3", tmp_path / "other")
    async with kept(m={"tokenizer": "./nowhere"}) as (models, reader):
        assert "m" in reader.faults
        models.want(config(m={"tokenizer": str(directory)}))
        await until(lambda: "m" in reader.interpreter.encoders and not reader.faults)
        before = reader.interpreter.encoders["m"]
        models.want(config(m={"tokenizer": str(other)}))
        assert "m" not in reader.interpreter.encoders
        await until(lambda: "m" in reader.interpreter.encoders)
        assert reader.interpreter.encoders["m"] is not before
        assert reader.interpreter.encoders["m"].number != before.number
        models.want(config(another={}))
        assert not reader.interpreter.encoders
        assert list(models.status()) == ["another"]


async def test_the_self_test_notices_a_pipeline_that_does_not_match_itself(directory: Path) -> None:
    async with kept(m={"tokenizer": str(directory)}) as (_, reader):
        assert await self_test(reader, "m") is None
        encoder = reader.interpreter.encoders["m"]
        whole = encoder.tokenizer.encode
        calls = iter(range(1000))

        class Forgetful:
            """Encodes otherwise each time."""

            def __getattr__(self, name: str) -> Any:
                return getattr(encoder_tokenizer, name)

            def encode(self, piece: str) -> bytes:
                return next(calls).to_bytes(4, "little") + whole(piece)

        encoder_tokenizer = encoder.tokenizer
        encoder.tokenizer = Forgetful()  # type: ignore[assignment]
        encoder.memo = Memo(1)
        assert await self_test(reader, "m") == "a prompt does not match itself"


async def test_the_self_test_names_what_makes_prompts_unreadable(tmp_path: Path) -> None:
    directory = vocabularies.make("gpt2", tmp_path / "model")
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    async with kept(m={"tokenizer": str(directory)}) as (models, reader):
        assert reader.faults["m"] == "self-test: a prompt cannot be read: cause template"
        assert models.status()["m"]["fault"] == reader.faults["m"]


async def test_the_self_test_does_not_ask_for_more_than_the_model_can_do(tmp_path: Path) -> None:
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + vocabularies.TEMPLATE
    strict, bare = vocabularies.make("gpt2", tmp_path / "strict"), vocabularies.make("gpt2", tmp_path / "bare")
    (strict / "chat_template.jinja").write_text(no_system)
    settings_of_bare = json.loads((bare / "tokenizer_config.json").read_text())
    del settings_of_bare["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings_of_bare))
    async with kept(strict={"tokenizer": str(strict)}, bare={"tokenizer": str(bare)}) as (models, reader):
        assert not reader.faults
        assert models.status()["bare"]["chat_template"] is False
        assert await self_test(reader, "bare") is None


async def test_a_self_test_that_gets_no_time_finds_nothing(tmp_path: Path) -> None:
    slow = vocabularies.make("metaspace", tmp_path / "model")
    async with kept(m={"tokenizer": str(slow)}) as (_, reader):
        assert not reader.faults
        reader.interpreter.settings = replace(reader.interpreter.settings, backlog_bytes=0)
        assert await self_test(reader, "m") is None


async def test_what_a_missing_tokenizer_leaves_is_said() -> None:
    async with kept(m={"tokenizer": "./nowhere"}) as (models, _):
        assert models.status()["m"]["tokens"] == "none"
