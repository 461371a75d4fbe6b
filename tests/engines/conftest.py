"""Models and vLLM's servers, once for all tests here; `make test-vllm` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import servers
from report import REPORT

_HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Left out unless they are asked for by name: they need 3.5 GB of vLLM."""
    asked = (Path(config.invocation_params.dir, each.partition("::")[0]).resolve() for each in config.args)
    return None if any(each.is_relative_to(_HERE) for each in asked) else True


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For models and logs; pytest keeps those of the last three runs."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def directories(folder: Path) -> dict[str, Path]:
    """All models, by name."""
    return {name: models.make(name, folder) for name in models.makers()}


@pytest.fixture(scope="session")
def render_ports(directories: dict[str, Path], folder: Path) -> Iterator[dict[str, int]]:
    """By the model's name, where its template and tokenizer are served. Tools may be used as a client likes."""
    options = ("--served-model-name", "m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with servers.render_servers([*directories.values()], folder, *options) as ports:
        yield {name: ports[directory] for name, directory in directories.items()}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := [*REPORT.lines()]:
        terminalreporter.section("against vLLM")
        terminalreporter.write_line("\n".join(lines))
